"""Chunks whose bytes are not those that an engine has stored (docs/digest.md). They leave every tier at once.

A copy or a device finds them out when it compares digests. Nobody gets such bytes: the job fails, and the prefix in
front of the chunk is used. Something is broken then, so each chunk has an ERROR line.
"""

import logging
from typing import Literal

from kvserver.errors import DeviceError
from kvserver.index.space import READY, Node, Space
from kvserver.service.requests.cut_off import cut_off
from kvserver.service.state.core import Core
from kvserver.service.state.jobs import Job

LINES_MAX = 8
"""Lines about the chunks of one job."""
Tier = Literal["dram", "disk"]


def in_retrieve(core: Core, job: Job, wrong: list[tuple[Node, int]], mode: str, now_ns: int) -> None:
    """A retrieve has found chunks of DRAM wrong. wrong: (chunk, group)."""
    mover = job.cache.mover
    for node, group in wrong[:LINES_MAX]:
        tell(core, job.space, node, group, tier="dram", device=mover.device_id or mover.device, mode=mode)
    device = mover.device_id or mover.device
    core.counters.mismatched(len(wrong) - len(wrong[:LINES_MAX]), tier="dram", device=device, mode=mode)
    drop(core, job.space.digest, min((node for node, _ in wrong), key=lambda node: node.depth), now_ns)


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
    if space is None or space.nodes.get(node.key) is not node or node.state != READY:
        return  # it was cleared, or has left
    error = DeviceError("digest", "a chunk had other bytes than were stored")
    cut_off(core, space, node, error, now_ns, cut=lambda: core.chunks.cut(space, node, "digest"))
