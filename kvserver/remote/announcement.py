"""Announcements: what servers tell one another of chunks in a store (docs/remote-format.md).

A server that has stored a chunk, written it to the store or found it gone appends a mark of it to the announcements of
its namespace. Marks are hints. A wrong or lost one costs a probe or a hit, never a byte: a chunk is read only after the
store has given its head.
"""

from array import array
from collections.abc import Sequence
from typing import Literal

from kvserver.transfer.native import Marker, MarkTable

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
COMES = 4
FORETOLD_BITS = KIND_BITS | COMES
KNOWN_MAX = 1 << 20
"""Chunks of which a server knows that they are in the store or gone from it, and likewise that they are stored
elsewhere: 8 MiB each."""


def mark_of(namespace: bytes, epoch: int, key: bytes) -> int:
    """64 bits that stand for a chunk; the lowest two are 0 and make room for a kind."""
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
        self.in_store = MarkTable(most)
        self._stored = MarkTable(most)
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
        return self.in_store.kind(mark) == WRITTEN
