"""Drains the whole server, so that it can be stopped without loss. It takes no stores (admission.py), and chunks that
only DRAM holds are written to disk, head first as always. Lookups, retrieves and reads go on.

The server is drained when nothing is left that could be written. Some chunks never can be: those that the admission of
the disk tier refuses, those of namespaces that fit no disk, or all of them without a disk. They stay in DRAM; status
and log say how many bytes they take, and why.
"""

from collections import Counter
from itertools import islice

from kvserver.index.eviction import NO_ROOM, REFUSED
from kvserver.index.space import Node
from kvserver.service.requests import holds
from kvserver.service.state.core import Core

LOOKS_MAX = 200_000
"""Chunks for which the reason is looked up. The brain does nothing else meanwhile."""


def begin(core: Core) -> None:
    """Begins to drain; a second call changes nothing. Holds end, because they pin chunks, and pinned chunks are not
    written."""
    if not core.operators.drain:
        core.operators.begin_drain()
        for hold in list(core.operators.holds.values()):
            holds.end(core, hold, "the server is being drained")


def resume(core: Core) -> None:
    core.operators.resume()


def turn(core: Core) -> None:
    """Notices when the server is drained. Called at each tick."""
    if core.operators.drain == "draining":
        core.operators.drain_waits_for(_waits_for(core))
        if not core.operators.drain_waits:
            core.operators.end_drain(_left(core))
            why = " ".join(f"{reason}={count}" for reason, count in core.operators.drain_left.items()) or "nothing"
            core.log(
                "server drained", ("chunks", core.chunks.chunks), ("dirty_bytes", dirty_bytes(core)), ("left", why)
            )


def dirty_bytes(core: Core) -> int:
    """Bytes that would be lost with DRAM."""
    return core.chunks.pool.bytes_used - core.chunks.clean_bytes


def _left(core: Core) -> dict[str, int]:
    """Bytes that only DRAM holds, by the reason why they could not be written."""
    left: Counter[str] = Counter()
    all_bytes = dirty_bytes(core)
    if core.disk is None:
        left["no-disk"] = all_bytes
    else:
        nodes = ((space, node) for space in core.chunks.spaces.values() for node in space.nodes.values())
        for space, node in islice(nodes, LOOKS_MAX):
            if groups := node.in_dram & ~node.on_disk:
                left[core.disk.chunks.why_not(space, _refused_below(node))] += space.group_bytes(groups)
        left["other"] = all_bytes - sum(left.values())
    return {reason: count for reason, count in left.items() if count}


def _refused_below(node: Node) -> Node:
    """The node, or one below it, whose write was refused: a chain is refused at its leaf."""
    at = node
    while not at.queued & (NO_ROOM | REFUSED) and at.children is not None:
        at = next(at.child_nodes())
    return at


def _waits_for(core: Core) -> str:
    """Why the server is not drained yet; empty when nothing more can be saved."""
    if core.chunks.pendings or any(job.kind == "store" for job in core.jobs.values()):
        return "stores"
    if core.chunks.forgetting:
        return "clears"
    tier = core.disk
    if tier is None:
        return ""
    if not tier.recovered or not tier.readable:
        return "disk-away"
    if tier.writes.chain or tier.writes.parked or tier.in_flight["write"] or tier.chunks.coldest_dirty() is not None:
        return tier.chunks.blocked or "writes"
    return "leases" if core.chunks.pins and dirty_bytes(core) else ""
