"""What happened between two status documents of one brain, for whoever shows figures per second.

Counters only grow while a brain lives, so a rate is a difference of two documents over the brain's own time, whatever
time their ways took. The page at / does the same in its own language (page/samples.js).
"""

from collections import deque

from kvserver.service.telling.counters import LOOKUP_RESULTS
from kvserver.wire.status import Status


class Between:
    """`before` may be the same as `after`: then nothing happened, in no time."""

    def __init__(self, before: Status, after: Status) -> None:
        assert before.incarnation == after.incarnation
        self._before = before
        self._after = after
        self.seconds = after.uptime_s - before.uptime_s

    def grown(self, counter: str, key: str = "") -> int:
        """By how much a counter has grown; `key` where it counts by reason."""
        return _count(self._after, counter, key) - _count(self._before, counter, key)

    def per_s(self, counter: str) -> float:
        return self.grown(counter) / self.seconds if self.seconds > 0 else 0.0

    def tokens(self) -> dict[str, int]:
        """Tokens that lookups asked for, by where they were."""
        return {result: self.grown("lookup_tokens", result) for result in LOOKUP_RESULTS}

    def troubles(self) -> dict[str, int]:
        """Those that have happened in between."""
        before = self._before.troubles
        grown = {words: count - before.get(words, 0) for words, count in self._after.troubles.items()}
        return {words: count for words, count in grown.items() if count > 0}


class History:
    """Status documents of the brain that lives now, as far back as somebody wants to look."""

    def __init__(self, seconds_max: float) -> None:
        self._seconds_max = seconds_max
        self._seen: deque[Status] = deque()

    @property
    def last(self) -> Status | None:
        return self._seen[-1] if self._seen else None

    def add(self, status: Status) -> None:
        """One that came later than all before. Another brain's forgets those before it."""
        if self._seen and self._seen[-1].incarnation != status.incarnation:
            self._seen.clear()
        self._seen.append(status)
        while len(self._seen) > 1 and status.uptime_s - self._seen[1].uptime_s >= self._seconds_max:
            self._seen.popleft()

    def lately(self, seconds: float) -> Between:
        """The last so many seconds, or what has been seen of them. There must be a document."""
        last = self._seen[-1]
        older = (seen for seen in reversed(self._seen) if last.uptime_s - seen.uptime_s >= seconds)
        return Between(next(older, self._seen[0]), last)


def _count(status: Status, counter: str, key: str) -> int:
    value = status.counters.get(counter, 0)
    return value.get(key, 0) if isinstance(value, dict) else value
