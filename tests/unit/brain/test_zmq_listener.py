"""The ZeroMQ door by itself: replies that wait for a peer that does not read."""

import asyncio
import socket
import tracemalloc
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from kvserver.brain.fair_turns import Line
from kvserver.brain.zmq_listener import UNREAD_PEER_BYTES_MAX, ZmqDoor
from kvserver.wire.zmtp import packed

FRAME = bytes(range(13))


class Scene:
    """A door and one connection, whose peer has number 1."""

    def __init__(self, path: Path) -> None:
        self.loop = asyncio.new_event_loop()
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen()
        self.listener.setblocking(False)
        self.client = socket.socket(socket.AF_UNIX)
        self.client.connect(str(path))
        numbers = count(1)
        self.door = ZmqDoor(
            self.listener,
            self.loop,
            lambda: next(numbers),
            lambda peer, message: None,
            Line(self.loop, lambda: 0),
            gone=lambda peer: None,
            strangers_max=3,
        )
        self.door.accept()

    def read(self, size: int) -> bytes:
        """Reads so many bytes while the loop runs."""
        self.client.setblocking(False)
        got = bytearray()
        for _ in range(size):
            if len(got) >= size:
                break
            self.loop.run_until_complete(asyncio.sleep(0))
            try:
                got += self.client.recv(1 << 16)
            except BlockingIOError:
                continue
        return bytes(got)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path / "s")
    yield made
    made.client.close()
    made.listener.close()
    made.loop.close()


def test_small_replies_that_nobody_reads_take_little_more_memory_than_their_bytes(scene: Scene) -> None:
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        sent = 0
        while scene.door.send(1, FRAME):
            sent += 1
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sent * len(packed(FRAME)) >= UNREAD_PEER_BYTES_MAX
    assert after - before < 2 * UNREAD_PEER_BYTES_MAX
    assert not scene.door.reads(1)


def test_replies_that_waited_arrive_whole_and_in_order_and_the_peer_reads_again(scene: Scene) -> None:
    greeting = scene.read(64)
    frames = [bytes([number % 251]) * (number % 97 + 1) for number in range(20_000)]
    taken = [frame for frame in frames if scene.door.send(1, frame)]
    expected = b"".join(map(packed, taken))
    assert (greeting + scene.read(len(expected)))[-len(expected) :] == expected
    assert scene.door.reads(1)
    assert scene.door.send(1, FRAME)
