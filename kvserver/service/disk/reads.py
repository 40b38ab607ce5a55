"""Reads from disk to DRAM: their order, and the end of chunks that cannot be read.

A chunk enters DRAM because a lease or a retrieve waits for it, and stays there for all others. If it cannot be read, it
and all chunks below it are no longer held. Leases end, waiting retrieves fail, and the next lookup says so. Nobody got
a wrong byte: only bytes that were read and verified get to a slot that a copy may read.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import islice

from kvserver.index.coverage import needed_at
from kvserver.index.space import Node, Space, is_below
from kvserver.service.holdings.disk_chunks import records_of
from kvserver.service.holdings.place_owners import DiskJob
from kvserver.service.requests import lookup
from kvserver.service.requests.dropped_chunks import cut_off
from kvserver.service.state.chunk_waits import mover_lost, unreadable
from kvserver.service.state.core import MILLISECOND_NS, Core
from kvserver.service.state.disk_tier import DiskTier
from kvserver.wire.orders import DISK_ITEMS_MAX, Promote

LOOKS_MAX = 1024
"""Queued reads of a device that are looked at for one that may be ordered. Others are under way, or belong to tenants
without a slot."""


def start(core: Core, tier: DiskTier, now_ns: int) -> None:
    """Orders as many reads as may be in flight, from all devices by turns. A tenant that gets no slot delays no other
    tenant."""
    while tier.waits.reads and tier.readable and "" not in tier.waits.starved:
        if tier.in_flight["read"] >= core.bounds.disk_jobs_max:
            return
        node = _next(core, tier)
        if node is None:
            return
        space, groups, _ = tier.waits.reads[node]
        groups &= node.on_disk & ~node.in_dram
        assert groups, "what is wanted from disk is there"
        account = account_of(core, space)
        if order(core, tier, space, node, groups=groups, now_ns=now_ns):
            tier.waits.ordered(node, account)
        else:
            tier.waits.starve(account, now_ns)


def _next(core: Core, tier: DiskTier) -> Node | None:
    """The first queued read that may be ordered, of the device with the fewest reads under way."""
    under_way = Counter(job.device for job in tier.chunks.jobs.values() if job.kind == "read")
    for device in sorted(tier.waits.lines, key=lambda device: under_way[device]):
        for node in islice(tier.waits.lines[device], LOOKS_MAX):
            if _may_be_read(core, tier, node):
                return node
    return None


def _may_be_read(core: Core, tier: DiskTier, node: Node) -> bool:
    return node not in tier.chunks.busy and not lacks_slots(core, tier, tier.waits.reads[node].space)


def lacks_slots(core: Core, tier: DiskTier, space: Space) -> bool:
    """The account that pays for the read lacked a slot for an earlier one."""
    return bool(tier.waits.starved) and account_of(core, space) in tier.waits.starved


def account_of(core: Core, space: Space) -> str:
    """The account that pays for a read; "" without quotas."""
    return core.chunks.accounts.of_space(space).name if core.chunks.accounts is not None else ""


def order(
    core: Core, tier: DiskTier, space: Space, node: Node, *, groups: int, now_ns: int, spares_dirty: bool = False
) -> bool:
    """Orders the read of groups (bits) of one chunk. False when there are no slots for them. spares_dirty: only chunks
    that are also on disk may go to make room."""
    assert node.disk is not None
    job = DiskJob(
        number=core.number("disk"),
        kind="read",
        space=space,
        node=node,
        device=tier.chunks.device_of(node),
        groups=groups,
        generation=node.disk.generation,
        began_ns=now_ns,
    )
    if not tier.chunks.begin_read(job, spares_dirty=spares_dirty):
        return False
    assert len(job.parts) <= DISK_ITEMS_MAX
    tier.devices[job.device].placement.reads.began(now_ns)
    tier.tell(Promote(job.number, records_of(job)))
    core.timers.set(now_ns + core.bounds.disk_job_ms * MILLISECOND_NS, "disk", job.number)
    return True


def ended(
    core: Core, tier: DiskTier, job: DiskJob, wrong: set[int], now_ns: int, *, lost: bool, sums: Sequence[int] = ()
) -> None:
    """Ends a read. wrong: parts that did not arrive. lost: they cannot be read; otherwise their mover is gone. sums: of
    the payload of each part, unless all are wrong."""
    space, node = job.space, job.node
    good = job.bytes - sum(space.parts[part].slot_bytes for part in wrong)
    placement = tier.devices[job.device].placement
    placement.reads.ended(good, now_ns)
    placement.read(good)
    core.counters.job_seconds["promote"].observe((now_ns - job.began_ns) / 1e9)
    tier.chunks.end_read(job, wrong, sums)
    if not wrong:
        core.counters.add("disk_reads")
    core.counters.add("disk_read_bytes", good)
    tier.waits.feed()
    groups = sum({1 << space.parts[part].group for part in wrong}) & node.on_disk
    if groups and lost and core.chunks.spaces.get(space.digest) is space:
        lose(core, tier, space, node, groups=groups, now_ns=now_ns)
    elif wrong:
        tier.waits.fail_all([node], mover_lost(), now_ns)
    tier.waits.arrived(space, node, now_ns)


def lose(core: Core, tier: DiskTier, space: Space, node: Node, *, groups: int, now_ns: int) -> None:
    """Handles groups of a chunk that cannot be read. If the chunk is servable without them, the leases that need them
    end, and, in arrived(), the fetches that wait for them. Otherwise the chunk ends for everybody, with all below it.
    Chunks that retrieves still read are cut off."""
    core.counters.add("disk_lost")
    left = node.in_dram | (node.on_disk & ~groups)
    if left & space.needed == space.needed:
        tier.chunks.lose(space, node, groups)
        _end_in_need(core, space, node, groups & ~node.in_dram)
        return
    cut_off(core, space, node, unreadable(), now_ns, cut=lambda: tier.chunks.lose_all(space, node, groups))


def _end_in_need(core: Core, space: Space, node: Node, groups: int) -> None:
    """Ends the leases that need these groups of a chunk: they may have kept them in DRAM once (read_room.py)."""
    for lease in [lease for lease in core.leases.values() if lease.space is space and is_below(lease.tail, node)]:
        if groups & needed_at(space, node.depth - 1, lease.chunks):
            lookup.end(core, lease)
