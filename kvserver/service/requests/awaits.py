"""Pledges and those who await them: an engine tells which chunks it computes now, others wait for its stores.

A pledged chunk is a third source of what is on its way, beside a disk (chunk_waits.py) and a remote store
(pursuits.py). It becomes an ordinary chunk with its store. Until then its pledge keeps a time, and ends at once when
the store is refused, cut short or fails.
"""

import logging

from kvserver.errors import DeviceError, ResourceError
from kvserver.index.space import READY, Space
from kvserver.service.requests import admission, computed_elsewhere, foretold, lookup
from kvserver.service.state.caches import Cache
from kvserver.service.state.core import MILLISECOND_NS, Core
from kvserver.service.state.pledges import Pledge, PledgeEnd, Pledger
from kvserver.service.state.sessions import Session
from kvserver.wire.messages import CHUNKS_MAX, KEY_BYTES, Pledged, Store, Unpledge, Unpledged
from kvserver.wire.messages import Pledge as PledgeRequest

DISTRUSTED_PATIENCES = 4
"""An engine that has not stored what it pledged may not pledge it again for so many times pledge_patience_ms. So others
wait for it at most a fifth of the time."""

WHY: dict[PledgeEnd, str] = {
    "stored": "all of it was stored",
    "withdrawn": "the engine that computed it took its word back",
    "died": "the process that pledged it has ended, or let its cache go",
    "late": "the engine that computes it made no progress, or took too long",
    "not-stored": "a store of it was refused, was cut short or failed",
    "cleared": "it was cleared, or what lies before it is served no more",
    "silent": "the server that computes it, or the store between, is not heard any more",
}


def pledge(core: Core, session: Session, peer: int, request: PledgeRequest, now_ns: int) -> None:
    """Takes an engine's word for those chunks of a prompt that nobody holds, up to the first that another one has
    pledged. Fewer are taken when the bounds of this server are reached."""
    lookup.check_keys(request.keys)
    lookup.check_namespace(request.namespace)
    bounds = core.bounds
    if len(session.pledges) >= bounds.pledges_max:
        raise ResourceError(
            "pledges", f"{len(session.pledges)} pledges of this session; at most {bounds.pledges_max} may be"
        )
    admission.check_store(core, request.namespace, now_ns)
    space = core.chunks.spaces.get(request.namespace)
    held = number = chunks = 0
    after = rest = b""
    pledger = _pledger(core, session, space) if space is not None else None
    if space is not None and pledger is not None:
        if not core.pledges.room(pledger).pledges:
            raise ResourceError(
                "pledges",
                f"{len(core.pledges)} pledges of all engines; at most {bounds.pledges_total_max} may be, "
                "and what is left is for others",
            )
        held = core.chunks.servable(space, request.keys)
        after, rest = request.keys[: held * KEY_BYTES][-KEY_BYTES:], request.keys[held * KEY_BYTES :]
        if not core.pledges.is_distrusted(pledger, space, rest[:KEY_BYTES], now_ns):
            chunks = _free(core, pledger, space, rest, before=after)
    if chunks:
        assert space is not None
        assert pledger is not None
        number = core.number("pledge")
        made = Pledge(
            number=number,
            session=session,
            pledger=pledger,
            space=space,
            after=after,
            keys=rest[: chunks * KEY_BYTES],
            slot_bytes=chunks * space.group_bytes(space.needed),
            expires_ns=now_ns + min(max(request.ttl_ms, 1), bounds.pledge_ttl_ms) * MILLISECOND_NS,
            moved_ns=now_ns,
        )
        core.pledges.begin(made)
        _set_timer(core, made)
        core.counters.add("chunks_pledged", chunks)
        foretold.begins(core, made, request.keys[: held * KEY_BYTES], now_ns)
    core.answer(peer, Pledged(request.id, number, held, chunks))


def _pledger(core: Core, session: Session, space: Space) -> Pledger | None:
    """Who pledges, if the engine has a cache of the namespace, and a chunk of it can be stored. Namespaces with window
    or state groups are left out: the chunks that these need depend on where a prompt ends."""
    if not space.only_full or not space.complete:
        return None
    for cache in core.caches.values():
        if cache.digest == space.digest and cache.session.engine is session.engine and cache.state != "unmapping":
            return Pledger(cache.tenant, session.engine.name)
    return None


def _free(core: Core, pledger: Pledger, space: Space, keys: bytes, *, before: bytes) -> int:
    """How many of the chunks after the held one `before` nobody has pledged, and have room beside what others have. A
    key that comes twice ends them, and so does a chunk that is elsewhere: such keys are no chain, and never come."""
    room = core.pledges.room(pledger)
    most = min(len(keys) // KEY_BYTES, room.chunks, room.slot_bytes // space.group_bytes(space.needed))
    seen: set[bytes] = set()
    while len(seen) < most:
        key = keys[len(seen) * KEY_BYTES : (len(seen) + 1) * KEY_BYTES]
        if key in seen or core.pledges.of(space, key) is not None or _is_elsewhere(space, key, before):
            break
        seen.add(key)
        before = key
    return len(seen)


def _is_elsewhere(space: Space, key: bytes, before: bytes) -> bool:
    """The index has this chunk behind another one than `before`, or it is servable although the prefix is not."""
    node = space.find(key)
    return node is not None and (node.state == READY or node.parent is None or node.parent.key != before)


def unpledge(core: Core, session: Session, peer: int, request: Unpledge, now_ns: int) -> None:
    """Takes a pledge back. One that is over, or another session's, is left alone."""
    made = core.pledges.get(request.pledge)
    if made is not None and made.session is session:
        end(core, made, "withdrawn", now_ns)
    core.answer(peer, Unpledged(request.id))


def not_stored(core: Core, session: Session, space: Space, keys: bytes) -> None:
    """An engine could not store these chunks. If it has pledged some, nobody awaits them after this event."""
    for at in range(0, len(keys), KEY_BYTES) if core.pledges else ():
        made = core.pledges.of(space, keys[at : at + KEY_BYTES])
        if made is not None and made.is_of(session.engine):
            core.pledges.breaks(made, "not-stored")
            return


def store_refused(core: Core, session: Session, request: Store) -> None:
    """A store was refused as a whole. Its keys may be any bytes."""
    cache = core.caches.get(request.cache)
    space = core.chunks.spaces.get(cache.digest) if cache is not None and cache.session is session else None
    if space is not None:
        not_stored(core, session, space, request.keys[: CHUNKS_MAX * KEY_BYTES])


def cache_goes(core: Core, cache: Cache) -> None:
    """Nothing is stored from this cache any more. Unless its engine writes the same from another one too, its pledges
    of that namespace cannot be kept."""
    engine = cache.session.engine
    if not core.pledges or any(
        other.digest == cache.digest
        and other.parts == cache.parts
        and _writers(other) == _writers(cache)
        and other.session.engine is engine
        and other is not cache
        and other.state != "unmapping"
        for other in core.caches.values()
    ):
        return
    for made in core.pledges.values():
        if made.space.digest == cache.digest and made.is_of(engine):
            core.pledges.breaks(made, "died")


def _writers(cache: Cache) -> list[tuple[int, int]]:
    """How many ranks hold the same bytes, and which of them this one is, group by group."""
    return [(group.writers, group.writer) for group in cache.layout.groups]


def overdue(core: Core, number: int, now_ns: int) -> None:
    end(core, core.pledges[number], "late", now_ns)


def end(core: Core, made: Pledge, how: PledgeEnd, now_ns: int) -> None:
    """Ends a pledge. Whoever awaits some of it is told at once, and keeps what has come."""
    waits = core.pledges.end(made)
    core.timers.cancel("pledge", made.number)
    if made.session is None:
        computed_elsewhere.ended(core, made)
    core.counters.pledges_ended[how] += 1
    core.log(
        "pledge ended",
        ("pledge", made.number),
        ("engine", made.producer),
        ("how", how),
        ("chunks", made.chunks),
        ("came", made.came),
        ("awaited_by", len(waits)),
        level=logging.DEBUG,
    )
    patience_ns = core.bounds.pledge_patience_ms * MILLISECOND_NS
    if how == "not-stored" or (how == "late" and now_ns >= made.moved_ns + patience_ns):
        core.pledges.distrust(made, now_ns + DISTRUSTED_PATIENCES * patience_ns)
    error = not_coming(WHY[how])
    for wait in waits:
        wait.on_end(error, now_ns)


def check_room(core: Core, made: Pledge) -> None:
    """Raises ResourceError if no further retrieve may await that pledge."""
    if len(made.waits) >= core.bounds.pledge_waits_max:
        raise ResourceError("waits", f"{len(made.waits)} leases and retrieves await these chunks, no more may")


def not_coming(why: str) -> DeviceError:
    return DeviceError("not-coming", f"chunks that were awaited do not come: {why}")


def turn(core: Core, now_ns: int) -> None:
    """Tells those who wait what this event brought."""
    news = core.pledges.take_news()
    for wait in news.come:
        wait.on_come(now_ns)
    for made, how in news.broken.items():
        if made.number in core.pledges:
            end(core, made, how, now_ns)
    for made in news.advanced:
        if made.number not in core.pledges:
            continue
        made.moved(now_ns)
        if made.came < made.chunks:
            _set_timer(core, made)
        else:
            end(core, made, "stored", now_ns)


def _set_timer(core: Core, made: Pledge) -> None:
    core.timers.set(made.due_ns(core.bounds.pledge_patience_ms * MILLISECOND_NS), "pledge", made.number)
