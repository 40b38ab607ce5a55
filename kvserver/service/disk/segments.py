"""Empties a segment of a device, so that it can serve extents of another size.

When a model with records of another size begins, its device is full of segments of the old size. Leaves go as usual,
least recently used first. But they lie all over the device, so no segment becomes empty. Therefore, once as many
extents of one size are free as a segment holds (disk_eviction.py), the emptiest segment is closed. Its records move to
these places by way of DRAM, as when a device is drained. A move loses nothing. Writes that need the segment wait for
it, others go on. For a while after it is empty, the segment is kept for the waiting writes.

A chunk for which DRAM has no room goes instead, with all below it, after PATIENCE_MS without progress. So does, at
once, a chunk that is larger than the daily budget ever allows. For one segment, at most as many bytes go as it holds.
If a chunk may not go either, its segment stays and another one is tried.
"""

from kvserver.index.space import READY, Node, Space
from kvserver.service.disk import reads, writes
from kvserver.service.disk.drain import MOVING_MAX, MOVING_SHARE
from kvserver.service.holdings.disk_eviction import Emptying
from kvserver.service.state.core import MILLISECOND_NS, Core
from kvserver.service.state.disk_tier import DiskTier
from kvserver.tiers.extents import place_of

LOOKS_MAX = 64
"""Chunks that are looked at in one event, because other events wait."""
PATIENCE_MS = 2_000
"""How long the emptying waits without progress while none of its reads and writes is under way."""
SPARE_MS = 500
"""How long the emptying waits without progress before chunks that are only in DRAM go for the records that move.
Meanwhile every chunk that may be written is."""
KEPT_MS = 5_000
"""How long an emptied segment is kept for the size that wanted it."""


def tick(core: Core, tier: DiskTier, now_ns: int) -> None:
    """Begins to empty segments before the writes that will need them, and goes on. Called at each tick."""
    if tier.readable and tier.recovered:
        room = tier.chunks.room
        for space, leaf in list(tier.chunks.dirty_spaces()):
            if not tier.chunks.writable(space):
                continue
            for device, takes_writes in enumerate(tier.chunks.extents.takes_writes):
                for slot_bytes in sorted(space.slot_sizes) if takes_writes else ():
                    room.prepare(room.wanted(device, slot_bytes, leaf.used, leaf.tenant))
    turn(core, tier, now_ns)


def turn(core: Core, tier: DiskTier, now_ns: int) -> None:
    """Goes on emptying segments. Called at each tick and when a read or write has ended."""
    if tier.readable and tier.recovered:
        for device, going in list(tier.chunks.room.emptying.items()):
            _go_on(core, tier, device, going, now_ns)


def gone(core: Core, tier: DiskTier) -> None:
    """Stops emptying when the mover has been reaped. Writes that need a segment begin anew."""
    for device in list(tier.chunks.room.emptying):
        _stop(core, tier, device, in_vain=False)


def _stop(core: Core, tier: DiskTier, device: int, *, in_vain: bool) -> None:
    tier.chunks.room.stop_emptying(device, in_vain=in_vain)
    writes.take_up(core, tier, device)


def _go_on(core: Core, tier: DiskTier, device: int, going: Emptying, now_ns: int) -> None:
    pool = tier.chunks.extents.pools[device]
    if not tier.chunks.extents.takes_writes[device] or not pool.is_closed(going.segment):
        _stop(core, tier, device, in_vain=False)
        return
    owners = pool.slab_owners(going.segment)
    if going.has_left(len(owners), now_ns) and not owners:
        writes.take_up(core, tier, device)
    if not owners:
        if now_ns - going.since_ns >= KEPT_MS * MILLISECOND_NS:
            _stop(core, tier, device, in_vain=False)
        return
    going.look_at(owners)
    for node, space in list(going.moving.items()):
        _step(core, tier, going, (space, node), now_ns)
    for _ in range(LOOKS_MAX):
        if not going.queue or not _has_hands_free(core, tier, going):
            break
        node = going.queue.pop()
        owner = tier.chunks.room.space_of(node)
        if owner is not None and node not in going.moving:
            going.moving[node] = owner
            _step(core, tier, going, (owner, node), now_ns)
    under_way = any(node in tier.chunks.busy for node in going.moving)
    if not under_way and now_ns - going.since_ns >= PATIENCE_MS * MILLISECOND_NS:
        for node in list(going.moving):
            _drop(tier, going, node)
        if len(pool.slab_owners(going.segment)) == going.records:
            going.give_up()
    if going.in_vain:
        _stop(core, tier, device, in_vain=True)


def _drop(tier: DiskTier, going: Emptying, node: Node) -> None:
    going.moving.pop(node, None)
    room, left = tier.chunks.room, tier.chunks.extents.segment_bytes - going.dropped_bytes
    going.dropped(room.drop_with_all_below(node, room.wanted(going.device, 0, going.used, going.tenant), left))


def _has_hands_free(core: Core, tier: DiskTier, going: Emptying) -> bool:
    """A device may always move one chunk. It may move more while all devices together leave enough DRAM to others."""
    if not 0 < len(going.moving) < MOVING_MAX:
        return not going.moving
    moving = (chunk for each in tier.chunks.room.emptying.values() for chunk in each.moving.items())
    moving_bytes = sum(space.group_bytes(node.on_disk) for node, space in moving)
    return moving_bytes < core.bounds.arena_bytes // MOVING_SHARE


def _is_there(core: Core, tier: DiskTier, going: Emptying, chunk: tuple[Space, Node]) -> bool:
    """The chunk still has a record in the segment."""
    space, node = chunk
    if node.disk is None or not core.chunks.serves(space, node):
        return False
    segment_bytes = tier.chunks.extents.segment_bytes
    places = (place_of(extent) for extent in node.disk.extents if extent >= 0)
    return any(place.device == going.device and place.offset // segment_bytes == going.segment for place in places)


def _step(core: Core, tier: DiskTier, going: Emptying, chunk: tuple[Space, Node], now_ns: int) -> None:
    """Reads a chunk, or writes it to another place. If there is no place, or the daily budget never allows so large a
    write, the chunk goes with all below it."""
    space, node = chunk
    if node in tier.chunks.busy:
        return
    if not _is_there(core, tier, going, chunk):
        del going.moving[node]
        if node in going.fetched:
            going.fetched.discard(node)
            if node.state == READY:
                core.chunks.room.let_go(space, node)  # the next chunk takes its slots
        return
    if not tier.devices[going.device].placement.budget.may_ever_allow(space.group_bytes(node.on_disk)):
        _drop(tier, going, node)
        return
    away = node.on_disk & ~node.in_dram
    if away:
        spares_dirty = now_ns - going.since_ns < SPARE_MS * MILLISECOND_NS
        if reads.order(core, tier, space, node, groups=away, now_ns=now_ns, spares_dirty=spares_dirty):
            going.fetched.add(node)
        elif spares_dirty:  # DRAM has no room for it now
            tier.writes.hurry(now_ns + SPARE_MS * MILLISECOND_NS)
        return
    job = writes.write_of(core, space, node, device=going.device, now_ns=now_ns, whole=True)
    used = node.used if node.children is None else now_ns  # others depend on it
    wait = writes.order(core, tier, job, used=used, now_ns=now_ns)
    if wait == "room":
        _drop(tier, going, node)
    elif wait:
        going.wait(now_ns)  # only the device's limits delay it, and not for ever
    else:
        core.counters.add("disk_rewritten_bytes", job.bytes)
