"""Rebuilds the index from the ledger after a brain died.

Only whole things are trusted: a namespace with a readable document, a group with all its shards, a chunk whose parent
is there. A chunk that holds nothing counts as there when it is marked. Everything else is withdrawn. Two entries for
one shard cannot both be true; the later generation wins.
"""

from collections import defaultdict

from kvserver.index.space import ABSENT, Node, Space
from kvserver.service.base.effects import DropNamespace
from kvserver.service.holdings.namespace_documents import space_from
from kvserver.service.state.core import Core
from kvserver.tiers.records import NO_GROUP, NO_PARENT, Record, decode_document, unpack_all

Shards = dict[tuple[int, int], Record]
"""(group, shard) -> record. The mark is under (NO_GROUP, 0)."""
Chunks = dict[tuple[bytes, bytes], Shards]


def restore(core: Core, documents: list[tuple[int, bytes]], records: bytes) -> None:
    """Fills the empty tables of `core`. The next effects withdraw everything that is dropped from the ledger."""
    for number, raw in documents:
        document = decode_document(raw)
        if document is None or document.digest in core.chunks.spaces or number >= core.bounds.namespaces_max:
            core.emit(DropNamespace(number))
        else:
            core.chunks.add_space(space_from(number, document))
    if not records:
        return
    chunks: Chunks = defaultdict(dict)
    for record in unpack_all(records):
        core.chunks.skip_generations(record.generation)
        shards = chunks[(record.namespace, record.key)]
        rival = shards.get((record.group, record.shard))
        if rival is not None:
            older = min(rival, record, key=lambda one: one.generation)
            core.chunks.withdrawn.append(older.offset)
            if older is record:
                continue
        shards[(record.group, record.shard)] = record
    core.chunks.marks.restore(_grow_trees(core, chunks))
    core.log(
        "index restored",
        ("chunks", core.chunks.chunks),
        ("withdrawn", len(core.chunks.withdrawn)),
        ("damaged", core.counters.ledger_damaged),
    )


def _grow_trees(core: Core, chunks: Chunks) -> list[tuple[Node, int]]:
    """Adds chunks, parents first. A chunk whose parent never comes is withdrawn. Returns the marked chunks with the
    places of their marks."""
    marked: list[tuple[Node, int]] = []
    by_parent: dict[tuple[bytes, bytes], list[bytes]] = defaultdict(list)
    for (namespace, key), shards in chunks.items():
        above = next(iter(shards.values())).parent
        by_parent[(namespace, b"" if above == NO_PARENT else above)].append(key)
    for digest, space in core.chunks.spaces.items():
        frontier: list[Node] = [space.root]
        for parent in frontier:
            for child in by_parent.get((digest, parent.key), ()):
                mark = _mark(core, chunks[(digest, child)])
                node = _adopt(core, space, parent, child, shards=chunks[(digest, child)], mark=mark)
                if node is not None:
                    del chunks[(digest, child)]
                    frontier.append(node)
                    if mark != ABSENT:
                        marked.append((node, mark))
    for shards in chunks.values():
        core.chunks.withdrawn.extend(record.offset for record in shards.values())
    return marked


def _mark(core: Core, shards: Shards) -> int:
    mark = shards.get((NO_GROUP, 0))
    return mark.offset if mark is not None and core.chunks.marks.is_place(mark.offset) else ABSENT


def _adopt(core: Core, space: Space, parent: Node, key: bytes, *, shards: Shards, mark: int) -> Node | None:
    """Adds one chunk as a ready node. None when a group that a prefix needs is not whole, or when nothing is whole and
    there is no mark."""
    if key in space.nodes or core.chunks.chunks >= core.bounds.chunks_max:
        return None
    slots = [ABSENT] * len(space.parts)
    present = 0
    for group in range(len(space.geometry.groups)):
        wanted = [shards.get((group, shard)) for shard in range(space.geometry.groups[group].shards)]
        records = [record for record in wanted if record is not None and _fits(space, record)]
        if len(records) == len(wanted):
            for record in records:
                slots[space.part_of[group] + record.shard] = record.offset
            present |= 1 << group
    if present & space.needed != space.needed or not (present or mark != ABSENT):
        return None
    first = next(iter(shards.values()))
    space.touch(first.generation)
    node = core.chunks.adopt(space, parent, key, tuple(slots), present, used=first.generation, tenant=first.tenant)
    if node is None:
        return None
    kept = {*slots, mark}
    core.chunks.withdrawn.extend(record.offset for record in shards.values() if record.offset not in kept)
    return node


def _fits(space: Space, record: Record) -> bool:
    part = space.parts[space.part_of[record.group] + record.shard]
    return part.slot_bytes == record.slot_bytes and part.payload_bytes == record.payload_bytes
