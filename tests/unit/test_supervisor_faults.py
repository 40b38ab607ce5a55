"""Calls of the supervisor that the kernel refuses: the arena outlives each, and the story goes on (supervisor_story)."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

STORY = Path(__file__).with_name("supervisor_story.py")
WAIT_S = 60
CALLS_MAX = 200


class Story:
    """Kills the first mover that it hears of, then a brain, and ends the supervisor when another mover has come."""

    def __init__(self, device: str, first: int, last: int, number: int) -> None:
        arguments = [device, *map(str, (first, last, number))]
        environment = {**os.environ, "PYTHONPATH": str(STORY.parents[2])}
        self._process = subprocess.Popen(
            [sys.executable, str(STORY), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            text=True,
        )
        self._device = device
        self.lines: list[str] = []
        self.calls = 0

    def live(self) -> str:
        """To its end; the log of the supervisor."""
        watchdog = subprocess.Popen(["sh", "-c", f"sleep {WAIT_S}; kill -9 {self._process.pid}"], start_new_session=True)
        try:
            deeds = iter((self._kill_mover, self._kill_brain, self._end))
            deed = next(deeds)
            for line in self._said():
                if line.startswith("mover") and deed(line):
                    deed = next(deeds, lambda _: False)
            _, log = self._process.communicate()
        finally:
            os.killpg(watchdog.pid, signal.SIGKILL)
            watchdog.wait()
        shown = "\n".join([*self.lines, log])
        assert self._process.returncode == 0, shown
        assert "Traceback" not in log, shown
        assert self.calls, shown
        return log

    def _said(self) -> Iterator[str]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.strip())
            if line.startswith("calls"):
                self.calls = int(line.split()[1])
            yield line
            if self._device == "disk" and line.startswith(("brain", "mover")):
                self._check_quiet()

    def _check_quiet(self) -> None:
        """Before anything begins after a disk mover, what it left under way has been waited for."""
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
        self._process.terminate()
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
@pytest.mark.parametrize("first", [1, 7, 12, 23, 34])
def test_all_calls_may_fail_for_a_while(device: str, first: int) -> None:
    story = Story(device, first, 0, errno.EAGAIN)
    log = story.live()
    assert story.calls > first
    assert "ERROR" in log


@pytest.mark.parametrize("number", [errno.ETOOMANYREFS, errno.ENOBUFS, errno.EMSGSIZE, errno.ENOMEM, errno.EMFILE])
def test_many_calls_in_a_row_may_fail(number: int) -> None:
    for first, last in ((2, 9), (10, 40), (17, 19)):
        Story("host", first, last, number).live()
