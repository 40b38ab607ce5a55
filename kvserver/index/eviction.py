"""Eviction order. Only leaves go, so the tail of a chain goes before its head.

The interface has two parts: a node is *offered* when it may go, and the policy names the node that should go next. An
offered node may become unevictable at any time without notice. So the policy checks a node before it names it, and the
node is offered again later.

There are three orders: nodes that may leave DRAM, nodes that should be written to disk before that (dirty), and nodes
that may leave a disk. A child that is on disk only does not keep its parent in DRAM. The first order is the policy's:
least recently used here, ARC in arc.py.
"""

import heapq
from collections.abc import Callable
from operator import attrgetter
from typing import Protocol

from kvserver.index.space import READY, Node, Space

DRAM, DIRTY, DISK, REFUSED, NO_ROOM, PARKED, STORED, REMOTE, CAME = 1, 2, 4, 8, 16, 128, 512, 1024, 16_384
"""Bits of Node.queued; arc.py has two more. REFUSED: it is not written to disk, because it was not requested a second
time, or can never fit there. NO_ROOM: it is not written, because the chunks there were used later, or its own device
takes no writes. PARKED: its write waits for a device. STORED: an engine has stored some of it, since the brain began.
REMOTE and CAME have a bit for each of four remote stores, of which this is the first. REMOTE: it is in the store, or
waits to be written there. CAME: some of it was read from the store."""


def evictable(node: Node) -> bool:
    """Whether it may leave DRAM: a ready node without pins (a store in flight pins the node that it extends), and
    with no descendants in DRAM. Unless its records on disk keep it in the index, it leaves the index too; then it
    must be a leaf."""
    if node.pins or node.state != READY or node.depth == 0:
        return False
    disk = node.disk
    if disk is None:
        return node.children is None
    below_is_cold = disk.cold_children == node.child_count()
    return below_is_cold and not disk.cold and (node.children is None or (disk.keeps and node.in_dram != 0))


def dirty(node: Node) -> bool:
    """Whether it may leave DRAM, a part would then be lost, and no write of it was refused."""
    return evictable(node) and node.in_dram & ~node.on_disk != 0 and not node.queued & (REFUSED | NO_ROOM | PARKED)


def droppable(node: Node) -> bool:
    """Whether its extents may go: no child has any, and if a part is lost with them, it is a leaf of the index."""
    disk = node.disk
    if disk is None or not disk.groups or disk.children or node.pins or node.state != READY:
        return False
    return disk.groups & ~node.in_dram == 0 or node.children is None


class Leftover(Protocol):
    """A table of a cleared namespace. It is dropped in pieces: a million entries at once would take 1 s."""

    def let_go(self, entries: int) -> None:
        """Drops this number of entries; there are at least as many."""

    def __len__(self) -> int: ...


class EvictionPolicy(Protocol):
    """The order of one namespace."""

    def leftovers(self) -> list[Leftover]:
        """All its tables, to be dropped. The order is not used afterwards."""

    def offer(self, node: Node) -> None:
        """Takes in a node that may go."""

    def coldest(self) -> Node | None:
        """The node that should go next."""


class Policy(Protocol):
    """An eviction policy: which chunk in DRAM goes first."""

    def add_space(self, space: Space) -> EvictionPolicy:
        """A namespace's order, without nodes."""

    def drop_space(self, space: Space) -> None:
        """Forgets a namespace that was cleared."""

    @property
    def rank(self) -> Callable[[Node], int]:
        """Ranks a node; the smallest rank goes first. Ranks may change with every event, so compare them at once."""


class LeafLru:
    """Least recently used leaf first; a parent inherits the last use of its children.

    A heap of (used, tie, node) with lazy repair: a request only sets `used`. An outdated entry is put back with its new
    time when it reaches the top. So a touch costs nothing, and finding a victim O(log n).
    """

    def __init__(self, may_go: Callable[[Node], bool] = evictable, mark: int = DRAM) -> None:
        """mark: bit of Node.queued for nodes that have an entry here."""
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
        """At most `most` nodes that may go, roughly the coldest, in no order."""
        return [node for _, _, node in self._heap[:most] if self._may_go(node)]

    def __len__(self) -> int:
        return len(self._heap)

    def let_go(self, entries: int) -> None:
        del self._heap[-entries:]

    def leftovers(self) -> list[Leftover]:
        return [self]

    def _forget(self, node: Node) -> None:
        """Records that its entry is gone; the next offer makes another."""
        node.queued &= ~self._mark


class Lru:
    """Least recently used, over all namespaces."""

    rank: Callable[[Node], int] = attrgetter("used")

    def add_space(self, space: Space) -> LeafLru:
        return LeafLru()

    def drop_space(self, space: Space) -> None:
        pass  # nothing is kept of it but its order


class DeviceLru(LeafLru):
    """The order of chunks that may leave one disk.

    The entry of a chunk that has moved to another disk stays behind, and is dropped when it reaches the top."""

    def __init__(self, device: int) -> None:
        def may_leave(node: Node) -> bool:  # no method: an order that refers to itself would never be freed
            return droppable(node) and node.disk is not None and node.disk.ordered_at == device

        super().__init__(may_leave, DISK)
        self._device = device

    def offer(self, node: Node) -> None:
        assert node.disk is not None
        if node.disk.ordered_at != self._device:
            node.disk.ordered_at = self._device
            node.queued &= ~DISK
        super().offer(node)

    def _forget(self, node: Node) -> None:
        assert node.disk is not None
        if node.disk.ordered_at == self._device:
            super()._forget(node)
