"""The promises for orders to the disk mover. The simulator keeps these books itself."""

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvserver.service.state.bounds import Bounds
from kvserver.tiers.extents import extent_at, place_of
from kvserver.tiers.placement import DAY_NS
from kvserver.tiers.records import DiskRecord, unpack_disk
from kvserver.tiers.slots import SLOT_ALIGN
from kvserver.wire.orders import Demote, Moved, Promote

from .content import key_of, path_of
from .ledger import Ledger
from .memory import Wrong

if TYPE_CHECKING:
    from .promises import Promises


Shard = tuple[bytes, bytes, int, int]


class DiskPromises:
    """The promises of one brain's life. In promises.py disk jobs stand among the copies under negative numbers."""

    def __init__(self, ledger: Ledger, promises: "Promises") -> None:
        self._ledger = ledger
        self._promises = promises
        self._extents: dict[int, tuple[int, str]] = {}
        """Extent -> (job, kind) of the job that may still touch it."""
        self._records: dict[int, DiskRecord] = {}
        self.written_bytes: dict[int, int] = {}
        """Device -> bytes ordered to be written."""
        self.generations: dict[int, tuple[bytes, bytes]] = {}
        """Write generation -> (namespace, key) of its chunk."""
        self.reads: dict[int, list[DiskRecord]] = {}
        self.now_ns = 0
        self.drained: set[int] = set()
        """Devices that the service has announced as draining."""
        self._began_ns = 0
        self._daily_bytes = 0
        self.namespaces: dict[int, bytes] = {}
        """Job -> namespace."""
        self.cleared: set[int] = set()
        """Jobs that were in flight when their namespace was cleared."""
        self._of_cleared: dict[int, tuple[Shard, int]] = {}
        """Extent -> (name, generation) of its record when its namespace was cleared.

        A retrieve already under way may still read that record, even if the name has a newer record elsewhere.
        """

    def began(self, bounds: Bounds, now_ns: int) -> None:
        self._daily_bytes, self._began_ns = bounds.disk_daily_write_bytes, now_ns

    def ordered(self, order: Demote | Promote, on_disk: dict[Shard, tuple[int, int]]) -> None:
        """Each order reads only sealed slots, writes only unused slots, and has its extents to itself. on_disk: where
        records are after the event: a scrub may read what has just moved."""
        for record in unpack_disk(order.records):
            extent = extent_at(record.device, record.offset)
            if extent in self._extents:
                raise Wrong(f"disk job {order.job} uses an extent that job {self._extents[extent]} may still use")
            self._extents[extent] = (order.job, type(order).__name__)
            self._records[extent] = record
            self.namespaces[order.job] = record.namespace
            units = range(record.arena_offset // SLOT_ALIGN, (record.arena_offset + record.extent_bytes) // SLOT_ALIGN)
            if isinstance(order, Demote):
                self._of_cleared.pop(extent, None)
                if record.device in self.drained:
                    raise Wrong(f"disk job {order.job} writes to device {record.device}, which is drained")
                self._check_source(record)
                self._promises.disk_reads_slot(order.job, list(units))
                self._charge(record)
            else:
                self._check_place(record, on_disk if not order.asked else self._promises.on_disk)
                self.reads.setdefault(order.job, []).append(record)
                self._promises.disk_writes_slot(order.job, record.arena_offset, list(units))

    def failed(self, moved: Moved) -> list[DiskRecord]:
        """The records that a read has not brought."""
        records = self.reads.get(moved.job, [])
        return [records[fault.item] for fault in moved.faults if records]

    def ended(self, moved: Moved, on_disk: dict[Shard, tuple[int, int]]) -> None:
        """A record that could not be read must no longer be listed as on disk."""
        records = self.reads.pop(moved.job, [])
        for fault in moved.faults if records else ():
            record = records[fault.item]
            name = _name(record)
            if on_disk.get(name) == (extent_at(record.device, record.offset), record.generation):
                raise Wrong(f"{name} could not be read ({fault.fault}) and is still said to be on disk")

    def writes_by(self, account_of: Callable[[bytes], str], on_disk: dict[Shard, tuple[int, int]]) -> Counter[str]:
        """Account -> bytes being written for it now, without records that move on their device."""
        writes: Counter[str] = Counter()
        for extent, (_, kind) in self._extents.items():
            record = self._records[extent]
            old, _ = on_disk.get(_name(record), (-1, 0))
            if kind == "Demote" and (old < 0 or place_of(old).device != record.device):
                writes[account_of(record.namespace)] += record.extent_bytes
        return writes

    def over(self, job: int) -> None:
        """The mover will not touch any byte of this job again."""
        self._extents = {extent: user for extent, user in self._extents.items() if user[0] != job}
        self._promises.copy_over(-job)

    def was_cleared(self, namespace: bytes) -> None:
        running = {user[0] for user in self._extents.values()}
        self.cleared.update(job for job in running if self.namespaces[job] == namespace)
        for name, (extent, generation) in self._promises.on_disk.items():
            if name[0] == namespace:
                self._of_cleared[extent] = name, generation

    def _check_source(self, record: DiskRecord) -> None:
        name = _name(record)
        if self._ledger.held.get(name) != record.arena_offset:
            raise Wrong(f"{name} is to be written to disk from {record.arena_offset}, where it is not sealed")
        parent = key_of(path_of(record.key)[:-1])
        if record.parent != (parent or bytes(32)):
            raise Wrong(f"chunk {path_of(record.key)} is written to disk under the parent {record.parent.hex()[:8]}")

    def _check_place(self, record: DiskRecord, on_disk: dict[Shard, tuple[int, int]]) -> None:
        """A read must name exactly the record that was written at its place."""
        name = _name(record)
        asked = (extent_at(record.device, record.offset), record.generation)
        if self._of_cleared.get(asked[0]) == (name, asked[1]):
            return
        if on_disk.get(name, asked) != asked:
            raise Wrong(f"{name} is read from {asked}; it is at {on_disk[name]}")

    def _charge(self, record: DiskRecord) -> None:
        """Writes stay within the daily budget, and no two chunks share a generation."""
        chunk = (record.namespace, record.key)
        if self.generations.setdefault(record.generation, chunk) != chunk:
            raise Wrong(f"generation {record.generation} is given to a second chunk")
        written = self.written_bytes.get(record.device, 0) + record.extent_bytes
        self.written_bytes[record.device] = written
        allowed = self._daily_bytes * (1 / 24 + 23 / 24 * (self.now_ns - self._began_ns) / DAY_NS)
        if self._daily_bytes and written > allowed + 1:
            raise Wrong(f"{written} bytes were written to device {record.device}, {allowed:.0f} may be by now")


def _name(record: DiskRecord) -> Shard:
    return record.namespace, record.key, record.group, record.shard
