"""The end of a chunk that must not be served any more, and of all below it.

In memory the chain is cut off there. From then on nothing of it is found. It is forgotten in pieces, because a million
chunks may hang below a shared prefix (Chunks.cut). Whoever counted on these chunks is told at once: waits for reads
fail, leases and holds end. Running retrieves finish; they keep their chunks until then.
"""

from collections.abc import Callable

from kvserver.errors import DeviceError
from kvserver.index.cuts import Cut
from kvserver.index.space import Node, Space, is_below
from kvserver.service.requests import holds, lookup
from kvserver.service.state.core import Core


def cut_off(core: Core, space: Space, node: Node, error: DeviceError, now_ns: int, *, cut: Callable[[], Space]) -> Cut:
    """Ends a chunk for everybody, with all below it. cut: cuts it off (Chunks.cut). Returns how far it is forgotten."""
    _end_below(core, space, node, error, now_ns)
    rest = cut()
    _move_pins(core, space, rest)
    return core.chunks.go_on(rest)


def _end_below(core: Core, space: Space, node: Node, error: DeviceError, now_ns: int) -> None:
    """Ends leases and holds on what is cut off, and fails retrieves that wait, because nothing of it will be served
    again. No other wait can need it: a wait needs its last chunk and what lies above."""
    leases = [lease for lease in core.leases.values() if lease.space is space and is_below(lease.tail, node)]
    for lease in leases:
        lookup.end(core, lease)
    for hold in [hold for hold in core.operators.holds.values() if hold.space is space and is_below(hold.tail, node)]:
        holds.end(core, hold, error.message)
    for job in [job for job in core.jobs.values() if job.held and job.space is space]:
        assert job.held is not None
        assert job.tail is not None
        if is_below(job.tail, node):
            assert core.disk is not None
            core.disk.waits.fail(job.held.fetch, error, now_ns)


def _move_pins(core: Core, space: Space, rest: Space) -> None:
    """Moves whoever still pins what was cut off, with those chunks, to the space below whose root it hangs now."""
    for running in core.jobs.values():
        if running.tail is not None and running.space is space and space.is_cut(running.tail):
            core.chunks.take_along(space, running.tail, rest)
            running.move_to(rest)
    for item in core.scrub.job.items if core.scrub.job is not None else ():
        if item.space is space and space.is_cut(item.node):
            core.chunks.take_along(space, item.node, rest)
            item.move_to(rest)
    for other in core.disk.chunks.jobs.values() if core.disk is not None else ():
        if other.space is space and space.is_cut(other.node):
            core.chunks.take_along(space, other.node, rest)
            other.move_to(rest)
