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

Note = tuple[int, int, dict[str, int], int, int, int, bool, str]
"""Of a lookup that was accepted: chunks that it asked for, tokens of each (0: nobody knows), and where its model's are
counted; chunks that are held, that were offered, and of these those on disk alone; whether it got a lease; why what is
held ends (endings.Ending)."""


class Asked:
    """The notes. Whoever reads the counters of lookups settles first."""

    def __init__(self, counters: Counters, reuse: Reuse) -> None:
        self._counters = counters
        self._reuse = reuse
        self._nobodys = counters.lookup_tokens_of("")
        self._notes: list[Note] = []

    def note(  # noqa: PLR0917 - keywords cost a quarter of a microsecond of every lookup
        self, space: Space | None, keys: bytes, held: int, offered: int, away: int, leased: bool, why: str
    ) -> None:
        """One lookup of packed keys, as in Note."""
        self._counters.lookups += 1
        each, tokens = 0, self._nobodys
        if space is not None:
            self._reuse.asked(space.digest, keys)
            each, tokens = space.geometry.chunk_tokens, space.lookup_tokens
        self._notes.append((len(keys) // KEY_BYTES, each, tokens, held, offered, away, leased, why))
        if len(self._notes) == NOTES_MAX:
            self.settle()

    def settle(self) -> None:
        """Counts what was noted. Every chunk that was asked for has one result: asked >= held >= offered >= away."""
        counters = self._counters
        by_chunks = counters.lookup_chunks
        for asked, each, by_tokens, held, offered, away, leased, why in self._notes:
            counters.lookups_hit += leased
            counters.lookup_ends[why] += 1
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
        self._notes.clear()
