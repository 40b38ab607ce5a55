"""Few descriptors, and clients that connect without end: the brain lives, stays small and serves known clients."""

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvserver.config.config import Config
from kvserver.config.descriptor_limit import OTHERS, share
from kvserver.wire import messages as wire
from kvserver.wire.codec import encode
from kvserver.wire.zmtp import GREETING, packed
from tests.process.bad_input.abuse import memory_bytes, refusal
from tests.process.engine import Engine, prompt
from tests.process.harness import (
    OBSERVER_SESSIONS,
    WAIT_S,
    RawPeer,
    RawSession,
    Server,
    descriptors_of,
    free_port,
    stopped,
    until,
)

LIMIT = 700
GROWTH_BYTES_MAX = 100 << 20
STORY = prompt(931, chunks=3)
READY = b"\4\x1a\5READY\x0bSocket-Type\0\0\0\6DEALER"
STATUS = packed(encode(wire.Status(7)))
UNFINISHED = b"\2" + wire.FRAME_BYTES_MAX.to_bytes(8, "big") + bytes(wire.FRAME_BYTES_MAX - 1)


class LimitedServer(Server):
    """A server that may have LIMIT open files."""

    limit = LIMIT

    @property
    def PROGRAM(self) -> tuple[str, ...]:  # type: ignore[override]
        set_limit = f"resource.setrlimit(resource.RLIMIT_NOFILE, ({self.limit}, {self.limit}))"
        return "-c", f"import resource; {set_limit}; from kvserver.cli.main import main; main()"


class TooFewServer(LimitedServer):
    limit = OTHERS


@pytest.fixture(scope="module")
def server() -> Iterator[LimitedServer]:
    with LimitedServer(attach_ttl_ms=400) as limited:
        yield limited


def connected(path: Path | str, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
    """A connected socket; connect blocks while the listen queue is full."""
    end = socket.socket(socket.AF_UNIX, kind)
    end.connect(str(path))
    end.settimeout(WAIT_S)
    return end


def test_a_client_that_leaves_between_two_looks_of_the_brain_leaves_no_descriptor(server: LimitedServer) -> None:
    """The brain gets the client's bytes and its close, with unread input left, at the same time."""
    brain = server.brain_pid()
    until("nobody else to be there", lambda: server.status().sessions == OBSERVER_SESSIONS)
    before = len(descriptors_of(brain))
    ends = [connected(server.path) for _ in range(5)]
    for end in ends:
        assert end.recv(1) == GREETING[:1], "the rest of its greeting stays unread"
    with stopped(brain):
        for end in ends:
            say(end, GREETING[:10])
            end.close()
    until("the brain to close them", lambda: len(descriptors_of(brain)) <= before)


def say(end: socket.socket, said: bytes) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):
        end.sendall(said)


@pytest.mark.parametrize(
    ("said", "count", "held_open"),
    [
        (b"", 3000, True),
        (b"", 20_000, False),
        (bytes(range(256)) * 256, 5000, False),
        (b"\1\0" + b"\x20" + bytes(32) * 2000, 1000, True),
        (GREETING + READY, 3000, True),
        (GREETING + READY + 200 * STATUS, 3000, False),
        (GREETING + READY + 2000 * STATUS, 300, True),
        (GREETING + READY + UNFINISHED, 300, True),
    ],
    ids=["silent", "gone", "garbage", "zmtp1", "greeted", "asked-and-gone", "never-reads", "unfinished"],
)
def test_no_sequence_of_connections_ends_the_brain_or_makes_it_large(
    server: LimitedServer, said: bytes, count: int, held_open: bool
) -> None:
    brain = server.brain_pid()
    before = memory_bytes(brain)
    held: list[socket.socket] = []
    with Engine(server.path) as engine:
        assert engine.ready().store(STORY).chunks == STORY.chunks
        for number in range(count):
            end = connected(server.path)
            say(end, said)
            if held_open:
                held.append(end)
            else:
                end.close()
            if number % (count // 10) == 0:
                assert memory_bytes(brain) < before + GROWTH_BYTES_MAX
                assert engine.retrieve(STORY) == STORY.chunks
        with RawSessions(server.path, 1):
            assert len(os.listdir(f"/proc/{brain}/fd")) < LIMIT - OTHERS / 2
        assert engine.retrieve(STORY) == STORY.chunks
        assert memory_bytes(brain) < before + GROWTH_BYTES_MAX
    for end in held:
        end.close()
    assert server.brain_pid() == brain


class RawSessions:
    """Attached sessions."""

    def __init__(self, path: Path, count: int) -> None:
        self.all = [RawSession(path, engine="one-of-many", epoch=1 + number) for number in range(count)]

    def __enter__(self) -> list[RawSession]:
        return self.all

    def __exit__(self, *_: object) -> None:
        for session in self.all:
            session.close()


def test_local_connections_without_a_session_make_room(server: LimitedServer) -> None:
    brain = server.brain_pid()
    silent = [connected(f"{server.path}.local", socket.SOCK_SEQPACKET) for _ in range(2 * LIMIT)]
    with RawSessions(server.path, 2):
        assert server.status().sessions >= 2
    assert server.brain_pid() == brain
    for connection in silent:
        connection.close()


def test_fewer_sessions_than_configured_is_said_by_name(server: LimitedServer) -> None:
    line = next(line for line in server.log().splitlines() if "fewer sessions than configured" in line)
    assert "WARNING" in line
    assert "sessions_max=1024" in line
    assert f"RLIMIT_NOFILE={LIMIT}" in line
    sessions = int(line.split("sessions=")[1].split()[0])
    peers = [RawPeer(server.path) for _ in range(sessions + 1)]
    replies = [peer.ask(wire.Hello(1, wire.PROTOCOL, "half", 1, 1, 0, "tests")) for peer in peers]
    refusal(replies[-1], "resource", "sessions", f"at most {sessions} may be")
    assert sum(isinstance(reply, wire.Welcome) for reply in replies) >= sessions - 1, "one is the observer's"
    for peer in peers:
        peer.close()
    until("their sessions to end", lambda: server.status().sessions == 1)


def test_offers_of_all_sessions_together_are_bounded(server: LimitedServer) -> None:
    brain = server.brain_pid()
    memory = os.memfd_create("offered")
    with RawSessions(server.path, 20) as sessions, RawSessions(server.path, 1) as late:
        replies = [session.local.ask(wire.Offer(5), [memory]) for session in sessions for _ in range(64)]  # type: ignore[union-attr]
        refused = [reply for reply in replies if isinstance(reply, wire.Error)]
        refusal(refused[-1], "resource", "descriptors", "wait for a register")
        assert len(replies) - len(refused) >= 64
        assert len(os.listdir(f"/proc/{brain}/fd")) < LIMIT - OTHERS / 2
        assert isinstance(late[0].local.ask(wire.Offer(5), [memory]), wire.Offered), "some room is left for others"  # type: ignore[union-attr]
    until("their sessions to end", lambda: server.status().sessions == 1)
    with RawSessions(server.path, 1) as sessions:
        assert isinstance(sessions[0].local.ask(wire.Offer(5), [memory]), wire.Offered)  # type: ignore[union-attr]
    os.close(memory)
    assert server.brain_pid() == brain


def test_a_limit_that_is_too_low_is_refused_by_name() -> None:
    server = TooFewServer()
    try:
        assert server.spawn().wait(WAIT_S) == 2
        assert f"{OTHERS} open files (RLIMIT_NOFILE)" in server.log()
        assert "sessions_max=1024" in server.log()
    finally:
        server.close()


def test_http_connections_that_say_nothing_have_a_share_of_the_descriptors() -> None:
    """tests/unit/config/test_descriptor_limit.py says that all shares together are no more than the limit."""
    silent, port = share(Config(), LIMIT).silent, free_port()
    held: list[socket.socket] = []
    with LimitedServer(http_port=port) as server:

        def is_crowded() -> str:
            held.extend(socket.create_connection(("127.0.0.1", port), WAIT_S) for _ in range(2 * silent))
            return next((line for line in server.log().splitlines() if "http crowded" in line), "")

        assert f"silent={silent} " in until("HTTP connections to be closed for others", is_crowded)
        for end in held:
            end.close()


class EventsServer(LimitedServer):
    limit = 2200


@pytest.mark.parametrize("suffix", ["", ".replay"])
def test_no_sequence_of_connections_at_the_events_ends_the_brain(tmp_path: Path, suffix: str) -> None:
    """ZeroMQ accepts by itself here. ZMTP 1 takes any bytes for messages, and each message keeps a descriptor busy."""
    path = f"{tmp_path}/events"
    zmtp1 = b"\1\0" + (b"\x20" + bytes(32)) * 500
    with EventsServer(events_endpoint=f"ipc://{path}") as server:
        brain = server.brain_pid()
        before = memory_bytes(brain)
        for said in (zmtp1, GREETING + READY + 200 * packed(bytes(40)), b""):
            held = []
            for _ in range(3000):
                with suppress(OSError):  # nobody listens for a while
                    held.append(connected(Path(f"{path}{suffix}")))
                    say(held[-1], said)
            assert len(os.listdir(f"/proc/{brain}/fd")) < EventsServer.limit - OTHERS / 2
            assert memory_bytes(brain) < before + GROWTH_BYTES_MAX
            for end in held:
                end.close()
            until("the door to be open again", lambda: _greeted(f"{path}{suffix}"))
        assert server.status().sessions == 1
        assert server.brain_pid() == brain


def _greeted(path: str) -> bool:
    with suppress(OSError), connected(path) as end:
        return end.recv(1) == b"\xff"
    return False
