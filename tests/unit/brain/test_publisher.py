"""The publisher: sequences, replays, and the answer to a reader that has missed more than is kept."""

import socket
import stat
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from kvserver.brain import publisher as publishing
from kvserver.brain import replay_log
from kvserver.brain.publisher import Publisher, replay_endpoint
from kvserver.brain.replay_log import REPLAYS_MAX, Replays, Sent
from kvserver.config.config import Config
from kvserver.errors import ConfigError
from kvserver.wire.kv_events import (
    REPLAY_END,
    Batch,
    ChunksRemoved,
    ChunksStored,
    Missed,
    NamespaceCleared,
    Refused,
    decode_batch,
    encode_batch,
)
from tests.rigs.event_reader import WAIT_MS, Reader

RETRY_MS = 200
SPACE = bytes(range(32))


def event(number: int) -> NamespaceCleared:
    return NamespaceCleared(number.to_bytes(32, "big"))


@pytest.fixture
def endpoint() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        yield f"ipc://{folder}/events"


@pytest.fixture
def pair(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Publisher, Reader]]:
    with monkeypatch.context() as soon:
        soon.setattr(publishing, "ALIVE_S", 0.1)
        publisher, reader = Publisher(Config(events_endpoint=endpoint), 77), Reader(endpoint)
        reader.next()  # a sign of life: the subscription has arrived
    yield publisher, reader
    publisher.close()
    reader.close()


def test_batches_have_one_sequence_and_say_whose_they_are(pair: tuple[Publisher, Reader]) -> None:
    publisher, reader = pair
    for number in (1, 2, 3):
        publisher.publish([event(number)])
    batches = [reader.next_batch() for _ in range(3)]
    assert [sequence for sequence, _ in batches] == [1, 2, 3]
    assert [batch.events for _, batch in batches] == [[event(1)], [event(2)], [event(3)]]
    assert {batch.incarnation for _, batch in batches} == {77}


def test_a_silent_publisher_tells_its_last_sequence(pair: tuple[Publisher, Reader]) -> None:
    publisher, reader = pair
    publisher.publish([event(1)])
    assert reader.next_batch()[0] == 1
    sequence, batch = reader.next()
    assert (sequence, batch.events) == (1, [])


def test_what_was_missed_is_told_again(pair: tuple[Publisher, Reader]) -> None:
    publisher, reader = pair
    for number in range(1, 6):
        publisher.publish([event(number)])
    while reader.next()[0] < 5:
        pass
    assert reader.replay(3) == [(number, [event(number)]) for number in (3, 4, 5)]
    assert reader.replay(6) == []
    assert [sequence for sequence, _ in reader.replay(0)] == [1, 2, 3, 4, 5]


def test_what_is_not_kept_any_more_is_named(pair: tuple[Publisher, Reader], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_log, "RING_BATCHES", 3)
    publisher, reader = pair
    for number in range(1, 9):
        publisher.publish([event(number)])
    while reader.next()[0] < 8:
        pass
    assert reader.replay(2) == [(5, [Missed(2, 5)]), *((number, [event(number)]) for number in (6, 7, 8))]


def test_batches_that_cannot_be_handed_over_leave_a_gap(
    pair: tuple[Publisher, Reader], monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher, reader = pair
    publisher.publish([event(1)])
    assert reader.next_batch()[0] == 1
    with monkeypatch.context() as patched:
        patched.setattr(publishing, "BACKLOG_BATCHES", 0)
        publisher.publish([event(2)])
    publisher.publish([event(3)])
    assert reader.next_batch()[0] == 3
    assert reader.replay(2) == [(2, [Missed(2, 2)]), (3, [event(3)])]


def test_nonsense_is_not_answered_and_hurts_nobody(pair: tuple[Publisher, Reader]) -> None:
    publisher, reader = pair
    publisher.publish([event(1)])
    assert reader.next_batch()[0] == 1
    for frames in ((b"",), (b"x", bytes(8)), (b"", bytes(7)), (b"", bytes(8), b"more")):
        reader.asking.send_multipart(frames)
    assert reader.replay(1) == [(1, [event(1)])]


LARGE = ChunksRemoved(SPACE, "disk", [bytes(32)] * 2_000)
"""About 70 KB: a few of them fill the kernel's buffer between two processes."""


class Stopped:
    """A reader that asks for a replay from the first batch on and then does not read."""

    def __init__(self, endpoint: str, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self.asking = context.socket(zmq.DEALER)
        self.asking.setsockopt(zmq.RCVHWM, 1)
        self.asking.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        self.asking.connect(replay_endpoint(endpoint))
        self.ask()

    def ask(self) -> None:
        self.asking.send_multipart((b"", (1).to_bytes(8, "big")))

    def read(self) -> tuple[bytes, bytes]:
        """Sequence and payload of the next message."""
        _, sequence, payload = self.asking.recv_multipart()
        return sequence, payload


def test_a_reader_that_stops_costs_a_few_batches_and_nobody_waits_for_it(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets the rest when it reads again."""
    told: Counter[bytes] = Counter()
    tell = Publisher._tell

    def counted(self: Publisher, identity: bytes, sequence: bytes, payload: bytes) -> Sent:
        sent = tell(self, identity, sequence, payload)
        told[identity] += sent is Sent.YES
        return sent

    monkeypatch.setattr(Publisher, "_tell", counted)
    publisher, reader = Publisher(Config(events_endpoint=endpoint), 77), Reader(endpoint)
    reader.next()
    for _ in range(60):
        publisher.publish([LARGE])
    while reader.next()[0] < 60:
        pass
    stopped = Stopped(endpoint, reader.context)
    assert stopped.read()[0] == (1).to_bytes(8, "big")
    for _ in range(3):  # by then it has been offered more than any buffer takes
        assert [sequence for sequence, _ in reader.replay(1)] == list(range(1, 61))
    assert 0 < min(told.values()) <= 20, "8 in ZeroMQ here, and what the kernel and the reader keep"
    assert [stopped.read()[0] for _ in range(60)] == [
        *(number.to_bytes(8, "big") for number in range(2, 61)),
        REPLAY_END,
    ]
    publisher.close()
    reader.close()


def test_replays_beyond_the_bound_are_refused_until_one_has_ended(
    pair: tuple[Publisher, Reader], endpoint: str
) -> None:
    publisher, reader = pair
    for _ in range(30):
        publisher.publish([LARGE])
    while reader.next()[0] < 30:
        pass
    stopped = [Stopped(endpoint, reader.context) for _ in range(REPLAYS_MAX)]
    for each in stopped:
        assert each.read()[0] == (1).to_bytes(8, "big")
    late = Stopped(endpoint, reader.context)
    sequence, payload = late.read()
    assert sequence == REPLAY_END
    (refused,) = decode_batch(payload).events
    assert isinstance(refused, Refused)
    assert (refused.code, str(REPLAYS_MAX) in refused.message) == ("replays", True)
    stopped[3].asking.close(linger=0)
    due_s = time.monotonic() + WAIT_MS / 1000
    while sequence == REPLAY_END and time.monotonic() < due_s:
        late.ask()
        sequence, payload = late.read()
    assert sequence == (1).to_bytes(8, "big")
    publisher.publish([event(1)])
    while reader.next()[0] < 31:
        pass


def test_connections_beyond_the_bound_are_closed_and_come_in_when_others_leave(
    pair: tuple[Publisher, Reader], endpoint: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    publisher, reader = pair
    for guests in publisher._guests:
        monkeypatch.setattr(guests, "_most", 3)
    publisher.publish([event(1)])
    assert reader.next_batch()[0] == 1
    others = [Stopped(endpoint, reader.context) for _ in range(2)]
    for each in others:
        assert each.read()[0] == (1).to_bytes(8, "big")
    assert len(reader.replay(1)) == 1
    assert caplog.messages == []
    with socket.socket(socket.AF_UNIX) as surplus:
        surplus.settimeout(WAIT_MS / 1000)
        surplus.connect(replay_endpoint(endpoint).removeprefix("ipc://"))
        while surplus.recv(64):  # possibly a greeting
            pass
    assert caplog.messages == ["events refused"]
    others[0].asking.close(linger=0)
    late = Stopped(endpoint, reader.context)
    for _ in range(WAIT_MS // RETRY_MS):  # a request over a connection that is then closed is lost
        if late.asking.poll(RETRY_MS):
            break
        late.ask()
    assert late.read()[0] == (1).to_bytes(8, "big")
    assert len(reader.replay(1)) == 1


def test_what_goes_from_the_ring_while_it_is_told_again_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_log, "RING_BATCHES", 3)
    told: list[int] = []
    ready = [True, False]

    def send(_identity: bytes, sequence: bytes, _payload: bytes) -> Sent:
        if not ready.pop(0):
            return Sent.LATER
        told.append(int.from_bytes(sequence, "big", signed=True))
        return Sent.YES

    replays = Replays(77, send)
    for number in (1, 2, 3):
        replays.keep(number, b"x")
    replays.ask(b"reader", 0)
    assert replays.turn()
    for number in (4, 5, 7):
        replays.keep(number, b"x")
    ready += [False]
    assert not replays.turn()
    ready += [True] * 9
    assert replays.turn()
    assert told == [1, 3, 4, 5, 6, 7, -1]
    assert not replays


@pytest.mark.parametrize("wrong", ["tcp://127.0.0.1", "tcp://:x", "127.0.0.1:5557", "ipc://relative", "tcp://h:65535"])
def test_wrong_endpoints_are_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match="events-endpoint"):
        replay_endpoint(wrong)


def test_an_endpoint_in_use_stops_the_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(ConfigError, match="in use"):
        Publisher(Config(events_endpoint=f"tcp://127.0.0.1:{other.getsockname()[1]}"), 1)


def test_a_path_is_open_to_nobody_else_and_what_lies_there_is_not_removed(endpoint: str, tmp_path: Path) -> None:
    first = Publisher(Config(events_endpoint=endpoint), 1)
    paths = [Path(each.removeprefix("ipc://")) for each in (endpoint, replay_endpoint(endpoint))]
    assert [stat.S_IMODE(path.stat().st_mode) for path in paths] == [0o600, 0o600]
    first.close()
    for path in paths:
        with socket.socket(socket.AF_UNIX) as left:
            path.unlink(missing_ok=True)
            left.bind(str(path))
    Publisher(Config(events_endpoint=endpoint), 2).close()
    letter = tmp_path / "letter"
    letter.write_text("dear")
    with pytest.raises(ConfigError, match="is no socket"):
        Publisher(Config(events_endpoint=f"ipc://{letter}"), 3)
    assert letter.read_text() == "dear"


def test_bytes_on_the_wire_stay_what_they_are() -> None:
    """The bytes that readers outside of this repository rely on."""
    stored = ChunksStored(b"n", "dram", b"", [b"k"], 16)
    batch = Batch(1.5, [stored, ChunksRemoved(b"n", "disk", [b"k"])], 3)
    assert encode_batch(batch).hex() == (
        "93cb3ff80000000000009296ad6368756e6b732d73746f726564c4016ea46472616dc40091c4016b10"
        "94ae6368756e6b732d72656d6f766564c4016ea46469736b91c4016b03"
    )
