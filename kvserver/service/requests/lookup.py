"""Lookups and the leases that they grant.

A lease belongs to an engine, not to a connection: each of its ranks may retrieve under it, in one or more parts. Every
retrieve extends it for those that follow. It ends when all ranks have had their last retrieve, when it is released, or
when its time is over. A job takes its own pin when it is submitted, so the end of a lease never frees a slot under a
copy.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Literal

from kvserver.errors import RequestError, ResourceError
from kvserver.index.space import Node, Space
from kvserver.service.holdings.accounts import Accounts
from kvserver.service.requests import computed_elsewhere, pursuits
from kvserver.service.requests.miss_reason import ending, missing
from kvserver.service.state import chunk_waits
from kvserver.service.state.chunk_waits import Fetch
from kvserver.service.state.core import MILLISECOND_NS, Core
from kvserver.service.state.disk_tier import DiskTier
from kvserver.service.state.leases import Lease
from kvserver.service.state.pledges import Pledge, Wait
from kvserver.service.state.sessions import Session
from kvserver.service.telling.lookup_counts import Ending, LookupResult
from kvserver.wire.messages import (
    CHUNKS_MAX,
    KEY_BYTES,
    NAMESPACE_BYTES,
    Await,
    Awaited,
    Found,
    FoundWhy,
    Lookup,
    Release,
    Released,
)


def lookup(core: Core, session: Session, peer: int, request: Lookup, now_ns: int) -> None:
    """Answers a lookup with the longest servable prefix, and a lease on it. The lease of an Await is also on what
    follows and is pledged."""
    check_keys(request.keys)
    check_namespace(request.namespace)
    space = core.chunks.spaces.get(request.namespace)
    accounts = core.chunks.accounts
    if accounts is not None and space is not None and not _may_see(accounts, session, space):
        space = None
    found = plan_lookup(core, request.namespace, space, request.keys, wanted_min=request.chunks_wanted_min)
    pledge, awaited = None, 0
    if space is not None and found.chunks == found.held and isinstance(request, Await):
        pledge, awaited = _pledged(core, session, space, keys=request.keys, held=found.held, now_ns=now_ns)
        if awaited and found.chunks + awaited >= request.chunks_wanted_min:
            found = found._replace(leased=True)
    if found.leased and len(core.leases) >= core.bounds.leases_max:
        raise ResourceError("leases", f"{len(core.leases)} leases are out, at most {core.bounds.leases_max} may be")
    core.lookup_counts.note(found)
    producer = pledge.producer if pledge is not None and awaited and found.leased else ""
    if level := core.lines.level("lookup", now_ns):
        line = _line(core, request, found, now_ns)
        more = (("awaited", awaited), ("producer", producer)) if producer else ()
        core.log("lookup", ("engine", session.engine.name), *line, *more, level=level)
    lease = ttl_ms = 0
    if space is not None and (found.chunks or producer):
        keys = request.keys[: found.chunks * KEY_BYTES]
        tail = space.nodes[keys[-KEY_BYTES:]] if keys else space.root
        space.touch(now_ns, tail)  # also without a lease: an engine that holds the prefix itself uses it
        if core.chunks.arc is not None and keys:
            core.chunks.arc.asked(space, tail)
        if found.leased:
            keys = request.keys[: (found.chunks + awaited) * KEY_BYTES]
            granted = _grant(core, session, space, tail, keys=keys, away=found.away, now_ns=now_ns)
            if pledge is not None and awaited:
                core.counters.add("chunks_awaited", awaited)
                if pledge.number not in core.pledges:
                    computed_elsewhere.begin(core, pledge, now_ns)
                _await(core, granted, pledge)
            lease, ttl_ms = granted.number, core.bounds.lease_ttl_ms
    coming = 0
    if core.remotes and not producer:
        coming = pursuits.coming(core, session, found, wanted_min=request.chunks_wanted_min, now_ns=now_ns)
    untold: FoundWhy = "recovering" if found.why == "recovering" else ""
    answer = request.id, found.chunks, lease, ttl_ms, len(found.away), untold, coming
    if isinstance(request, Await):
        core.answer(peer, Awaited(*answer, awaited if producer else 0, producer))
    else:
        core.answer(peer, Found(*answer))


def _pledged(
    core: Core, session: Session, space: Space, *, keys: bytes, held: int, now_ns: int
) -> tuple[Pledge | None, int]:
    """The pledge on what follows the held chunks, and how many of them it brings: that of an engine of this server, or
    the word of another server, which has not begun."""
    if core.pledges:
        pledge, awaited = core.pledges.following(session.engine, space, keys, held)
        if pledge is not None:
            return (pledge, awaited) if len(pledge.waits) < core.bounds.pledge_waits_max else (None, 0)
    pledge = computed_elsewhere.offered(core, session, space, keys, held=held, now_ns=now_ns) if core.remotes else None
    return pledge, pledge.chunks if pledge is not None else 0


def plan_lookup(core: Core, namespace: bytes, space: Space | None, keys: bytes, *, wanted_min: int) -> LookupResult:
    """The result of a lookup of these packed keys, and why it is not more. It changes nothing. space: the namespace, or
    None if it is unknown or the engine may not see it."""
    held = core.chunks.servable(space, keys) if space is not None else 0
    chunks = held
    away: dict[Node, int] = {}
    why = ending(core, namespace, space, keys, held)
    if held and space is not None and core.disk is not None:
        chunks, away, refused = _offered(core, core.disk, space, keys, held)
        why = why if why == "recovering" else refused or why
    return LookupResult(space, keys, held, chunks, away, 0 < chunks >= wanted_min, why)


def _may_see(accounts: Accounts, session: Session, space: Space) -> bool:
    """The engine may see the namespace: it has registered a cache of the same account."""
    return space.tenant is not None and accounts.of_space(space) in session.engine.accounts


def _grant(
    core: Core, session: Session, space: Space, tail: Node, *, keys: bytes, away: dict[Node, int], now_ns: int
) -> Lease:
    """Grants a lease on the prefix that ends in `tail`, and begins the reads that it needs."""
    lease = Lease(
        number=core.number("lease"),
        engine=session.engine,
        space=space,
        tail=tail,
        keys=keys,
        expires_ns=now_ns + core.bounds.lease_ttl_ms * MILLISECOND_NS,
    )
    core.chunks.pin(tail)
    core.leases.grant(lease)
    core.timers.set(lease.expires_ns, "lease", lease.number)
    if not tail.depth:
        return lease
    pursuits.offer_used(core, space, tail)
    if core.disk is not None:
        core.disk.asked_for(tail)
        core.chunks.offer(space, tail)
        if away:
            fetch = Fetch(space=space, needs=dict(away), on_ready=_nothing, on_failed=lambda _, __: end(core, lease))
            lease.await_chunks(core.disk.waits.begin(fetch))
    return lease


def _await(core: Core, lease: Lease, pledge: Pledge) -> None:
    """Has a lease grow with the chunks that a pledge brings."""
    lease.awaits(
        core.pledges.wait(
            Wait(
                holder=lease,
                pledge=pledge,
                until=lease.reach,
                on_come=lambda _: lease.awaits_no_more(),
                on_end=lambda _, __: lease.awaits_no_more(),
            )
        )
    )


def _nothing() -> None:
    """Nobody waits for the chunks of a lease by themselves."""


def _line(core: Core, request: Lookup, found: LookupResult, now_ns: int) -> Iterator[tuple[str, object]]:
    """Fields of a lookup's log line: tokens by where they are, and why they end."""
    each = found.space.geometry.chunk_tokens if found.space is not None else 0
    yield "request", request.id
    yield "tokens", len(request.keys) // KEY_BYTES * each
    yield "dram_tokens", (found.chunks - len(found.away)) * each
    yield "disk_tokens", len(found.away) * each
    yield "why", found.why
    key = request.keys[found.chunks * KEY_BYTES : (found.chunks + 1) * KEY_BYTES]
    if key:
        lacks = missing(core, request.namespace, key, now_ns)
        yield "key", lacks.key
        if lacks.cause:
            yield "cause", lacks.cause
            yield "gone_s", round(lacks.gone_s, 3)
        if lacks.held_in:
            yield "held_in", lacks.held_in[0][:12]


Refused = Literal["", "declined", "disk-away", "recovering"]


def _offered(
    core: Core, tier: DiskTier, space: Space, keys: bytes, chunks: int
) -> tuple[int, dict[Node, int], Ending | Literal[""]]:
    """Returns how many of the chunks are offered, which have to be read from disk, and why fewer are offered than held.
    The reasons: the disk cannot be read now, a chunk exceeds its tenant's maximum in DRAM, or computing would be
    faster."""
    refused: Refused = ""
    while chunks:
        tail = space.nodes[keys[(chunks - 1) * KEY_BYTES : chunks * KEY_BYTES]]
        away = chunk_waits.missing(space, tail)
        if not away:
            break
        first = next(iter(away)).depth
        if tier.readable:
            tokens = (chunks - first + 1) * space.geometry.chunk_tokens
            if core.chunks.may_ever_fit(space, away) and not _too_slow(core, tier, space, away, tokens=tokens):
                return chunks, away, refused
            refused = "declined"
        else:
            refused = "disk-away" if tier.recovered else "recovering"
        chunks = core.chunks.servable(space, keys[: (first - 1) * KEY_BYTES]) if first > 1 else 0
    return chunks, {}, refused


def _too_slow(core: Core, tier: DiskTier, space: Space, away: dict[Node, int], *, tokens: int) -> bool:
    """Reading would take longer than computing the tokens that it saves. Devices read in parallel."""
    if not core.bounds.recompute_tokens_per_s:
        return False
    device_bytes: dict[int, int] = {}
    for node, groups in away.items():
        device = tier.chunks.device_of(node)
        device_bytes[device] = device_bytes.get(device, 0) + space.group_bytes(groups)
    reads = [(tier.devices[device].placement.reads, count) for device, count in device_bytes.items()]
    load_bytes = sum(space.rank_bytes(groups) * count for groups, count in Counter(away.values()).items())
    return core.computes_faster(tokens, reads, load_bytes)


def release(core: Core, session: Session, peer: int, request: Release) -> None:
    """Releases a lease. A second release does nothing; another engine's lease is refused."""
    lease = core.leases.get(request.lease)
    if lease is not None:
        if lease.engine is not session.engine:
            raise _foreign(lease, session)
        core.counters.add("leases_released")
        end(core, lease)
    core.answer(peer, Released(request.id))


def usable(core: Core, session: Session, number: int, now_ns: int) -> Lease:
    """The lease, if this rank may retrieve under it now; otherwise raises RequestError."""
    lease = core.leases.get(number)
    if lease is None or lease.expires_ns <= now_ns:
        raise RequestError("lease-unknown", f"lease {number} is not held: never granted, expired, used up or released")
    if lease.engine is not session.engine:
        raise _foreign(lease, session)
    if not 0 <= session.rank < session.engine.ranks:
        raise RequestError(
            "lease-rank", f"rank {session.rank} cannot retrieve; ranks are 0 to {session.engine.ranks - 1}"
        )
    if session.rank in lease.ranks_used:
        raise RequestError("lease-used", f"rank {session.rank} has had its last retrieve under lease {number}")
    return lease


def use(core: Core, session: Session, lease: Lease, now_ns: int, *, more: bool) -> None:
    """Extends a lease after a rank's retrieve, whose job has its own pin. more: the rank will retrieve again. The lease
    ends when every rank has had its last retrieve."""
    extended_ns = now_ns + core.bounds.lease_extended_ms * MILLISECOND_NS
    if extended_ns > lease.expires_ns:
        lease.extend(extended_ns)
        core.timers.set(extended_ns, "lease", lease.number)
    if not more and lease.used_by(session.rank):
        end(core, lease)


def unheard(core: Core, number: int) -> None:
    """Ends a lease whose reply was not sent: nobody will use it or give it back."""
    lease = core.leases.get(number)
    if lease is not None:
        core.counters.add("leases_released")
        end(core, lease)


def expire(core: Core, number: int, now_ns: int) -> None:
    """Ends a lease whose time is over."""
    lease = core.leases[number]
    assert lease.expires_ns <= now_ns
    core.counters.add("leases_expired")
    end(core, lease)


def end(core: Core, lease: Lease) -> None:
    core.leases.end(lease)
    core.timers.cancel("lease", lease.number)
    if core.disk is not None and (fetch := lease.take_fetch()) is not None:
        core.disk.waits.end(fetch)
    if lease.wait is not None:
        core.pledges.leave(lease.wait)
        lease.awaits_no_more()
    core.chunks.unpin(lease.space, lease.tail)


def check_keys(keys: bytes) -> int:
    """The number of keys. Raises RequestError unless it is whole and within the bounds."""
    count, rest = divmod(len(keys), KEY_BYTES)
    if rest or not 1 <= count <= CHUNKS_MAX:
        raise RequestError("keys", f"{len(keys)} bytes of keys; expected 1 to {CHUNKS_MAX} keys of {KEY_BYTES} bytes")
    return count


def check_namespace(namespace: bytes) -> None:
    if len(namespace) != NAMESPACE_BYTES:
        raise RequestError("namespace", f"{len(namespace)} bytes; a namespace is a digest of {NAMESPACE_BYTES} bytes")


def _foreign(lease: Lease, session: Session) -> RequestError:
    return RequestError(
        "lease-foreign",
        f"lease {lease.number} belongs to engine {lease.engine.name!r} epoch {lease.engine.epoch}, "
        f"not to {session.engine.name!r} epoch {session.engine.epoch}",
    )
