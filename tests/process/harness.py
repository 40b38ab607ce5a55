"""Real servers for tests: started, observed from outside, and gone at the end in any case.

    with Server(arena_bytes=64 << 20) as server:      # or the fixture `server` of conftest.py
        server.status()                               # the status document, asked over the wire
        server.mover_pid()                            # processes are found by looking, not by asking
        peer = RawPeer(server.path)                   # speaks frames without kvclient, also wrong ones
        until("the session to end", lambda: server.status().sessions == 1)

Rules: every wait is bounded and names what it waited for. Nothing sleeps for a fixed time. A Server used in a `with`
leaves no process behind, and fails the test when one of its processes logged a traceback."""

import mmap
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from kvserver._native import SUBMITTED
from kvserver.wire.messages import BOARD_WORDS
from kvserver.wire.status import Status
from tests.process.raw import WAIT_S, RawLocal, RawPeer, RawSession
from tests.rigs.pauses import pause_s

__all__ = [
    "OBSERVER_SESSIONS",
    "WAIT_S",
    "Boards",
    "RawLocal",
    "RawPeer",
    "RawSession",
    "Server",
    "command_of",
    "descriptors_of",
    "free_port",
    "is_gone",
    "kill",
    "maps",
    "pids_below",
    "resume",
    "state_of",
    "stop",
    "stopped",
    "until",
]

OBSERVER_SESSIONS = 1
"""Sessions that status() itself holds open."""

T = TypeVar("T")


def until(what: str, probe: Callable[[], T | None], within_s: float = WAIT_S) -> T:
    """Polls `probe` until it returns a true value, and returns that. TimeoutError names `what` at the time limit."""
    began_s = time.monotonic()
    while not (value := probe()):
        if (waited_s := time.monotonic() - began_s) > within_s:
            raise TimeoutError(f"waited {within_s:g} s for {what}; last seen: {value!r}")
        time.sleep(pause_s(waited_s))
    return value


# ---------------------------------------------------------------- processes


def pids_below(pid: int) -> list[int]:
    """Child processes of a process."""
    try:
        return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def state_of(pid: int) -> str:
    """State letter such as "S", "T" or "Z" when all threads share it, else "mixed"; "" when there is no process."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return ""
    states = set(map(_state_of_thread, tasks))
    if states == {"ended"}:
        return state_of(pid)  # all listed threads have ended meanwhile, so the next look decides
    return states.pop() if len(states) == 1 else "mixed"


def _state_of_thread(task: Path) -> str:
    """State letter of one thread; empty for a thread that ends during the look."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "ended"


def is_gone(pid: int) -> bool:
    """Whether no thread of the process runs any more: reaped, or a zombie."""
    return state_of(pid) in ("", "Z", "X")


def descriptors_of(pid: int) -> list[str]:
    """Targets of a process's open descriptors."""
    held = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            held.append(os.readlink(link))
    return held


def maps(pid: int, name: str) -> bool:
    """Whether a process maps a memfd of that name or holds its descriptor."""
    inside = Path(f"/proc/{pid}/maps").read_text()
    return any(f"memfd:{name}" in text for text in (inside, *descriptors_of(pid)))


def stop(pid: int) -> None:
    """Sends SIGSTOP; returns when none of the process's threads runs."""
    os.kill(pid, signal.SIGSTOP)
    until(f"process {pid} to stop", lambda: state_of(pid) == "T")


def resume(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stops the process inside the block; afterwards it runs again, if it lives."""
    stop(pid)
    try:
        yield
    finally:
        resume(pid)


def kill(pid: int) -> None:
    """Sends SIGKILL; returns when nothing of the process runs any more."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    until(f"process {pid} to end", lambda: is_gone(pid))


# ---------------------------------------------------------------- the server


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """`kvserver serve` in its own folder. Settings are configuration keys, as keyword arguments."""

    PROGRAM: tuple[str, ...] = ("-m", "kvserver")
    """Interpreter arguments before the command."""

    def __init__(self, **settings: object) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kv-"))
        self.path = self.folder / "s" / "kv.sock"
        self.settings: dict[str, object] = {
            "arena_bytes": 64 << 20,
            "http_port": 0,
            "copy_threads": 2,
            "touch_threads": 1,
            **settings,
        }
        self.log_path = self.folder / "log"
        self.process: subprocess.Popen[bytes] | None = None
        self._observer: RawSession | None = None

    def __enter__(self) -> "Server":
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        text = self.log()
        self.close()
        if kind is not None:
            print(f"---- log of the server ----\n{text[-8000:]}", file=sys.stderr)
        else:
            assert "Traceback" not in text, text

    def start(self) -> None:
        """Starts it (again); returns when it answers."""
        self.spawn()
        self.status()

    def spawn(self) -> subprocess.Popen[bytes]:
        """Starts it without waiting."""
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in self.settings.items()]
        command = [sys.executable, *self.PROGRAM, "serve", f"--socket={self.path}", *flags]
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        return self.process

    def stop(self) -> int:
        """Sends SIGTERM; returns the exit status."""
        assert self.process is not None
        self._forget_observer()
        self.process.terminate()
        return self.process.wait(WAIT_S)

    def kill(self) -> None:
        """Kills the supervisor with SIGKILL; returns when its children are gone as well."""
        assert self.process is not None
        below = pids_below(self.process.pid)
        self._forget_observer()
        self.process.kill()
        self.process.wait(WAIT_S)
        until("the server's children to end", lambda: all(is_gone(pid) for pid in below))

    def close(self) -> None:
        """Ends all processes and removes the folder."""
        self._forget_observer()
        if self.process is not None and self.process.poll() is None:
            below = pids_below(self.process.pid)
            self.process.kill()
            self.process.wait(WAIT_S)
            for pid in below:  # they die with the supervisor; this is for the day on which they do not
                if "kvserver" in command_of(pid):
                    kill(pid)
        shutil.rmtree(self.folder, ignore_errors=True)

    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    # ---------------------------------------------------------------- seen from outside

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def brain_pid(self) -> int:
        return until("a brain", lambda: self._child("kvserver.brain.process"))

    def mover_pid(self) -> int:
        return until("a mover", lambda: self._child("kvserver.movers.mover"))

    def disk_mover_pid(self) -> int:
        return until("the disk mover", lambda: self._child("kvserver.movers.disk_mover") or None)

    def mover_pid_now(self) -> int:
        """Pid of the mover; 0 when there is none."""
        return self._child("kvserver.movers.mover")

    def disk_mover_pid_now(self) -> int:
        """Pid of the disk mover; 0 when there is none."""
        return self._child("kvserver.movers.disk_mover")

    def status(self, within_s: float = WAIT_S) -> Status:
        """The status document, asked over a session that is reopened whenever it was lost."""
        began_s = time.monotonic()
        while True:
            assert self.process is None or self.process.poll() is None, f"the server has ended:\n{self.log()}"
            if self._observer is None:
                self._observer = _try_session(self.path)
            document = self._observer.status() if self._observer is not None else None
            if document is not None:
                return document
            self._forget_observer()
            if (waited_s := time.monotonic() - began_s) > within_s:
                raise TimeoutError(f"the server did not answer for {within_s:g} s:\n{self.log()}")
            time.sleep(pause_s(waited_s))

    def boards(self) -> "Boards":
        return Boards(self.brain_pid())

    def _child(self, module: str) -> int:
        found = [pid for pid in pids_below(self.pid) if f"-m {module} " in command_of(pid) and not is_gone(pid)]
        return found[0] if found else 0

    def _forget_observer(self) -> None:
        if self._observer is not None:
            self._observer.close()
            self._observer = None


class Boards:
    """Job state words of all sessions, read through the brain's descriptors."""

    def __init__(self, brain_pid: int) -> None:
        self._maps: list[mmap.mmap] = []
        for link in Path(f"/proc/{brain_pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                if "memfd:kvserver-board" in os.readlink(link):
                    with link.open("rb") as file:
                        self._maps.append(mmap.mmap(file.fileno(), BOARD_WORDS * 8, prot=mmap.PROT_READ))

    def any_submitted(self) -> bool:
        """Whether a mover works on some job now."""
        return any(bytes([SUBMITTED]) in board[::8] for board in self._maps)

    def close(self) -> None:
        for board in self._maps:
            board.close()


def _try_session(path: Path) -> RawSession | None:
    try:
        return RawSession(path, engine="observer", rank=-1, within_s=1.0)
    except (OSError, TimeoutError):
        return None
