"""Chunks whose bytes are not those that an engine has stored (docs/digest.md). They leave every tier at once.

A copy or a device finds them out when it compares digests. Nobody gets such bytes: the job fails, and the prefix in
front of the chunk is used. Something is broken then, so each chunk has an ERROR line.
"""

import logging
from typing import Literal

from kvserver.errors import DeviceError
from kvserver.index.space import READY, Node, Space
from kvserver.service.holdings.place_owners import DiskJob
from kvserver.service.requests.dropped_chunks import cut_off
from kvserver.service.state.core import Core
from kvserver.service.state.jobs import Job
from kvserver.service.state.movers import Mover

LINES_MAX = 8
"""Lines about the chunks of one job."""
MODES: dict[str, tuple[str, ...]] = {"host": ("direct",), "disk": ("demote",), "remote": ("put",)}
GPU_MODES = ("direct", "staged", "server-gather")
Tier = Literal["dram", "disk", "remote"]


def expect(core: Core, mover: Mover) -> None:
    """Counts begin at zero when a mover is ready: an alert sees the first mismatch only if there was a count before."""
    scrubs = ("scrub",) if core.bounds.scrub_bytes_per_s else ()
    for mode in MODES.get(mover.device, GPU_MODES):
        core.counters.mismatched(0, tier="dram", device=_device(mover), mode=mode)
    if scrubs:
        core.counters.mismatched(0, tier="dram", device="host", mode="scrub")
    if mover.device == "remote":
        core.counters.mismatched(0, tier="remote", device=_device(mover), mode="fetch")
    if mover.device == "disk" and core.disk is not None:
        for device in range(len(core.disk.devices)):
            for mode in ("promote", *scrubs):
                core.counters.mismatched(0, tier="disk", device=str(device), mode=mode)


def _device(mover: Mover) -> str:
    return mover.device_id or mover.device


def in_retrieve(core: Core, job: Job, wrong: list[tuple[Node, int]], mode: str, now_ns: int) -> None:
    """A retrieve has found chunks of DRAM wrong. wrong: (chunk, group)."""
    device = _device(job.cache.mover)
    for node, group in wrong[:LINES_MAX]:
        tell(core, job.space, node, group, tier="dram", device=device, mode=mode)
    core.counters.mismatched(len(wrong) - len(wrong[:LINES_MAX]), tier="dram", device=device, mode=mode)
    drop(core, job.space.digest, min((node for node, _ in wrong), key=lambda node: node.depth), now_ns)


def in_scrub(core: Core, wrong: list[tuple[Space, Node, int]], now_ns: int) -> None:
    """A scrub has found chunks of DRAM wrong. wrong: (namespace, chunk, group)."""
    for space, node, group in wrong[:LINES_MAX]:
        tell(core, space, node, group, tier="dram", device="host", mode="scrub")
    core.counters.mismatched(len(wrong) - len(wrong[:LINES_MAX]), tier="dram", device="host", mode="scrub")
    for space, node, _ in wrong:
        drop(core, space.digest, node, now_ns)


def on_device(core: Core, job: DiskJob, group: int) -> None:
    """A disk mover has found a shard wrong: in DRAM before it wrote it, or on disk."""
    if job.kind == "write":
        tell(core, job.space, job.node, group, tier="dram", device="disk", mode="demote")
    else:
        mode = "scrub" if job.kind == "scrub" else "promote"
        tell(core, job.space, job.node, group, tier="disk", device=str(job.device), mode=mode)


def tell(core: Core, space: Space, node: Node, group: int, *, tier: Tier, device: str, mode: str) -> None:
    """Counts a wrong shard, and logs it."""
    core.counters.mismatched(1, tier=tier, device=device, mode=mode)
    name = ("namespace", space.digest[:6].hex()), ("key", node.key.hex()), ("group", group)
    where = ("tier", tier), ("device", device), ("mode", mode)
    core.log("digest mismatch", *name, *where, level=logging.ERROR)


def drop(core: Core, digest: bytes, node: Node, now_ns: int) -> None:
    """Takes the chunk, and all that continues it, out of every tier. digest: of its namespace. The job that found it
    out may itself have been cut off below the chunk."""
    space = core.chunks.spaces.get(digest)
    if space is None or space.find(node.key) is not node or node.state != READY:
        return  # it was cleared, or has left
    error = DeviceError("digest", "a chunk had other bytes than were stored")
    cut_off(core, space, node, error, now_ns, cut=lambda: core.chunks.cut(space, node, "digest"))
