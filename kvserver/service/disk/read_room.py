"""Makes room for reads that find no slots, because leases and waiting retrieves keep all of DRAM.

What a lease keeps has to be in DRAM only while it is copied. So chunks that are also on disk leave DRAM, and are read
again when their retrieve comes. Chunks that are only in DRAM are written first. The retrieve that has waited longest
keeps what was read for it, so one after the other is served.
"""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from kvserver.errors import DeviceError
from kvserver.index.space import Node, Space
from kvserver.service.disk import reads, writes
from kvserver.service.requests import lookup, transfers
from kvserver.service.state.core import MILLISECOND_NS, Core
from kvserver.service.state.disk_tier import DiskTier
from kvserver.service.state.jobs import Job
from kvserver.service.state.leases import Lease

GIVE_UP_AFTER = 10
"""A retrieve is given up when reads have waited for slots this many times Bounds.read_room_ms."""
ROOM_SHARE = 16
"""The chunks that leave DRAM in one event take about 1 / this of the arena."""
LOOKS_MAX = 2048
"""Chunks that are looked at in one event, because other events wait."""


class Kept(NamedTuple):
    """A chain that is kept for later."""

    space: Space
    tail: Node


def tick(core: Core, tier: DiskTier, now_ns: int) -> None:
    """Orders the reads that lacked slots, and makes room for them. Called at each tick, because nothing announces a
    slot that comes free."""
    _try_again(core, tier, now_ns)
    starved_ns, patience_ns = tier.waits.starved_ns(now_ns), core.bounds.read_room_ms * MILLISECOND_NS
    if starved_ns < patience_ns or _arena_grows(core):
        return
    if _make(core, tier, now_ns):
        _try_again(core, tier, now_ns)
    elif not _end_a_hold(core, tier, now_ns) and starved_ns >= GIVE_UP_AFTER * patience_ns:
        _give_up_last(core, tier, now_ns)


def _try_again(core: Core, tier: DiskTier, now_ns: int) -> None:
    tier.waits.feed()
    reads.start(core, tier, now_ns)


def _arena_grows(core: Core) -> bool:
    return core.chunks.pool.slabs_ready < core.chunks.pool.slabs_total and not core.arena_problem


def _waiting(core: Core, tier: DiskTier) -> list[Job]:
    """Retrieves whose reads lack slots, the one that came first in front."""
    return [job for job in core.jobs.values() if job.held is not None and reads.lacks_slots(core, tier, job.space)]


def _lease_of(job: Job) -> int:
    assert job.held is not None
    return job.held.request.lease


def _make(core: Core, tier: DiskTier, now_ns: int) -> bool:
    """Makes room for the retrieve that has waited longest. False when no chunk may leave DRAM."""
    waiting = _waiting(core, tier)
    if not waiting:
        return False
    first = waiting[0]
    assert first.held is not None
    tier.waits.prefer(first.held.fetch)  # before the reads for leases whose retrieve has not come
    later = [job for job in waiting if _lease_of(job) != _lease_of(first)]
    chains = _kept_for_later(core, first, later)
    pins = Counter(chain.tail for chain in chains)
    room_bytes, looks = core.bounds.arena_bytes // ROOM_SHARE, LOOKS_MAX
    went: set[Node] = set()
    unwritten: Kept | None = None
    for chain in chains:
        for node in _free_of_others(chain.tail, pins):
            looks -= 1
            if node.in_dram & ~node.on_disk:
                unwritten = unwritten or Kept(chain.space, node)
            elif node.in_dram and node.disk is not None and node.disk.keeps:
                room_bytes -= chain.space.group_bytes(node.in_dram)
                core.chunks.room.send_away(chain.space, node)
                went.add(node)
        if room_bytes <= 0 or looks <= 0:
            break
    for job in later:
        if job.tail is not None and not went.isdisjoint(job.space.chain(job.tail)):
            transfers.wait_again(core, job)
    if not went and unwritten is not None:
        writes.choose_kept(core, tier, *unwritten)
    return bool(went)


def _kept_for_later(core: Core, first: Job, later: list[Job]) -> list[Kept]:
    """The chains that are kept for others than the first retrieve: those of leases whose retrieve has not come, the
    last one in front, then those of later retrieves. Tenants give room only to themselves."""
    account = reads.account_of(core, first.space)
    asked = {_lease_of(job) for job in (first, *later)}
    leases = [lease for number, lease in core.leases.items() if number not in asked]
    its_leases = [lease for number, lease in core.leases.items() if number in asked and number != _lease_of(first)]
    rows: list[Lease | Job] = [*reversed(leases), *reversed(its_leases), *reversed(later)]
    chains = [Kept(row.space, row.tail) for row in rows if row.tail is not None]
    return [
        chain
        for chain in chains
        if core.chunks.spaces.get(chain.space.digest) is chain.space and reads.account_of(core, chain.space) == account
    ]


def _free_of_others(tail: Node, pins: Counter[Node]) -> Iterator[Node]:
    """The chain from its tail up to the first chunk that somebody else needs. pins: those of all chains that are kept
    for later."""
    node, below = tail, 0
    while node.depth and node.pins == pins[node] and node.child_count() - node.cold_child_count() == below:
        yield node
        assert node.parent is not None
        node, below = node.parent, 1


def _end_a_hold(core: Core, tier: DiskTier, now_ns: int) -> bool:
    """Ends the last hold that waits for room beside a retrieve: operators can wait longer than a request. False when
    there is none."""
    holds = core.operators.holds.values()
    waiting = [hold.fetch for hold in holds if hold.fetch and reads.lacks_slots(core, tier, hold.space)]
    if not waiting or not _waiting(core, tier):
        return False
    error = DeviceError("disk-room", "its chunks have no room in DRAM beside what requests need")
    tier.waits.fail(waiting[-1], error, now_ns)
    return True


def _give_up_last(core: Core, tier: DiskTier, now_ns: int) -> None:
    """Ends the lease whose first retrieve came last, when retrieves keep room from each other and no chunk may leave
    DRAM. A single retrieve waits on, because leases that nobody uses run out."""
    waiting = _waiting(core, tier)
    numbers = list(dict.fromkeys(map(_lease_of, waiting)))
    if len(numbers) < 2:
        return
    error = DeviceError("disk-room", "its chunks have no room in DRAM beside those that retrieves before it wait for")
    for job in waiting:
        if job.held is not None and _lease_of(job) == numbers[-1]:
            tier.waits.fail(job.held.fetch, error, now_ns)
    lease = core.leases.get(numbers[-1])
    if lease is not None:
        lookup.end(core, lease)
