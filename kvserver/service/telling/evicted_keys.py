"""Chunks that left the index lately, with time and cause. A lookup that ends early and `kvserver explain` use it to
explain the missing chunk. No decision depends on it.

The table has a fixed size, because one that grows and shrinks with each eviction takes ten times its size from the
heap. A chunk may be in one of four places, chosen by its namespace and key. It replaces the chunk there that left
first.
"""

from array import array
from collections.abc import Iterable
from typing import Literal, NamedTuple, get_args

from kvserver.index.space import Node

EVICTED_KEYS_MAX = 131_072
"""Chunks that are remembered, in 2.1 MiB. The head of a prompt leaves last, and the next lookup misses it first."""
WAYS = 4
PRIME = (1 << 64) - 59

Cause = Literal[
    "store", "promote", "index", "disk", "lost", "digest", "died", "failed", "abandoned", "deadline", "cleared"
]  # fmt: skip
"""Why a chunk left. store, promote, index: it made room in DRAM for a store or for a read from disk, or in the index.
disk: it was on disk alone and made room there, or its device was drained. lost: it could not be read. digest: its bytes
had changed. The others are counters.DISCARD_REASONS."""
CAUSES: tuple[Cause, ...] = get_args(Cause)
NUMBERS = {cause: number for number, cause in enumerate(CAUSES)}


class Departure(NamedTuple):
    """Cause and time of a chunk's departure from the index."""

    cause: Cause
    at_ns: int


class EvictedKeys:
    """The chunks that left last, by namespace and key. It holds about as many as the index does, EVICTED_KEYS_MAX at
    most."""

    def __init__(self, chunks_max: int) -> None:
        self._rows = 1 << max(0, (min(EVICTED_KEYS_MAX, chunks_max) // WAYS - 1).bit_length())
        places = self._rows * WAYS
        self._names = array("Q", bytes(8 * places))
        """Hash of namespace and key (_name); 0 where nothing is remembered."""
        self._at_ns = array("q", bytes(8 * places))
        self._causes = bytearray(places)

    def add(self, nodes: Iterable[tuple[bytes, Node, Cause]], now_ns: int) -> None:
        """Remembers chunks that left. nodes: namespace, chunk and cause."""
        names, at_ns = self._names, self._at_ns
        for namespace, node, cause in nodes:
            name = _name(namespace, node.key)
            chosen = first = name % self._rows * WAYS
            for place in range(first, first + WAYS):
                if names[place] == name:
                    chosen = place
                    break
                if at_ns[place] < at_ns[chosen]:
                    chosen = place
            names[chosen], at_ns[chosen], self._causes[chosen] = name, now_ns, NUMBERS[cause]

    def get(self, namespace: bytes, key: bytes) -> Departure | None:
        """The last departure of this chunk, if it is remembered."""
        name = _name(namespace, key)
        first = name % self._rows * WAYS
        for place in range(first, first + WAYS):
            if self._names[place] == name:
                return Departure(CAUSES[self._causes[place]], self._at_ns[place])
        return None


def _name(namespace: bytes, key: bytes) -> int:
    """A 64-bit hash that depends on every byte of both; never 0."""
    return (int.from_bytes(namespace) ^ int.from_bytes(key)) % PRIME or 1
