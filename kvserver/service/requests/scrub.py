"""Reads sealed chunks in DRAM at a bounded rate, and drops what changed before anybody asks for it.

A mover reads them, at the lowest priority (_native.Scrubber). One order is under way at a time, and it pins its chunks.
The chunks on disk have their own scrub (disk/scrub.py).
"""

from kvserver.index.space import READY, Node
from kvserver.service.requests import mismatches
from kvserver.service.state.core import MILLISECOND_NS, Core
from kvserver.service.state.movers import Mover
from kvserver.service.state.scrub import Item, ScrubJob
from kvserver.tiers.records import SCRUB_ITEM, names_hash
from kvserver.wire.orders import Scrub, Scrubbed

ORDER_BYTES = 4 << 20
ORDER_SHARE = 64
"""An order ends with the slot that reaches the first number of bytes, or this part (1 / share) of the arena: what it
reads cannot be evicted."""
ITEMS_MAX = 256
"""Slots of one order."""
SLOWEST_BYTES_PER_S = 10_000_000
"""A slot may have a GiB, and its reader the lowest priority."""


def turn(core: Core, now_ns: int) -> None:
    """Orders what is due. Called at each tick and when a scrub has ended."""
    scrub, rate = core.scrub, core.bounds.scrub_bytes_per_s
    if not rate or not core.bounds.verifies or scrub.job is not None or not scrub.dram.is_due(now_ns):
        return
    mover = next((mover for mover in core.movers.values() if mover.state == "ready"), None)
    items = _next_items(core, now_ns) if mover is not None else []
    if mover is None or not items:
        return
    sizes = [item.space.parts[item.part].payload_bytes for item in items]
    job = ScrubJob(core.number("scrub"), mover, items, sum(sizes))
    scrub.begin(job)
    scrub.dram.spend(job.bytes, rate, now_ns)
    for item in items:
        core.chunks.pin(item.node)
    packed = [SCRUB_ITEM.pack(item.slot, size, _name(item)) for item, size in zip(items, sizes, strict=True)]
    core.instruct(mover, Scrub(job.number, b"".join(packed)))
    patience_ns = core.bounds.job_ttl_ms * MILLISECOND_NS + job.bytes * 1_000_000_000 // SLOWEST_BYTES_PER_S
    core.timers.set(now_ns + patience_ns, "scrub", job.number)


def ended(core: Core, mover: Mover, report: Scrubbed, now_ns: int) -> None:
    job = core.scrub.job
    if job is None or (job.number, job.mover) != (report.job, mover):
        return
    _end(core, job)
    core.counters.scrubbed("dram", report.bytes)
    wrong = [job.items[index] for index in report.wrong]
    mismatches.in_scrub(core, [(it.space, it.node, it.space.parts[it.part].group) for it in wrong], now_ns)
    turn(core, now_ns)


def gone(core: Core, mover: Mover) -> None:
    """The mover has been reaped. What it read is read again in the next round."""
    job = core.scrub.job
    if job is not None and job.mover is mover:
        _end(core, job)


def _end(core: Core, job: ScrubJob) -> None:
    core.timers.cancel("scrub", job.number)
    core.scrub.end()
    for item in job.items:
        core.chunks.unpin(item.space, item.node)


def _next_items(core: Core, now_ns: int) -> list[Item]:
    """The next sealed slots."""
    items: list[Item] = []
    count, most = 0, min(ORDER_BYTES, core.bounds.arena_bytes // ORDER_SHARE)
    for _, slot, owner in core.scrub.dram.places([core.chunks.pool], now_ns):
        if isinstance(owner, Node) and owner.state == READY and (space := core.chunks.space_of(owner)) is not None:
            part = owner.slots.index(slot)
            items.append(Item(space, owner, part, slot))
            count += space.parts[part].payload_bytes
            if count >= most or len(items) == ITEMS_MAX:
                break
    return items


def _name(item: Item) -> bytes:
    part = item.space.parts[item.part]
    return names_hash(item.space.digest, part.group, part.shard, [item.node.key])
