"""Calls of the supervisor that the kernel refuses: the arena outlives each, and the story goes on."""

import errno
import multiprocessing
import os
import selectors
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TextIO

import pytest

from kvserver.config.config import Config
from kvserver.ipc.fd_sockets import pair
from kvserver.supervisor import supervisor
from kvserver.supervisor.kept_memory import Held
from kvserver.supervisor.systemd import Manager
from kvserver.transfer.native import ArenaGrower, create_memfd
from tests.rigs.supervisor_story import ARENA_BYTES, SLAB_BYTES, run

WAIT_S = 60
CLEAN = multiprocessing.get_context("forkserver")
"""Forks off a process without threads. This one may have threads of libraries that do not survive a fork."""
CLEAN.set_forkserver_preload(["tests.rigs.supervisor_story"])
CALLS_MAX = 200


def play(says: Connection, log: str, story: tuple[str, int, int, int]) -> None:
    """The supervisor's process."""
    os.dup2(says.fileno(), 1)
    says.close()
    os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), 2)
    run(*story)


class Story:
    """Kills the first mover that it hears of, then a brain, and ends the supervisor when another mover has come."""

    def __init__(self, device: str, first: int, last: int, number: int) -> None:
        self._arguments = (device, first, last, number)
        self._device = device
        self._killed = ""
        self.lines: list[str] = []
        self.calls = 0

    def live(self) -> str:
        """Plays the story to its end; returns the supervisor's log."""
        said, says = CLEAN.Pipe(duplex=False)
        with tempfile.NamedTemporaryFile("r") as log:
            process = CLEAN.Process(target=play, args=(says, log.name, self._arguments))
            process.start()
            says.close()
            assert process.pid is not None
            self._pid = process.pid
            watchdog = threading.Timer(WAIT_S, process.kill)
            watchdog.start()
            try:
                with open(os.dup(said.fileno())) as lines:
                    self._direct(lines)
            finally:
                process.join()
                watchdog.cancel()
                said.close()
            text = log.read()
        shown = "\n".join([*self.lines, text])
        assert process.exitcode == 0, shown
        assert "Traceback" not in text, shown
        assert self.calls, shown
        return text

    def _direct(self, lines: TextIO) -> None:
        deeds = iter((self._kill_mover, self._kill_brain, self._end))
        deed = next(deeds)
        for line in self._said(lines):
            if line.startswith("mover") and deed(line):
                deed = next(deeds, lambda _: False)

    def _said(self, lines: TextIO) -> Iterator[str]:
        for line in lines:
            self.lines.append(line.strip())
            if line.startswith("calls"):
                self.calls = int(line.split()[1])
            yield line
            if self._device == "disk" and line.startswith(("brain", "mover")):
                self._check_quiet()

    def _check_quiet(self) -> None:
        """Checks that each dead disk mover's I/O has been waited for before anything begins after it."""
        movers = sum(line.startswith("mover") for line in self.lines[:-1])
        assert self.lines[:-1].count("quiet") >= movers, self.lines

    def _kill_mover(self, line: str) -> bool:
        _kill(line.split()[1])
        return True

    def _kill_brain(self, line: str) -> bool:
        self._killed = line.split()[3]
        _kill(self._killed)
        return True

    def _end(self, line: str) -> bool:
        if line.split()[3] == self._killed:
            return False
        os.kill(self._pid, signal.SIGTERM)
        return True


def test_a_brain_that_has_closed_its_socket_wakes_the_supervisor_no_more() -> None:
    """The socket would be readable until the process is gone, and the supervisor take a core for as long."""
    arena = create_memfd("arena", ARENA_BYTES, 0)
    grower = ArenaGrower(arena, ARENA_BYTES, SLAB_BYTES, 1)
    config = Config(arena_bytes=ARENA_BYTES, slab_bytes=SLAB_BYTES)
    alone = supervisor.Supervisor(config, Held(arena, arena, found=False), grower, Manager({}), "anywhere")
    ours, theirs = pair()
    with ours:
        alone._control = ours
        alone._selector.register(ours, selectors.EVENT_READ, alone._on_wish)
        theirs.close()
        ((key, _),) = alone._selector.select(WAIT_S)
        key.data()
        assert alone._selector.select(0) == []
    grower.close()
    os.close(arena)


def _kill(pid: str) -> None:
    with suppress(ProcessLookupError):
        os.kill(int(pid), signal.SIGKILL)


@pytest.mark.parametrize("device", ["host", "disk"])
def test_any_single_call_may_fail(device: str) -> None:
    refused = 0
    for first in range(1, CALLS_MAX):
        story = Story(device, first, first, errno.ENOMEM)
        story.live()
        if story.calls < first:
            break
        refused += 1
    else:
        pytest.fail(f"the story still had more than {CALLS_MAX} calls")
    assert refused > 30, "fewer calls were met than the story has"


@pytest.mark.parametrize("device", ["host", "disk"])
@pytest.mark.parametrize("first", [1, 12, 34])
def test_all_calls_may_fail_for_a_while(device: str, first: int) -> None:
    story = Story(device, first, 0, errno.EAGAIN)
    log = story.live()
    assert story.calls > first
    assert "ERROR" in log


@pytest.mark.parametrize("number", [errno.ETOOMANYREFS, errno.EMSGSIZE])
def test_many_calls_in_a_row_may_fail(number: int) -> None:
    for first, last in ((2, 5), (10, 13), (17, 19)):
        Story("host", first, last, number).live()
