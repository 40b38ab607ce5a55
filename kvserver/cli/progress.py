"""Progress display of long work: a live line on a terminal, a plain line now and then anywhere else."""

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

PLAIN_S = 10.0


class Shown(Protocol):
    """A context manager. Called with the work done, all of the work, and a line that says it in words."""

    def __call__(self, done: int, total: int, line: str) -> None: ...
    def __enter__(self) -> "Shown": ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def shown() -> Shown:
    """The display for standard error: Live on a terminal, else Plain."""
    console = Console(stderr=True)
    return Live(console) if console.is_terminal else Plain(lambda line: sys.stderr.write(f"{line}\n"))


class Live:
    """A bar followed by the line, redrawn in place and removed at the end."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(BarColumn(24), TextColumn("{task.description}"), console=console, transient=True)
        self._task = self._progress.add_task("", total=None)

    def __call__(self, done: int, total: int, line: str) -> None:
        self._progress.update(self._task, completed=done, total=total or None, description=line)

    def __enter__(self) -> "Live":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


class Plain:
    """Plain lines: the first, the last, and one every PLAIN_S between them; none twice in a row."""

    def __init__(self, write: Callable[[str], object], clock_s: Callable[[], float] = time.monotonic) -> None:
        self._write = write
        self._clock_s = clock_s
        self._written_s = float("-inf")
        self._held = ""
        self._last = ""

    def __call__(self, done: int, total: int, line: str) -> None:
        self._held = line if line != self._last else ""
        if self._held and self._clock_s() - self._written_s >= PLAIN_S:
            self._flush()

    def __enter__(self) -> "Plain":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._held:
            self._flush()

    def _flush(self) -> None:
        self._write(self._held)
        self._written_s = self._clock_s()
        self._last, self._held = self._held, ""
