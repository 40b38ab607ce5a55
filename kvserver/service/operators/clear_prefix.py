"""Clearing one prefix: a chunk, and all that continues it.

In memory the chain is cut off there, as it is when a chunk cannot be read. On disk the records stay where they are
until something else needs their place, and so do older ones of the same chunks that nobody remembers; so the devices
keep a note, as they do of a cleared namespace. It names the chunk, and the generation up to which records of it, and of
whatever hangs on it, are void: recovery heeds it also for chunks that were stored again since, with what is left of the
old ones behind them.
"""

from kvserver.errors import DeviceError, ResourceError
from kvserver.index.space import Node, Space
from kvserver.service.disk import reads
from kvserver.service.requests import holds
from kvserver.service.state import clear_notes
from kvserver.service.state.core import Clearing, Core, DiskTier
from kvserver.tiers.prefix_notes import ClearedPrefix, prefix_note
from kvserver.wire.messages import Cleared

PREFIXES_MAX = 1024
"""Notes of cleared prefixes on the devices; each start reads them all. After that, namespaces are to be cleared."""


def clear(core: Core, peer: int, request_id: int, prefix: ClearedPrefix, now_ns: int) -> None:
    """Answered when the devices have noted it: also of a chunk that is not known, as they may have forgotten records of
    it."""
    holds.check_digest("namespace", prefix.namespace)
    holds.check_digest("key", prefix.key)
    tier = core.disk
    if tier is not None and not tier.recovered:
        raise ResourceError("disk-recovering", "what is on disk is not known yet; ask again when it is")
    digest = prefix_note(prefix)
    noted = tier is not None and (prefix.namespace in tier.noted or not tier.all_known)
    if noted and tier is not None and digest not in tier.cleared and len(tier.cleared) >= PREFIXES_MAX:
        raise ResourceError("clears", f"{PREFIXES_MAX} prefixes were cleared; clear their namespaces instead")
    clear_notes.check_clears(core, 1)
    space = core.chunks.spaces.get(prefix.namespace)
    node = space.nodes.get(prefix.key) if space is not None else None
    chunks = _forget(core, space, node, now_ns) if space is not None and node is not None else 0
    if noted and tier is not None:
        tier.cleared[digest] = prefix
        tier.noted.setdefault(digest, 0)
    going = core.chunks.going([prefix.namespace])
    clearing = Clearing(peer, Cleared(request_id, chunks), core.number("disk"), spaces=going)
    clear_notes.answer_when_void(core, clearing, [digest] if noted else [], now_ns)


def tick(core: Core) -> None:
    """Removes notes of prefixes whose whole namespace was cleared or forgotten since: the note of the namespace makes
    void what theirs do, and where there is none, what is forgotten (disk.md) does."""
    tier = core.disk
    if tier is None or not tier.readable or not tier.recovered or len(tier.cleared) <= core.bounds.prefix_notes_kept:
        return
    clear_notes.forget(core, tier, [note for note, prefix in tier.cleared.items() if _is_overtaken(tier, note, prefix)])


def _is_overtaken(tier: DiskTier, note: bytes, prefix: ClearedPrefix) -> bool:
    void = tier.noted[note]
    return prefix.namespace not in tier.unnoted and tier.noted.get(prefix.namespace, void) >= void


def _forget(core: Core, space: Space, node: Node, now_ns: int) -> int:
    """Cuts the chunk off with all below it; retrieves that run come to their end. Returns how many chunks went."""
    doomed = space.subtree(node)
    gone = set(doomed)
    cleared = DeviceError("cleared", "its prefix was cleared")
    if core.disk is not None:
        reads.fail_all(core, core.disk, doomed, cleared, now_ns)
    reads.end_below(core, space, gone, cleared, now_ns)
    rest = core.chunks.cut(space, node, "cleared")
    if rest is not None:
        reads.moved_to(core, space, gone, rest)
    return len(doomed)
