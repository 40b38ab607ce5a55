"""Calls of the supervisor that the kernel refuses: the arena outlives each, and the story goes on."""

import errno
import os
import signal
import tempfile
import threading
import traceback
from collections.abc import Iterator
from contextlib import suppress
from typing import NoReturn, TextIO

import pytest

from tests.rigs.supervisor_story import run

WAIT_S = 60
CALLS_MAX = 200


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
        said, says = os.pipe()
        with tempfile.TemporaryFile("w+") as log:
            self._pid = os.fork()
            if not self._pid:
                self._play(says, log.fileno())
            os.close(says)
            watchdog = threading.Timer(WAIT_S, os.kill, (self._pid, signal.SIGKILL))
            watchdog.start()
            try:
                with open(said) as lines:
                    self._direct(lines)
            finally:
                _, status = os.waitpid(self._pid, 0)
                watchdog.cancel()
            log.seek(0)
            text = log.read()
        shown = "\n".join([*self.lines, text])
        assert status == 0, shown
        assert "Traceback" not in text, shown
        assert self.calls, shown
        return text

    def _play(self, says: int, log: int) -> NoReturn:
        os.dup2(says, 1)
        os.dup2(log, 2)
        try:
            run(*self._arguments)
        except BaseException:
            os.write(2, traceback.format_exc().encode())
            os._exit(1)
        os._exit(0)

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
