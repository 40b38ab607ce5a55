"""Bounds on what may be in flight, so that a caller that is faster than the server is told so instead of queued."""

import threading


class Slots:
    """A count up to a bound. Taken by callers' threads, given back by the loop's."""

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
