"""The simulated ledger, and what must be served from it, read as plainly as the design says it.

The ledger holds exactly the sealed shards, so it is the truth that lookups are held against, and what a restarted brain
must come back with is computed from it alone.
"""

from array import array

from kvserver.tiers.records import NO_PARENT, Record, pack, unpack_all
from kvserver.tiers.slots import SLOT_ALIGN

from .content import block_of, key_of, path_of
from .memory import Arena, Wrong
from .shapes import Shape


class Ledger:
    """Outlives brains. Units are SLOT_ALIGN bytes of the arena."""

    def __init__(self, arena: Arena) -> None:
        self.records: dict[int, Record] = {}
        self.documents: dict[int, bytes] = {}
        self.held: dict[tuple[bytes, bytes, int, int], int] = {}
        """(namespace, key, group, shard) -> offset."""
        self.units: dict[int, int] = {}
        """Arena unit -> offset of the sealed slot that covers it."""
        self._arena = arena

    def publish(self, record: Record, shape: Shape) -> None:
        """Seals one slot; its bytes must be there already, and right."""
        wanted = [
            block_of(record.namespace, record.key, record.group, record.shard, place)
            for place in range(shape.blocks_per_chunk(record.group))
        ]
        if self._arena.slot(record.offset) != wanted:
            raise Wrong(
                f"{_name(record)} was published with other bytes than its own: {self._arena.slot(record.offset)}"
            )
        if record.slot_bytes != shape.slot_bytes(record.group, record.shard):
            raise Wrong(f"{_name(record)} was published with slot_bytes={record.slot_bytes}")
        parent = key_of(path_of(record.key)[:-1]) or NO_PARENT
        if record.parent != parent:
            raise Wrong(f"{_name(record)} was published under the parent {record.parent.hex()[:8]}")
        self.put(record)

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

    def packed(self) -> bytes:
        """What scan() returns: ascending by offset."""
        return b"".join(pack(self.records[offset]) for offset in sorted(self.records))

    def present(self, digest: bytes, key: bytes, group: int, shards: int) -> bool:
        return all((digest, key, group, shard) in self.held for shard in range(shards))


def servable(ledger: Ledger, shape: Shape, digest: bytes, keys: list[bytes]) -> int:
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


def survivors(ledger: Ledger, shapes: dict[bytes, Shape]) -> set[int]:
    """The offsets that a restarted brain must keep: whole groups of chunks that have all they need, down to the root.

    A chunk whose parent has no sealed shard at all cannot be reached any more: only sealed shards leave a record."""
    found: set[int] = set()
    by_parent: dict[tuple[bytes, bytes], list[bytes]] = {}
    for digest, key, *_ in ledger.held:
        keys = by_parent.setdefault((digest, key_of(path_of(key)[:-1])), [])
        if key not in keys:
            keys.append(key)
    for digest, shape in shapes.items():
        frontier = [b""]
        for parent in frontier:
            for key in by_parent.get((digest, parent), ()):
                whole = [
                    index
                    for index, group in enumerate(shape.groups)
                    if ledger.present(digest, key, index, group.shards)
                ]
                if whole and all(index in whole for index, group in enumerate(shape.groups) if group.kind == "full"):
                    frontier.append(key)
                    for index in whole:
                        shards = range(shape.groups[index].shards)
                        found.update(ledger.held[digest, key, index, shard] for shard in shards)
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
