"""Prints the results of checks for a person at a machine that is available only once, and continues after failures."""

import signal
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

CHECK_S = 280


class Report:
    """Prints `ok: …`, `FAILED: …` and `skipped: …` as they come."""

    def __init__(self) -> None:
        self.failed = 0
        self.held = 0
        self._name = ""

    def check(self, holds: bool, text: str) -> None:
        self.held += holds
        self.failed += not holds
        self.say(f"{'ok' if holds else 'FAILED'}: {self._name}: {text}")

    def skip(self, text: str) -> None:
        self.say(f"skipped: {self._name}: {text}")

    def say(self, text: str) -> None:
        print(text, flush=True)

    @contextmanager
    def part(self, name: str, within_s: int = CHECK_S) -> Iterator[None]:
        """Runs a part. An exception or timeout counts as a failure and ends the part; the next one still runs."""

        def overdue(*_: object) -> None:
            raise TimeoutError(f"{name} takes longer than {within_s} s")

        began, self._name = time.monotonic(), name
        before = signal.signal(signal.SIGALRM, overdue)
        signal.alarm(within_s)
        try:
            yield
        except Exception as problem:  # any failure: the other parts must run too
            signal.alarm(0)
            traceback.print_exc()
            self.check(False, f"{type(problem).__name__}: {problem}")
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)
            self.say(f"({name}: {time.monotonic() - began:.1f} s)")
