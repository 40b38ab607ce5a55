"""ARC (Megiddo and Modha, FAST 2003) over chains.

Chunks that were found again are kept apart from chunks that were not. The share of the arena that each half gets is
learnt from chunks that are stored again soon after they were evicted.

A chunk is *recent* until a lookup finds it, then *frequent*. After an eviction the key is kept as a *ghost* of the half
that the chunk left. A stored chunk with a ghost is frequent at once, and shows that its half was too small. Then the
target moves in favour of that half. The target is the number of bytes that the recent half may hold before it gives.

Differences from the paper:

* only leaves go, as under the other policy, so a half gives its coldest leaf; if it has none, the other half gives one;
* a request for a chunk asks for the whole prefix, so the frequent chunks are closed under prefixes. Each chunk is moved
  once in its life, because the frequent part of a chain need not be moved again;
* all counts are in slot bytes, because slots have many sizes; with one size this is the paper, times that size;
* there is one target for all namespaces. Each has its own orders, and its ghosts go when it is cleared.

A restart begins with recent chunks alone, no ghosts and a target of 0.
"""

import heapq
from collections import OrderedDict
from typing import NamedTuple

from kvserver.index.eviction import DRAM, LeafLru, Leftover, evictable
from kvserver.index.space import Node, Space

FREQUENT, FREQUENT_LEAF = 32, 64
"""Bits of Node.queued. FREQUENT: it is in that half. FREQUENT_LEAF: it has an entry in that half's order."""
OTHER_HALF = 1 << 63
"""Ranks all chunks of one half after all of the other. More than any time in nanoseconds."""
HEAP_LEAVES_MIN = 64


class Half:
    """Recent chunks of all namespaces, or frequent ones."""

    __slots__ = ("ghost_bytes", "ghost_hits", "ghosts", "held_bytes")

    def __init__(self) -> None:
        self.held_bytes = 0
        """Slot bytes in DRAM."""
        self.ghosts = 0
        self.ghost_bytes = 0
        """Slot bytes that the ghosts' chunks had."""
        self.ghost_hits = 0
        """Chunks that were stored again while they had a ghost here. Since the brain started."""


class Ghost(NamedTuple):
    serial: int
    """A smaller number is older, over all namespaces."""
    slot_bytes: int


class Ghosts(OrderedDict[bytes, Ghost]):
    """Keys of chunks that left one half of one namespace, oldest first."""

    slot_bytes = 0
    """Bytes of the slots that these chunks had."""

    def let_go(self, entries: int) -> None:
        for _ in range(entries):
            self.popitem()


def entry_mark(node: Node) -> int:
    """Bit of Node.queued for an entry in the order that the node belongs to."""
    return FREQUENT_LEAF if node.queued & FREQUENT else DRAM


def may_go_recent(node: Node) -> bool:
    return not node.queued & FREQUENT and evictable(node)


def may_go_frequent(node: Node) -> bool:
    return node.queued & FREQUENT != 0 and evictable(node)


class HalfOrder(LeafLru):
    """The leaves of one half of a namespace.

    While only the other half gives, no outdated entry reaches the top here. So they are dropped when they may be the
    majority."""

    def __init__(self, *, frequent: bool) -> None:
        super().__init__(*((may_go_frequent, FREQUENT_LEAF) if frequent else (may_go_recent, DRAM)))
        self._tidy_at = HEAP_LEAVES_MIN

    def offer(self, node: Node) -> None:
        super().offer(node)
        if len(self._heap) > self._tidy_at:
            for _, _, stale in [entry for entry in self._heap if not self._may_go(entry[2])]:
                self._forget(stale)
            self._heap = [entry for entry in self._heap if self._may_go(entry[2])]
            heapq.heapify(self._heap)
            self._tidy_at = max(HEAP_LEAVES_MIN, 2 * len(self._heap))


class ArcOrder:
    """The order of one namespace (eviction.EvictionPolicy)."""

    def __init__(self, arc: "Arc") -> None:
        self._arc = arc
        self._recent, self._frequent = HalfOrder(frequent=False), HalfOrder(frequent=True)
        self.ghosts = {arc.recent: Ghosts(), arc.frequent: Ghosts()}
        """Keys of evicted chunks by the half that they left."""

    def offer(self, node: Node) -> None:
        (self._frequent if node.queued & FREQUENT else self._recent).offer(node)

    def leftovers(self) -> list[Leftover]:
        return [self._recent, self._frequent, *self.ghosts.values()]

    def __len__(self) -> int:
        return len(self._recent) + len(self._frequent)

    def coldest(self) -> Node | None:
        recent, frequent = self._recent, self._frequent
        if self._arc.recent_gives:
            return recent.coldest() or frequent.coldest()
        return frequent.coldest() or recent.coldest()


class Arc:
    """The eviction policy ARC (eviction.Policy), and the calls by which it learns."""

    def __init__(self, capacity_bytes: int, ghosts_max: int) -> None:
        """capacity_bytes: of the arena. ghosts_max: maximum number of ghosts, however small their chunks were. The
        bytes of all ghosts are at most another arena."""
        self.recent, self.frequent = Half(), Half()
        self.target_bytes = 0
        """Bytes that the recent half may hold before it gives."""
        self.capacity_bytes = capacity_bytes
        self.ghosts_max = ghosts_max
        self.orders: dict[Space, ArcOrder] = {}
        self._serial = 0

    # ---------------------------------------------------------------- eviction.Policy

    def add_space(self, space: Space) -> ArcOrder:
        order = self.orders[space] = ArcOrder(self)
        return order

    def drop_space(self, space: Space) -> None:
        """Removes its ghosts from the counts. Its chunks in DRAM are counted until they go."""
        for half, ghosts in self.orders.pop(space).ghosts.items():
            half.ghosts -= len(ghosts)
            half.ghost_bytes -= ghosts.slot_bytes

    def rank(self, node: Node) -> int:
        """First the half that gives, by last use, then the other half."""
        gives = bool(node.queued & FREQUENT) != self.recent_gives
        return node.used if gives else node.used + OTHER_HALF

    @property
    def recent_gives(self) -> bool:
        return self.recent.held_bytes > self.target_bytes

    # ---------------------------------------------------------------- what it is told

    def asked(self, space: Space, tail: Node) -> None:
        """A lookup found the prefix that ends in `tail`."""
        if tail.queued & FREQUENT:
            return
        at: Node | None = tail
        while at is not None and at.parent is not None and not at.queued & FREQUENT:
            held_bytes = _held_bytes(space, at)
            self.recent.held_bytes -= held_bytes
            self.frequent.held_bytes += held_bytes
            at.queued |= FREQUENT
            at = at.parent
        if evictable(tail):
            self.orders[space].offer(tail)

    def comes(self, space: Space, node: Node) -> None:
        """A store brings a chunk that the index did not have. No part of it is in DRAM yet."""
        for half, ghosts in self.orders[space].ghosts.items():
            ghost = ghosts.get(node.key)
            if ghost is not None:
                self._learn(half, ghost)
                self._forget(half, ghosts, node.key)
                self.asked(space, node)
                return

    def count(self, space: Space, node: Node, sign: int) -> None:
        """Call it with sign -1 before the node's parts in DRAM change, and with 1 afterwards."""
        half = self.frequent if node.queued & FREQUENT else self.recent
        half.held_bytes += sign * _held_bytes(space, node)
        if sign > 0:
            self._trim()

    def evicted(self, space: Space, node: Node, slot_bytes: int) -> None:
        """A chunk has left DRAM to make room, and gave back `slot_bytes`."""
        order = self.orders.get(space)
        if order is None or not slot_bytes:
            return
        half = self.frequent if node.queued & FREQUENT else self.recent
        self._serial += 1
        order.ghosts[half][node.key] = Ghost(self._serial, slot_bytes)
        order.ghosts[half].slot_bytes += slot_bytes
        half.ghosts += 1
        half.ghost_bytes += slot_bytes
        self._trim()

    # ---------------------------------------------------------------- inside

    def _learn(self, half: Half, ghost: Ghost) -> None:
        """Enlarges the half by the bytes that were lost; by more if it has fewer ghosts than the other."""
        half.ghost_hits += 1
        other = self.frequent if half is self.recent else self.recent
        step = max(ghost.slot_bytes, ghost.slot_bytes * other.ghost_bytes // half.ghost_bytes)
        if half is self.recent:
            self.target_bytes = min(self.capacity_bytes, self.target_bytes + step)
        else:
            self.target_bytes = max(0, self.target_bytes - step)

    def _trim(self) -> None:
        """Keeps the bounds: the recent half with its ghosts one arena, all together two arenas, and ghosts_max."""
        recent, frequent, most = self.recent, self.frequent, self.capacity_bytes
        while recent.ghosts and recent.held_bytes + recent.ghost_bytes > most:
            self._forget_oldest(recent)
        held_bytes = recent.held_bytes + frequent.held_bytes
        while frequent.ghosts and held_bytes + recent.ghost_bytes + frequent.ghost_bytes > 2 * most:
            self._forget_oldest(frequent)
        while recent.ghosts + frequent.ghosts > self.ghosts_max:
            self._forget_oldest(recent if recent.ghosts > frequent.ghosts else frequent)

    def _forget_oldest(self, half: Half) -> None:
        tables = (order.ghosts[half] for order in self.orders.values() if order.ghosts[half])
        ghosts = min(tables, key=lambda table: _first(table).serial)
        self._forget(half, ghosts, next(iter(ghosts)))

    @staticmethod
    def _forget(half: Half, ghosts: Ghosts, key: bytes) -> None:
        slot_bytes = ghosts.pop(key).slot_bytes
        ghosts.slot_bytes -= slot_bytes
        half.ghost_bytes -= slot_bytes
        half.ghosts -= 1


def _held_bytes(space: Space, node: Node) -> int:
    """Slot bytes of the node's present parts in DRAM. A branch cut off from its namespace has none."""
    return space.group_bytes(node.present & node.in_dram)


def _first(table: Ghosts) -> Ghost:
    return next(iter(table.values()))
