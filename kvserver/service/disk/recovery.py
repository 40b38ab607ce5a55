"""Recovery of chunks that earlier brains left on disk, while the server already serves.

The mover first names the namespaces that it found. Then it lists the chunks as they are asked for, parents first. Each
chunk is looked at once, when it is listed. Only whole chunks are trusted: each needed group has all its shards, of one
generation, with the sizes that its namespace fixes; the namespace was not cleared since; the parent is there. The
places of all others are free. So nothing is remembered between two reports, whatever the devices hold.
"""

import logging
from collections.abc import Iterator
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import NamedTuple

from kvserver.index.space import ABSENT, READY, Node, Space
from kvserver.index.tags import Tags
from kvserver.service.base.effects import PutNamespace
from kvserver.service.holdings.namespace_documents import document_of, space_from
from kvserver.service.state.core import Core
from kvserver.service.state.disk_tier import DiskTier
from kvserver.tiers.extents import extent_at
from kvserver.tiers.prefix_notes import prefix_from
from kvserver.tiers.records import (
    DISK_RECORD,
    NO_PARENT,
    DiskRecord,
    Packed,
    decode_document,
    disk_record,
    encode_document,
)
from kvserver.tiers.slots import SLOT_ALIGN
from kvserver.wire.orders import FoundNote, FoundRecords, Listed, TellRecords

ASKED_AHEAD = 2
"""Reports under way: the mover makes one while another is taken in. The shell serves others after each."""

_namespace_of = itemgetter(1)
_tenant_of = itemgetter(7)


class Chunk(NamedTuple):
    """A chunk on disk."""

    key: bytes
    parent: bytes
    groups: int
    """Bit g: all shards of group g."""
    extents: tuple[int, ...]
    """The extent of each part, or ABSENT."""
    generation: int
    tenant: int


def found(core: Core, tier: DiskTier, report: FoundNote | Listed | FoundRecords) -> None:
    """Handles the mover's report of what is on disk."""
    recovery = tier.recovery
    recovery.begin_listing()
    match report:
        case FoundNote(namespace, document, void, newest):
            prefix = prefix_from(document)
            tier.notes.found(namespace, void, prefix)
            recovery.found_namespace(namespace, document if prefix is None else b"", newest)
            core.chunks.skip_generations(max(void, newest) + 1)
        case Listed(records, damaged):
            core.counters.add("disk_damaged", damaged)
            recovery.begin_telling(records)
            for device in tier.devices:
                device.say_listed()
            _add_spaces(core, tier)
            core.log("disk read", ("records", records), ("damaged", damaged))
            for _ in range(ASKED_AHEAD):
                tier.tell(TellRecords())
        case FoundRecords(records) if records:
            _take_in(core, tier, records)
            tier.tell(TellRecords())
        case FoundRecords():
            if recovery.not_taken:
                why = "what they hang on is on no device here, or is not whole"
                core.log("disk chunks not reached", ("chunks", recovery.not_taken), ("why", why), level=logging.WARNING)
            core.log("disk recovered", ("chunks", tier.chunks.held), ("records", recovery.records))
            recovery.end()
            for account in tier.chunks.accounts.all() if tier.chunks.accounts is not None else ():
                if over_bytes := account.lacks(0):
                    core.log("tenant above its maximum on disk", ("tenant", account.name), ("over_bytes", over_bytes))


def _add_spaces(core: Core, tier: DiskTier) -> None:
    """Adds the namespaces that have records which are not void, the last written first: cleared ones must not take the
    places of those that can be served."""
    found = tier.recovery
    alive = [digest for digest, newest in found.newest.items() if newest > tier.notes.noted[digest]]
    spaces = core.chunks.spaces
    free = sorted(set(range(core.bounds.namespaces_max)) - {space.number for space in spaces.values()})
    for digest in sorted(alive, key=lambda digest: found.newest[digest], reverse=True):
        raw = found.documents.get(digest, b"")
        document = decode_document(raw) if raw else None
        if document is None or document.digest != digest:
            continue
        if digest in spaces:
            _hold_against(core, tier, spaces[digest], space_from(spaces[digest].number, document))
        elif free:
            number = free.pop(0)
            space = space_from(number, document)
            space.touch(found.newest[digest])
            core.chunks.add_space(space)
            core.emit(PutNamespace(number, raw))


def _hold_against(core: Core, tier: DiskTier, space: Space, told: Space) -> None:
    """Compares a namespace that was known before the disk was read with its document on disk. Shapes of ranks that have
    not registered yet are taken from disk, and so are epochs that nobody knew. Another epoch on disk is older: the
    brain died before the devices had noted the next one. If shapes contradict each other, the records on disk are void,
    however well their sizes fit."""
    both = list(zip(space.parts, told.parts, strict=False))
    agree = all(None in (part.pages, other.pages) or part.pages == other.pages for part, other in both)
    if space.geometry != told.geometry or not agree:
        tier.notes.void_later.add(space.digest)
        why = f"on disk it has {told.geometry} or pages that are not those of {space.geometry}, which was registered"
        core.log("disk chunks not reached", ("namespace", space.digest[:6].hex()), ("why", why), level=logging.WARNING)
        return
    missing = [index for index, (part, other) in enumerate(both) if part.pages is None and other.pages is not None]
    for index in missing:
        other = told.parts[index]
        assert other.pages is not None
        space.fix_part(index, other.pages, other.payload_bytes, other.slot_bytes)
    lacks_epochs = bool(told.epochs.keys() - space.epochs.keys())
    if lacks_epochs:
        space.belongs_to_epochs(told.epochs | space.epochs)
    if space.epochs != told.epochs:
        tier.notes.describe_anew(space.digest)
    if missing or lacks_epochs:
        core.emit(PutNamespace(space.number, encode_document(document_of(space))))


def _take_in(core: Core, tier: DiskTier, packed: bytes) -> None:
    notes, recovery = tier.notes, tier.recovery
    for digest, told in groupby(DISK_RECORD.iter_unpack(packed), key=_namespace_of):
        space = core.chunks.spaces.get(digest)
        if space is None and (digest in notes.unnoted or recovery.newest.get(digest, 0) > notes.noted.get(digest, 0)):
            tags = notes.left_out.setdefault(digest, Tags())
            for tag in set(map(_tenant_of, told)):
                tags.add(tag)
        if space is None or not space.needed:
            continue
        whole = _whole_records if len(space.parts) == 1 else _whole_chunks
        adopted: list[Node] = []
        cleared = {
            prefix.key: notes.noted[note] for note, prefix in notes.cleared.items() if prefix.namespace == digest
        }
        for chunk in whole(space, notes.noted.get(digest, 0), told):
            space.tags.add(chunk.tenant)
            if cleared and _is_void(space, cleared, recovery.floors, chunk):
                continue
            known = space.find(chunk.key)
            if known is None:
                node = _adopt_new(core, tier, space, chunk)
            else:
                node = _adopt_known(core, tier, space, chunk, known)
            if node is not None:
                adopted.append(node)
            elif known is None or not known.on_disk:
                recovery.take_not(1)
        core.counters.add("disk_recovered", len(adopted))
        for node in adopted:
            if node.children is None:  # parents may go only after their children
                tier.chunks.room.offer(space, node)


def _is_void(space: Space, cleared: dict[bytes, int], floors: dict[Node, int], chunk: Chunk) -> bool:
    """The chunk was written before its prefix was cleared. cleared: key -> generation up to which that chunk and all
    below it are void. floors: the same for nodes already looked at, including what their ancestors make void."""
    key, above, _, _, generation, _ = chunk
    node = space.find(above) if above != NO_PARENT else None
    path: list[Node] = []
    while node is not None and node.depth and node not in floors:
        path.append(node)
        node = node.parent
    floor = floors.get(node, 0) if node is not None else 0
    for at in reversed(path):
        floor = floors[at] = max(floor, cleared.get(at.key, 0))
    return generation <= max(floor, cleared.get(key, 0))


def _adopt_new(core: Core, tier: DiskTier, space: Space, chunk: Chunk) -> Node | None:
    key, above, groups, extents, generation, tenant = chunk
    parent = space.root if above == NO_PARENT else space.find(above)
    if parent is None or parent.state != READY or core.chunks.chunks >= core.chunks.chunks_max:
        return None
    accounts = core.chunks.accounts
    if accounts is not None and not accounts.takes_back(space, tenant):
        return None
    core.chunks.make_way(space, key)
    node = Node(key, parent, generation, tenant)
    return node if tier.chunks.adopt_new(space, node, groups, extents, generation) else None


def _adopt_known(core: Core, tier: DiskTier, space: Space, chunk: Chunk, node: Node) -> Node | None:
    """Takes in the records of a chunk that the index knows. It may be in DRAM, from the ledger or stored by this brain.
    Or the mover lists it again, or lists an older generation."""
    _, above, groups, extents, generation, _ = chunk
    assert node.parent is not None
    free = node.state == READY and not node.on_disk and node not in core.chunks.pendings
    if not free or node.parent.key != (b"" if above == NO_PARENT else above):
        return None
    return node if tier.chunks.adopt(space, node, groups, extents, generation) else None


def _whole_records(space: Space, void: int, told: Iterator[Packed]) -> Iterator[Chunk]:
    """Fast path for namespaces in which a chunk is one record: most of them, and called a million times."""
    (part,) = space.parts
    shape = 0, 0, part.payload_bytes, part.slot_bytes // SLOT_ALIGN
    for _, _, key, above, group, shard, payload_bytes, tenant, units, generation, _, offset, device, _ in told:
        if generation > void and (group, shard, payload_bytes, units) == shape:
            yield Chunk(key, above, 1, (extent_at(device, offset),), generation, tenant)


def _whole_chunks(space: Space, void: int, told: Iterator[Packed]) -> Iterator[Chunk]:
    """The whole generations of each chunk: most groups first, among equals the newest. A write that moved the chunk and
    did not end may have left a newer generation with fewer groups."""
    for _, records in groupby(map(disk_record, told), key=attrgetter("key")):
        by_generation: dict[int, dict[tuple[int, int], DiskRecord]] = {}
        for record in records:
            if record.generation > void:
                by_generation.setdefault(record.generation, {})[record.group, record.shard] = record
        chunks: list[Chunk] = []
        for generation, shards in by_generation.items():
            groups, extents = _whole_groups(space, shards)
            if groups & space.needed == space.needed:
                record = next(iter(shards.values()))
                chunks.append(Chunk(record.key, record.parent, groups, extents, generation, record.tenant))
        yield from sorted(chunks, key=lambda chunk: (chunk.groups.bit_count(), chunk.generation), reverse=True)


def _whole_groups(space: Space, shards: dict[tuple[int, int], DiskRecord]) -> tuple[int, tuple[int, ...]]:
    """(groups, extents) of the groups that have all their shards, with the sizes that the namespace fixes."""
    groups, extents = 0, [ABSENT] * len(space.parts)
    for group in range(len(space.geometry.groups)):
        parts = space.group_parts(group)
        wanted = [shards.get((group, space.parts[part].shard)) for part in parts]
        whole = [record for record in wanted if record is not None and _fits(space, record)]
        if len(whole) == len(parts):
            groups |= 1 << group
            for part, record in zip(parts, whole, strict=True):
                extents[part] = extent_at(record.device, record.offset)
    return groups, tuple(extents)


def _fits(space: Space, record: DiskRecord) -> bool:
    part = space.parts[space.part_of[record.group] + record.shard]
    return part.slot_bytes == record.extent_bytes and part.payload_bytes == record.payload_bytes
