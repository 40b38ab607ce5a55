"""Counters of lookups, updated after the reply is out.

`note()` queues one row, and the lookup is answered. The shell calls `settle()` afterwards, while the engine wakes up:
cold code takes some microseconds, and no lookup shall wait for that. Call `settle()` before reading these counters.
"""

from collections.abc import Iterator

from kvserver.index.space import Space
from kvserver.service.telling.counters import Counters
from kvserver.service.telling.reuse import Reuse
from kvserver.wire.messages import KEY_BYTES

NOTES_MAX = 64
"""Rows that may be queued. The lookup that fills the queue settles it."""

Note = tuple[Space | None, bytes, int, int, int, bool, str]
"""One accepted lookup: its namespace, if known; the packed keys; the number of chunks held, of those offered, and of
those on disk alone; whether it got a lease; why the held prefix ends (miss_reason.py)."""


class Asked:
    """The queue of lookups to count. Call settle() before reading the counters of lookups, or the reuse."""

    def __init__(self, counters: Counters, reuse: Reuse) -> None:
        self._counters = counters
        self._reuse = reuse
        self._nobodys = counters.lookup_tokens_of("")
        self._notes: list[Note] = []

    def note(  # noqa: PLR0917 - keywords cost a quarter of a microsecond of every lookup
        self, space: Space | None, keys: bytes, held: int, offered: int, away: int, leased: bool, why: str
    ) -> None:
        """Queues one lookup, see Note."""
        self._counters.add("lookups")
        self._notes.append((space, keys, held, offered, away, leased, why))
        if len(self._notes) == NOTES_MAX:
            self.settle()

    def settle(self) -> None:
        """Counts the queued lookups."""
        counters = self._counters
        for space, keys, held, offered, away, leased, why in self._notes:
            counters.add("lookups_hit", leased)
            counters.lookup_ends[why] += 1
            asked, each, tokens = len(keys) // KEY_BYTES, 0, self._nobodys
            if space is not None:
                self._reuse.asked(space.digest, keys)
                each, tokens = space.geometry.chunk_tokens, space.lookup_tokens
            for result, chunks in _results(asked, held, offered, away, leased=leased):
                counters.lookup_chunks[result] += chunks
                tokens[result] += chunks * each
        self._notes.clear()


def _results(asked: int, held: int, offered: int, away: int, *, leased: bool) -> Iterator[tuple[str, int]]:
    """Splits the chunks that were asked for by result, each counted once. asked >= held >= offered >= away (to be read
    first)."""
    if leased:
        yield "dram", offered - away
        yield "disk", away
    else:
        yield "unwanted", offered
    yield "declined", held - offered
    yield "miss", asked - held
