"""What goes first. Only leaves go, so the tail of a chain goes before its head.

The interface is what a policy needs to know and no more: a node *may go* from now on (it is a ready leaf, without pins
and without a store in flight), and which of those should go next. A node that was offered may stop being evictable at
any time without notice; the policy asks `evictable` before it names it, and the node is offered again afterwards.
"""

import heapq
from typing import Protocol

from kvserver.index.space import READY, Node


def evictable(node: Node) -> bool:
    """A ready leaf that nobody pins (a store in flight pins what it extends)."""
    return node.children is None and node.pins == 0 and node.state == READY and node.depth > 0


class EvictionPolicy(Protocol):
    """The order of one namespace."""

    def offer(self, node: Node) -> None:
        """`node` may go from now on."""

    def coldest(self) -> Node | None:
        """The node that should go next; it stays first until it stops being evictable."""


class LeafLru:
    """Least recently used leaf first; a parent inherits the last use of its children.

    A heap of (used, tie, node) with lazy repair: asking for a chunk only sets `used`, and an entry that turns out to be
    old is put back with its new time when it reaches the top. So a touch costs nothing and a victim O(log n).
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Node]] = []
        self._ties = 0

    def offer(self, node: Node) -> None:
        if not node.queued:
            self._ties += 1
            heapq.heappush(self._heap, (node.used, self._ties, node))
            node.queued = True

    def coldest(self) -> Node | None:
        while self._heap:
            used, tie, node = self._heap[0]
            if not evictable(node):
                heapq.heappop(self._heap)
                node.queued = False
            elif node.used != used:
                heapq.heapreplace(self._heap, (node.used, tie, node))
            else:
                return node
        return None

    def __len__(self) -> int:
        return len(self._heap)
