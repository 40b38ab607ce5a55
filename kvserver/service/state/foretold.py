"""Chunks that are foretold: a server computes them now, and will write them to a store.

`Foretellings` has what this server has foretold, `Foretold` what others have. Nothing is served because of it. A chunk
that is foretold and never comes costs whoever awaits it a bounded time.
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass

from kvserver.index.space import Space
from kvserver.remote.announcement import FORETOLD_BITS
from kvserver.service.state.pledges import Pledge

FORETELLING_MAX = 8192
"""Chunks that this server has foretold and not written yet: as many as may wait to be written."""
FORETOLD_MAX = 1 << 16
"""Chunks that others have foretold, as far as they are remembered."""
REMEMBERED_NS = 60_000_000_000
"""A mark that is believed no more is kept for so long, to tell a silent server from one that took its word back."""


@dataclass(slots=True, eq=False, kw_only=True)
class Foretelling:
    """A pledge of an engine of this server, told to the other servers of a store."""

    pledge: Pledge
    space: Space
    epoch: int
    keys: list[bytes]
    """Keys of the chunks that the store lacked: those that were held, then those that are pledged."""
    marks: list[int]
    held: int
    """How many of them were held."""
    moved_ns: int
    """When it began, or a chunk of it was written last."""
    told_ns: int | None = None
    """When the others were told last; None: not yet."""
    written: int = 0
    """Leading chunks that are in the store, as far as is known."""

    @property
    def stored(self) -> int:
        """Leading chunks that were held, or have come since."""
        return self.held + self.pledge.came

    def tells(self, now_ns: int) -> list[int]:
        """The others are told now. Returns the marks of all that is to come."""
        self.told_ns = now_ns
        return self.marks[self.written :]

    def was_written(self, now_ns: int) -> None:
        """The next chunk is in the store."""
        self.written += 1
        self.moved_ns = now_ns

    def cut(self, chunks: int) -> list[int]:
        """No more than so many leading chunks will come. Returns the marks of the others."""
        rest = self.marks[chunks:]
        del self.keys[chunks:], self.marks[chunks:]
        return rest


class Foretellings:
    """The chunks that this server has foretold in one store."""

    def __init__(self) -> None:
        self.rows: dict[int, Foretelling] = {}
        """Number of the pledge -> its row. The pledge may be over while its chunks are still being written."""
        self.marks: Counter[int] = Counter()
        """Mark of each chunk that is to come -> in how many rows."""
        self.chunks = 0
        """Chunks that are to come, of all rows."""
        self.said: set[int] = set()
        """Marks of chunks of these rows that the others have been told to come, and that this server has not written
        since."""
        self.mine: OrderedDict[int, int] = OrderedDict()
        """Marks that this server has told -> until when they may still be heard here (ns), the oldest first."""

    def begin(self, row: Foretelling) -> None:
        self.rows[row.pledge.number] = row
        self.marks.update(row.marks)
        self.chunks += len(row.marks)

    def wrote(self, mark: int) -> None:
        """This server has written a chunk, or the store had it when it was to be written: its word is kept."""
        self.said.discard(mark)

    def was_written(self, row: Foretelling, now_ns: int) -> list[int]:
        """The next chunk of a row is in the store, as far as is known. Returns its mark if this server has not written
        it, as cut() does."""
        left = self._leave(row.marks[row.written : row.written + 1])
        row.was_written(now_ns)
        return left

    def cut(self, row: Foretelling, chunks: int) -> list[int]:
        """No more than so many leading chunks of a row will come. Returns the marks in `said` of the others, unless
        another row has them."""
        return self._leave(row.cut(chunks))

    def end(self, row: Foretelling) -> list[int]:
        """Ends a row. Returns the marks of what has not come, as cut() does."""
        del self.rows[row.pledge.number]
        return self.cut(row, row.written)

    def _leave(self, marks: list[int]) -> list[int]:
        """Returns the marks in `said` that no row has any more."""
        self.chunks -= len(marks)
        said = []
        for mark in marks:
            self.marks[mark] -= 1
            if not self.marks[mark]:
                del self.marks[mark]
                if mark in self.said:
                    self.said.remove(mark)
                    said.append(mark)
        return said

    def told(self, marks: list[int], now_ns: int, until_ns: int, *, comes: bool) -> None:
        """These marks were told by this server, which does not believe them until then: nobody awaits itself. comes:
        they are of chunks of a row."""
        self.said.update(marks if comes else ())
        for mark in marks:
            self.mine[mark & ~FORETOLD_BITS] = until_ns
            self.mine.move_to_end(mark & ~FORETOLD_BITS)
        while self.mine and (next(iter(self.mine.values())) <= now_ns or len(self.mine) > FORETOLD_MAX):
            self.mine.popitem(last=False)

    def is_mine(self, mark: int, now_ns: int) -> bool:
        return now_ns < self.mine.get(mark & ~FORETOLD_BITS, 0)


class Foretold:
    """The chunks that other servers have foretold in one store, of all namespaces and epochs."""

    def __init__(self) -> None:
        self.until_ns: OrderedDict[int, int] = OrderedDict()
        """Mark -> until when it is believed; the oldest first."""

    def __bool__(self) -> bool:
        return bool(self.until_ns)

    def heard(self, mark: int, until_ns: int) -> None:
        """A server has told that the chunk comes."""
        self.until_ns[mark & ~FORETOLD_BITS] = until_ns
        self.until_ns.move_to_end(mark & ~FORETOLD_BITS)
        if len(self.until_ns) > FORETOLD_MAX:
            self.until_ns.popitem(last=False)

    def comes_no_more(self, mark: int) -> None:
        self.until_ns.pop(mark & ~FORETOLD_BITS, None)

    def comes(self, mark: int, now_ns: int) -> bool:
        """A server is believed that the chunk comes."""
        return now_ns < self.until_ns.get(mark & ~FORETOLD_BITS, 0)

    def was_told(self, mark: int) -> bool:
        """A server has told that the chunk comes, and none has taken it back."""
        return mark & ~FORETOLD_BITS in self.until_ns

    def forget_old(self, now_ns: int) -> None:
        """Forgets what has not been believed for a while."""
        while self.until_ns and next(iter(self.until_ns.values())) <= now_ns - REMEMBERED_NS:
            self.until_ns.popitem(last=False)
