"""The publisher: sequences, replays, and what is said to whoever has missed more than is kept."""

import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from kvserver import publisher as publishing
from kvserver.config import Config
from kvserver.errors import ConfigError
from kvserver.publisher import Publisher, replay_endpoint
from kvserver.wire.kv_events import (
    REPLAY_END,
    TOPIC,
    Batch,
    ChunksRemoved,
    ChunksStored,
    KvEvent,
    Missed,
    NamespaceCleared,
    decode_batch,
    encode_batch,
)

WAIT_MS = 20_000
SPACE = bytes(range(32))


def event(number: int) -> NamespaceCleared:
    return NamespaceCleared(number.to_bytes(32, "big"))


class Reader:
    """A subscriber of its own thread's publisher."""

    def __init__(self, endpoint: str) -> None:
        self.context = zmq.Context(1)
        self.heard = self.context.socket(zmq.SUB)
        self.heard.setsockopt(zmq.SUBSCRIBE, TOPIC)
        self.heard.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        self.heard.connect(endpoint)
        self.asking = self.context.socket(zmq.DEALER)
        self.asking.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        self.asking.connect(replay_endpoint(endpoint))

    def next(self) -> tuple[int, Batch]:
        topic, sequence, payload = self.heard.recv_multipart()
        assert topic == TOPIC
        return int.from_bytes(sequence, "big"), decode_batch(payload)

    def replay(self, first: int) -> list[tuple[int, list[KvEvent]]]:
        self.asking.send_multipart((b"", first.to_bytes(8, "big")))
        found = []
        while True:
            empty, sequence, payload = self.asking.recv_multipart()
            assert empty == b""
            if sequence == REPLAY_END:
                return found
            found.append((int.from_bytes(sequence, "big"), decode_batch(payload).events))

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def endpoint() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        yield f"ipc://{folder}/events"


@pytest.fixture
def pair(endpoint: str) -> Iterator[tuple[Publisher, Reader]]:
    publisher, reader = Publisher(Config(events_endpoint=endpoint), 77), Reader(endpoint)
    reader.next()  # a sign of life: the subscription has arrived
    yield publisher, reader
    publisher.close()
    reader.close()


def test_batches_have_one_sequence_and_say_whose_they_are(pair: tuple[Publisher, Reader]) -> None:
    publisher, reader = pair
    for number in (1, 2, 3):
        publisher.publish([event(number)])
    batches = [reader.next() for _ in range(3)]
    assert [sequence for sequence, _ in batches] == [1, 2, 3]
    assert [batch.events for _, batch in batches] == [[event(1)], [event(2)], [event(3)]]
    assert {batch.incarnation for _, batch in batches} == {77}


def test_a_silent_publisher_tells_its_last_sequence(pair: tuple[Publisher, Reader]) -> None:
    publisher, reader = pair
    publisher.publish([event(1)])
    assert reader.next()[0] == 1
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
    monkeypatch.setattr(publishing, "RING_BATCHES", 3)
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
    assert reader.next()[0] == 1
    with monkeypatch.context() as patched:
        patched.setattr(publishing, "BACKLOG_BATCHES", 0)
        publisher.publish([event(2)])
    publisher.publish([event(3)])
    assert reader.next()[0] == 3
    assert reader.replay(2) == [(2, [Missed(2, 2)]), (3, [event(3)])]


def test_nonsense_is_not_answered_and_hurts_nobody(pair: tuple[Publisher, Reader]) -> None:
    publisher, reader = pair
    publisher.publish([event(1)])
    assert reader.next()[0] == 1
    for frames in ((b"",), (b"x", bytes(8)), (b"", bytes(7)), (b"", bytes(8), b"more")):
        reader.asking.send_multipart(frames)
    assert reader.replay(1) == [(1, [event(1)])]


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
    """As readers outside of this repository know them."""
    stored = ChunksStored(b"n", "dram", b"", [b"k"], 16)
    batch = Batch(1.5, [stored, ChunksRemoved(b"n", "disk", [b"k"])], 3)
    assert encode_batch(batch).hex() == (
        "93cb3ff80000000000009296ad6368756e6b732d73746f726564c4016ea46472616dc40091c4016b10"
        "94ae6368756e6b732d72656d6f766564c4016ea46469736b91c4016b03"
    )
