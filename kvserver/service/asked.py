"""What lookups asked for and found, counted when no engine waits for it.

A lookup leaves a note and answers. Notes are counted together, at the next tick or when somebody wants to read what was
counted: one after the other they take half as long as one at a time between other work, and no answer waits for them.
"""

from kvserver.index.space import Space
from kvserver.service.counters import Counters
from kvserver.service.reuse import Reuse
from kvserver.wire.messages import KEY_BYTES

NOTES_MAX = 64
"""The lookup that leaves the last one counts them all."""

Note = tuple[Space | None, bytes, int, int, int, bool, str]
"""Of a lookup that was accepted: its namespace, where that is known; the packed keys; chunks that are held, that were
offered, and of these those on disk alone; whether it got a lease; why what is held ends (endings.Ending)."""


class Asked:
    """The notes. Whoever reads the counters of lookups, or the reuse, settles first."""

    def __init__(self, counters: Counters, reuse: Reuse) -> None:
        self._counters = counters
        self._reuse = reuse
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
            if space is None:
                self._count(len(keys) // KEY_BYTES, held, offered, away, leased=leased, each=0)
                continue
            self._reuse.asked(space.digest, keys)
            asked, each = len(keys) // KEY_BYTES, space.geometry.chunk_tokens
            if leased and offered == asked and not away:  # most of them
                counters.lookup_chunks["dram"] += asked
                counters.lookup_tokens["dram"] += asked * each
            else:
                self._count(asked, held, offered, away, leased=leased, each=each)
        self._notes.clear()

    def _count(self, asked: int, held: int, offered: int, away: int, *, leased: bool, each: int) -> None:
        """Every chunk that was asked for has one result: asked >= held >= offered >= away (to be read first). each:
        tokens of a chunk."""
        by_chunks, by_tokens = self._counters.lookup_chunks, self._counters.lookup_tokens
        from_disk = away if leased else 0
        found = "dram" if leased else "unwanted"
        by_chunks[found] += offered - from_disk
        by_tokens[found] += (offered - from_disk) * each
        if from_disk:
            by_chunks["disk"] += from_disk
            by_tokens["disk"] += from_disk * each
        if offered < asked:
            by_chunks["declined"] += held - offered
            by_tokens["declined"] += (held - offered) * each
            by_chunks["miss"] += asked - held
            by_tokens["miss"] += (asked - held) * each
