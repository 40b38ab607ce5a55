"""Reads records on disk at a bounded rate, and drops what changed before anybody asks for it.

A chunk is read into free slots, which are free again at its end: nothing goes for it, and nothing stays in DRAM. One
chunk is under way at a time. It waits while somebody's read is queued, and while DRAM has no free slot.
"""

from kvserver.index.space import ABSENT, READY, Node, Space
from kvserver.service.disk import reads
from kvserver.service.holdings.disk_chunks import records_of
from kvserver.service.holdings.place_owners import DiskJob, ExtentOwner
from kvserver.service.state.core import MILLISECOND_NS, Core
from kvserver.service.state.disk_tier import DiskTier
from kvserver.tiers.extents import extent_at
from kvserver.wire.orders import Promote


def turn(core: Core, tier: DiskTier, now_ns: int) -> None:
    """Orders what is due. Called at each tick and when a read or write has ended."""
    walk = core.scrub.disk
    if not core.bounds.scrub_bytes_per_s or not walk.is_due(now_ns) or not tier.readable or not tier.recovered:
        return
    if tier.waits.reads or tier.in_flight["scrub"]:
        return
    for device, offset, owner in walk.places(tier.chunks.extents.pools, now_ns):
        chunk = _chunk_at(core, tier, extent_at(device, offset), owner) if _may_be_read(tier, device) else None
        if chunk is not None:
            if not _order(core, tier, *chunk, now_ns):
                walk.stay(device, offset)
            return


def ended(core: Core, tier: DiskTier, job: DiskJob, wrong: set[int], now_ns: int, *, compared: bool) -> None:
    """Ends a scrub. wrong: parts that cannot be read. compared: otherwise the mover is gone."""
    space, node = job.space, job.node
    tier.chunks.end_scrub(job)
    if compared:
        core.counters.scrubbed("disk", job.bytes)
    tier.waits.feed()
    groups = sum({1 << space.parts[part].group for part in wrong}) & node.on_disk
    if groups and core.chunks.spaces.get(space.digest) is space:
        reads.lose(core, tier, space, node, groups=groups, now_ns=now_ns)
    tier.waits.arrived(space, node, now_ns)


def _may_be_read(tier: DiskTier, device: int) -> bool:
    """The device has no problem. Otherwise one failure after the other would end its chunks."""
    return tier.is_at_hand(tier.devices[device]) and tier.devices[device].takes_writes


def _chunk_at(core: Core, tier: DiskTier, extent: int, owner: ExtentOwner | None) -> tuple[Space, Node] | None:
    """The chunk whose first extent this is, if nothing reads or writes it now."""
    if not isinstance(owner, Node) or owner.state != READY or owner.disk is None or owner in tier.chunks.busy:
        return None
    if extent != next(mine for mine in owner.disk.extents if mine != ABSENT):
        return None
    space = core.chunks.space_of(owner)
    return None if space is None else (space, owner)


def _order(core: Core, tier: DiskTier, space: Space, node: Node, now_ns: int) -> bool:
    """False when DRAM has no free slots for it."""
    assert node.disk is not None
    job = DiskJob(
        number=core.number("disk"),
        kind="scrub",
        space=space,
        node=node,
        device=tier.chunks.device_of(node),
        groups=node.on_disk,
        generation=node.disk.generation,
        began_ns=now_ns,
    )
    if not tier.chunks.begin_scrub(job):
        return False
    core.scrub.disk.spend(job.bytes, core.bounds.scrub_bytes_per_s, now_ns)
    tier.tell(Promote(job.number, records_of(job), asked=False))
    core.timers.set(now_ns + core.bounds.disk_job_ms * MILLISECOND_NS, "disk", job.number)
    return True
