"""The brain's end of a mover's socket: orders go out, and a copy of GPU memory keeps the brain awake for its end."""

import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvserver.brain import listeners
from kvserver.brain.listeners import LINGER_S, MoverDoor
from kvserver.wire.orders import Cancel, Copy


class Loop:
    """A minimal event loop: only the queue of calls to run next."""

    def __init__(self) -> None:
        self.soon: list[Callable[[], None]] = []

    def call_soon(self, call: Callable[[], None]) -> None:
        self.soon.append(call)

    def remove_reader(self, _end: object) -> None: ...

    def remove_writer(self, _end: object) -> None: ...

    def turn(self) -> None:
        calls, self.soon = self.soon, []
        for call in calls:
            call()


@pytest.fixture
def loop() -> Loop:
    return Loop()


@pytest.fixture
def door(loop: Loop) -> Iterator[MoverDoor]:
    brains, movers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made = MoverDoor(brains, os.open("/dev/null", os.O_RDONLY), loop)  # type: ignore[arg-type]
    with movers:
        yield made
        made.close()


def copy(mode: Any) -> Copy:
    return Copy(7, "store", 3, 0, 1, mode, [])


def test_after_a_copy_of_gpu_memory_the_loop_looks_on_until_its_time_is_over(
    door: MoverDoor, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [100.0]
    monkeypatch.setattr(listeners.time, "monotonic", lambda: now_s[0])
    door.send(copy("staged"), [])
    now_s[0] += 0.7 * LINGER_S
    door.send(copy("server-gather"), [])
    assert len(loop.soon) == 1, "it looks on once, however many copies there are"
    now_s[0] += 0.7 * LINGER_S
    loop.turn()
    assert len(loop.soon) == 1, "since the second order less time has passed"
    now_s[0] += 0.7 * LINGER_S
    loop.turn()
    assert loop.soon == []
    door.send(copy("staged"), [])
    assert len(loop.soon) == 1


def test_copies_of_host_memory_and_other_orders_let_it_sleep(door: MoverDoor, loop: Loop) -> None:
    door.send(copy("direct"), [])
    door.send(Cancel(7), [])
    assert loop.soon == []
