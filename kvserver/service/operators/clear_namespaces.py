"""Forgetting whole namespaces: one, or all of a tenant.

No lookup finds anything of them from then on. Their chunks go in pieces, as a million takes seconds, and with them
their entries in the ledger. Who asked is answered when all are gone and the devices have noted it (disk.py), of several
namespaces together.
"""

from collections.abc import Iterable

from kvserver.errors import ResourceError
from kvserver.service.base.effects import GoOn
from kvserver.service.requests import holds, kv_events, namespaces
from kvserver.service.requests.lookup import check_namespace
from kvserver.service.requests.lookup import end as end_lease
from kvserver.service.state import clear_notes
from kvserver.service.state.core import Clearing, Core, check_name
from kvserver.wire.admin import TenantCleared
from kvserver.wire.messages import Cleared
from kvserver.wire.tenants import tag_of


def clear(core: Core, peer: int, request_id: int, namespace: bytes, now_ns: int) -> None:
    """Forgets every chunk of a namespace; leases and holds on it end, registrations stay."""
    check_namespace(namespace)
    clear_notes.check_clears(core, 1)
    done = Cleared(request_id, _forget(core, [namespace]))
    clearing = Clearing(peer, done, core.number("disk"), spaces=core.chunks.going([namespace]))
    clear_notes.answer_when_void(core, clearing, [namespace], now_ns)


def clear_tenant(core: Core, peer: int, request_id: int, tenant: str, now_ns: int) -> None:
    """The same of every namespace in which the tenant has a cache or a chunk, or may have one; also of those for which
    the index had no place when the devices were read. What a device holds that is not open cannot be promised."""
    check_name("tenant", tenant)
    tier, tag = core.disk, tag_of(tenant)
    if tier is not None and not tier.recovered:
        raise ResourceError("disk-recovering", "what is on disk is not known yet; ask again when it is")
    tags = {digest: space.tags for digest, space in core.chunks.spaces.items()}
    left_out = tier.left_out if tier is not None else {}
    digests = [*dict.fromkeys(digest for table in (tags, left_out) for digest in table if table[digest].may_be(tag))]
    clear_notes.check_clears(core, len(digests))
    done = TenantCleared(request_id, _forget(core, digests), len(digests))
    clearing = Clearing(peer, done, core.number("disk"), spaces=core.chunks.going(digests))
    if tier is not None and not tier.all_known:
        clearing.why = "what lies on a device that could not be opened is not known; clear again when it is back"
    clear_notes.answer_when_void(core, clearing, digests, now_ns)


def go_on(core: Core) -> None:
    """Some more chunks of what was cleared go."""
    core.going = False
    core.chunks.empty()


def turn(core: Core) -> None:
    """At the end of each event: who waits only for chunks to go is answered when they are gone."""
    if core.clears_going:
        going, core.clears_going = core.clears_going, []
        for clearing in going:
            clear_notes.end(core, clearing)
    core.chunks.event_ended()
    if core.chunks.emptying and not core.going:
        core.going = True
        core.effects.append(GoOn())


def _forget(core: Core, digests: Iterable[bytes]) -> int:
    """In memory. Returns how many chunks go."""
    found = (core.chunks.spaces.get(digest) for digest in digests)
    spaces = {space: 0 for space in found if space is not None}
    for lease in [lease for lease in core.leases.values() if lease.space in spaces]:
        end_lease(core, lease)
    for hold in [hold for hold in core.wishes.holds.values() if hold.space in spaces]:
        holds.end(core, hold, "its namespace was cleared")
    for space in spaces:
        chunks = spaces[space] = core.chunks.clear(space, "cleared")
        if space.caches:
            core.chunks.add_space(space.successor())
        else:
            namespaces.left(core, space)
        kv_events.cleared(core, space)
        core.log("namespace cleared", ("namespace", space.digest[:6].hex()), ("chunks", chunks))
    core.chunks.empty()
    return sum(spaces.values())
