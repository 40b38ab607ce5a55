"""Announcements: what servers tell one another of chunks in a store (docs/remote-format.md).

A server that has stored a chunk, written it to the store or found it gone appends a mark of it to the announcements of
its namespace. Marks are hints. A wrong or lost one costs a probe or a hit, never a byte: a chunk is read only after the
store has given its head.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Literal

Kind = Literal[0, 1, 2, 3]
UNKNOWN: Kind = 0
STORED: Kind = 1
"""A server has computed it and holds it, or did."""
WRITTEN: Kind = 2
"""It is in the store."""
GONE: Kind = 3
"""It was in the store, and is not there any more."""
MARK_BYTES = 8
KIND_BITS = 3
MARK_BITS = ~KIND_BITS
COMES = 4
FORETOLD_BITS = KIND_BITS | COMES
KNOWN_MAX = 1 << 20
"""Chunks of which a server knows that they are in the store or gone from it, and likewise that they are stored
elsewhere: 8 MiB each."""
WAYS = 4
"""Places in which a chunk may lie."""


class Marker:
    """Makes the marks of a namespace's chunks under one epoch. It has hashed what they share: a copy of that hash takes
    less than half the time of a new one."""

    __slots__ = ("_shared",)

    def __init__(self, namespace: bytes, epoch: int) -> None:
        self._shared = blake2b(namespace + epoch.to_bytes(8, "little"), digest_size=MARK_BYTES)

    def of(self, key: bytes) -> int:
        """64 bits that stand for a chunk; the lowest two are 0 and make room for a kind."""
        told = self._shared.copy()
        told.update(key)
        return int.from_bytes(told.digest(), "little") & MARK_BITS


def mark_of(namespace: bytes, epoch: int, key: bytes) -> int:
    """The mark of one chunk."""
    return Marker(namespace, epoch).of(key)


def foretold(mark: int, *, comes: bool) -> int:
    """A mark of kind UNKNOWN. A server computes the chunk and will write it to the store, or it comes no more. Releases
    that do not know it take it for nothing."""
    return mark & ~FORETOLD_BITS | (COMES if comes else 0)


def pack(marks: Sequence[int]) -> bytes:
    """A batch: marks with their kinds, 8 bytes each, little-endian, the oldest first."""
    return array("Q", marks).tobytes()


def unpack(batch: bytes) -> Sequence[int]:
    """The marks of a batch. What does not make a whole mark at its end is left out."""
    return array("Q", batch[: len(batch) // MARK_BYTES * MARK_BYTES])


class KnownChunks:
    """The last announcement of each chunk. Its size is fixed: a new chunk takes the place of another one when all
    places in which it may lie are taken. Chunks that are only stored somewhere take places of their own, so that
    they never take that of one that is in the store; and what is known of the store counts for more than that they
    are stored."""

    def __init__(self, most: int = KNOWN_MAX) -> None:
        """most: chunks of each of the two, a power of two."""
        self.in_store = Marks(most)
        self._stored = Marks(most)
        self.forgotten = 0
        """Chunks in the store whose place was taken."""

    def note(self, mark: int, kind: int) -> None:
        """kind: was told of the chunk now."""
        if kind == STORED:
            self._stored.put(mark | kind)
        elif kind in (WRITTEN, GONE):
            self.forgotten += self.in_store.put(mark | kind) & KIND_BITS == WRITTEN

    def kind(self, mark: int) -> int:
        """The kind that counts for the chunk."""
        return self.in_store.kind(mark) or self._stored.kind(mark)

    def is_written(self, mark: int) -> bool:
        """The kind that counts for the chunk is WRITTEN."""
        return self.in_store.has(mark | WRITTEN)


class Marks:
    """A table of marks with kinds, in buckets of WAYS places."""

    def __init__(self, most: int) -> None:
        assert most >= WAYS, "there is a bucket"
        assert most & (most - 1) == 0, "a power of two"
        self._marks = array("Q", bytes(MARK_BYTES * most))
        self._last_bucket = most // WAYS - 1

    def put(self, mark: int) -> int:
        """Returns the mark of another chunk whose place it took; 0: of none."""
        first = self._first(mark)
        bucket = self._marks[first : first + WAYS]
        same = next((at for at, there in enumerate(bucket) if there | KIND_BITS == mark | KIND_BITS), None)
        if same is not None:
            self._marks[first + same] = mark
            return 0
        # A free place is 0; what is gone is needed less than what is there.
        at = next((at for at, there in enumerate(bucket) if not there), None)
        if at is None:
            at = next((at for at, there in enumerate(bucket) if there & KIND_BITS == GONE), (mark >> 60) % WAYS)
        self._marks[first + at] = mark
        return bucket[at]

    def has(self, mark: int) -> bool:
        """Whether it is there with this very kind. Nearly every lookup that misses asks. A bucket is filled from its
        first place on, and no place is ever free again."""
        first = (mark >> 2 & self._last_bucket) * WAYS
        return self._marks[first] != 0 and mark in self._marks[first : first + WAYS]

    def kind(self, mark: int) -> int:
        first = self._first(mark)
        for there in self._marks[first : first + WAYS]:
            if there & ~KIND_BITS == mark:
                return there & KIND_BITS
        return UNKNOWN

    def _first(self, mark: int) -> int:
        return (mark >> 2 & self._last_bucket) * WAYS
