"""The replay's own server: runs in its own directory, and is always stopped and removed at the end."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import monotonic, sleep

from benchmarks.replay.options import DISK_FLAG, DISK_PATHS_FLAG
from kvserver.errors import ResourceError

PR_SET_PDEATHSIG = 1
STOP_S_MAX = 10.0
KILL_S_MAX = 30.0
KILL_POLL_S = 0.01
LOG_TAIL_BYTES = 2000


TETHER = (
    f"import ctypes, os, sys; ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, {signal.SIGTERM:d}, 0, 0, 0); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)
"""Runs before the server in its process, so that a killed replay leaves no arena behind."""


class Served:
    """`kvserver serve` as a child process. `socket` is its path; only a client sees when it is ready."""

    def __init__(self, flags: Sequence[str], arena_bytes: int, disk_dir: Path | None = None) -> None:
        """disk_dir: parent of a disk tier's directory, if the flags ask for a disk tier but name no directory."""
        self._directory = Path(tempfile.mkdtemp(prefix="kvserver-replay-"))
        self._disk: Path | None = None
        self.socket = self._directory / "kv.sock"
        self._log = self._directory / "log"
        command = [sys.executable, "-c", TETHER, sys.executable, "-m", "kvserver", "serve"]
        command += ["--socket", str(self.socket), "--arena-bytes", str(arena_bytes), "--http-port", "0", *flags]
        if disk_dir is not None and DISK_FLAG in flags and DISK_PATHS_FLAG not in flags:
            self._disk = _made(disk_dir, self._directory)
            command += [DISK_PATHS_FLAG, str(self._disk)]
        self._command = command
        self._process = self._started()

    @property
    def pid(self) -> int:
        """The supervisor's pid."""
        return self._process.pid

    def problem(self) -> str:
        """How the server ended; empty while it runs."""
        code = self._process.poll()
        return "" if code is None else f"the server exited with {code}; its last words: {self.last_words()}"

    def restart(self) -> None:
        """Kills all its processes at once, like a machine reset, and starts it again on its disks.

        Raises ResourceError if one of the processes does not die.
        """
        doomed = [self._process.pid, *_below(self._process.pid)]
        for pid in doomed:
            _kill(pid)
        self._process.wait()
        give_up_s = monotonic() + KILL_S_MAX
        while any(map(_lives, doomed)):
            if monotonic() > give_up_s:
                raise ResourceError("server-kill", f"processes {doomed} were killed and live on")
            sleep(KILL_POLL_S)
        self._process = self._started()

    def stop(self) -> None:
        """Ends it in order, or kills it after STOP_S_MAX."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def start(self) -> None:
        """Starts it again after stop(), over what it left."""
        self._process = self._started()

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self._directory, ignore_errors=True)
        if self._disk is not None:
            shutil.rmtree(self._disk, ignore_errors=True)

    def last_words(self) -> str:
        """The end of its log."""
        return self._log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").strip() or "(none)"

    def _started(self) -> "subprocess.Popen[bytes]":
        with self._log.open("ab") as log:
            return subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)


def _made(disk_dir: Path, ours: Path) -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix="kvserver-replay-disk-", dir=disk_dir))
    except OSError as error:
        shutil.rmtree(ours, ignore_errors=True)
        raise ResourceError("disk-dir", f"{disk_dir}: {error.strerror}") from error


def _below(pid: int) -> Iterator[int]:
    """Its children and their descendants."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            yield child
            yield from _below(child)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # it died with its parent


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"
