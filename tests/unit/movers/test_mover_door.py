"""The brain's end of a mover's socket: orders go out, and a copy of GPU memory keeps the brain awake for its end."""

import os
import socket
from collections.abc import Iterator

import pytest

from kvserver.brain import listeners
from kvserver.brain.listeners import LINGER_S, MoverDoor
from kvserver.wire.orders import Cancel
from tests.rigs.mover_loop import Loop, copy


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
