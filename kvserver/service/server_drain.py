"""Emptying the whole server, so that it can be stopped without loss: no store is taken (admission.py), and what DRAM
alone holds is written to disk, head first as ever. Lookups and retrieves go on, and so do reads.

It is drained when nothing is left that could be written. What never can be (chunks that the admission of the disk tier
refuses, namespaces that fit no disk, a server without a disk) stays in DRAM, and the log says how many bytes that are.
"""

from kvserver.service import holds
from kvserver.service.state import Core


def begin(core: Core) -> None:
    """Asking again changes nothing. Holds end: what they keep is pinned, and what is pinned is not written."""
    if not core.wishes.drain:
        core.wishes.drain, core.wishes.drain_waits = "draining", "stores"
        for hold in list(core.wishes.holds.values()):
            holds.end(core, hold, "the server is being drained")


def resume(core: Core) -> None:
    core.wishes.drain, core.wishes.drain_waits = "", ""


def turn(core: Core) -> None:
    """At each tick."""
    if core.wishes.drain == "draining":
        core.wishes.drain_waits = _waits_for(core)
        if not core.wishes.drain_waits:
            core.wishes.drain = "drained"
            core.log("server drained", ("chunks", core.chunks.chunks), ("dirty_bytes", dirty_bytes(core)))


def dirty_bytes(core: Core) -> int:
    """Of DRAM, what would be lost with it."""
    return core.chunks.pool.bytes_used - core.chunks.clean_bytes


def _waits_for(core: Core) -> str:
    """What is still under way, or keeps it from going on; empty when nothing more can be saved."""
    if core.chunks.pendings or any(job.kind == "store" for job in core.jobs.values()):
        return "stores"
    tier = core.disk
    if tier is None:
        return ""
    if not tier.recovered or not tier.readable:
        return "disk-away"
    if tier.writes or tier.in_flight["write"] or tier.chunks.coldest_dirty() is not None:
        return tier.chunks.blocked or "writes"
    return "leases" if core.chunks.pins and dirty_bytes(core) else ""
