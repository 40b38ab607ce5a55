"""Bounds on work in flight: a caller faster than the server is told so instead of queued."""

import threading


class Slots:
    """A bounded count. Callers' threads take slots; the loop's thread gives them back."""

    def __init__(self) -> None:
        self._taken = 0
        self._lock = threading.Lock()

    def take(self, most: int) -> bool:
        with self._lock:
            if self._taken >= most:
                return False
            self._taken += 1
            return True

    def give(self) -> None:
        with self._lock:
            assert self._taken > 0
            self._taken -= 1
