"""Which chunks have left the index lately, when and why: what a lookup that ends early, and `kvserver explain`, say of
the chunk that is missing. The oldest are forgotten; nothing is decided by it."""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Literal, NamedTuple

from kvserver.index.space import Node

DEPARTED_MAX = 65_536
"""Some 20 MB. Of a prompt the head goes last, and it is the chunk that the next lookup misses."""

Cause = Literal[
    "store", "promote", "index", "disk", "lost", "died", "failed", "abandoned", "deadline", "cleared"
]  # fmt: skip
"""store, promote, index: it made room, in DRAM for a store or for what was read from disk, or in the index. disk: it
was on disk alone and made room there, or its device was drained. lost: it could not be read. The others are
counters.DISCARD_REASONS."""


class Departure(NamedTuple):
    """A chunk's way out of the index."""

    namespace: bytes
    cause: Cause
    at_ns: int


class Departed:
    """The last keys that left, as many as the index holds at most, and DEPARTED_MAX."""

    def __init__(self, chunks_max: int) -> None:
        self._most = min(DEPARTED_MAX, chunks_max)
        self._known: OrderedDict[bytes, Departure] = OrderedDict()

    def add(self, nodes: Iterable[tuple[bytes, Node, Cause]], now_ns: int) -> None:
        """nodes: namespace, chunk and cause."""
        known = self._known
        for namespace, node, cause in nodes:
            known[node.key] = Departure(namespace, cause, now_ns)
            known.move_to_end(node.key)
        while len(known) > self._most:
            known.popitem(last=False)

    def get(self, namespace: bytes, key: bytes) -> Departure | None:
        """The last time that this chunk of the namespace left, as far as it is remembered."""
        departure = self._known.get(key)
        return departure if departure is not None and departure.namespace == namespace else None
