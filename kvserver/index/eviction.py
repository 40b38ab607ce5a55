"""Eviction order. Only leaves go, so the tail of a chain goes before its head.

The interface is what a policy needs to know and no more: a node *may go* from now on, and which of those should go
next. A node that was offered may stop being one at any time without notice; the policy asks before it names it, and the
node is offered again afterwards.

There are three orders: of what may leave DRAM, of that which a disk should get before (dirty), and of what may leave a
disk. What is on disk alone is no reason for its parent to stay in DRAM. The first is the policy's: here least recently
used, another in arc.py.
"""

import heapq
from collections.abc import Callable
from operator import attrgetter
from typing import Protocol

from kvserver.index.space import READY, Node, Space

DRAM, DIRTY, DISK, REFUSED, NO_ROOM, PARKED = 1, 2, 4, 8, 16, 128
"""Bits of Node.queued; arc.py has two more. REFUSED, NO_ROOM: it shall not be written to disk, for all that is known of
it; since what lies there was used later, or its own device takes nothing. PARKED: its write waits for a segment to be
emptied."""


def evictable(node: Node) -> bool:
    """It may leave DRAM: a ready node without pins (a store in flight pins what it extends), below which nothing is in
    DRAM. It leaves the index too unless what it has on disk keeps it, so then it must be a leaf."""
    if node.pins or node.state != READY or node.depth == 0:
        return False
    disk = node.disk
    if disk is None:
        return node.children is None
    below_is_cold = disk.cold_children == node.child_count()
    return below_is_cold and not disk.cold and (node.children is None or (disk.keeps and node.in_dram != 0))


def dirty(node: Node) -> bool:
    """It may leave DRAM, something of it would be lost, and it was not refused."""
    return evictable(node) and node.in_dram & ~node.on_disk != 0 and not node.queued & (REFUSED | NO_ROOM | PARKED)


def droppable(node: Node) -> bool:
    """Its extents may go: no child has any, and what is lost with them, if anything is, is a leaf of the index."""
    disk = node.disk
    if disk is None or not disk.groups or disk.children or node.pins or node.state != READY:
        return False
    return disk.groups & ~node.in_dram == 0 or node.children is None


class Leftover(Protocol):
    """A table of a cleared namespace that is dropped in pieces: all at once would take 1 s for a million entries."""

    def let_go(self, entries: int) -> None:
        """Drops so many entries, which there are."""

    def __len__(self) -> int: ...


class EvictionPolicy(Protocol):
    """The order of one namespace."""

    def leftovers(self) -> list[Leftover]:
        """All that it consists of, for whoever drops it; nothing more is asked of it."""

    def offer(self, node: Node) -> None:
        """`node` may go from now on."""

    def coldest(self) -> Node | None:
        """The node that should go next."""


class Policy(Protocol):
    """An eviction policy: which chunk in DRAM goes first."""

    def add_space(self, space: Space) -> EvictionPolicy:
        """A namespace's order, without nodes."""

    def drop_space(self, space: Space) -> None:
        """The namespace was cleared."""

    @property
    def rank(self) -> Callable[[Node], int]:
        """The node with the smaller rank goes first. A rank may change with every event; it is compared at once."""


class LeafLru:
    """Least recently used leaf first; a parent inherits the last use of its children.

    A heap of (used, tie, node) with lazy repair: asking for a chunk only sets `used`, and an entry that turns out to be
    old is put back with its new time when it reaches the top. So a touch costs nothing and a victim O(log n).
    """

    def __init__(self, may_go: Callable[[Node], bool] = evictable, mark: int = DRAM) -> None:
        """mark: the bit of Node.queued that says that a node has an entry here."""
        self._heap: list[tuple[int, int, Node]] = []
        self._ties = 0
        self._may_go = may_go
        self._mark = mark

    def offer(self, node: Node) -> None:
        if not node.queued & self._mark:
            self._ties += 1
            heapq.heappush(self._heap, (node.used, self._ties, node))
            node.queued |= self._mark

    def coldest(self) -> Node | None:
        while self._heap:
            used, tie, node = self._heap[0]
            if not self._may_go(node):
                heapq.heappop(self._heap)
                self._forget(node)
            elif node.used != used:
                heapq.heapreplace(self._heap, (node.used, tie, node))
            else:
                return node
        return None

    def among_the_coldest(self, most: int) -> list[Node]:
        """Some that may go, at most so many, which are about the coldest; in no order."""
        return [node for _, _, node in self._heap[:most] if self._may_go(node)]

    def __len__(self) -> int:
        return len(self._heap)

    def let_go(self, entries: int) -> None:
        del self._heap[-entries:]

    def leftovers(self) -> list[Leftover]:
        return [self]

    def _forget(self, node: Node) -> None:
        """Its entry is gone; the next offer makes another."""
        node.queued &= ~self._mark


class Lru:
    """Least recently used, whatever the namespace."""

    rank: Callable[[Node], int] = attrgetter("used")

    def add_space(self, space: Space) -> LeafLru:
        return LeafLru()

    def drop_space(self, space: Space) -> None:
        pass  # nothing is kept of it but its order


class DeviceLru(LeafLru):
    """The order of what may leave one disk. A chunk that has moved to another disk leaves its entry behind, which falls
    when it comes to the top."""

    def __init__(self, device: int) -> None:
        super().__init__(self._may_leave, DISK)
        self._device = device

    def offer(self, node: Node) -> None:
        assert node.disk is not None
        if node.disk.ordered_at != self._device:
            node.disk.ordered_at = self._device
            node.queued &= ~DISK
        super().offer(node)

    def _may_leave(self, node: Node) -> bool:
        return droppable(node) and node.disk is not None and node.disk.ordered_at == self._device

    def _forget(self, node: Node) -> None:
        assert node.disk is not None
        if node.disk.ordered_at == self._device:
            super()._forget(node)
