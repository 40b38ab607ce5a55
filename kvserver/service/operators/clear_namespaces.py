"""Clears whole namespaces: one, or all of a tenant.

From then on no lookup finds their chunks. The chunks and their ledger entries go in pieces, because a million takes
seconds. The caller is answered when all are gone and the devices have noted it (clear_notes.py); several namespaces are
answered together.
"""

from collections.abc import Iterable

from kvserver.errors import ResourceError
from kvserver.index.subtrees import Cut
from kvserver.service.requests import holds, kv_events, namespaces
from kvserver.service.requests.lookup import check_namespace
from kvserver.service.requests.lookup import end as end_lease
from kvserver.service.state.clear_notes import CLEARS_MAX
from kvserver.service.state.clears import Clear
from kvserver.service.state.core import MILLISECOND_NS, Core, check_name
from kvserver.wire.admin import TenantCleared
from kvserver.wire.messages import Cleared
from kvserver.wire.tenants import tag_of


def clear(core: Core, peer: int, request_id: int, namespace: bytes, now_ns: int) -> None:
    """Clears a namespace: every chunk goes, leases and holds on it end, registrations stay."""
    check_namespace(namespace)
    check_room(core, 1)
    done = Cleared(request_id, forget(core, [namespace]))
    answer_when_void(core, peer, done, notes=[namespace], of=[namespace], now_ns=now_ns)


def clear_tenant(core: Core, peer: int, request_id: int, tenant: str, now_ns: int) -> None:
    """Clears every namespace in which the tenant has or may have a cache or a chunk, including those on disk for which
    the index had no room. Nothing can be promised about a device that is not open."""
    check_name("tenant", tenant)
    tier, tag = core.disk, tag_of(tenant)
    if tier is not None and not tier.recovered:
        raise ResourceError("disk-recovering", "what is on disk is not known yet; ask again when it is")
    tags = {digest: space.tags for digest, space in core.chunks.spaces.items()}
    left_out = tier.notes.left_out if tier is not None else {}
    digests = [*dict.fromkeys(digest for table in (tags, left_out) for digest in table if table[digest].may_be(tag))]
    check_room(core, len(digests))
    done = TenantCleared(request_id, forget(core, digests), len(digests))
    why = ""
    if tier is not None and not tier.all_known:
        why = "what lies on a device that could not be opened is not known; clear again when it is back"
    answer_when_void(core, peer, done, notes=digests, of=digests, now_ns=now_ns, why=why)


def answer_when_void(
    core: Core,
    peer: int,
    done: Cleared | TenantCleared,
    *,
    notes: list[bytes],
    of: list[bytes],
    now_ns: int,
    why: str = "",
    cut: Cut | None = None,
) -> None:
    """Makes the records under these notes void. Answers when the devices have noted it and the chunks of the namespaces
    `of` have left the index; at once when the devices know none of the notes. why: why the clear cannot be durable.
    cut: its chunks are counted when they have gone."""
    number, spaces = core.number("disk"), core.chunks.still_forgetting(of)
    clear = Clear(number=number, peer=peer, done=done, spaces=spaces, cut=cut, why=why)
    if core.remotes and of:
        core.timers.set(now_ns + core.bounds.job_ttl_ms * MILLISECOND_NS, "remote-clear", number)
        for store in core.remotes:
            for digest in of:
                store.owe_clear(digest, clear, core.fresh_epoch)
    tier = core.disk
    known = [note for note in notes if tier is not None and tier.may_have(note)]
    if tier is None or not known:
        core.clears.end(clear)
        return
    core.timers.set(now_ns + core.bounds.job_ttl_ms * MILLISECOND_NS, "clear", clear.number)
    tier.notes.answer_when_void(clear, known, listed=tier.recovery.listed)


def check_room(core: Core, clears: int) -> None:
    """Raises ResourceError when too many clears would wait, for disks or for a remote store."""
    if core.disk is not None:
        core.disk.notes.check_room(clears)
    owed = max((store.clears_waiting for store in core.remotes), default=0)
    if core.remotes and owed + clears > CLEARS_MAX:
        raise ResourceError("clears", f"{owed} clears wait for the remote store, at most {CLEARS_MAX} may")


def remote_overdue(core: Core, number: int) -> None:
    """A clear has waited for remote stores as long as a job may run."""
    found = [clear for store in core.remotes if (clear := store.give_up_clear(number)) is not None]
    found[0].leave_stores()


def forget(core: Core, digests: Iterable[bytes]) -> int:
    """Forgets namespaces in memory. Returns how many chunks go."""
    found = (core.chunks.spaces.get(digest) for digest in digests)
    spaces = {space: 0 for space in found if space is not None}
    for lease in [lease for lease in core.leases.values() if lease.space in spaces]:
        end_lease(core, lease)
    for hold in [hold for hold in core.operators.holds.values() if hold.space in spaces]:
        holds.end(core, hold, "its namespace was cleared")
    for space in spaces:
        chunks = spaces[space] = core.chunks.clear(space, "cleared")
        if space.caches:
            core.chunks.add_space(space.successor(caches=space.caches))
        else:
            namespaces.left(core, space)
        kv_events.cleared(core, space)
        core.log("namespace cleared", ("namespace", space.digest[:6].hex()), ("chunks", chunks))
    core.chunks.forget_some()
    return sum(spaces.values())
