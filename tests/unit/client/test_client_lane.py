"""The lane by itself: a socket whose other end the test holds."""

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from kvclient.base.loop import Lost, Overdue, Trouble
from kvclient.transport.lane import Lane
from kvclient.transport.transports import Full
from kvserver.wire.codec import decode_request, encode
from kvserver.wire.messages import FRAME_BYTES_MAX, Found, Lookup, Released
from tests.rigs.fake_server import WAIT_S, until


class Ends:
    def __init__(self) -> None:
        ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.theirs.settimeout(WAIT_S)
        self.lane = Lane(ours)

    def read(self) -> int:
        """The id of the next request."""
        return decode_request(self.theirs.recv(FRAME_BYTES_MAX)).id

    def answer(self, number: int, chunks: int = 0, lease: int = 0) -> None:
        self.theirs.send(encode(Found(number, chunks, lease, 0, 0, "")))


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.lane.shut()
    made.theirs.close()


def lookup(number: int) -> Lookup:
    return Lookup(number, bytes(32), bytes(32), 1)


def later() -> float:
    return time.monotonic() + WAIT_S


def test_each_reply_is_taken_once(ends: Ends) -> None:
    for number in (3, 4):
        ends.lane.send(lookup(number))
    ends.answer(4)
    assert [reply.id for reply in ends.lane.take(later())] == [4]
    ends.answer(3)
    assert [reply.id for reply in ends.lane.take(later())] == [3]
    assert ends.lane.take() == []


def test_who_waits_has_the_first_reply_and_does_not_wait_for_the_second(ends: Ends) -> None:
    for number in (3, 4):
        ends.lane.send(lookup(number))
    ends.answer(3)
    due_s = later()
    assert [reply.id for reply in ends.lane.take(due_s)] == [3]
    assert time.monotonic() < due_s


def test_nobody_waits_for_a_reply_when_all_have_come(ends: Ends) -> None:
    ends.lane.send(lookup(3))
    ends.answer(3)
    assert len(ends.lane.take(later())) == 1
    due_s = later()
    assert ends.lane.take(due_s) == []
    assert time.monotonic() < due_s


def test_nobody_waits_behind_a_thread_that_waits_for_its_own_reply(ends: Ends) -> None:
    ends.lane.send(lookup(3))
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(ends.lane.ask, lookup(4), Found, later())
        assert [ends.read(), ends.read()] == [3, 4]
        assert ends.lane.take() == []
        with pytest.raises(Trouble, match="busy"):
            ends.lane.send(lookup(5))
        due_s = time.monotonic() + 0.02
        assert ends.lane.take(due_s) == []
        assert time.monotonic() >= due_s, "who waits is not to try again and again"
        assert not asked.done()
        ends.answer(3, chunks=7)
        ends.answer(4, chunks=8)
        assert asked.result(WAIT_S).chunks == 8
    (reply,) = ends.lane.take()
    assert reply == Found(3, 7, 0, 0, 0, "")


def test_a_lane_that_is_full_has_room_again_when_the_server_reads(ends: Ends) -> None:
    sent = 0
    with suppress(Full):
        while True:
            ends.lane.send(lookup(sent))
            sent += 1
    with pytest.raises(Full):
        ends.lane.ask(lookup(sent), Found, later())
    assert [ends.read() for _ in range(sent)] == list(range(sent))
    ends.lane.send(lookup(sent))
    assert ends.read() == sent


@pytest.mark.parametrize("patience_s", [0.0002, 0.0011])
def test_a_patience_that_is_no_whole_millisecond_ends_all_the_same(ends: Ends, patience_s: float) -> None:
    ended: list[Trouble] = []

    def ask() -> None:
        with pytest.raises(Overdue) as caught:
            ends.lane.ask(lookup(3), Found, time.monotonic() + patience_s)
        ended.append(caught.value)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    until("the end of the lookup", lambda: ended)


def test_what_is_no_reply_ends_the_lane_also_for_those_that_wait_later(ends: Ends) -> None:
    ends.lane.send(lookup(3))
    ends.theirs.send(b"\xff")
    with pytest.raises(Lost, match="connection-lost"):
        ends.lane.take(later())
    with pytest.raises(Lost, match="connection-lost"):
        ends.lane.ask(lookup(4), Found, later())


def test_a_reply_of_another_kind_is_no_answer(ends: Ends) -> None:
    ends.theirs.send(encode(Released(3)))
    with pytest.raises(Lost, match="expected Found, the server said Released"):
        ends.lane.ask(lookup(3), Found, later())
