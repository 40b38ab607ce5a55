"""Announcements in objects: each server has objects of its own, writes them anew when they grow, and reads all.

An object cannot be appended to. So a server keeps what its newest object has, and replaces it by what has come since.
Each write and each list is a request that is paid for, so marks wait until some time has passed.
"""

import secrets
import time
from collections.abc import Mapping

from kvserver.remote.announcement import MARK_BYTES
from kvserver.remote.objects.driver import Driver, Named
from kvserver.remote.store import Announced, Cursor, StoreError

OBJECT_BYTES_MAX = 256 << 10
"""A server begins another object then."""
OBJECTS_MAX = 256
"""Objects of an epoch; whoever begins another removes those that were not written to for longest."""
OTHER_EPOCH_S_MAX = 86_400
"""Objects of another epoch are removed when they were not written to for so long."""
WAITING_BYTES_MAX = 1 << 20
"""Marks that wait for their time; more are written at once."""
LISTED_MAX, LIST_S_MAX = 65_536, 10.0
"""There are hundreds. A list that does not end must not fill the memory."""
READ_BYTES_MAX = 1 << 20
READ_S_MAX = 1.0
"""Afterwards the rest is left for the next time, if something was read."""


class AnnouncementObjects:
    """The announcements of one namespace. Calls may come from one thread at a time."""

    def __init__(self, driver: Driver, folder: str, within_s: float, *, every_s: float) -> None:
        """folder: the beginning of all names, with its "/"."""
        self._driver = driver
        self._folder = folder
        self._within_s = within_s
        self._every_s = every_s
        self._writer = secrets.token_hex(8)
        self._begun = 0
        """Objects that this server has begun."""
        self._mine = _Mine(-1)
        self._read = -1, float("-inf")
        """The epoch that was read last, and when all of it was read."""

    def append(self, epoch: int, batch: bytes) -> None:
        if self._mine.epoch != epoch:
            self._mine = _Mine(epoch)
        self._mine.waiting += batch
        self._write(self._mine)

    def read(self, epoch: int, after: Cursor | None) -> Announced:
        if self._mine.epoch == epoch:
            self._write(self._mine)
        offsets = dict(after) if isinstance(after, Mapping) else {}
        now_s = time.monotonic()
        read_epoch, read_s = self._read
        if after is not None and epoch == read_epoch and now_s < read_s + self._every_s:
            return Announced(b"", offsets, True)
        there = self._there(epoch)
        pieces: list[bytes] = []
        failed: StoreError | None = None
        left = READ_BYTES_MAX
        due_s = now_s + READ_S_MAX
        for one in there:
            offset = offsets.get(one.name, 0)
            end = one.bytes // MARK_BYTES * MARK_BYTES
            if end < offset:
                offset = 0  # a write of it was lost that a reader has seen
            if end <= offset:
                continue
            piece = memoryview(bytearray(min(end - offset, left)))
            try:
                if not self._driver.read(one.name, [(offset, piece)], within_s=self._within_s):
                    continue  # whoever has begun another one has removed it
            except StoreError as problem:
                failed = problem.with_traceback(None)
                if time.monotonic() > due_s:
                    break
                continue  # the others are heard all the same
            pieces.append(bytes(piece))
            offsets[one.name] = offset + len(piece)
            left -= len(piece)
            if left <= 0 or time.monotonic() > due_s:
                left = 0
                break
        if failed is not None and not pieces:
            raise failed
        if left:
            self._read = epoch, now_s
        names = {one.name for one in there}
        kept = {name: offset for name, offset in offsets.items() if name in names}
        return Announced(b"".join(pieces), kept, left > 0)

    def drop(self, epoch: int) -> None:
        if self._mine.epoch == epoch:
            self._mine = _Mine(-1)
        self._remove([one.name for one in self._there(epoch)])

    def _write(self, mine: "_Mine") -> None:
        """Writes what waits, if its time has come. What could not be written waits on, unless it is too much."""
        now_s = time.monotonic()
        is_too_much = len(mine.waiting) >= WAITING_BYTES_MAX
        if not mine.waiting or (now_s < mine.written_s + self._every_s and not is_too_much):
            return
        is_new = not mine.name or len(mine.content) >= OBJECT_BYTES_MAX
        if is_new:
            self._begun += 1
            mine.name, mine.content = f"{self._of(mine.epoch)}{self._writer}.{self._begun:08x}", b""
        content = mine.content + mine.waiting
        name = mine.name
        if is_too_much:
            # Also if it fails: they are hints. It may have happened all the same, so nothing shorter replaces it.
            mine.waiting.clear()
            mine.name = ""
        self._driver.replace(name, content, within_s=self._within_s)
        mine.name = name
        mine.content, mine.written_s = content, now_s
        mine.waiting.clear()
        if is_new:
            self._sweep(mine.epoch)

    def _of(self, epoch: int) -> str:
        return f"{self._folder}{epoch:016x}/"

    def _there(self, epoch: int | None = None) -> list[Named]:
        """Objects of an epoch, or of all, in the order of their names: those of a server as it has begun them."""
        beginning = self._folder if epoch is None else self._of(epoch)
        found: list[Named] = []
        due_s = time.monotonic() + LIST_S_MAX
        for some in self._driver.listed(beginning, within_s=self._within_s):
            found += some
            if len(found) > LISTED_MAX or time.monotonic() > due_s:
                said = f"{beginning} has more than {LISTED_MAX} objects, or its list takes longer than {LIST_S_MAX:g} s"
                raise StoreError("remote-slow", said)
        return sorted(found)

    def _sweep(self, epoch: int) -> None:
        """Removes old objects. Their age is told by the store's clock: machines' clocks differ."""
        there = self._there()
        now_s = max((one.written_s for one in there), default=0.0)
        same = [one for one in there if one.name.startswith(self._of(epoch))]
        others = [one for one in there if one not in same and now_s - one.written_s > OTHER_EPOCH_S_MAX]
        oldest = sorted(same, key=lambda one: -one.written_s)[OBJECTS_MAX:]
        self._remove([one.name for one in (*others, *oldest)])

    def _remove(self, names: list[str]) -> None:
        if names:
            self._driver.remove(names, within_s=self._within_s)


class _Mine:
    """The newest object of this server, and what it does not have yet."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.name = ""
        self.content = b""
        self.waiting = bytearray()
        self.written_s = float("-inf")
