"""What lookups asked for and found, counted when the answer is out.

A lookup leaves a note and is answered. The shell has the notes counted behind that, while the engine wakes up: code
that runs cold takes some microseconds, which no lookup shall wait for. Whoever reads what was counted settles first.
"""

from collections.abc import Iterator

from kvserver.index.space import Space
from kvserver.service.telling.counters import Counters
from kvserver.service.telling.reuse import Reuse
from kvserver.wire.messages import KEY_BYTES

NOTES_MAX = 64
"""Where nobody has them counted, the lookup that leaves the last one does."""

Note = tuple[Space | None, bytes, int, int, int, bool, str]
"""Of a lookup that was accepted: its namespace, where that is known; the packed keys; chunks that are held, that were
offered, and of these those on disk alone; whether it got a lease; why what is held ends (endings.Ending)."""


class Asked:
    """The notes. Whoever reads the counters of lookups, or the reuse, settles first."""

    def __init__(self, counters: Counters, reuse: Reuse) -> None:
        self._counters = counters
        self._reuse = reuse
        self._nobodys = counters.lookup_tokens_of("")
        self._notes: list[Note] = []

    def note(  # noqa: PLR0917 - keywords cost a quarter of a microsecond of every lookup
        self, space: Space | None, keys: bytes, held: int, offered: int, away: int, leased: bool, why: str
    ) -> None:
        """One lookup, as in Note."""
        self._counters.lookups += 1
        self._notes.append((space, keys, held, offered, away, leased, why))
        if len(self._notes) == NOTES_MAX:
            self.settle()

    def settle(self) -> None:
        """Counts what was noted."""
        counters = self._counters
        for space, keys, held, offered, away, leased, why in self._notes:
            counters.lookups_hit += leased
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
    """Every chunk that was asked for has one: asked >= held >= offered >= away (to be read first)."""
    if leased:
        yield "dram", offered - away
        yield "disk", away
    else:
        yield "unwanted", offered
    yield "declined", held - offered
    yield "miss", asked - held
