"""Sessions, from Hello to their end.

A session lives as long as its process and the connection that it attached. Missed messages never end it.
"""

from kvserver.errors import RequestError, ResourceError
from kvserver.service.base.effects import AnswerWithBoard, CloseSession
from kvserver.service.requests import caches, movers, transfers
from kvserver.service.requests.lookup import end as end_lease
from kvserver.service.state.core import MILLISECOND_NS, Core, check_name
from kvserver.service.state.sessions import Session
from kvserver.wire.codec import protocol_mismatch
from kvserver.wire.messages import (
    BLOCKS_MAX,
    CHUNKS_MAX,
    PROTOCOL,
    SESSION_BYTES,
    SHARDS_MAX,
    Attach,
    Attached,
    Hello,
    Lane,
    LaneOpen,
    Limits,
    Offer,
    Offered,
    Welcome,
)


def hello(core: Core, peer: int, request: Hello, now_ns: int) -> None:
    """Opens a session."""
    if request.protocol != PROTOCOL:
        raise protocol_mismatch(request.protocol)
    if peer in core.sessions.by_peer:
        raise RequestError("hello-twice", "this connection has said hello before")
    check_name("engine", request.engine)
    check_name("software", request.software)
    if not 1 <= request.ranks <= SHARDS_MAX or not -1 <= request.rank < request.ranks:
        raise RequestError(
            "rank", f"rank={request.rank} of ranks={request.ranks}; expected -1 <= rank < ranks <= {SHARDS_MAX}"
        )
    if len(core.sessions) >= core.bounds.sessions_max:
        raise ResourceError(
            "sessions", f"{len(core.sessions)} sessions are open, at most {core.bounds.sessions_max} may be"
        )
    engine = core.sessions.engine(request.engine, request.epoch, request.ranks)
    if engine.ranks != request.ranks:
        raise RequestError(
            "ranks", f"engine {request.engine!r} has ranks={engine.ranks}, this process says {request.ranks}"
        )
    token = core.random_bytes(SESSION_BYTES)
    session = Session(core.number("session"), token, engine, request.rank, request.software)
    core.sessions.open(session, peer)
    core.timers.set(now_ns + core.bounds.attach_ttl_ms * MILLISECOND_NS, "attach", session.number)
    core.counters.add("sessions_opened")
    limits = Limits(CHUNKS_MAX, BLOCKS_MAX, core.bounds.jobs_max, core.bounds.lease_ttl_ms)
    core.answer(peer, Welcome(request.id, token, core.server, core.incarnation, limits))


def attach(core: Core, peer: int, request: Attach) -> None:
    session = _by_token(core, peer, request.session)
    if session.attached_peer:
        raise RequestError("attached-twice", f"session {session.number} is attached already")
    session.attach(peer)
    core.timers.cancel("attach", session.number)
    core.sessions.join(session, peer)
    core.emit(AnswerWithBoard(peer, Attached(request.id), session.number))
    core.log(
        "session opened",
        ("session", session.number),
        ("engine", session.engine.name),
        ("rank", session.rank),
        ("software", session.software),
    )


def lane(core: Core, peer: int, request: Lane) -> None:
    core.sessions.join(_by_token(core, peer, request.session), peer)
    core.answer(peer, LaneOpen(request.id))


def offer(core: Core, session: Session, peer: int, request: Offer, descriptor: int) -> None:
    """Keeps a descriptor until Register names it."""
    if descriptor < 0 or peer != session.attached_peer:
        if descriptor >= 0:
            core.close((descriptor,))
        raise RequestError("offer", "an offer comes on the attached connection with exactly one descriptor")
    if len(session.offered) >= core.bounds.descriptors_max:
        core.close((descriptor,))
        raise ResourceError("descriptors", f"at most {core.bounds.descriptors_max} descriptors may wait for a register")
    session.offered.add(descriptor)
    core.answer(peer, Offered(request.id, descriptor))


def peer_gone(core: Core, peer: int, now_ns: int) -> None:
    """Handles a closed connection. The attached connection takes its session with it, and so does the last connection
    of a session that has not attached: its client would begin with another Hello."""
    session = core.sessions.leave(peer)
    if session is not None and (peer == session.attached_peer or not session.peers):
        end(core, session, "connection closed", now_ns)


def attach_overdue(core: Core, number: int, now_ns: int) -> None:
    session = core.sessions[number]
    assert not session.attached_peer
    end(core, session, "never attached", now_ns)


def end(core: Core, session: Session, why: str, now_ns: int) -> None:
    """Ends a session and frees all that it holds. Memory that a mover still maps is freed when the mover lets it go or
    is killed."""
    peers = core.sessions.close(session)
    core.timers.cancel("attach", session.number)
    core.close(tuple(sorted(session.offered)))
    session.offered.clear()
    core.emit(CloseSession(session.number, peers))
    core.counters.add("sessions_closed")
    core.log("session closed", ("session", session.number), ("engine", session.engine.name), ("why", why))
    if not session.engine.sessions:
        for number in sorted(session.engine.leases):
            end_lease(core, core.leases[number])
    for number in sorted(session.pledges):
        core.pledges.breaks(core.pledges[number], "died")
    for number in sorted(session.jobs):
        transfers.cancel(core, core.jobs[number], now_ns)
    for cache in list(session.caches.values()):
        cache.take_waiting()
        caches.begin_unmap(core, cache, now_ns)
    for mover in core.movers.values():
        movers.drop_board(core, mover, session)


def _by_token(core: Core, peer: int, token: bytes) -> Session:
    if peer in core.sessions.by_peer:
        raise RequestError("hello-twice", "this connection belongs to a session already")
    session = core.sessions.by_token.get(token)
    if session is None:
        raise session_unknown()
    return session


def session_unknown() -> RequestError:
    return RequestError("session-unknown", "no such session here: say hello first (the server may have restarted)")
