"""A server of the replay's own: started in a directory of its own, stopped and removed at the end whatever happened."""

import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType

PR_SET_PDEATHSIG = 1
STOP_S_MAX = 10.0
LOG_TAIL_BYTES = 2000


TETHER = (
    f"import ctypes, os, sys; ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, {signal.SIGTERM:d}, 0, 0, 0); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)
"""Run before the server in its process: a replay that is killed must not leave an arena behind."""


class Served:
    """`kvserver serve` as a child process. `socket` is where it will answer; being ready is the client's to see."""

    def __init__(self, flags: tuple[str, ...], arena_bytes: int) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="kvserver-replay-"))
        self.socket = self._directory / "kv.sock"
        self._log = self._directory / "log"
        command = [sys.executable, "-c", TETHER, sys.executable, "-m", "kvserver", "serve"]
        command += ["--socket", str(self.socket), "--arena-bytes", str(arena_bytes), "--http-port", "0", *flags]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)

    def __enter__(self) -> "Served":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Of the supervisor."""
        return self._process.pid

    def problem(self) -> str:
        """How the server ended; empty while it runs."""
        code = self._process.poll()
        return "" if code is None else f"the server exited with {code}; its last words: {self.last_words()}"

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)

    def last_words(self) -> str:
        """The end of its log."""
        return self._log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").strip() or "(none)"
