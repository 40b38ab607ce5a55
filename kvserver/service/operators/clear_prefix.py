"""Clears one prefix: a chunk and all that continues it.

In memory the chain is cut off there, as when a chunk cannot be read. On disk the records stay until other records need
their places, and so do older records of the same chunks that nobody remembers. Therefore the devices keep a note, as
for a cleared namespace. It names the chunk, and the generation up to which its records and those of everything below it
are void. Recovery also applies it to chunks that were stored again since and still have old records below them.
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
"""Notes of cleared prefixes that the devices may have; each start reads them all. Beyond that, namespaces must be
cleared instead."""


def clear(core: Core, peer: int, request_id: int, prefix: ClearedPrefix, now_ns: int) -> None:
    """Clears a prefix, and answers when the devices have noted it. An unknown chunk is noted as well, because devices
    may have records of it that were forgotten here."""
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
    """Removes notes of prefixes whose whole namespace was cleared or forgotten since: the namespace's note makes the
    same records void. Without such a note, the forgetting itself does (disk.md)."""
    tier = core.disk
    if tier is None or not tier.readable or not tier.recovered or len(tier.cleared) <= core.bounds.prefix_notes_kept:
        return
    clear_notes.forget(core, tier, [note for note, prefix in tier.cleared.items() if _is_overtaken(tier, note, prefix)])


def _is_overtaken(tier: DiskTier, note: bytes, prefix: ClearedPrefix) -> bool:
    void = tier.noted[note]
    return prefix.namespace not in tier.unnoted and tier.noted.get(prefix.namespace, void) >= void


def _forget(core: Core, space: Space, node: Node, now_ns: int) -> int:
    """Cuts a chunk off with all below it. Running retrieves finish. Returns how many chunks went."""
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
