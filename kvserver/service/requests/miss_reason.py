"""Reasons why the prefix that a lookup found ends where it does. They are counted for each lookup, and shown in its log
line and by `explain`.

    whole        it does not end: all chunks that were asked for are held
    absent       nothing is known of the next chunk: it was never stored, or left long ago
    gone         the next chunk was held, or was being stored, and has left (evicted_keys.py says when and why)
    writing      the next chunk is being stored
    partial      the next chunk is held, but one of its window or state groups, or of those before it, is not
    declined     the rest is on disk, and reading it is slower than computing it, or a chunk exceeds its tenant's
                 maximum in DRAM
    disk-away    the rest is on disk, which cannot be read now
    namespace    nothing was ever registered here under this namespace
    recovering   takes precedence over all but whole: the rest may be on a disk whose contents are not known yet. With
                 quotas and until recovery ends, every namespace that the engine does not see gets this reason, so
                 nobody learns what others have on disk
"""

from itertools import islice
from typing import NamedTuple

from kvserver.index.space import READY, Space
from kvserver.service.state.core import Core
from kvserver.service.state.disk_tier import DiskTier
from kvserver.service.telling.lookup_counts import Ending
from kvserver.wire.messages import KEY_BYTES

HOLDERS_MAX = 8


def ending(core: Core, namespace: bytes, space: Space | None, keys: bytes, held: int) -> Ending:
    """Why no more than `held` chunks of the packed keys can be served, as far as the index knows. space: the namespace,
    or None if the engine may not see it."""
    if space is not None and held * KEY_BYTES == len(keys):
        return "whole"
    hidden = space is None and core.chunks.accounts is not None  # another tenant's namespace must look like none
    if core.disk is not None and (not core.disk.recovered if hidden else may_tell_of(core.disk, namespace)):
        return "recovering"
    if space is None:
        return "namespace"
    key = keys[held * KEY_BYTES : (held + 1) * KEY_BYTES]
    node = space.find(key)
    if node is None:
        is_known = key in space.nodes or core.evicted_keys.get(space.digest, key) is not None
        return "gone" if is_known else "absent"
    if node.state != READY:
        return "writing"
    return "absent" if space.only_full else "partial"  # with full groups only, a ready chunk here is of another chain


def may_tell_of(tier: DiskTier, namespace: bytes) -> bool:
    """Recovery may still find chunks of the namespace on disk."""
    if tier.recovered:
        return False
    if not tier.recovery.listed:
        return namespace not in tier.notes.void_later
    return tier.recovery.newest.get(namespace, 0) > tier.notes.noted.get(namespace, 0)


class Missing(NamedTuple):
    """Facts about a chunk that is not served."""

    key: str
    """The chunk's key, hexadecimal."""
    cause: str
    """Why the chunk left; empty unless it left lately."""
    gone_s: float
    held_in: list[str]
    """Other namespaces that hold the same key, hexadecimal."""


def missing(core: Core, namespace: bytes, key: bytes, now_ns: int) -> Missing:
    """Facts about a missing chunk. It searches every namespace, so it is for occasional lines, not for each lookup."""
    departure = core.evicted_keys.get(namespace, key)
    holders = (digest.hex() for digest, space in core.chunks.spaces.items() if space.find(key))
    return Missing(
        key=key.hex(),
        cause=departure.cause if departure is not None else "",
        gone_s=(now_ns - departure.at_ns) / 1e9 if departure is not None else 0.0,
        held_in=[name for name in islice(holders, HOLDERS_MAX) if name != namespace.hex()],
    )
