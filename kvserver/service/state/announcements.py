"""Announcements of one namespace: what this server still has to tell, and how far it has read what was told.

    silent ──all was read──► heard ──nothing could be read for a while──► silent
                              │  ▲
            a chunk was found │  │ DOUBTED_MS later
             that nobody told │  │
                              ▼  │
                            doubted

Only in `heard` a chunk of which nobody has told is taken to be absent; otherwise the store is asked.
"""

from dataclasses import dataclass, field
from typing import Literal

from kvserver.remote.announcement import Kind

MILLISECOND_NS = 1_000_000
HEARD_MS = 10_000
"""An announcement that was read so long ago counts no more."""
DOUBTED_MS = 600_000
TRIED_EVERY = 512
"""One in so many chunks of which nobody has told is looked for all the same."""
TRIES_APART_MS = 1_000
"""It is not, so soon after the last one. A server that looks up a thousand such chunks in 50 ms asks the store once."""
TRIED_MS = 600_000
"""After so long one is looked for in any case."""
BATCH_MAX = 256
"""Marks told at a time."""
UNTOLD_MAX = 1 << 16
"""Marks that wait; more are not told."""
State = Literal["silent", "heard", "doubted"]


@dataclass(slots=True, eq=False, kw_only=True)
class Announcements:
    untold: list[int] = field(default_factory=list)
    """Marks with their kinds, the oldest first."""
    is_telling: bool = False
    is_listening: bool = False
    tell_at_ns: int = 0
    listen_at_ns: int = 0
    epoch: int | None = None
    """The epoch whose announcements were read."""
    heard_ns: int | None = None
    """When all had been read, the last time; None: not yet."""
    doubted_until_ns: int = 0
    untried: int = 0
    """So many chunks of which nobody has told are passed over before one is tried. The first one is."""
    try_from_ns: int = 0
    """None is tried before."""
    try_at_ns: int = 0
    """Then one is tried in any case."""

    def state(self, epoch: int, now_ns: int) -> State:
        if self.epoch != epoch or self.heard_ns is None or now_ns - self.heard_ns > HEARD_MS * MILLISECOND_NS:
            return "silent"
        return "doubted" if now_ns < self.doubted_until_ns else "heard"

    def believed_until_ns(self, epoch: int, now_ns: int) -> int:
        """Until when a chunk of which nobody tells is passed over, unless it is its turn to be tried; 0: it is not."""
        if self.heard_ns is None or self.state(epoch, now_ns) != "heard":
            return 0
        return min(self.heard_ns + HEARD_MS * MILLISECOND_NS, self.try_at_ns)

    def is_try_due(self, now_ns: int) -> bool:
        """Whether the next chunk of which nobody has told is looked for all the same."""
        return now_ns >= (self.try_at_ns if self.untried else self.try_from_ns)

    def passed_over(self) -> None:
        """A chunk of which nobody has told was looked up, and is not looked for."""
        self.untried = (self.untried or TRIED_EVERY) - 1

    def tries(self, now_ns: int) -> None:
        """A chunk of which nobody has told is looked for."""
        self.untried = TRIED_EVERY - 1
        self.try_from_ns = now_ns + TRIES_APART_MS * MILLISECOND_NS
        self.try_at_ns = now_ns + TRIED_MS * MILLISECOND_NS

    def is_behind(self, epoch: int) -> bool:
        """More is to be read: it is the first time, or something was left the last time."""
        return epoch != self.epoch or self.heard_ns is None or not self.listen_at_ns

    def are_incomplete(self, now_ns: int) -> None:
        """The store has a chunk of which nobody has told."""
        self.doubted_until_ns = now_ns + DOUBTED_MS * MILLISECOND_NS

    def tell(self, mark: int, kind: Kind) -> None:
        """Other servers are to be told of a chunk. They are not if too many wait."""
        if len(self.untold) < UNTOLD_MAX:
            self.untold.append(mark | kind)

    @property
    def is_crowded(self) -> bool:
        """Half of the room is taken. It is left for what has happened: what will happen is told again."""
        return len(self.untold) >= UNTOLD_MAX // 2

    def wants_to_tell(self, now_ns: int) -> bool:
        return bool(self.untold) and not self.is_telling and now_ns >= self.tell_at_ns

    def tell_begins(self, next_ns: int) -> list[int]:
        """Returns the marks of the next batch. A batch that is not taken is lost. next_ns: when the one after it may
        begin; if more wait already, it may at once."""
        batch, self.untold = self.untold[:BATCH_MAX], self.untold[BATCH_MAX:]
        self.is_telling, self.tell_at_ns = True, 0 if self.untold else next_ns
        return batch

    def not_told(self, next_ns: int) -> None:
        """A batch was lost. next_ns: the time of the next one."""
        self.tell_at_ns = next_ns

    def not_heard(self, next_ns: int) -> None:
        """Nothing could be read. next_ns: the time of the next try."""
        self.listen_at_ns = next_ns

    def tell_ends(self) -> None:
        self.is_telling = False

    def wants_to_listen(self, now_ns: int) -> bool:
        return not self.is_listening and now_ns >= self.listen_at_ns

    def listen_begins(self, epoch: int, next_ns: int) -> None:
        if epoch != self.epoch:
            self.epoch, self.heard_ns, self.doubted_until_ns = epoch, None, 0
        self.is_listening, self.listen_at_ns = True, next_ns

    def listens_soon(self, now_ns: int, pause_ns: int) -> None:
        """Somebody waits for news. pause_ns: the usual one; a longer one is after a failure, and is kept."""
        if now_ns < self.listen_at_ns <= now_ns + pause_ns:
            self.listen_at_ns = now_ns

    def listen_ends(self) -> None:
        self.is_listening = False

    def heard_since_ns(self, epoch: int) -> int | None:
        """Announcements that are heard now were told after this. None: they may be of any age."""
        return self.heard_ns if epoch == self.epoch else None

    def heard(self, epoch: int, began_ns: int, *, is_all: bool) -> None:
        """Announcements of an epoch were read. is_all: there were no more when it began."""
        if is_all and epoch == self.epoch:
            self.heard_ns = began_ns
        elif not is_all:
            self.listen_at_ns = 0

    def mover_ended(self) -> None:
        """The next mover reads from the beginning."""
        self.heard_ns = None
