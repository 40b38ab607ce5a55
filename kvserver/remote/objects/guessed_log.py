"""Announcements in a store that lists no names: objects whose names a reader can guess, by time and by number.

Time is cut into turns of ten minutes. In each turn a server takes the first number that is free, creates an object
with it, and puts a longer one in its place when more has come. Objects of old turns are evicted like all else. Another
server may then take the name, so each object begins with random bytes that tell who has written it.
"""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

from kvserver.remote.announcement import MARK_BYTES
from kvserver.remote.objects.driver import Driver
from kvserver.remote.store import Announced, Cursor, StoreError

TURN_S = 600.0
TURNS_READ = 144
"""Turns that a server reads that begins: a day."""
TURNS_AROUND = 1
"""Turns before and after the present one that count as under way: clocks of machines differ."""
NUMBERS_AT_A_TIME = 8
NUMBERS_MAX = 256
"""Objects of a turn."""
WRITER_BYTES = MARK_BYTES
"""At the beginning of an object."""
OBJECT_BYTES_MAX = 256 << 10
"""A server begins another object then."""
WAITING_BYTES_MAX = 1 << 20
"""Marks that wait for their time. More are written at once; if that fails the oldest are forgotten."""
READ_BYTES_MAX = 1 << 20
READ_S_MAX = 1.0
"""Afterwards the rest is left for the next time, if something was read."""


class GuessableObjects(Driver, Protocol):
    """A driver that tells the sizes of many objects at once."""

    def sizes(self, names: Sequence[str]) -> list[int | StoreError | None]: ...


class _Read(NamedTuple):
    """How far an object was read."""

    writer: bytes
    end: int


NOTHING = _Read(b"", WRITER_BYTES)


class _Place(NamedTuple):
    first_turn: int
    """All of the turns before was read."""
    objects: Mapping[str, _Read]


class GuessedLog:
    """The announcements of one namespace. Calls may come from one thread at a time."""

    def __init__(
        self,
        driver: GuessableObjects,
        folder: str,
        within_s: float,
        *,
        every_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """folder: the beginning of all names, with its "/"."""
        self._driver = driver
        self._folder = folder
        self._within_s = within_s
        self._every_s = every_s
        self._clock = clock
        self._epoch = -1
        """The epoch of what follows."""
        self._waiting = bytearray()
        self._name = ""
        """The newest object of this server; empty if it has none."""
        self._turn = -1
        self._content = b""
        self._written_s = float("-inf")
        self._read = -1, float("-inf")
        """The epoch that was read last, and when all of it was read."""

    def append(self, epoch: int, batch: bytes) -> None:
        if epoch != self._epoch:
            self._epoch, self._name, self._written_s = epoch, "", float("-inf")
            self._waiting.clear()
        self._waiting += batch
        self._write()

    def read(self, epoch: int, after: Cursor | None) -> Announced:
        if epoch == self._epoch:
            with suppress(StoreError):  # a full store can be read; the next append tells
                self._write()
        turn, now_s = self._now(), time.monotonic()
        place = after if isinstance(after, _Place) else _Place(turn - TURNS_READ, {})
        read_epoch, read_s = self._read
        if after is not None and epoch == read_epoch and now_s < read_s + self._every_s:
            return Announced(b"", place, True)
        objects, pieces, left = dict(place.objects), list[bytes](), READ_BYTES_MAX
        # Whatever the clock did meanwhile: a day at most, and always the turns under way.
        first = max(min(place.first_turn, turn - TURNS_AROUND), turn - TURNS_READ)
        for name, size in self._there(epoch, range(first, turn + TURNS_AROUND + 1)):
            piece, objects[name] = self._rest(name, size, objects.get(name, NOTHING), left)
            if not piece:
                continue
            pieces.append(piece)
            left -= len(piece)
            if left <= 0 or time.monotonic() > now_s + READ_S_MAX:
                return Announced(b"".join(pieces), _Place(first, objects), False)
        self._read = epoch, now_s
        first = turn - TURNS_AROUND
        kept = {name: known for name, known in objects.items() if self._turn_of(name) >= first}
        return Announced(b"".join(pieces), _Place(first, kept), True)

    def drop(self, epoch: int) -> None:
        if epoch == self._epoch:
            self._name, self._epoch = "", -1
            self._waiting.clear()
        turn = self._now()
        names = [name for name, _ in self._there(epoch, range(turn - TURNS_READ, turn + TURNS_AROUND + 1))]
        if names:
            self._driver.remove(names, within_s=self._within_s)

    def _rest(self, name: str, size: int, known: _Read, left: int) -> tuple[bytes, _Read]:
        """Reads what an object has more; all of it, if another one has taken its place. Returns how far it was read."""
        offset = known.end if known.end <= size else WRITER_BYTES
        end = min(size // MARK_BYTES * MARK_BYTES, offset + left)
        if end <= offset:
            return b"", known
        writer, piece = memoryview(bytearray(WRITER_BYTES)), memoryview(bytearray(end - offset))
        if not self._driver.read(name, [(0, writer), (offset, piece)], within_s=self._within_s):
            return b"", known  # it is being replaced, or was evicted
        if offset > WRITER_BYTES and writer != known.writer:
            return self._rest(name, size, NOTHING, left)
        return bytes(piece), _Read(bytes(writer), end)

    def _write(self) -> None:
        """Writes what waits, if its time has come. What could not be written waits on, unless it is too much."""
        now_s, turn = time.monotonic(), self._now()
        is_too_much = len(self._waiting) >= WAITING_BYTES_MAX
        if not self._waiting or (now_s < self._written_s + self._every_s and not is_too_much):
            return
        waiting = bytes(self._waiting)
        if is_too_much:
            self._waiting.clear()
        goes_on = self._name and self._turn == turn and len(self._content) < OBJECT_BYTES_MAX
        content = (self._content if goes_on else secrets.token_bytes(WRITER_BYTES)) + waiting
        if not goes_on or not self._is_rewritten(content):
            self._name, self._turn = self._begun(turn, content), turn
        self._content, self._written_s = content, now_s
        self._waiting.clear()

    def _is_rewritten(self, content: bytes) -> bool:
        """Puts this content in the place of this server's newest object. False: another server has that name now, or
        nobody can have it for a while, because a write of it has not ended."""
        writer = memoryview(bytearray(WRITER_BYTES))
        if self._driver.read(self._name, [(0, writer)], within_s=self._within_s):
            if writer != content[:WRITER_BYTES]:
                return False
            self._driver.remove([self._name], within_s=self._within_s)
        return self._driver.create(self._name, [content], within_s=self._within_s)

    def _begun(self, turn: int, content: bytes) -> str:
        """The name of an object that nobody had, and that has this content now."""
        taken = [name for name, _ in self._there(self._epoch, [turn])]
        for number in range(NUMBERS_MAX):
            name = self._object(self._epoch, turn, number)
            if name not in taken and self._driver.create(name, [content], within_s=self._within_s):
                return name
        raise StoreError("remote-full", f"{NUMBERS_MAX} announcements in {TURN_S:g} s: no more are written")

    def _there(self, epoch: int, turns: Sequence[int]) -> list[tuple[str, int]]:
        """Names and sizes of the objects of turns, in order of turn and number. An evicted one hides none after it
        that was asked for together with it."""
        found: dict[tuple[int, int], tuple[str, int]] = {}
        first = 0
        while turns and first < NUMBERS_MAX:
            places = [(turn, number) for turn in turns for number in range(first, first + NUMBERS_AT_A_TIME)]
            names = [self._object(epoch, *place) for place in places]
            for place, name, size in zip(places, names, self._driver.sizes(names), strict=True):
                if isinstance(size, StoreError):
                    raise size
                if size is not None:
                    found[place] = name, size
            turns = [turn for turn in turns if (turn, first + NUMBERS_AT_A_TIME - 1) in found]
            first += NUMBERS_AT_A_TIME
        return [found[place] for place in sorted(found)]

    def _object(self, epoch: int, turn: int, number: int) -> str:
        return f"{self._folder}{epoch:016x}/{turn:08x}.{number:04x}"

    def _turn_of(self, name: str) -> int:
        return int(name.rpartition("/")[2].partition(".")[0], 16)

    def _now(self) -> int:
        return int(self._clock() // TURN_S)
