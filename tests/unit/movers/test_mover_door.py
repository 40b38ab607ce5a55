"""The brain's end of a mover's socket: orders go out, and a copy of GPU memory keeps the brain awake for its end."""

import os
import signal
import socket
import subprocess
from collections.abc import Iterator

import pytest

from kvserver.brain import listeners
from kvserver.brain.listeners import LINGER_S, MoverDoor
from kvserver.ipc.fd_sockets import Receiver, pair, send
from kvserver.wire.codec import MESSAGE_CHARS_MAX
from kvserver.wire.orders import ORDER_BYTES_MAX, Cancel, RemoteIs, Unmapped, encode
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


TOO_LONG = encode(RemoteIs("", ["n" * ORDER_BYTES_MAX]))
UNREADABLE = {
    "too long": TOO_LONG,
    "cut": TOO_LONG[: ORDER_BYTES_MAX - 1],
    "no report": encode(Cancel(7)),
    "long tag": encode(["x" * (ORDER_BYTES_MAX - 100)]),
    "no array": encode({"a": 1}),
    "no text": encode(RemoteIs("same", [])).replace(b"same", b"\xff\xfe\xff\xff"),
    "no msgpack": b"\xc1",
    "nested": b"\x91" * (ORDER_BYTES_MAX - 1),
}


@pytest.mark.parametrize("frame", UNREADABLE.values(), ids=UNREADABLE)
def test_a_mover_whose_report_cannot_be_read_is_killed(
    frame: bytes, loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    process = subprocess.Popen(["sleep", "600"])
    brains, movers = pair()
    brains.setblocking(False)
    door = MoverDoor(brains, os.pidfd_open(process.pid), loop)  # type: ignore[arg-type]
    receiver = Receiver(ORDER_BYTES_MAX, 4)
    with movers:
        send(movers, encode(Unmapped(3)))
        send(movers, frame)
        assert door.report(receiver) == Unmapped(3)
        assert door.report(receiver) is None
        assert process.wait(60) == -signal.SIGKILL
        with pytest.raises(BlockingIOError):
            door.report(receiver)
    assert door.report(receiver) is None, "it has ended"
    door.close()
    (record,) = caplog.records
    why = str(dict(record.fields)["why"])  # type: ignore[attr-defined]
    assert why.startswith("its reports cannot be read: ")
    assert len(why) < 2 * MESSAGE_CHARS_MAX
