"""Invalid requests at both doors: one typed error each, and no other client is affected."""

import errno
import random
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest
import zmq

from kvserver.ipc.fd_sockets import widen
from kvserver.wire import messages as wire
from kvserver.wire.codec import encode
from tests.process.bad_input.abuse import Abuser, Victim, refusal
from tests.process.engine import prompt
from tests.process.harness import RawLocal, RawPeer, RawSession, maps, until
from tests.rigs.bad_frames import BadFrames
from tests.rigs.golden_frames import REQUESTS

FRAMES = 10_000
PATIENCE_MS = 60_000
GREETING = b"\xff" + bytes(8) + b"\x7f\3\0" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\4\x1a\5READY" + b"\x0bSocket-Type" + b"\0\0\0\6DEALER"
"""A ZeroMQ client's READY command, sent before its first message."""
GOOD = [golden for _, golden in REQUESTS]


@pytest.fixture(scope="module")
def running() -> Iterator[Victim]:
    with Victim() as victim:
        yield victim


@pytest.fixture
def victim(running: Victim) -> Iterator[Victim]:
    """A server that must come out of the test unharmed."""
    yield running
    running.unharmed()


@pytest.fixture(scope="module")
def running_patiently() -> Iterator[Victim]:
    with Victim(attach_ttl_ms=PATIENCE_MS) as victim:
        yield victim


@pytest.fixture
def patient(running_patiently: Victim) -> Iterator[Victim]:
    """A server that drops no stranger during a test; the test has to close what it opens."""
    yield running_patiently
    running_patiently.unharmed()


@pytest.fixture
def peer(victim: Victim) -> Iterator[RawPeer]:
    stranger = RawPeer(victim.path)
    yield stranger
    stranger.close()


@pytest.fixture
def local(patient: Victim) -> Iterator[RawLocal]:
    stranger = RawLocal(patient.path)
    yield stranger
    stranger.close()


# ---------------------------------------------------------------- ZeroMQ


def test_random_frames_over_zeromq_get_one_reply_each(victim: Victim, peer: RawPeer) -> None:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    tally: Counter[str] = Counter()
    for number, frames in enumerate(_batches(list(BadFrames(seed, GOOD).take(FRAMES)), 100)):
        for frame in frames:
            peer.send(frame)
        tally.update(_word(peer.receive()) for _ in frames)
        if number % 10 == 0:
            victim.serves()
    assert tally.total() == FRAMES
    assert tally["frame"] > FRAMES // 2
    assert tally["session-unknown"] + tally["Welcome"] > 0, "some frames are requests"


def test_a_message_of_several_parts_is_one_refusal(victim: Victim, peer: RawPeer) -> None:
    for parts in ((encode(wire.Status(1)), b""), (b"", encode(wire.Status(1))), (b"x",) * 1000):
        peer.send(*parts)
        refusal(peer.receive(), "request", "frame", f"{len(parts)} parts; a message is one part")


def test_a_long_frame_is_refused_and_a_much_longer_one_ends_the_connection(victim: Victim, peer: RawPeer) -> None:
    peer.send(bytes(wire.FRAME_BYTES_MAX + 1))
    refusal(
        peer.receive(), "request", "frame-size", f"{wire.FRAME_BYTES_MAX + 1} bytes, at most {wire.FRAME_BYTES_MAX}"
    )
    monitor = peer.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    peer.send(bytes(3 * wire.FRAME_BYTES_MAX))
    assert monitor.poll(20_000), "the server must not take it in"


def test_each_door_has_its_own_first_message(patient: Victim, local: RawLocal) -> None:
    """An Attach over ZeroMQ would make a session whose end nobody notices."""
    peer, stranger = RawPeer(patient.path), RawPeer(patient.path)
    welcome = peer.ask(wire.Hello(1, wire.PROTOCOL, "halfway", 1, 1, 0, "tests"))
    for request in (wire.Attach(2, welcome.session), wire.Lane(3, welcome.session)):
        for asked in (peer, stranger):
            refusal(asked.ask(request), "request", "door", "comes on a local connection, not over ZeroMQ")
    refusal(local.ask(wire.Hello(4, wire.PROTOCOL, "local", 1, 1, 0, "tests")), "request", "door", "over ZeroMQ")
    assert isinstance(local.ask(wire.Attach(5, welcome.session)), wire.Attached)
    peer.close()
    stranger.close()


@pytest.mark.parametrize(
    "said", [b"", b"\xff", b"GET / HTTP/1.1\r\n\r\n", b"\xff\0\0\0\0\0\0\0\1\x7f\3", bytes(70_000)]
)
def test_a_peer_that_speaks_no_zeromq_is_dropped(victim: Victim, said: bytes) -> None:
    """Includes peers that close in the middle of a greeting."""
    connections = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(20)]
    for connection in connections:
        connection.settimeout(20)
        connection.connect(str(victim.path))
        try:
            connection.sendall(said)
        except (BrokenPipeError, ConnectionResetError):
            assert len(said) > 10, "a short message is taken in whole"
    victim.serves()
    for connection in connections:
        connection.close()


@pytest.mark.parametrize(
    "said",
    [
        GREETING + READY + b"\2\0\0\0\0\0\x0f\xff\xff" + bytes(5000),
        GREETING + READY + (b"\1\xff" + bytes(255)) * 4000,
        GREETING + READY + (b"\2" + b"\xff" * 8),
        GREETING + READY[:7],
        GREETING[:11],
    ],
    ids=["half a frame", "a message without an end", "a frame of all there is", "half a handshake", "half a greeting"],
)
def test_a_peer_that_leaves_in_the_middle_of_a_message_leaves_nothing(victim: Victim, said: bytes) -> None:
    for _ in range(10):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(20)
            connection.connect(str(victim.path))
            with suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(said)
            victim.serves()


# ---------------------------------------------------------------- the local door


def test_random_frames_on_local_connections_get_one_reply_each(patient: Victim, local: RawLocal) -> None:
    """Half of the frames come from strangers, half from inside a session."""
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    tally: Counter[str] = Counter()
    session = RawSession(patient.path, engine="noisy")
    assert session.local is not None
    frames = [frame for frame in BadFrames(seed, GOOD).take(FRAMES) if frame]
    for number, batch in enumerate(_batches(frames, 20)):
        if number % 10 == 0:
            local.close()
            local = RawLocal(patient.path)
        asked = session.local if number % 2 else local
        for frame in batch:
            asked.send(frame)
        tally.update(_word(asked.receive()[0]) for _ in batch)
        if number % 50 == 0:
            patient.serves()
    assert tally.total() == len(frames) > FRAMES - 1000
    assert tally["frame"] > FRAMES // 2
    session.close()
    local.close()


def test_a_long_message_is_refused_and_the_connection_stays(local: RawLocal) -> None:
    widen(local.socket)
    for count in (wire.FRAME_BYTES_MAX + 1, wire.FRAME_BYTES_MAX + 2, 2 * wire.FRAME_BYTES_MAX):
        if not _sends(local, bytes(count)):
            pytest.skip("without privilege no socket sends a message of more than 2 x wmem_max bytes")
        refusal(local.receive()[0], "request", "frame-size", f"at most {wire.FRAME_BYTES_MAX} ")
    refusal(local.ask(wire.Status(7)), "request", "session-unknown")


def test_an_empty_message_ends_the_connection(local: RawLocal) -> None:
    local.send(b"")
    with pytest.raises(ConnectionError):
        local.receive()


def test_descriptors_that_nobody_asked_for_are_closed(patient: Victim, local: RawLocal) -> None:
    with Abuser(patient) as abuser:
        attached = abuser.local
        pool = abuser.pool
        for asked, frame, descriptors, code in (
            (local, encode(wire.Offer(1)), [pool], "session-unknown"),
            (local, encode(wire.Status(1)), [pool] * 3, "session-unknown"),
            (local, encode(wire.Attach(1, b"nobody's token..")), [pool], "session-unknown"),
            (local, b"\xc1", [pool] * 4, "frame"),
            (attached, encode(wire.Offer(2)), [], "offer"),
            (attached, encode(wire.Offer(3)), [pool, pool], "offer"),
            (attached, encode(wire.Offer(4)), [pool] * 4, "offer"),
            (attached, encode(wire.Offer(5)), [pool] * 5, "frame-size"),
            (attached, encode(wire.Offer(6)), [pool] * 200, "frame-size"),
            (attached, b"\xc0", [pool] * 2, "frame"),
        ):
            asked.send(frame, descriptors)
            refusal(asked.receive()[0], "request", code)
        lane = RawLocal(patient.path)
        assert isinstance(lane.ask(wire.Lane(1, abuser.raw.welcome.session), [pool] * 2), wire.LaneOpen)
        refusal(lane.ask(wire.Offer(2), [pool]), "request", "offer", "attached connection with exactly one descriptor")
        lane.close()
        brain = patient.server.brain_pid()
        until("no copy of the pool to be left", lambda: not maps(brain, "abuser-pool"))


def test_a_client_that_leaves_in_the_middle_leaves_nothing(victim: Victim) -> None:
    """Before, in and after the handshake, with requests in flight, and with offers that were never used."""
    for _ in range(50):
        RawLocal(victim.path).close()
    for _ in range(10):
        peer = RawPeer(victim.path)
        peer.send(encode(wire.Hello(1, wire.PROTOCOL, "hasty", 1, 1, 0, "tests")))
        peer.close()
    for leave_after in range(4):
        abuser = Abuser(victim, engine="hasty")
        if leave_after > 0:
            for _ in range(7):
                abuser.offer(abuser.pool)
        if leave_after > 1:
            abuser.register()
        if leave_after > 2:
            abuser.send(abuser.storing(prompt(902, chunks=1).keys, [0, 1, 2]))
            abuser.send(abuser.registration(abuser.pool, name="another"))
        abuser.__exit__()


def _word(reply: Any) -> str:
    return reply.code if isinstance(reply, wire.Error) else type(reply).__name__


def _batches(frames: Sequence[bytes], count: int) -> list[Sequence[bytes]]:
    return [frames[at : at + count] for at in range(0, len(frames), count)]


def _sends(local: RawLocal, frame: bytes) -> bool:
    try:
        local.send(frame)
    except OSError as problem:
        if problem.errno != errno.EMSGSIZE:
            raise
        return False
    return True
