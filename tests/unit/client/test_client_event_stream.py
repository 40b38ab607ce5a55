"""Following the server's events: in order, each once, without waiting, whatever is lost."""

import tempfile
import time
from collections import deque
from collections.abc import Iterator

import msgspec
import pytest

from kvclient.transport.event_stream import LATER_S, REPLAY_S, SILENT_S, EventStream, ZeroMqSockets
from kvserver.brain import publisher as publishing
from kvserver.brain.publisher import Publisher
from kvserver.config.config import Config
from kvserver.errors import ConfigError
from kvserver.wire.kv_events import (
    REPLAY_END,
    TOPIC,
    Batch,
    Begun,
    KvEvent,
    Missed,
    NamespaceCleared,
    Refused,
    encode_batch,
)
from tests.rigs.event_reader import WAIT_MS

FOREVER = float("inf")


def event(number: int) -> NamespaceCleared:
    return NamespaceCleared(number.to_bytes(32, "big"))


@pytest.fixture
def endpoint() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        yield f"ipc://{folder}/events"


@pytest.fixture
def stream(endpoint: str) -> Iterator[EventStream]:
    made = EventStream(ZeroMqSockets(endpoint))
    yield made
    made.close()


def until(stream: EventStream, last: KvEvent) -> list[KvEvent]:
    """All events up to one, however long they take."""
    found: list[KvEvent] = []
    for _ in range(WAIT_MS):
        found += stream.take(until_s=FOREVER)
        if last in found:
            return found
        time.sleep(0.001)
    raise AssertionError(f"{last} never came; {found}")


class Sockets:
    """Messages by hand."""

    def __init__(self) -> None:
        self.news: deque[list[bytes]] = deque()
        self.asked: list[int] = []
        self.takes_questions = False
        self.answers: deque[list[bytes]] = deque()

    def put(self, sequence: int, payload: bytes) -> None:
        self.news.append([TOPIC, sequence.to_bytes(8, "big"), payload])

    def published(self) -> list[bytes] | None:
        return self.news.popleft() if self.news else None

    def replayed(self) -> list[bytes] | None:
        return self.answers.popleft() if self.answers else None

    def ask(self, first: int) -> bool:
        self.asked.append(first)
        return self.takes_questions

    def drop_replayed(self) -> None:
        self.takes_questions = False

    def close(self) -> None:
        pass


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_reader_that_comes_late_gets_what_is_kept_and_then_what_is_new(endpoint: str, stream: EventStream) -> None:
    publisher = Publisher(Config(events_endpoint=endpoint), 7)
    for number in (1, 2, 3):
        publisher.publish([event(number)])
    assert until(stream, event(3)) == [Begun(0), event(1), event(2), event(3)]
    for number in (4, 5):
        publisher.publish([event(number)])
    assert until(stream, event(5)) == [event(4), event(5)]
    assert stream.is_followed
    publisher.close()


def test_without_a_server_nothing_is_told_and_nobody_waits(stream: EventStream) -> None:
    assert [stream.take(until_s=FOREVER) for _ in range(3)] == [[], [], []]
    assert not stream.is_followed


def test_a_server_that_comes_later_is_followed(endpoint: str, stream: EventStream) -> None:
    assert stream.take(until_s=FOREVER) == []
    publisher = Publisher(Config(events_endpoint=endpoint), 7)
    publisher.publish([event(1)])
    assert until(stream, event(1)) == [Begun(0), event(1)]
    publisher.close()


def test_what_the_server_lost_for_good_is_named(
    endpoint: str, stream: EventStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = Publisher(Config(events_endpoint=endpoint), 7)
    publisher.publish([event(1)])
    until(stream, event(1))
    with monkeypatch.context() as patched:
        patched.setattr(publishing, "BACKLOG_BATCHES", 0)
        publisher.publish([event(2)])
    publisher.publish([event(3)])
    assert until(stream, event(3)) == [Missed(2, 2), event(3)]
    publisher.close()


def test_what_zeromq_dropped_is_asked_for_again(
    endpoint: str, stream: EventStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = Publisher(Config(events_endpoint=endpoint), 7)
    publisher.publish([event(0)])
    until(stream, event(0))
    for number in range(1, 4_000):  # more than both queues hold
        publisher.publish([event(number)])
    assert until(stream, event(3_999)) == [event(number) for number in range(1, 4_000)]
    publisher.close()


def test_another_life_of_the_server_voids_what_was_told(endpoint: str, stream: EventStream) -> None:
    first = Publisher(Config(events_endpoint=endpoint), 7)
    for number in range(1, 5):
        first.publish([event(number)])
    until(stream, event(4))
    first.close()
    second = Publisher(Config(events_endpoint=endpoint), 8)
    second.publish([Begun(3), event(9)])
    told = until(stream, event(9))
    assert told[-2:] == [Begun(3), event(9)]
    assert set(map(repr, told)) <= {repr(Begun(0)), repr(Begun(3)), repr(event(9))}
    second.close()


def test_late_messages_of_an_earlier_life_say_nothing() -> None:
    sockets = Sockets()
    stream = EventStream(sockets)
    sockets.put(1, encode_batch(Batch(0.0, [event(1)], 8)))
    sockets.put(1, encode_batch(Batch(0.0, [event(2)], 7)))
    sockets.put(2, encode_batch(Batch(0.0, [event(3)], 8)))
    assert stream.take(until_s=FOREVER) == [Begun(0), event(1), event(3)]


def test_a_life_with_a_lower_number_is_heard_once_the_server_was_away() -> None:
    sockets, clock = Sockets(), Clock()
    stream = EventStream(sockets, clock)
    sockets.put(1, encode_batch(Batch(0.0, [event(1)], 8)))
    assert stream.take(until_s=FOREVER) == [Begun(0), event(1)]
    clock.now_s += SILENT_S + 1
    assert stream.take(until_s=FOREVER) == [Begun(0)]
    sockets.put(1, encode_batch(Batch(0.0, [event(2)], 7)))
    assert stream.take(until_s=FOREVER) == [Begun(0), event(2)]


def test_a_server_that_is_silent_for_long_holds_nothing_that_can_be_told() -> None:
    sockets, clock = Sockets(), Clock()
    stream = EventStream(sockets, clock)
    sockets.put(1, encode_batch(Batch(0.0, [event(1)], 8)))
    stream.take(until_s=FOREVER)
    clock.now_s += SILENT_S
    sockets.put(1, encode_batch(Batch(0.0, [], 8)))  # a sign of life
    assert stream.take(until_s=FOREVER) == []
    assert stream.is_followed
    clock.now_s += SILENT_S + 1
    assert stream.take(until_s=FOREVER) == [Begun(0)]
    assert not stream.is_followed
    assert stream.take(until_s=FOREVER) == [], "said once"
    assert sockets.asked[-1] == 1, "all is asked for again"


def test_a_sign_of_life_with_a_higher_sequence_shows_a_loss() -> None:
    sockets = Sockets()
    stream = EventStream(sockets)
    sockets.put(1, encode_batch(Batch(0.0, [event(1)], 8)))
    stream.take(until_s=FOREVER)
    assert stream.is_followed
    sockets.put(2, encode_batch(Batch(0.0, [], 8)))
    stream.take(until_s=FOREVER)
    assert not stream.is_followed


def test_an_event_of_a_later_release_is_passed_over_and_nothing_is_missing() -> None:
    sockets = Sockets()
    stream = EventStream(sockets)
    later = [["of-tomorrow", 5], ["namespace-cleared", bytes(32), "more"]]
    sockets.put(1, msgspec.msgpack.encode([0.5, later, 8, "more"]))
    sockets.put(2, encode_batch(Batch(0.0, [event(3)], 8)))
    told = stream.take(until_s=FOREVER)
    assert told[2:] == [event(0), event(3)]
    assert stream.is_followed


@pytest.mark.parametrize("frames", [[TOPIC, bytes(8)], [TOPIC, bytes(8), b"\x93"], [TOPIC, bytes(8), b"\x01"]])
def test_another_publisher_is_not_believed(frames: list[bytes]) -> None:
    sockets = Sockets()
    stream = EventStream(sockets)
    sockets.news.append(frames)
    with pytest.raises(msgspec.DecodeError):
        stream.take(until_s=FOREVER)


def test_an_answer_that_does_not_come_is_given_up_and_late_parts_of_it_are_not_taken_for_the_next() -> None:
    sockets, clock = Sockets(), Clock()
    stream = EventStream(sockets, clock)
    sockets.takes_questions = True
    assert stream.take(until_s=FOREVER) == []
    clock.now_s += REPLAY_S - 1
    stream.take(until_s=FOREVER)
    assert sockets.asked == [1], "it may come still"
    clock.now_s += 2
    stream.take(until_s=FOREVER)
    assert sockets.asked == [1, 1]
    assert not sockets.takes_questions, "what was on its way is dropped"


def test_a_refused_replay_is_asked_for_again_later() -> None:
    sockets, clock = Sockets(), Clock()
    stream = EventStream(sockets, clock)
    sockets.takes_questions = True
    stream.take(until_s=FOREVER)
    refusal = encode_batch(Batch(0.0, [Refused("replays", "16 are under way")], 8))
    sockets.answers.append([b"", REPLAY_END, refusal])
    stream.take(until_s=FOREVER)
    assert (sockets.asked, stream.is_followed) == ([1], False)
    clock.now_s += LATER_S
    stream.take(until_s=FOREVER)
    assert sockets.asked == [1, 1]


def test_a_replay_without_what_was_seen_is_of_another_life() -> None:
    """Sequences of a later life are lower. Its replay has nothing from the sequence that was asked for."""
    sockets, clock = Sockets(), Clock()
    stream = EventStream(sockets, clock)
    sockets.put(1, encode_batch(Batch(0.0, [event(1)], 8)))
    stream.take(until_s=FOREVER)
    sockets.put(3, encode_batch(Batch(0.0, [event(3)], 8)))
    sockets.takes_questions = True
    clock.now_s += LATER_S
    stream.take(until_s=FOREVER)
    stream.take(until_s=FOREVER)
    sockets.answers.append([b"", REPLAY_END, b""])
    assert Begun(0) in stream.take(until_s=FOREVER)
    assert sockets.asked[-1] == 1, "all is asked for again"


def test_a_call_reads_no_longer_than_it_may() -> None:
    sockets, clock = Sockets(), Clock()
    stream = EventStream(sockets, clock)
    for number in range(1, 9):
        sockets.put(number, encode_batch(Batch(0.0, [event(number)], 8)))
    assert event(8) not in stream.take(until_s=clock.now_s)
    assert len(sockets.news) >= 6


def test_an_endpoint_that_cannot_be_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="events_endpoint='ipc://x' must be tcp://HOST:PORT or ipc:///PATH"):
        ZeroMqSockets("ipc://x")
