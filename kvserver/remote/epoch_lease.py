"""Whether a server may use a namespace's chunks in a remote store now, and of which epoch. Pure; time is an argument.

Clear replaces the epoch in the namespace's note. Every server reads the note again and again, and believes what it read
for LEASE_S from the moment at which it began to read. So LEASE_S after a Clear was answered no server uses what was
there before, cut off or not. A server that sees another epoch than before first drops its own copies.

    unknown ──read──► known ──its lease ends──► stale ──read, the same epoch──► known
       ▲                │                         │
       └── a Clear of our own begins ◄────────────┘    known or stale ──read, another epoch──► dropping ──► known
"""

from collections.abc import Callable
from typing import Literal

from kvserver.remote.namespace_note import NamespaceNote

LEASE_S = 5.0
READ_EVERY_S = 1.0
WRITE_AGAIN_S, WRITE_AGAIN_S_MAX = 2.0, 16.0
"""A note that was written, and was never read well since, is not written again so soon. The pause doubles each time: a
note that is written is another epoch, for which servers drop their own copies."""
Step = Literal["", "make", "replace", "drop-local"]
"""The caller's next step: make a note where there is none; replace a damaged one; drop its own copies of the
namespace's chunks."""


class EpochLease:
    """The belief of one server in one namespace of one store.

    A read, a making or a replacement is begun by the caller, with the time of its begin, and ended by exactly one call
    here. Only one of them is under way at a time, but a Clear may begin while a read is.
    """

    def __init__(self, *, last_seen: int | None, fresh: Callable[[], int]) -> None:
        """last_seen: the epoch that this server's own copies belong to; None if it has none. fresh: a random epoch."""
        self._fresh = fresh
        self._seen = last_seen
        self._until_s = float("-inf")
        self._floor_s = float("-inf")
        """Answers to what began before do not count: a Clear of our own came between."""
        self._next_read_s = float("-inf")
        self._clearing = 0
        self._contradictions = 0
        """Contradictory answers in a row: a making that found a note after a read that found none, or a read that found
        none, or a damaged one, soon after it was written."""
        self._write_again_s = float("-inf")
        self._pause_s = WRITE_AGAIN_S
        self._dropping: tuple[int, float] | None = None
        """The epoch that counts once our own copies are dropped, and until when."""

    @property
    def seen(self) -> int | None:
        """The epoch that this server's own copies belong to."""
        return self._seen

    def epoch(self, now_s: float) -> int | None:
        """The epoch whose chunks may be used now; None if nothing may be used."""
        is_known = not self._clearing and self._dropping is None and now_s < self._until_s
        return self._seen if is_known else None

    @property
    def until_s(self) -> float:
        """When its epoch ceases to count if nothing comes between; it may be over."""
        return self._until_s

    @property
    def contradictions(self) -> int:
        """How often in a row the store has contradicted itself about the note.

        The first time is no fault: another server was first, or what was written is not seen everywhere yet."""
        return self._contradictions

    def wants_read(self, now_s: float) -> bool:
        """Whether the caller should read the note now. It counts as begun."""
        if self._clearing or now_s < self._next_read_s:
            return False
        self._next_read_s = now_s + READ_EVERY_S
        return True

    def was_read(self, note: NamespaceNote | None, *, is_damaged: bool, began_s: float) -> Step:
        """Ends a read that succeeded. One that failed is not told: the lease just runs out."""
        if began_s < self._floor_s or self._clearing:
            return ""
        if note is None:
            if began_s < self._write_again_s:
                self._contradictions += 1
                return ""
            return "replace" if is_damaged else "make"
        self._write_again_s, self._pause_s = float("-inf"), WRITE_AGAIN_S
        return self._believe(note.epoch, began_s)

    def fresh_epoch(self) -> int:
        return self._fresh()

    def was_made(self, epoch: int, *, is_first: bool, began_s: float) -> Step:
        """Ends the making or replacement of a note. is_first: nobody else had made one. Otherwise it is read again."""
        if began_s < self._floor_s or self._clearing:
            self._next_read_s = float("-inf")
            return ""
        if not is_first:
            self._contradictions += 1
            if self._contradictions == 1:
                self._next_read_s = float("-inf")
            return ""
        self._write_again_s = began_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, WRITE_AGAIN_S_MAX)
        return self._believe(epoch, began_s)

    def clear_begins(self) -> int:
        """A Clear of our own: nothing may be used until it has ended. Returns the epoch to replace the note with."""
        self._clearing += 1
        self._dropping = None
        return self._fresh()

    def clear_ended(self, epoch: int, *, began_s: float, now_s: float, is_done: bool) -> None:
        """Ends it; our own copies were dropped when it began.

        A read will tell the epoch if it failed, for it may have happened, and if another Clear of our own was under way
        meanwhile, for either may have come last."""
        self._clearing -= 1
        is_alone = began_s >= self._floor_s and not self._clearing
        self._floor_s = now_s
        self._next_read_s = float("-inf")
        self._until_s = began_s + LEASE_S if is_done and is_alone else float("-inf")
        if is_done:
            self._seen = epoch

    def dropped_local(self) -> None:
        """Our own copies are gone, as was_read() or was_made() wanted."""
        if self._dropping is not None:
            self._seen, self._until_s = self._dropping
            self._dropping = None

    def _believe(self, epoch: int, began_s: float) -> Step:
        self._contradictions = 0
        until_s = began_s + LEASE_S
        if self._seen is not None and epoch != self._seen:
            self._dropping = (epoch, until_s)
            return "drop-local"
        self._seen = epoch
        self._dropping = None
        self._until_s = max(self._until_s, until_s)
        return ""
