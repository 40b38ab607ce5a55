"""A server of the replay's own: started in a directory of its own, stopped and removed at the end whatever happened."""

import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType

STOP_S_MAX = 10.0
LOG_TAIL_BYTES = 2000


class Served:
    """`kvserver serve` as a child process. `socket` is where it will answer; being ready is the client's to see."""

    def __init__(self, flags: tuple[str, ...], arena_bytes: int) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="kvserver-replay-"))
        self.socket = self._directory / "kv.sock"
        self._log = self._directory / "log"
        command = [sys.executable, "-m", "kvserver", "serve", "--socket", str(self.socket)]
        command += ["--arena-bytes", str(arena_bytes), *flags]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)

    def __enter__(self) -> "Served":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

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
