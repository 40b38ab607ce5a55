"""Which chunks have left the index lately, when and why: what a lookup that ends early, and `kvserver explain`, say of
the chunk that is missing. The oldest are forgotten; nothing is decided by it."""

from collections import deque
from collections.abc import Iterable
from typing import Literal, NamedTuple

from kvserver.index.space import Node

DEPARTED_MAX = 65_536
"""Some 24 MB. Of a prompt the head goes last, and it is the chunk that the next lookup misses."""

PAGES_MAX = 16
"""Each is asked for a chunk that is missing, which takes 0.1 us."""

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
    """The last chunks that left, by namespace and key, as many as the index holds at most, and DEPARTED_MAX.

    They are kept in pages, and a page is forgotten as a whole: one table of all would now and then be made anew, which
    stops the brain for 10 ms."""

    def __init__(self, chunks_max: int) -> None:
        most = min(DEPARTED_MAX, chunks_max)
        self._page_most = -(-most // PAGES_MAX)
        self._pages: deque[dict[tuple[bytes, bytes], Departure]] = deque([{}], maxlen=most // self._page_most)

    def add(self, nodes: Iterable[tuple[bytes, Node, Cause]], now_ns: int) -> None:
        """nodes: namespace, chunk and cause."""
        for namespace, node, cause in nodes:
            if len(self._pages[-1]) == self._page_most:
                self._pages.append({})
            self._pages[-1][namespace, node.key] = Departure(cause, now_ns)

    def get(self, namespace: bytes, key: bytes) -> Departure | None:
        """The last time that this chunk of the namespace left, as far as it is remembered."""
        chunk = namespace, key
        return next((page[chunk] for page in reversed(self._pages) if chunk in page), None)
