"""The loop of a mover's process, and copies that it is told to make."""

from collections.abc import Callable
from typing import Any

from kvserver.wire.orders import Copy


class Loop:
    """A minimal event loop: only the queue of calls to run next."""

    def __init__(self) -> None:
        self.soon: list[Callable[[], None]] = []

    def call_soon(self, call: Callable[[], None]) -> None:
        self.soon.append(call)

    def remove_reader(self, _end: object) -> None: ...

    def remove_writer(self, _end: object) -> None: ...

    def turn(self) -> None:
        calls, self.soon = self.soon, []
        for call in calls:
            call()


def copy(mode: Any) -> Copy:
    return Copy(7, "store", 3, 0, 1, mode, [])
