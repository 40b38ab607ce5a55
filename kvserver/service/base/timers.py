"""Deadlines of leases, jobs, caches, sessions and movers.

A heap cannot be searched, so a deadline that is cancelled or moved leaves a dead entry in it. The entry goes when it
comes to the top, or when most of the heap is dead and all dead entries are swept at once. So memory is bounded by the
live deadlines, however fast they come and go, and no operation costs more than O(log n) on average.
"""

import heapq

Timer = tuple[str, int]
"""Kind and number of the thing that has a deadline."""

DEAD_SPARE = 16
"""Dead entries that are tolerated without a sweep."""


class Timers:
    """At most one deadline for each timer."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, Timer]] = []
        self._deadlines: dict[Timer, int] = {}

    def set(self, at_ns: int, kind: str, number: int) -> None:
        """Sets a deadline, or moves it."""
        timer = (kind, number)
        if self._deadlines.get(timer) != at_ns:
            self._deadlines[timer] = at_ns
            heapq.heappush(self._heap, (at_ns, timer))
            self._sweep()

    def cancel(self, kind: str, number: int) -> None:
        """Cancels a deadline. It does nothing if none is set, since the timer may just have fired."""
        if self._deadlines.pop((kind, number), None) is not None:
            self._sweep()

    def due(self, now_ns: int) -> Timer | None:
        """Takes out the first timer that is due."""
        while self._heap and self._heap[0][0] <= now_ns:
            at_ns, timer = heapq.heappop(self._heap)
            if self._deadlines.get(timer) == at_ns:
                del self._deadlines[timer]
                self._sweep()
                return timer
        return None

    def deadlines(self) -> dict[Timer, int]:
        """All deadlines that are set, in ns."""
        return self._deadlines.copy()

    def check(self) -> None:
        """Asserts that the heap is within its bound and holds every deadline."""
        assert len(self._heap) <= 2 * len(self._deadlines) + DEAD_SPARE, "most timers held are dead"
        assert self._deadlines.items() <= {(timer, at_ns) for at_ns, timer in self._heap}

    def _sweep(self) -> None:
        if len(self._heap) > 2 * len(self._deadlines) + DEAD_SPARE:
            self._heap = [(at_ns, timer) for timer, at_ns in self._deadlines.items()]
            heapq.heapify(self._heap)
