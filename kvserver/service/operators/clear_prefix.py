"""Clears one prefix: a chunk and all that continues it.

In memory the chain is cut off there, as when a chunk cannot be read. The caller is answered when the last of its
chunks has left the index. On disk the records stay until other records need
their places, and so do older records of the same chunks that nobody remembers. Therefore the devices keep a note, as
for a cleared namespace. It names the chunk, and the generation up to which its records and those of everything below it
are void. Recovery also applies it to chunks that were stored again since and still have old records below them.
"""

from kvserver.errors import DeviceError, ResourceError
from kvserver.index.space import Node, Space
from kvserver.index.subtrees import Cut
from kvserver.service.operators import clear_namespaces
from kvserver.service.requests import holds
from kvserver.service.requests.dropped_chunks import cut_off
from kvserver.service.state.clear_notes import ClearNotes
from kvserver.service.state.core import Core
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
    noted = tier is not None and (prefix.namespace in tier.notes.noted or not tier.all_known)
    if tier is not None:
        cleared = tier.notes.cleared
        if noted and digest not in cleared and len(cleared) >= PREFIXES_MAX:
            raise ResourceError("clears", f"{PREFIXES_MAX} prefixes were cleared; clear their namespaces instead")
    clear_namespaces.check_room(core, 1)
    space = core.chunks.spaces.get(prefix.namespace)
    node = space.find(prefix.key) if space is not None else None
    cut = _forget(core, space, node, now_ns) if space is not None and node is not None else None
    if noted and tier is not None:
        tier.notes.clear_prefix(digest, prefix)
    done = Cleared(request_id, 0)
    clear_namespaces.answer_when_void(
        core, peer, done, notes=[digest] if noted else [], of=[prefix.namespace], now_ns=now_ns, cut=cut
    )


def tick(core: Core) -> None:
    """Removes notes of prefixes whose whole namespace was cleared or forgotten since: the namespace's note makes the
    same records void. Without such a note, the forgetting itself does (disk.md)."""
    tier = core.disk
    if tier is None or not tier.readable or not tier.recovered:
        return
    notes = tier.notes
    if len(notes.cleared) > core.bounds.prefix_notes_kept:
        notes.forget_prefixes([note for note, prefix in notes.cleared.items() if _is_overtaken(notes, note, prefix)])


def _is_overtaken(notes: ClearNotes, note: bytes, prefix: ClearedPrefix) -> bool:
    void = notes.noted[note]
    return prefix.namespace not in notes.unnoted and notes.noted.get(prefix.namespace, void) >= void


def _forget(core: Core, space: Space, node: Node, now_ns: int) -> Cut:
    """Cuts a chunk off with all below it. Running retrieves finish."""
    cleared = DeviceError("cleared", "its prefix was cleared")
    return cut_off(core, space, node, cleared, now_ns, cut=lambda: core.chunks.cut(space, node, "cleared"))
