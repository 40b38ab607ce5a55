"""Rates: the differences between two status documents of one brain.

Counters only grow while a brain lives. A rate is the difference of two documents over the difference of their uptimes,
so delays on their way do not matter. The page at / does the same in JavaScript (page/samples.js).
"""

from collections import deque

from kvserver.service.telling.counters import LOOKUP_RESULTS
from kvserver.units import percent
from kvserver.wire.status import Status


class Between:
    """The difference of two documents of one brain. `before` may be the same as `after`; None: the brain's start."""

    def __init__(self, before: Status | None, after: Status) -> None:
        assert before is None or before.incarnation == after.incarnation
        self._before = before
        self._after = after
        self.seconds = after.uptime_s - (before.uptime_s if before is not None else 0.0)

    def grown(self, counter: str, key: str = "") -> int:
        """The growth of a counter; `key` selects a reason if it counts by reason."""
        return _count(self._after, counter, key) - (_count(self._before, counter, key) if self._before else 0)

    def grown_in(self, store: str, counter: str) -> int:
        """The growth of a counter of a remote store. counter: as in RemoteStatus.counted."""
        return _count_in(self._after, store, counter) - (_count_in(self._before, store, counter) if self._before else 0)

    def per_s(self, counter: str, key: str = "") -> float:
        return self.grown(counter, key) / self.seconds if self.seconds > 0 else 0.0

    def per_s_in(self, store: str, counter: str) -> float:
        return self.grown_in(store, counter) / self.seconds if self.seconds > 0 else 0.0

    def tokens_of(self, *results: str) -> str:
        """Share of the tokens asked for that had these results, in percent; without any: of those that were hits."""
        found = sum(self.grown("lookup_tokens", result) for result in results)
        return percent(found if results else self.grown("lookup_tokens_hit"), self.grown("lookup_tokens_asked"))

    def tokens(self) -> dict[str, int]:
        """Lookup result -> tokens that lookups asked for."""
        return {result: self.grown("lookup_tokens", result) for result in LOOKUP_RESULTS}

    def troubles(self) -> dict[str, int]:
        """The troubles that happened in between, with their counts."""
        before = self._before.troubles if self._before else {}
        grown = {words: count - before.get(words, 0) for words, count in self._after.troubles.items()}
        return {words: count for words, count in grown.items() if count > 0}


class History:
    """The last status documents of the current brain, up to `seconds_max` back."""

    def __init__(self, seconds_max: float) -> None:
        self._seconds_max = seconds_max
        self._seen: deque[Status] = deque()

    @property
    def last(self) -> Status | None:
        return self._seen[-1] if self._seen else None

    def add(self, status: Status) -> None:
        """Adds a document that is newer than all others. One of another brain removes those before it."""
        if self._seen and self._seen[-1].incarnation != status.incarnation:
            self._seen.clear()
        self._seen.append(status)
        while len(self._seen) > 1 and status.uptime_s - self._seen[1].uptime_s >= self._seconds_max:
            self._seen.popleft()

    def lately(self, seconds: float) -> Between:
        """The last `seconds`, or as much of them as was seen. At least one document must have been added."""
        last = self._seen[-1]
        older = (seen for seen in reversed(self._seen) if last.uptime_s - seen.uptime_s >= seconds)
        return Between(next(older, self._seen[0]), last)


def _count_in(status: Status, store: str, counter: str) -> int:
    if not status.other_remotes:
        return _count(status, f"remote_{counter}", "")
    return sum(remote.counted.get(counter, 0) for remote in status.remotes if remote.name == store)


def _count(status: Status, counter: str, key: str) -> int:
    value = status.counters.get(counter, 0)
    return value.get(key, 0) if isinstance(value, dict) else value
