"""Clients that exhaust resources: they ask and never read, connect and say nothing, or come in large numbers."""

import os
from collections.abc import Iterator

import pytest
import zmq

from kvserver.brain.zmq_listener import LONG_BYTES
from kvserver.wire import messages as wire
from kvserver.wire.codec import encode
from tests.process.bad_input.abuse import Abuser, Victim, pack, refusal
from tests.process.engine import prompt
from tests.process.harness import RawLocal, RawPeer, RawSession, until

REQUESTS = 20_000
SESSIONS_MAX = 5
LOCAL_MAX = 4 * SESSIONS_MAX
"""The server's bound: LOCAL_CONNECTIONS_PER_SESSION for each allowed session."""
HELD = 2
"""Local connections and sessions of the observer and the keeper. The keeper has a lane as well."""
OLDER, NEWER = prompt(911, chunks=1), prompt(912, chunks=2)


@pytest.fixture(scope="module")
def running() -> Iterator[Victim]:
    with Victim(
        sessions_max=SESSIONS_MAX, caches_max=3, leases_max=4, namespaces_max=2, jobs_max=3, mover_grace_ms=30_000
    ) as victim:
        yield victim


@pytest.fixture
def victim(running: Victim) -> Iterator[Victim]:
    """A server that must come out of the test unharmed."""
    yield running
    running.unharmed()


# ---------------------------------------------------------------- clients that read nothing


def test_a_zeromq_client_that_reads_nothing_costs_nobody_anything(victim: Victim) -> None:
    """Short replies fill the peer's allowance; the server drops the rest. It refuses long ones earlier."""
    peer = RawPeer(victim.path)
    peer.socket.setsockopt(zmq.RCVHWM, 1)  # for later connections
    peer.socket.disconnect(f"ipc://{victim.path}")
    peer.socket.connect(f"ipc://{victim.path}")
    assert isinstance(peer.ask(wire.Hello(1, wire.PROTOCOL, "deaf", 1, 1, 0, "tests")), wire.Welcome)
    dropped = _counter(victim, "replies_dropped")
    for number in range(REQUESTS):
        peer.send(encode(wire.Status(2 + number)))
        if number % 2_000 == 0:
            victim.serves()
    until("the replies that do not fit to be dropped", lambda: _counter(victim, "replies_dropped") > dropped)
    victim.serves()
    peer.close()


def test_long_replies_that_nobody_reads_take_no_memory_and_each_request_is_answered() -> None:
    """Unread replies are in the kernel's buffer; the server keeps no further status documents for such a peer."""
    deaf, asked = 12, 900
    with Victim(sessions_max=2 * deaf) as victim:
        sessions = [
            RawSession(victim.path, engine=f"{number:03}" + "e" * 120, received_max=1) for number in range(deaf)
        ]
        for session in sessions:
            for number in range(asked):
                session.zmq.send(encode(wire.Status(2 + number)))
        until("most of them to be refused", lambda: _refused(victim) > deaf * asked // 2)
        victim.serves()
        victim.unharmed_memory()
        refused = 0
        for session in sessions:
            replies = [session.zmq.receive() for _ in range(asked)]
            assert [reply.id for reply in replies] == list(range(2, 2 + asked))
            assert isinstance(replies[0], wire.StatusIs)
            assert len(replies[0].document) > LONG_BYTES
            errors = [reply for reply in replies if not isinstance(reply, wire.StatusIs)]
            for error in errors:
                refusal(error, "resource", "unread", "not read yet")
            refused += len(errors)
            session.close()
        assert refused > deaf * asked // 2
        victim.unharmed()


@pytest.mark.parametrize("kind", ["attached", "lane", "stranger"])
def test_a_local_client_that_reads_nothing_loses_its_connection(victim: Victim, kind: str) -> None:
    session = RawSession(victim.path, engine="deaf")
    assert session.local is not None
    connection = session.local if kind == "attached" else RawLocal(victim.path)
    if kind == "lane":
        assert isinstance(connection.ask(wire.Lane(1, session.welcome.session)), wire.LaneOpen)
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        _ask_without_reading(connection, victim)
    victim.serves()
    connection.close()
    session.close()


# ---------------------------------------------------------------- clients that say nothing


def test_silent_connections_make_room_for_others(victim: Victim) -> None:
    """Opens the maximum number of silent connections, then newer ones: those silent for longest are dropped."""
    silent = [RawLocal(victim.path) for _ in range(LOCAL_MAX)]
    with Abuser(victim, engine="prompt") as prompt_one:
        prompt_one.register()
    victim.serves()
    with pytest.raises(ConnectionError):
        silent[0].receive()
    for connection in silent:  # all of them go after attach_ttl_ms
        with pytest.raises(ConnectionError):
            connection.receive()
        connection.close()


def test_connections_with_a_session_are_bounded(victim: Victim) -> None:
    """Connections with a session are never dropped for a newer one; the newer one is refused."""
    session = RawSession(victim.path, engine="many-lanes")
    lanes = [RawLocal(victim.path) for _ in range(LOCAL_MAX - HELD - 2)]
    for lane in lanes:
        assert isinstance(lane.ask(wire.Lane(1, session.welcome.session)), wire.LaneOpen)
    late = RawLocal(victim.path)
    refusal(late.receive()[0], "resource", "connections", "are open, no more can be")
    with pytest.raises(ConnectionError):
        late.receive()
    victim.serves()
    for connection in (*lanes, late, session):
        connection.close()


def test_sessions_that_never_attach_make_room_for_others(victim: Victim) -> None:
    peers = [RawPeer(victim.path) for _ in range(SESSIONS_MAX - HELD + 1)]
    *welcome, last = (peer.ask(wire.Hello(1, wire.PROTOCOL, "half", 1, 1, 0, "tests")) for peer in peers)
    assert all(isinstance(reply, wire.Welcome) for reply in welcome)
    refusal(last, "resource", "sessions", f"{SESSIONS_MAX} sessions are open, at most {SESSIONS_MAX} may be")
    victim.serves()
    until("room for another session", lambda: _is_welcome(peers[-1]))
    for peer in peers:
        peer.close()


# ---------------------------------------------------------------- clients that take all there is


def test_the_longest_order_that_a_request_can_cause_is_read_by_the_mover() -> None:
    """An allowed request must not end a mover, and with it every client's caches. Its slots need a larger arena."""
    groups, chunks = 8, wire.CHUNKS_MAX
    group = wire.GroupSpec(1, 9, "full", 0, 1, 0, 1, 0, [wire.RegionRun(0, 0, 1, 0, 1, 1)])
    with Victim(arena_bytes=160 << 20) as victim:
        with Abuser(victim, engine="large") as large:
            registered = large.ask(large.registration(large.pool), chunk_tokens=1, groups=[group] * groups)
            assert isinstance(registered, wire.Registered)
            large.cache = registered.cache
            store = large.storing(prompt(931, chunks=chunks).keys, [0])
            blocks = [wire.GroupBlocks(index, 0, pack([index]) * chunks) for index in range(groups)]
            refusal(large.ask(store, groups=blocks), "request", "block-duplicate")
        victim.unharmed()


def _ask_without_reading(connection: RawLocal, victim: Victim) -> None:
    for number in range(500_000):
        connection.send(encode(wire.Status(number)))
        if number % 10_000 == 0:
            victim.serves()


def _counter(victim: Victim, name: str) -> int:
    count = victim.server.status().counters[name]
    assert isinstance(count, int)
    return count


def _refused(victim: Victim) -> int:
    errors = victim.server.status().counters["errors"]
    assert isinstance(errors, dict)
    return int(errors["resource"])


def _is_welcome(peer: RawPeer) -> bool:
    return isinstance(peer.ask(wire.Hello(os.getpid(), wire.PROTOCOL, "half", 1, 1, 0, "tests")), wire.Welcome)
