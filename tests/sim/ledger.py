"""The simulated ledger, and a plain implementation of what must be served from it.

The ledger holds exactly the sealed shards. Lookups are checked against it, and what a restarted brain must restore
is computed from it alone.
"""

from array import array

from kvserver.tiers.records import NO_GROUP, NO_PARENT, NO_SUM, Record, decode_document, pack, unpack_all
from kvserver.tiers.slots import SLOT_ALIGN

from .content import block_of, key_of, keys_of, path_of
from .memory import Arena, Wrong
from .shapes import Shape
from .sums import names_of


class Ledger:
    """The ledger, which outlives brains. Units are SLOT_ALIGN bytes of the arena."""

    def __init__(self, arena: Arena) -> None:
        self.records: dict[int, Record] = {}
        self.documents: dict[int, bytes] = {}
        self.held: dict[tuple[bytes, bytes, int, int], int] = {}
        """(namespace, key, group, shard) -> offset; marks are stored as (NO_GROUP, 0)."""
        self.units: dict[int, int] = {}
        """Arena unit -> offset of the sealed slot that covers it."""
        self.entries: dict[int, Record] = {}
        """The content of each place. It stays when the record is withdrawn, until the place is sealed again."""
        self.cut_off: set[int] = set()
        """Offsets of records that were cut off and are not withdrawn yet."""
        self.undescribed: set[int] = set()
        """Offsets of records whose namespace lost its document, and that are not withdrawn yet."""
        self.arena = arena

    def named(self, offsets: list[int], names: bytes) -> list[Record]:
        """What a mover reads before a retrieve: the entry of each slot. They must be those that the brain names."""
        entries = [self.entries[offset] for offset in offsets]
        first = entries[0]
        same = all(entry[1:2] + entry[4:6] == first[1:2] + first[4:6] for entry in entries)
        if not same or names_of(entries) != names:
            raise Wrong(f"slots {offsets} hold {[_name(entry) for entry in entries]}, which the brain names otherwise")
        return entries

    def publish(self, record: Record, shape: Shape) -> None:
        """Seals one slot, whose right bytes must be there already; or keeps a mark, which has no slot."""
        if record.group == NO_GROUP:
            if record.offset < self.arena.bytes:
                raise Wrong(f"{_name(record)} is a mark and lies in the arena")
            if record.sum != NO_SUM:
                raise Wrong(f"{_name(record)} is a mark and has a sum")
        else:
            self._check_slot(record, shape)
        parent = key_of(path_of(record.key)[:-1]) or NO_PARENT
        if record.parent != parent:
            raise Wrong(f"{_name(record)} was published under the parent {record.parent.hex()[:8]}")
        self.put(record)

    def check_order(self, published: list[Record]) -> None:
        """Each chunk is recorded after its parent, unless the parent had a record already.

        A brain may die between two records, and the next one must find the whole path to each of them.
        """
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
        if self.arena.meant(record.offset) != wanted:
            raise Wrong(
                f"{_name(record)} was published with other bytes than its own: {self.arena.slot(record.offset)}"
            )
        if record.sum != self.arena.told[record.offset]:
            raise Wrong(f"{_name(record)} was published with another sum than its mover told")
        if record.slot_bytes != shape.slot_bytes(record.group, record.shard):
            raise Wrong(f"{_name(record)} was published with slot_bytes={record.slot_bytes}")

    def put(self, record: Record) -> None:
        for unit in _units(record):
            if unit in self.units:
                raise Wrong(f"{_name(record)} was published over a slot that is sealed")
            self.units[unit] = record.offset
        self.records[record.offset] = self.entries[record.offset] = record
        name = (record.namespace, record.key, record.group, record.shard)
        rival = self.held.get(name)
        if rival is None or self.records[rival].generation < record.generation:
            self.held[name] = record.offset

    def withdraw(self, offset: int) -> None:
        """Removes a record; does nothing if there is none."""
        self.cut_off.discard(offset)
        self.undescribed.discard(offset)
        record = self.records.pop(offset, None)
        if record is None:
            return
        for unit in _units(record):
            del self.units[unit]
        name = (record.namespace, record.key, record.group, record.shard)
        if self.held.get(name) == offset:
            del self.held[name]

    def doom(self, digest: bytes) -> list[Record]:
        """Returns the records of a cleared namespace. They are no longer served, and are withdrawn step by step."""
        doomed = [record for record in self.records.values() if record.namespace == digest]
        for name in [name for name in self.held if name[0] == digest]:
            del self.held[name]
        return doomed

    def died_before_withdrawing(self, offsets: list[int]) -> None:
        """The brain died before it had withdrawn these records."""
        self.cut_off.update(offset for offset in offsets if offset in self.records)

    def cut(self, offsets: list[int]) -> list[tuple[bytes, bytes]]:
        """These records are no longer served, and are withdrawn step by step. Returns the chunks that were held."""
        chunks = []
        for offset in offsets:
            record = self.records[offset]
            name = (record.namespace, record.key, record.group, record.shard)
            if self.held.get(name) == offset:
                del self.held[name]
                self.cut_off.add(offset)
                chunks.append(name[:2])
        return chunks

    def read_again(self) -> None:
        """Rebuilds `held`, as a new brain does. Doomed records are held again unless a newer one exists."""
        self.held.clear()
        for offset, record in self.records.items():
            name = (record.namespace, record.key, record.group, record.shard)
            rival = self.held.get(name)
            if rival is None or self.records[rival].generation < record.generation:
                self.held[name] = offset

    @property
    def slots(self) -> set[int]:
        """Offsets of sealed slots, without marks."""
        return {offset for offset, record in self.records.items() if record.group != NO_GROUP}

    def drop_document(self, number: int) -> None:
        """Nothing of the namespace is served any more, whether it was cleared or forgotten for another one."""
        document = decode_document(self.documents.pop(number))
        if document is not None and document.digest not in self.documented:
            self.undescribed.update(record.offset for record in self.doom(document.digest))

    def check_documents(self, namespaces: set[bytes]) -> None:
        """Each namespace with chunks has its document, without which the next brain drops them."""
        missing = namespaces - self.documented
        if missing:
            raise Wrong(f"{missing} have chunks, and no document")

    @property
    def documented(self) -> set[bytes]:
        """Namespaces that have a document."""
        return {document.digest for document in map(decode_document, self.documents.values()) if document is not None}

    def packed(self) -> bytes:
        """The bytes that scan() returns: records ascending by offset."""
        return b"".join(pack(self.records[offset]) for offset in sorted(self.records))

    def present(self, digest: bytes, key: bytes, group: int, shards: int) -> bool:
        return all((digest, key, group, shard) in self.held for shard in range(shards))


class Both:
    """DRAM and disk together: a group is present if each of its shards is in one of them."""

    def __init__(self, ledger: Ledger, on_disk: set[tuple[bytes, bytes, int, int]]) -> None:
        self._ledger = ledger
        self._on_disk = on_disk

    def keep_only(self, offsets: set[int]) -> None:
        """Keeps only these offsets of DRAM, using the ledger's present state."""
        kept = Ledger(self._ledger.arena)
        kept.held = {name: offset for name, offset in self._ledger.held.items() if offset in offsets}
        self._ledger = kept

    def present(self, digest: bytes, key: bytes, group: int, shards: int) -> bool:
        if self._ledger.present(digest, key, group, shards):
            return True
        return all((digest, key, group, shard) in self._on_disk for shard in range(shards))


def servable(ledger: Ledger | Both, shape: Shape, digest: bytes, keys: list[bytes]) -> int:
    """The longest boundary that every group can serve, found by trying each one."""
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
    """True if the held shards can serve this boundary."""
    return boundary == 0 or servable(ledger, shape, digest, keys[:boundary]) == boundary


def away_of(ledger: Ledger, shape: Shape, digest: bytes, keys: list[bytes]) -> int:
    """The number of chunks of a prefix for which DRAM misses something needed."""
    missing = {
        chunk
        for index, group in enumerate(shape.groups)
        for chunk in (needed(shape, index, len(keys)) if keys else ())
        if not ledger.present(digest, keys[chunk], index, group.shards)
    }
    return len(missing)


def survivors(ledger: Ledger, shapes: dict[bytes, Shape]) -> set[int]:
    """Offsets that a restarted brain must keep: every complete group of a chunk whose whole prefix, and itself, has all
    full groups.

    Marks are ignored: without a full group, no complete group may be lost. A cleared namespace has no document any
    more, and what was not withdrawn yet goes.
    """
    found: set[int] = set()
    documented = ledger.documented
    for (digest, key, index, _), offset in ledger.held.items():
        if index == NO_GROUP or digest not in documented:
            continue
        shape, prefix = shapes[digest], keys_of(path_of(key))
        full = [number for number, group in enumerate(shape.groups) if group.kind == "full"]
        reachable = all(
            ledger.present(digest, before, number, shape.groups[number].shards) for before in prefix for number in full
        )
        if reachable and ledger.present(digest, key, index, shape.groups[index].shards):
            found.add(offset)
    return found


def may_be_lost(ledger: Ledger, shapes: dict[bytes, Shape]) -> set[int]:
    """Offsets that a restarted brain may find or lose.

    In namespaces without a full group this is what was cut off: it depends on marks. In all others it is what was left
    of a namespace that went, and came again with a new document: that one may lack the shapes of some ranks.
    """
    with_full = {digest for digest, shape in shapes.items() if any(group.kind == "full" for group in shape.groups)}
    cut_off = {offset for offset in ledger.cut_off if ledger.records[offset].namespace not in with_full}
    return cut_off | ledger.undescribed


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
