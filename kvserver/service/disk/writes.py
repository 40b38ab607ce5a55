"""Writes from DRAM to disk: which chunks, in which order, and when not.

Writes run ahead of evictions. The coldest share of DRAM is kept free or clean (also on disk), so that room for a store
can be taken at once. The coldest dirty leaf is written next, and before it the rest of its chain that is not on disk,
head first. A store never waits for a write: a chunk that is not written in time is dropped, as it would be without a
disk.

Chunks of one chain lie on one device for a while (runs.py). When a device has its share of the writes under way, the
chain is put aside, and another one is written to another device.
"""

from kvserver.index.eviction import NO_ROOM, PARKED, REFUSED
from kvserver.index.space import Node, Space
from kvserver.service.disk import runs
from kvserver.service.holdings.disk_chunks import records_of
from kvserver.service.holdings.disk_eviction import device_of
from kvserver.service.holdings.place_owners import DiskJob
from kvserver.service.state.core import MILLISECOND_NS, Core
from kvserver.service.state.disk_tier import DiskTier
from kvserver.wire.orders import Demote

WRITING_SHARE = 8
"""Writes in flight take at most 1 / this of the arena, because their chunks cannot be evicted meanwhile."""
LOOK_AGAIN_MS = 1
"""Pause after no write was due. Lookups and ends of copies change too little in a millisecond to look after each of
them."""
REFUSALS_A_LOOK = 64
"""Leaves that are refused in one event. Thousands may be due at once, and other events wait."""
PARKED_A_LOOK = 64
"""Chains that are put aside in one event because their device empties a segment, or is busy. Others are written
meanwhile."""
PAUSE_MS = 100
"""Pause after a refusal, before another chain is chosen. With quotas it is LOOK_AGAIN_MS when one tenant has no room,
because others may have some."""


def turn(core: Core, tier: DiskTier, now_ns: int) -> None:
    """Chooses the chunks to write next, and orders the writes that the devices take."""
    for _ in range(PARKED_A_LOOK):
        choose(core, tier, now_ns)
        if not _start(core, tier, now_ns):
            return


def choose(core: Core, tier: DiskTier, now_ns: int) -> None:
    """Queues the chain of the coldest dirty leaf, if the leaf is among the chunks to go next."""
    if tier.writes.chain or now_ns < tier.writes.wait_until_ns:
        return
    for _ in range(REFUSALS_A_LOOK):
        found = tier.chunks.coldest_dirty()
        if found is None:
            return
        space, leaf = found
        if not _is_due(core, leaf, now_ns):
            tier.writes.wait(now_ns + LOOK_AGAIN_MS * MILLISECOND_NS)
            return
        if space.is_cut(leaf):
            leaf.mark(REFUSED)
            continue
        untouched = core.bounds.disk_second_touch and leaf.key not in tier.writes.touched
        if not tier.chunks.writable(space) or untouched:
            leaf.mark(REFUSED)
            tier.writes.touched.add(leaf.key)
            continue
        _choose(tier, space, leaf)
        return


def choose_kept(core: Core, tier: DiskTier, space: Space, leaf: Node) -> None:
    """Queues the chain of a chunk that leases keep in DRAM, so that it can leave."""
    refused = leaf.queued & (REFUSED | NO_ROOM | PARKED)
    if not tier.writes.chain and tier.chunks.writable(space) and not refused and not core.bounds.disk_second_touch:
        _choose(tier, space, leaf)


def _choose(tier: DiskTier, space: Space, leaf: Node) -> None:
    chain: list[Node] = []
    node: Node | None = leaf
    while node is not None and node.depth:
        node.touch(leaf.used)  # same use as the leaf; else two chains drop each other
        if node.in_dram & ~node.on_disk:
            chain.append(node)
        node = node.parent
    tier.writes.choose(space, reversed(chain), leaf.used)


def _is_due(core: Core, leaf: Node, now_ns: int) -> bool:
    """Whether the coldest dirty leaf is among the coldest share of DRAM, by the time since its last use. Free room
    counts as colder than any chunk. The clean bytes say nothing here, because chunks that were just read from disk are
    clean and the warmest of all."""
    if (
        core.bounds.disk_write_through
        or core.operators.drain
        or (core.disk and now_ns < core.disk.writes.hurry_until_ns)
    ):
        return True
    pool = core.chunks.pool
    ready_bytes = pool.slabs_ready * pool.slab_bytes
    free_bytes = ready_bytes - pool.bytes_used
    ahead_percent = core.bounds.disk_clean_percent - free_bytes * 100 // ready_bytes if ready_bytes else 0
    if ahead_percent <= 0:
        return False
    oldest_ns = core.chunks.room.coldest_used(leaf.used)
    return leaf.used <= oldest_ns + (now_ns - oldest_ns) * ahead_percent // 100


def _start(core: Core, tier: DiskTier, now_ns: int) -> bool:
    """Orders the queued writes that the devices take. True when the chain was put aside and another may be chosen."""
    most_bytes = core.bounds.arena_bytes // WRITING_SHARE
    while tier.writes.chain:
        writing = [job for job in tier.chunks.jobs.values() if job.kind == "write"]
        if len(writing) >= core.bounds.disk_jobs_max or sum(job.bytes for job in writing) >= most_bytes:
            return False
        space, node = tier.writes.next()
        if node in tier.chunks.busy and _is_wanted(core, space, node):
            return False  # it is being read
        if _is_wanted(core, space, node) and _parent_claims(node):
            device = _device_for(core, tier, space, node, now_ns)
            busy = runs.busy(core, tier)
            if device in busy and len(busy) < len(tier.chunks.extents.writable):
                tier.writes.fall_behind(device)
                return True
            blocked = _order(core, tier, space, node, device=device, now_ns=now_ns)
            if device is not None:
                tier.devices[device].placement.heard(blocked, now_ns)
            if blocked == "queue":
                return False
            if blocked == "segment":
                assert device is not None
                tier.writes.park(device)
                return True
            tier.chunks.block(blocked)
            if blocked == "device" and any(tier.chunks.extents.takes_writes):  # other devices may take theirs
                node.mark(NO_ROOM)
            elif blocked:
                is_tenants_own = blocked == "room" and tier.chunks.accounts is not None
                pause_ms = LOOK_AGAIN_MS if is_tenants_own else PAUSE_MS
                tier.writes.give_up(now_ns + pause_ms * MILLISECOND_NS, no_room=blocked == "room")
                return False
        tier.writes.skip(node)
    return False


def take_up(core: Core, tier: DiskTier, device: int) -> None:
    """Offers the chains again that were put aside until this device had emptied a segment."""
    _offer_again(core, tier, tier.writes.unpark(device))


def _offer_again(core: Core, tier: DiskTier, leaves: dict[Node, Space]) -> None:
    for leaf, space in leaves.items():
        if core.chunks.serves(space, leaf):
            tier.chunks.offer(space, leaf)


def _is_wanted(core: Core, space: Space, node: Node) -> bool:
    return node.in_dram & ~node.on_disk != 0 and core.chunks.serves(space, node)


def _parent_claims(node: Node) -> bool:
    """The parent is on disk or being written. Otherwise a restart would not find the chunk."""
    parent = node.parent
    assert parent is not None
    return parent.depth == 0 or (parent.disk is not None and parent.disk.claims)


def _device_for(core: Core, tier: DiskTier, space: Space, node: Node, now_ns: int) -> int | None:
    """The device that a chunk is written to: the one that already holds some of its groups, else that of its run. None:
    no device takes writes."""
    return tier.chunks.device_of(node) if node.on_disk else runs.device_for(core, tier, space, node, now_ns)


def _order(core: Core, tier: DiskTier, space: Space, node: Node, *, device: int | None, now_ns: int) -> str:
    """Orders the write of one chunk. Returns why not (see order(), or "device"); empty when it was ordered."""
    if device is None or not tier.chunks.extents.takes_writes[device]:
        return "device"
    job = write_of(core, space, node, device=device, now_ns=now_ns)
    return order(core, tier, job, used=tier.writes.used, now_ns=now_ns)


def write_of(core: Core, space: Space, node: Node, *, device: int, now_ns: int, whole: bool = False) -> DiskJob:
    """The write of what of a chunk is not on disk yet, of the generation of its other records. whole: of all that is on
    disk, to another place."""
    is_first = whole or node.disk is None or not node.on_disk
    return DiskJob(
        number=core.number("disk"),
        kind="write",
        space=space,
        node=node,
        device=device,
        groups=node.on_disk if whole else node.in_dram & ~node.on_disk,
        generation=core.chunks.next_generation() if is_first or node.disk is None else node.disk.generation,
        began_ns=now_ns,
        moves=whole and device_of(node) == device,
    )


def order(core: Core, tier: DiskTier, job: DiskJob, *, used: int, now_ns: int) -> str:
    """Orders a write. Chunks used before `used` may go to make room. Returns why not
    (placement.REFUSALS; "queue"; "segment": the device is emptying one); empty when it was ordered."""
    placement = tier.devices[job.device].placement
    if job.generation > tier.notes.generation_max:
        return "queue"
    count = job.space.group_bytes(job.groups)
    if not placement.budget.may_ever_allow(count):
        return "room"  # "budget" would be tried again and again, before all others
    refusal = placement.refusal(count, now_ns)
    if refusal:
        return refusal
    if not tier.chunks.begin_write(job, used):
        return "segment" if job.device in tier.chunks.room.emptying and not job.moves else "room"
    assert job.bytes == count
    placement.ordered(count, now_ns)
    tier.notes.describe(job.space.digest, job.generation - 1)
    tier.tell(Demote(job.number, records_of(job)))
    core.timers.set(now_ns + core.bounds.disk_job_ms * MILLISECOND_NS, "disk", job.number)
    return ""


def ended(core: Core, tier: DiskTier, job: DiskJob, *, kept: bool, now_ns: int) -> None:
    """Ends a write. kept: every record is on the device."""
    placement = tier.devices[job.device].placement
    placement.ended(job.bytes, now_ns)
    core.counters.job_seconds["demote"].observe((now_ns - job.began_ns) / 1e9)
    tier.chunks.end_write(job, kept=kept)
    if kept:
        core.counters.add("disk_writes")
        core.counters.add("disk_written_bytes", job.bytes)
        placement.wrote(job.bytes)
    if job.device in tier.writes.behind and runs.writing(tier)[job.device] <= runs.share(core, tier) // 2:
        _offer_again(core, tier, tier.writes.catch_up(job.device))
