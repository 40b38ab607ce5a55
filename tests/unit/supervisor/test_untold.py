"""The kernel takes no message: the receiver is ended, the sender goes on, and no descriptor is kept."""

import errno
import gc
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvserver.brain.listeners import MoverDoor, SupervisorDoor
from kvserver.wire.orders import ORDER_BYTES_MAX, Alive, KillMover, MapBoard, Wish, decode_wish
from tests.rigs.mover_loop import Loop, copy

WAIT_S = 20
ERRORS = [errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM, errno.EMSGSIZE, errno.EPERM]


class Mover:
    """A process, and the brain's end of its socket."""

    def __init__(self) -> None:
        self.brains, self.movers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.brains.setblocking(False)
        self.process = subprocess.Popen([sys.executable, "-ISc", "import signal; signal.pause()"])
        pidfd = os.pidfd_open(self.process.pid)
        self.door = MoverDoor(self.brains, pidfd, Loop())  # type: ignore[arg-type]


@pytest.fixture
def mover() -> Iterator[Mover]:
    made = Mover()
    yield made
    made.process.kill()
    made.process.wait(WAIT_S)
    made.movers.close()


def descriptors() -> int:
    gc.collect()  # what earlier tests have left is closed now, not between two counts
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("number", ERRORS)
def test_a_mover_that_cannot_be_told_is_killed(mover: Mover, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    before = descriptors()
    monkeypatch.setattr(socket.socket, "sendmsg", refuse)
    monkeypatch.setattr(socket.socket, "send", refuse)
    for _ in range(3):
        mover.door.send(MapBoard(5), [os.open("/dev/null", os.O_RDONLY)])
    mover.door.send(copy("direct"), [])
    assert mover.process.wait(WAIT_S) == -signal.SIGKILL
    assert descriptors() == before
    mover.door.close()


def test_orders_that_wait_behind_the_untold_one_keep_no_descriptor(
    mover: Mover, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mover reads nothing at first, so that orders wait."""
    with suppress(BlockingIOError):
        while mover.brains.send(bytes(4096)):
            pass
    waiting = MoverDoor(mover.brains, os.dup(mover.door.pidfd), _Loop())  # type: ignore[arg-type]
    before = descriptors()
    for _ in range(3):
        waiting.send(MapBoard(5), [os.open("/dev/null", os.O_RDONLY)])
    assert descriptors() == before + 3
    waiting.kill("the test wants it")
    assert descriptors() == before
    assert mover.process.wait(WAIT_S) == -signal.SIGKILL
    waiting.close()
    os.close(mover.door.pidfd)


class _Loop(Loop):
    def add_writer(self, *_: object) -> None: ...


def test_an_order_that_is_longer_than_the_socket_takes_kills_the_mover(mover: Mover) -> None:
    """The kernel itself answers EMSGSIZE. No real order is as long as this one."""
    mover.brains.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    mover.door.send(MapBoard(1 << 60), [])
    assert mover.process.poll() is None
    longest = copy("direct")
    longest.groups.extend([] for _ in range(ORDER_BYTES_MAX))  # type: ignore[misc]
    mover.door.send(longest, [])
    assert mover.process.wait(WAIT_S) == -signal.SIGKILL
    mover.door.close()


@pytest.mark.parametrize("number", [*ERRORS, errno.EAGAIN])
def test_wishes_wait_until_the_supervisor_can_be_told(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    door = SupervisorDoor(ours)

    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with ours, theirs:
        with monkeypatch.context() as short:
            short.setattr(socket.socket, "send", refuse)
            door.tell(KillMover(3))
            door.tell(KillMover(4))
            door.alive()
        door.alive()
        theirs.settimeout(WAIT_S)
        heard: list[Wish | Alive] = [decode_wish(theirs.recv(100)) for _ in range(3)]
        assert heard == [KillMover(3), KillMover(4), Alive()]


def test_wishes_to_a_supervisor_that_is_gone_are_dropped() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.close()
    door = SupervisorDoor(ours)
    door.tell(KillMover(3))
    assert door.flush()
    ours.close()
