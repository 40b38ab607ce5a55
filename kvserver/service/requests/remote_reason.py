"""Reasons why a remote store has not brought a chunk that a lookup misses. `explain` shows them.

unusable     the store is not open, its only node is left alone, or its mover does not run
clear-owed   the namespace was cleared here, and the store has not confirmed it: nothing is read or written
unknown      the namespace's note was not read in the last seconds, so nothing there counts
queued       the chunk is here, and waits to be written
probing      it is looked for, and the store has not answered yet
reading      it is there, and is read or will be
aside        it was not there, could not be read or was not wanted, and is not asked for again for a while
unannounced  no server has announced that it is there, so the store is mostly not asked
unasked      none of these: no lookup has asked for it lately
"""

from typing import Literal

from kvserver.index.space import Space
from kvserver.service.state.core import Core
from kvserver.service.state.remote_tier import RemoteTier

RemoteReason = Literal[
    "unusable", "clear-owed", "unknown", "queued", "probing", "reading", "aside", "unannounced", "unasked"
]


def remote_reason(
    core: Core, tier: RemoteTier, digest: bytes, key: bytes, now_ns: int
) -> tuple[RemoteReason | Literal[""], float]:
    """The reason, and for how many seconds the chunk is not asked for. The question changes nothing."""
    space = core.chunks.spaces.get(digest)
    if space is None:
        return "", 0.0
    if not tier.usable or tier.is_left_alone:
        return "unusable", 0.0
    known = tier.epochs.get(digest)
    if known is not None and known.owes_clear:
        return "clear-owed", 0.0
    if tier.epoch_of(space, now_ns) is None:
        return "unknown", 0.0
    node = space.find(key)
    if node is not None and node in tier.queue:
        return "queued", 0.0
    why, rest_s = _sought(tier, space, key, now_ns)
    if why == "unasked" and tier.is_unannounced(space, key, now_ns):
        return "unannounced", 0.0
    return why, rest_s


def _sought(tier: RemoteTier, space: Space, key: bytes, now_ns: int) -> tuple[RemoteReason, float]:
    """The same for a chunk of a namespace whose epoch is known."""
    pursuit, _ = tier.wanted.get((space.digest, key), (None, 0))
    if pursuit is not None:
        return ("probing" if pursuit.heads is None else "reading"), 0.0
    rest_ns = tier.aside_ns(space, key, now_ns)
    return ("aside", rest_ns / 1e9) if rest_ns else ("unasked", 0.0)
