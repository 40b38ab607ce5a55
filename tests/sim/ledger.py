"""The simulated ledger, and what must be served from it, read as plainly as the design says it.

The ledger holds exactly the sealed shards, so it is the truth that lookups are held against, and what a restarted brain
must come back with is computed from it alone.
"""

from array import array

from kvserver.tiers.records import NO_GROUP, NO_PARENT, Record, pack, unpack_all
from kvserver.tiers.slots import SLOT_ALIGN

from .content import block_of, key_of, keys_of, path_of
from .memory import Arena, Wrong
from .shapes import Shape


class Ledger:
    """Outlives brains. Units are SLOT_ALIGN bytes of the arena."""

    def __init__(self, arena: Arena) -> None:
        self.records: dict[int, Record] = {}
        self.documents: dict[int, bytes] = {}
        self.held: dict[tuple[bytes, bytes, int, int], int] = {}
        """(namespace, key, group, shard) -> offset; marks stand under (NO_GROUP, 0)."""
        self.units: dict[int, int] = {}
        """Arena unit -> offset of the sealed slot that covers it."""
        self.arena = arena

    def publish(self, record: Record, shape: Shape) -> None:
        """Seals one slot, whose bytes must be there already, and right; or keeps a mark, which has no slot."""
        if record.group == NO_GROUP:
            if record.offset < self.arena.bytes:
                raise Wrong(f"{_name(record)} is a mark and lies in the arena")
        else:
            self._check_slot(record, shape)
        parent = key_of(path_of(record.key)[:-1]) or NO_PARENT
        if record.parent != parent:
            raise Wrong(f"{_name(record)} was published under the parent {record.parent.hex()[:8]}")
        self.put(record)

    def check_order(self, published: list[Record]) -> None:
        """A brain may die between two records, and the next one must find what leads to each of them: a chunk of which
        nothing was recorded yet is recorded ahead of those behind it."""
        held = {(namespace, key) for namespace, key, _, _ in self.held}
        behind = {(record.namespace, record.key) for record in published} - held
        for record in published:
            behind.discard((record.namespace, record.key))
            if (record.namespace, record.parent) in behind:
                raise Wrong(f"{_name(record)} is published ahead of the chunk before it")

    def _check_slot(self, record: Record, shape: Shape) -> None:
        wanted = [
            block_of(record.namespace, record.key, record.group, record.shard, place)
            for place in range(shape.blocks_per_chunk(record.group))
        ]
        if self.arena.slot(record.offset) != wanted:
            raise Wrong(
                f"{_name(record)} was published with other bytes than its own: {self.arena.slot(record.offset)}"
            )
        if record.slot_bytes != shape.slot_bytes(record.group, record.shard):
            raise Wrong(f"{_name(record)} was published with slot_bytes={record.slot_bytes}")

    def put(self, record: Record) -> None:
        for unit in _units(record):
            if unit in self.units:
                raise Wrong(f"{_name(record)} was published over a slot that is sealed")
            self.units[unit] = record.offset
        self.records[record.offset] = record
        name = (record.namespace, record.key, record.group, record.shard)
        rival = self.held.get(name)
        if rival is None or self.records[rival].generation < record.generation:
            self.held[name] = record.offset

    def withdraw(self, offset: int) -> None:
        """Free places are left as they are."""
        record = self.records.pop(offset, None)
        if record is None:
            return
        for unit in _units(record):
            del self.units[unit]
        name = (record.namespace, record.key, record.group, record.shard)
        if self.held.get(name) == offset:
            del self.held[name]

    def doom(self, digest: bytes) -> list[Record]:
        """What it has of a namespace that was cleared: nothing of that is served, and it goes by and by."""
        doomed = [record for record in self.records.values() if record.namespace == digest]
        for name in [name for name in self.held if name[0] == digest]:
            del self.held[name]
        return doomed

    def read_again(self) -> None:
        """As a new brain does. What was doomed and had not gone is held, unless something newer is."""
        self.held.clear()
        for offset, record in self.records.items():
            name = (record.namespace, record.key, record.group, record.shard)
            rival = self.held.get(name)
            if rival is None or self.records[rival].generation < record.generation:
                self.held[name] = offset

    @property
    def slots(self) -> set[int]:
        """Offsets of what is sealed, without marks."""
        return {offset for offset, record in self.records.items() if record.group != NO_GROUP}

    def packed(self) -> bytes:
        """What scan() returns: ascending by offset."""
        return b"".join(pack(self.records[offset]) for offset in sorted(self.records))

    def present(self, digest: bytes, key: bytes, group: int, shards: int) -> bool:
        return all((digest, key, group, shard) in self.held for shard in range(shards))


class Both:
    """DRAM and disk: a group is present where all its shards are, in one of them."""

    def __init__(self, ledger: Ledger, on_disk: set[tuple[bytes, bytes, int, int]]) -> None:
        self._ledger = ledger
        self._on_disk = on_disk

    def keep_only(self, offsets: set[int]) -> None:
        """Of what is in DRAM, as it is now."""
        kept = Ledger(self._ledger.arena)
        kept.held = {name: offset for name, offset in self._ledger.held.items() if offset in offsets}
        self._ledger = kept

    def present(self, digest: bytes, key: bytes, group: int, shards: int) -> bool:
        if self._ledger.present(digest, key, group, shards):
            return True
        return all((digest, key, group, shard) in self._on_disk for shard in range(shards))


def servable(ledger: Ledger | Both, shape: Shape, digest: bytes, keys: list[bytes]) -> int:
    """The longest boundary that every group can serve, by trying each of them token by token."""
    for boundary in range(len(keys), 0, -1):
        if all(
            ledger.present(digest, keys[chunk], index, group.shards)
            for index, group in enumerate(shape.groups)
            for chunk in needed(shape, index, boundary)
        ):
            return boundary
    return 0


def needed(shape: Shape, group: int, boundary: int) -> list[int]:
    """The chunks that a group needs for a boundary after `boundary` chunks."""
    kind, tokens = shape.groups[group].kind, boundary * shape.chunk_tokens
    if kind == "full":
        return list(range(boundary))
    if kind == "state":
        return [boundary - 1]
    window = range(max(0, tokens - shape.groups[group].window_tokens), tokens)
    return sorted({token // shape.chunk_tokens for token in window})


def serves(ledger: Ledger | Both, shape: Shape, digest: bytes, keys: list[bytes], boundary: int) -> bool:
    """What is held can serve this boundary."""
    return boundary == 0 or servable(ledger, shape, digest, keys[:boundary]) == boundary


def away_of(ledger: Ledger, shape: Shape, digest: bytes, keys: list[bytes]) -> int:
    """Chunks of which a prefix needs something that DRAM does not hold."""
    missing = {
        chunk
        for index, group in enumerate(shape.groups)
        for chunk in (needed(shape, index, len(keys)) if keys else ())
        if not ledger.present(digest, keys[chunk], index, group.shards)
    }
    return len(missing)


def survivors(ledger: Ledger, shapes: dict[bytes, Shape]) -> set[int]:
    """The offsets that a restarted brain must keep: every whole group of a chunk that has, and whose prefix has, all
    full groups. Marks are not asked: where there is no full group, nothing that is whole may be lost."""
    found: set[int] = set()
    for (digest, key, index, _), offset in ledger.held.items():
        if index == NO_GROUP:
            continue
        shape, prefix = shapes[digest], keys_of(path_of(key))
        full = [number for number, group in enumerate(shape.groups) if group.kind == "full"]
        reachable = all(
            ledger.present(digest, before, number, shape.groups[number].shards) for before in prefix for number in full
        )
        if reachable and ledger.present(digest, key, index, shape.groups[index].shards):
            found.add(offset)
    return found


def records_in(packed: bytes) -> list[Record]:
    return list(unpack_all(packed))


def offsets_in(packed: bytes) -> list[int]:
    return array("q", packed).tolist()


def _units(record: Record) -> range:
    return range(record.offset // SLOT_ALIGN, (record.offset + record.slot_bytes) // SLOT_ALIGN)


def _name(record: Record) -> str:
    return (
        f"namespace {record.namespace[:2].hex()} chunk {path_of(record.key)} group {record.group} shard {record.shard}"
    )
