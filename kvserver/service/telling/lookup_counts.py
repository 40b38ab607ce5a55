"""Counters of lookups, updated after the reply is out.

`note()` queues one result, and the lookup is answered. The shell calls `settle()` afterwards, while the engine wakes
up: cold code takes some microseconds, and no lookup shall wait for that. Call `settle()` before reading these counters.
"""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, Protocol

from kvserver.index.space import Node, Space
from kvserver.service.telling.counters import Counters
from kvserver.service.telling.reuse import Reuse
from kvserver.wire.messages import KEY_BYTES

RESULTS_MAX = 64
"""Results that may be queued. The lookup that fills the queue settles it."""

Ending = Literal["whole", "absent", "gone", "writing", "partial", "declined", "disk-away", "namespace", "recovering"]
"""Why a found prefix ends (requests/miss_reason.py). One of counters.LOOKUP_ENDS."""


class LookupResult(NamedTuple):
    """The chunks that an accepted lookup found. chunks asked for >= held >= chunks >= len(away)."""

    space: Space | None
    """The namespace; None if it is unknown, or the engine may not see it."""
    keys: bytes
    """The packed keys that were asked for."""
    held: int
    """Leading chunks that are held."""
    chunks: int
    """Leading chunks that are offered."""
    away: dict[Node, int]
    """Offered chunks that have to be read from disk first: node -> groups (bits), head first."""
    leased: bool
    """The lookup gets a lease: as many chunks are offered as the client wants at least."""
    why: Ending
    """Why the prefix ends."""


class PassedOver(Protocol):
    """A remote store that is not asked for what a lookup missed."""

    def passed_over(self) -> None: ...


class LookupCounts:
    """The queue of lookups to count. Call settle() before reading the counters of lookups, or the reuse."""

    def __init__(self, counters: Counters, reuse: Reuse) -> None:
        self._counters = counters
        self._reuse = reuse
        self._nobodys = counters.lookup_tokens_of("")
        self._results: list[LookupResult] = []
        self._passed: list[Sequence[PassedOver]] = []
        """Stores that were not asked for what a lookup missed, lookup by lookup."""

    def note(self, result: LookupResult) -> None:
        """Queues the result of one lookup."""
        self._counters.lookup_came()
        self._results.append(result)
        if len(self._results) == RESULTS_MAX:
            self.settle()

    def passed_over(self, by: Sequence[PassedOver]) -> None:
        """Queues a miss that these stores, one at least, were not asked for. Its result is queued before."""
        self._passed.append(by)

    def settle(self) -> None:
        """Counts the queued lookups."""
        counters = self._counters
        for by in self._passed:
            counters.add("remote_unannounced")
            for store in by:
                store.passed_over()
        self._passed.clear()
        for result in self._results:
            space = result.space
            if result.leased:
                counters.add("leases_granted")
            counters.lookup_ends[result.why] += 1
            each, tokens = 0, self._nobodys
            if space is not None:
                self._reuse.asked(space.digest, result.keys, result.held)
                each, tokens = space.geometry.chunk_tokens, space.lookup_tokens
            for name, chunks in _chunks_by_result(result):
                counters.lookup_chunks[name] += chunks
                tokens[name] += chunks * each
        self._results.clear()


def _chunks_by_result(result: LookupResult) -> Iterator[tuple[str, int]]:
    """Splits the chunks that were asked for by result, each counted once."""
    if result.leased:
        yield "dram", result.chunks - len(result.away)
        yield "disk", len(result.away)
    else:
        yield "unwanted", result.chunks
    yield "declined", result.held - result.chunks
    yield "miss", len(result.keys) // KEY_BYTES - result.held
