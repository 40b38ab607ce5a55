"""What earlier brains left on disk, taken into the index while it serves.

The mover tells its notes and its records, in any order. Then each chunk is looked at once its parent is in: trusted is
what is whole. Each needed group has all its shards, of one generation, with the sizes that its namespace fixes; the
namespace was not cleared since; the parent is there. Everything else is as if it were not there, and its place is free.
"""

import logging

from kvserver.index.space import ABSENT, READY, Node, Space
from kvserver.service.documents import space_from
from kvserver.service.effects import PutNamespace
from kvserver.service.state import Core, DiskTier, Found
from kvserver.tiers.extents import extent_at
from kvserver.tiers.records import NO_PARENT, DiskRecord, decode_document, unpack_disk
from kvserver.wire.orders import FoundNote, FoundRecords, Recovered

CHUNKS_PER_TURN = 500
"""Of an event. At some 20 us each, others wait for them about 10 ms."""


def found(core: Core, tier: DiskTier, report: FoundNote | FoundRecords | Recovered) -> None:
    """The mover tells what is there."""
    tier.found = tier.found or Found()
    match report:
        case FoundNote(namespace, document, void):
            tier.found.void[namespace] = max(void, tier.found.void.get(namespace, 0))
            tier.noted[namespace] = max(void, tier.noted.get(namespace, 0))
            tier.found.documents[namespace] = document
            core.chunks.generation = max(core.chunks.generation, void + 1)
        case FoundRecords(records):
            for record in unpack_disk(records):
                _remember(tier.found, record)
                core.chunks.generation = max(core.chunks.generation, record.generation + 1)
        case Recovered(damaged):
            core.counters.disk_damaged += damaged
            tier.found.complete = True
            _add_spaces(core, tier.found)
            tier.found.frontier = _known_parents(core, tier.found)
            core.log("disk read", ("records", tier.found.records), ("damaged", damaged))


def _add_spaces(core: Core, found: Found) -> None:
    """The namespaces that have records which are not void, those written last first: what was cleared must not take
    the place of what can be served."""
    alive = [digest for digest, newest in found.newest.items() if newest > found.void.get(digest, 0)]
    spaces = core.chunks.spaces
    free = sorted(set(range(core.bounds.namespaces_max)) - {space.number for space in spaces.values()})
    for digest in sorted(alive, key=lambda digest: found.newest[digest], reverse=True):
        raw = found.documents.get(digest, b"")
        document = decode_document(raw) if raw and free else None
        if document is not None and document.digest == digest and digest not in spaces:
            number = free.pop(0)
            space = space_from(number, document)
            space.root.used = found.newest[digest]
            core.chunks.add_space(space)
            core.effects.append(PutNamespace(number, raw))


def _known_parents(core: Core, found: Found) -> list[tuple[Space, Node]]:
    """What is in the index already, from the ledger or from new stores, and has something on disk below it."""
    known: list[tuple[Space, Node]] = []
    for namespace, key in found.below:
        space = core.chunks.spaces.get(namespace)
        parent = space.nodes.get(key, space.root if key == b"" else None) if space is not None else None
        if space is not None and parent is not None:
            known.append((space, parent))
    return known


def _remember(found: Found, record: DiskRecord) -> None:
    found.records += 1
    found.newest[record.namespace] = max(record.generation, found.newest.get(record.namespace, 0))
    name = (record.namespace, record.key)
    known = found.chunks.get(name)
    if known is None:
        found.chunks[name] = [record]
        parent = b"" if record.parent == NO_PARENT else record.parent
        found.below.setdefault((record.namespace, parent), []).append(record.key)
    else:
        known.append(record)


def take_in(core: Core, tier: DiskTier) -> None:
    """The next chunks, parents first."""
    found = tier.found
    if found is None or not found.complete:
        return
    left = CHUNKS_PER_TURN
    adopted: list[tuple[Space, Node]] = []
    while found.frontier and left:
        space, parent = found.frontier[-1]
        keys = found.below.get((space.digest, parent.key))
        lives = core.chunks.spaces.get(space.digest) is space and parent.state == READY
        if not keys or not lives:
            found.frontier.pop()
            continue
        left -= 1
        key = keys.pop()
        node = _adopt(core, tier, (space, parent, key), found.chunks.pop((space.digest, key)))
        if node is not None:
            core.counters.disk_recovered += 1
            adopted.append((space, node))
            found.frontier.append((space, node))
    for space, node in reversed(adopted):
        core.chunks.settled(space, node)
    if not found.frontier:
        tier.recovered, tier.found = True, None
        if found.chunks:
            why = "cleared, or what they hang on is on no device here"
            core.log("disk chunks not reached", ("chunks", len(found.chunks)), ("why", why), level=logging.WARNING)
        core.log("disk recovered", ("chunks", tier.chunks.held), ("records", found.records))


def _adopt(core: Core, tier: DiskTier, where: tuple[Space, Node, bytes], records: list[DiskRecord]) -> Node | None:
    """where: namespace, parent, key."""
    space, parent, key = where
    assert tier.found is not None
    void = max(tier.found.void.get(space.digest, 0), tier.noted.get(space.digest, 0))
    whole = _newest_whole(space, [record for record in records if record.generation > void])
    node = space.nodes.get(key)
    if whole is None or not space.needed:
        return None
    groups, extents, newest = whole
    if node is not None:
        free = node.parent is parent and node.state == READY and not node.on_disk and node not in core.chunks.pendings
        adopted = free and tier.chunks.adopt(space, node, groups, extents, newest.generation)
        return node if adopted else None
    if core.chunks.chunks >= core.chunks.chunks_max:
        return None
    node = core.chunks.grow(space, parent, key, used=newest.generation, tenant=newest.tenant)
    if not tier.chunks.adopt(space, node, groups, extents, newest.generation):
        core.chunks.remove(space, node)
        return None
    core.chunks.made_ready(space, node)
    return node


def _newest_whole(space: Space, records: list[DiskRecord]) -> tuple[int, tuple[int, ...], DiskRecord] | None:
    """(groups, extents, a record of them): the newest generation that has what a prefix needs."""
    if len(records) == len(space.parts) == 1:  # most namespaces, and a million times
        (record,) = records
        if space.needed == 1 and (record.group, record.shard) == (0, 0) and _fits(space, record):
            return 1, (extent_at(record.device, record.offset),), record
        return None
    by_generation: dict[int, dict[tuple[int, int], DiskRecord]] = {}
    for record in records:
        by_generation.setdefault(record.generation, {})[record.group, record.shard] = record
    for _, shards in sorted(by_generation.items(), reverse=True):
        extents = [ABSENT] * len(space.parts)
        groups = 0
        for group in range(len(space.geometry.groups)):
            parts = space.group_parts(group)
            wanted = [shards.get((group, space.parts[part].shard)) for part in parts]
            whole = [record for record in wanted if record is not None and _fits(space, record)]
            if len(whole) == len(parts):
                groups |= 1 << group
                for part, record in zip(parts, whole, strict=True):
                    extents[part] = extent_at(record.device, record.offset)
        if groups & space.needed == space.needed and groups:
            return groups, tuple(extents), next(iter(shards.values()))
    return None


def _fits(space: Space, record: DiskRecord) -> bool:
    part = space.parts[space.part_of[record.group] + record.shard]
    return part.slot_bytes == record.extent_bytes and part.payload_bytes == record.payload_bytes
