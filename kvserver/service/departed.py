"""Which chunks have left the index lately, when and why: what a lookup that ends early, and `kvserver explain`, say of
the chunk that is missing. The oldest are forgotten; nothing is decided by it."""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Literal, NamedTuple

from kvserver.index.space import Node

DEPARTED_MAX = 65_536
"""Some 24 MB. Of a prompt the head goes last, and it is the chunk that the next lookup misses."""

Cause = Literal[
    "store", "promote", "index", "disk", "lost", "died", "failed", "abandoned", "deadline", "cleared"
]  # fmt: skip
"""store, promote, index: it made room, in DRAM for a store or for what was read from disk, or in the index. disk: it
was on disk alone and made room there, or its device was drained. lost: it could not be read. The others are
counters.DISCARD_REASONS."""


class Departure(NamedTuple):
    """A chunk's way out of the index."""

    cause: Cause
    at_ns: int


class Departed:
    """The last chunks that left, by namespace and key, as many as the index holds at most, and DEPARTED_MAX."""

    def __init__(self, chunks_max: int) -> None:
        self._most = min(DEPARTED_MAX, chunks_max)
        self._known: OrderedDict[tuple[bytes, bytes], Departure] = OrderedDict()

    def add(self, nodes: Iterable[tuple[bytes, Node, Cause]], now_ns: int) -> None:
        """nodes: namespace, chunk and cause."""
        known = self._known
        for namespace, node, cause in nodes:
            known[namespace, node.key] = Departure(cause, now_ns)
            known.move_to_end((namespace, node.key))
        while len(known) > self._most:
            known.popitem(last=False)

    def get(self, namespace: bytes, key: bytes) -> Departure | None:
        """The last time that this chunk of the namespace left, as far as it is remembered."""
        return self._known.get((namespace, key))
