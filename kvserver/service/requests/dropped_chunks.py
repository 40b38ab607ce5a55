"""The end of a chunk that must not be served any more, and of all below it.

In memory the chain is cut off there. From then on nothing of it is found. It is forgotten in pieces, because a million
chunks may hang below a shared prefix (Chunks.cut). Whoever counted on these chunks is told at once: waits for reads
fail, leases and holds end. Running retrieves finish; they keep their chunks until then.
"""

from collections.abc import Callable

from kvserver.errors import DeviceError
from kvserver.index.space import Node, Space
from kvserver.index.subtrees import Below, Cut
from kvserver.service.requests import holds, lookup
from kvserver.service.state.core import Core
from kvserver.service.state.leases import Lease
from kvserver.service.state.remote_tier import PutJob
from kvserver.wire.messages import KEY_BYTES


def cut_off(core: Core, space: Space, node: Node, error: DeviceError, now_ns: int, *, cut: Callable[[], Space]) -> Cut:
    """Ends a chunk for everybody, with all below it. cut: cuts it off (Chunks.cut). Returns how far it is forgotten."""
    below = Below(node)
    _end_below(core, space, below, error, now_ns)
    rest = cut()
    _move_pins(core, space, below, rest)
    return core.chunks.go_on(rest)


def _end_below(core: Core, space: Space, below: Below, error: DeviceError, now_ns: int) -> None:
    """Ends leases and holds on what is cut off, and fails retrieves that wait, because nothing of it will be served
    again. No other wait can need it: a wait needs its last chunk and what lies above."""
    for lease in [lease for lease in core.leases.values() if lease.space is space and _needs(lease, below)]:
        lookup.end(core, lease)
    for hold in [hold for hold in core.operators.holds.values() if hold.space is space and hold.tail in below]:
        holds.end(core, hold, error.message)
    for job in [job for job in core.jobs.values() if job.space is space and job.tail and job.tail in below]:
        if job.held is not None:
            assert core.disk is not None
            core.disk.waits.fail(job.held.fetch, error, now_ns)
        elif job.awaiting is not None:
            core.pledges.fail(job.awaiting.wait, error, now_ns)


def _needs(lease: Lease, below: Below) -> bool:
    """Whether the lease is on what is cut off. There may be thousands, so most are asked for one key of theirs."""
    if not lease.is_chain or lease.tail.depth > lease.reach:
        return lease.tail in below
    depth = below.top.depth
    return depth <= lease.chunks and lease.keys[(depth - 1) * KEY_BYTES : depth * KEY_BYTES] == below.top.key


def _move_pins(core: Core, space: Space, below: Below, rest: Space) -> None:
    """Moves whoever still pins what was cut off, with those chunks, to the space below whose root it hangs now."""
    for running in core.jobs.values():
        if running.tail is not None and running.space is space and running.tail in below:
            core.chunks.take_along(space, running.tail, rest)
            running.move_to(rest)
    for item in core.scrub.job.items if core.scrub.job is not None else ():
        if item.space is space and item.node in below:
            core.chunks.take_along(space, item.node, rest)
            item.move_to(rest)
    for other in core.disk.chunks.jobs.values() if core.disk is not None else ():
        if other.space is space and other.node in below:
            core.chunks.take_along(space, other.node, rest)
            other.move_to(rest)
    for put in (job for store in core.remotes for job in store.jobs.values()):
        if isinstance(put, PutJob) and put.space is space and put.node in below:
            core.chunks.take_along(space, put.node, rest)
            put.move_to(rest)
