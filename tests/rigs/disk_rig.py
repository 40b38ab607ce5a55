"""A Rig whose service has a disk tier: its disk mover obeys at once, or waits for finish_disk()."""

from typing import Any

from kvserver.service.base.events import MoverGone
from kvserver.service.state.clear_notes import GENERATIONS
from kvserver.tiers.extents import DEVICES_MAX
from kvserver.tiers.records import DiskRecord, pack_disk, unpack_disk
from kvserver.transfer.native import RecoveryOrder
from kvserver.wire.orders import (
    DISK_ITEMS_MAX,
    Demote,
    DeviceIs,
    DrainDevice,
    DrainState,
    EraseDevice,
    Fault,
    ForgetNotes,
    FoundNote,
    FoundRecords,
    ItemFault,
    Listed,
    Moved,
    Note,
    Noted,
    NotesForgotten,
    Order,
    Promote,
    Recover,
    TellRecords,
)
from tests.rigs.brain_rig import SLAB_BYTES, Client, Rig, chain

RECORDS_A_REPORT = 5
EXTENT_BYTES = 4 << 10
"""Extent size of a chunk of the rig's cache; its slot has the same size."""
SEGMENT_BYTES = 5 * EXTENT_BYTES
"""Four extents, and a page for their headers."""
DISK = {
    "arena_bytes": 4 * SLAB_BYTES,
    "disk_devices": 1,
    "disk_device_bytes": 200 * SEGMENT_BYTES,
    "disk_segment_bytes": SEGMENT_BYTES,
    "disk_write_through": True,
}
CHUNKS = 3
"""Chunks per prompt, as many as the rig's cache has blocks for."""
PROMPTS_OF_ARENA = 21
LAST_OF_FILL = 1000 + PROMPTS_OF_ARENA + 2
"""Seed of the prompt that fill() stores last."""


def sums_of(order: Demote | Promote) -> bytes:
    """Sums of the payloads that an order reads, as a mover reports them."""
    records = unpack_disk(order.records) if isinstance(order, Promote) else ()
    return b"".join(record.key[:7] + b"\0" for record in records)


class DiskRig(Rig):
    def __init__(self, **bounds: Any) -> None:
        self.disk_works = True
        """False: reads and writes stay under way until finish_disk()."""
        self._at_work = False
        self.moving: list[tuple[int, Demote | Promote]] = []
        """(mover, order) of the reads and writes under way."""
        self.written: list[list[DiskRecord]] = []
        """The records of each write, in the order of the writes."""
        self.read: list[list[DiskRecord]] = []
        self.notes: list[Note] = []
        """Notes of namespaces."""
        self.forgotten: list[bytes] = []
        self.forgets_lost = 0
        """Further orders to forget notes that a mover does not carry out, because it dies before or has no room."""
        self.notes_answered = True
        """False: notes stay unanswered until answer_notes() is called."""
        self.noting: list[tuple[int, Noted]] = []
        self.generations = 0
        """Highest record generation that may be used, as the devices know it."""
        self.damaged = 0
        """Count of damaged records that the devices report."""
        self.devices: dict[tuple[int, int], DiskRecord] = {}
        self.drains: dict[int, DrainState] = {}
        """Drain state by device, as the directories report it."""
        self.telling = RecoveryOrder([], chunk_most=1)
        """The records that the last Recover found, in the order of telling."""
        self.notes_kept = True
        """False: no device could write the notes."""
        self.problem = ""
        """Reason why devices take no writes; empty when they do."""
        self.unopened: set[int] = set()
        """Devices whose store the mover cannot open."""
        self.tells = True
        """False: the mover names the records that it found, and tells no chunk of them."""
        self.fault: Fault | None = None
        """Fault of the first record of each job; None for no fault."""
        self.faulty: set[int] = set(range(DEVICES_MAX))
        """Devices whose jobs get the fault."""
        super().__init__(**{**DISK, **bounds})
        self.wait_ms(50)

    def finish_disk(self, unreadable: bytes = b"") -> None:
        """Ends the jobs under way. `unreadable` is the key of a chunk whose record differs from what was written."""
        moving, self.moving = self.moving, []
        for mover, order in moving:
            records = list(unpack_disk(order.records))
            if isinstance(order, Demote):
                self.devices.update({(record.device, record.offset): record for record in records})
            fault = self.fault if records[0].device in self.faulty else None
            fault = "checksum" if records[0].key == unreadable else fault
            faults = [ItemFault(0, fault)] if fault is not None else []
            self.report(mover, Moved(order.job, faults, 1, sums_of(order)))

    def _work(self) -> None:
        """Ends all jobs under way, and those that their ends cause.

        A loop, not recursion: emptying a segment takes hundreds of reads and writes, each ordered when the one before
        it ends."""
        self._at_work = True
        try:
            while self.disk_works and self.moving:
                self.finish_disk()
        finally:
            self._at_work = False

    def answer_notes(self) -> None:
        noting, self.noting = self.noting, []
        for mover, noted in noting:
            self.report(mover, noted)

    def another_mover(self) -> None:
        """Replaces a dead disk mover; the new one reports on its devices."""
        (mover,) = (mover.mover for mover in self.service.status(self.now_ns).movers if mover.device == "disk")
        self.handle(MoverGone(mover, "signal 9"))
        self.wait_ms(self.bounds.disk_restart_ms + 100)
        self.tell_devices()

    def tell_devices(self) -> None:
        (mover,) = (mover.mover for mover in self.service.status(self.now_ns).movers if mover.device == "disk")
        for device in range(self.bounds.disk_devices):
            self.report(mover, self._device_is(device))

    def keys_written(self) -> list[bytes]:
        return [records[0].key for records in self.written]

    def _obey(self, mover: int, order: Order) -> None:
        match order:
            case Demote() | Promote():
                log = self.written if isinstance(order, Demote) else self.read
                log.append(list(unpack_disk(order.records)))
                self.moving.append((mover, order))
                if self.disk_works and not self._at_work:
                    self._work()
            case Note(namespace, _, void):
                if namespace == GENERATIONS:
                    self.generations = void
                else:
                    self.notes.append(order)
                is_nowhere = len(self.drains) == self.bounds.disk_devices and {*self.drains.values()} == {"drained"}
                self.noting.append((mover, Noted(namespace, void, self.notes_kept or is_nowhere)))
                if self.notes_answered:
                    self.answer_notes()
            case ForgetNotes() if self.forgets_lost:
                self.forgets_lost -= 1
            case ForgetNotes(namespaces, _):
                if self.notes_kept:
                    self.forgotten += namespaces
                    self.notes = [note for note in self.notes if note.namespace not in namespaces]
                self.report(mover, NotesForgotten(namespaces, self.notes_kept))
            case Recover():
                for device in range(self.bounds.disk_devices):
                    self.report(mover, self._device_is(device))
                self._recover(mover)
            case TellRecords() if self.tells:
                self.report(mover, FoundRecords(self.telling.next(RECORDS_A_REPORT)))
            case DrainDevice(device) if device in self.unopened:
                self.report(mover, self._device_is(device))
            case DrainDevice(device):
                self.drains[device] = "draining"
                self.report(mover, self._device_is(device))
            case EraseDevice(device):
                assert device not in self.unopened, "nobody knows what it holds"
                self.drains[device] = "drained"
                self.devices = {at: record for at, record in self.devices.items() if at[0] != device}
                self.report(mover, self._device_is(device))
            case _:
                super()._obey(mover, order)

    def _recover(self, mover: int) -> None:
        there = [record for record in self.devices.values() if record.device not in self.unopened]
        found = [pack_disk(record._replace(arena_offset=-1)) for record in there]
        self.report(mover, FoundNote(GENERATIONS, b"", self.generations, 0))
        self.telling = RecoveryOrder(found, chunk_most=DISK_ITEMS_MAX)
        newest = self.telling.namespaces
        for note in self.notes:
            self.report(mover, FoundNote(note.namespace, note.document, note.void, newest.get(note.namespace, 0)))
        for namespace in newest.keys() - {note.namespace for note in self.notes}:
            self.report(mover, FoundNote(namespace, b"", newest[namespace], newest[namespace]))
        self.report(mover, Listed(self.telling.records, self.damaged))

    def _device_is(self, device: int) -> DeviceIs:
        drain = self.drains.get(device, "")
        if device in self.unopened:
            return DeviceIs(device, 0, "foreign", drain)
        return (
            DeviceIs(device, 0, "drained", drain)
            if drain == "drained"
            else DeviceIs(device, 1 << 20, self.problem, drain)
        )


def fill(client: Client, first: int = 1000, prompts: int = PROMPTS_OF_ARENA + 3) -> None:
    """Stores so much else that earlier chunks leave DRAM."""
    for seed in range(first, first + prompts):
        client.rig.now_ns += 1_000_000
        client.store(chain(seed, CHUNKS))


def cold_prompt(rig: DiskRig) -> tuple[Client, bytes]:
    """Stores a prompt and makes it leave DRAM, so that it is on disk alone."""
    client, keys = Client(rig).register(), chain(1, CHUNKS)
    client.store(keys)
    fill(client)
    return client, keys


def restart(rig: DiskRig) -> None:
    """Starts another brain, with nothing in DRAM."""
    rig.service = rig.new_service()
    rig.copies.clear()
    rig.wait_ms(100)
