"""The end of a chunk that must not be served any more, and of all below it.

In memory the chain is cut off there. Whoever counted on these chunks is told: waits for reads fail, leases and holds
end. Running retrieves finish; they keep their chunks until then.
"""

from collections.abc import Callable

from kvserver.errors import DeviceError
from kvserver.index.space import Node, Space
from kvserver.service.requests import holds, lookup
from kvserver.service.state.core import Core


def cut_off(
    core: Core, space: Space, node: Node, error: DeviceError, now_ns: int, *, cut: Callable[[], Space | None]
) -> int:
    """Ends a chunk for everybody, with all below it. cut: takes them out of the index (Chunks.cut). Returns how many
    there were."""
    below = space.subtree(node)
    doomed = set(below)
    if core.disk is not None:
        core.disk.waits.fail_all(below, error, now_ns)
    _end_below(core, space, doomed, error, now_ns)
    rest = cut()
    if rest is not None:
        _moved_to(core, space, doomed, rest)
    return len(below)


def _end_below(core: Core, space: Space, doomed: set[Node], error: DeviceError, now_ns: int) -> None:
    """Ends leases and holds on these nodes, and fails retrieves that wait for them, because the nodes will not be
    served again."""
    for lease in [lease for lease in core.leases.values() if lease.space is space and lease.tail in doomed]:
        lookup.end(core, lease)
    for hold in [hold for hold in core.operators.holds.values() if hold.space is space and hold.tail in doomed]:
        holds.end(core, hold, error.message)
    for job in [job for job in core.jobs.values() if job.held and job.space is space and job.tail in doomed]:
        assert job.held is not None
        assert core.disk is not None
        core.disk.waits.fail(job.held.fetch, error, now_ns)


def _moved_to(core: Core, space: Space, doomed: set[Node], rest: Space) -> None:
    """Moves running jobs to the space in which their cut-off nodes hang now (Chunks.cut)."""
    for running in core.jobs.values():
        if running.tail is not None and running.tail in doomed and running.space is space:
            running.move_to(rest)
    core.scrub.moved(space, doomed, rest)
    for other in core.disk.chunks.jobs.values() if core.disk is not None else ():
        if other.node in doomed and other.space is space:
            other.move_to(rest)
