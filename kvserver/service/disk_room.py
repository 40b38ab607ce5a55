"""Room on the devices: extents are taken here, and when none is free it is decided here what goes.

The order is that of DRAM, leaf first and least recently used first, among what has extents. Two things can be lost with
extents: nothing, when the chunk is in DRAM as well; or the chunk, which must then be a leaf of the index.
"""

from collections.abc import Callable, Sequence

from kvserver.index.eviction import DeviceLru, droppable
from kvserver.index.space import ABSENT, READY, Node, Space
from kvserver.service.owners import ExtentOwner
from kvserver.tiers.extents import Extents, place_of

SEGMENTS_LOOKED_AT = 8
"""Of another size, when one of them must be emptied."""
PRICE_MAX = 4
"""Chunks that may go for each extent of a segment that is emptied: below a shared prefix hang a million."""


class DiskRoom:
    """The extents, and for each namespace and device the order in which they go."""

    def __init__(self, extents: Extents[ExtentOwner], drop: Callable[[Space, Node], None]) -> None:
        """drop: takes its extents from a chunk, and the chunk out of the index when it is nowhere else."""
        self.extents = extents
        self._drop = drop
        self._orders: dict[Space, list[DeviceLru]] = {}

    def add_space(self, space: Space) -> None:
        self._orders[space] = [DeviceLru(device) for device in range(len(self.extents.pools))]

    def drop_space(self, space: Space) -> None:
        self._orders.pop(space, None)

    def offer(self, space: Space, node: Node) -> None:
        if droppable(node) and space in self._orders:
            self._orders[space][device_of(node)].offer(node)

    def has(self, device: int, extent_bytes: int, used: int) -> bool:
        """take() is likely to give one."""
        coldest = self._coldest(device)
        free = self.extents.pools[device].has_room(extent_bytes)
        return free or (coldest is not None and coldest[1].used < used)

    def take(self, device: int, extent_bytes: int, owner: ExtentOwner, used: int) -> int | None:
        """An extent that now belongs to `owner`; what was used before `used` goes for it. None when nothing can go.

        Without that bound, chunks of a DRAM that holds more than the device would push each other out for ever."""
        pool = self.extents.pools[device]
        vain_bytes = 0
        while True:
            extent = self.extents.allocate(device, extent_bytes, owner)
            if extent is not None:
                return extent
            before = pool.bytes_used
            if vain_bytes < self.extents.segment_bytes:
                going = self._drop_coldest(device, used)
            else:
                going = self._empty_a_segment(device, extent_bytes, used)
                vain_bytes = 0
            if not going:
                return None
            vain_bytes += before - pool.bytes_used

    def evict_leaf(self) -> bool:
        """Takes the coldest chunk that is on disk alone out of the index; False when there is none."""
        leaves = [
            (node.used, space, node)
            for space, orders in self._orders.items()
            for order in orders
            if (node := order.coldest()) is not None and not node.in_dram and node.children is None
        ]
        if not leaves:
            return False
        _, space, node = min(leaves, key=lambda leaf: leaf[0])
        self._drop(space, node)
        return True

    def drop_any(self) -> bool:
        """Takes the extents of one chunk with which nothing in DRAM is lost; False when none can go."""
        for device in range(len(self.extents.pools)):
            best = self._coldest(device)
            if best is not None and (not best[1].in_dram or best[1].in_dram & best[0].needed == best[0].needed):
                self._drop(*best)
                return True
        return False

    def closure(
        self, owners: Sequence[ExtentOwner], used: int | None, chunks_max: int | None = None
    ) -> dict[Node, Space] | None:
        """Every chunk that has to give its extents back so that these do. None when one of them must stay (it is
        pinned, was used since `used`, or something below it that is in DRAM hangs on it), or they are too many."""
        doomed: dict[Node, Space] = {}
        for owner in owners:
            if not isinstance(owner, Node):
                return None
            space = self.space_of(owner)
            if space is None:
                return None
            below = [owner]
            while below:
                node = below.pop()
                if node in doomed:
                    continue
                lost = node.on_disk & ~node.in_dram != 0
                if (
                    len(doomed) == chunks_max
                    or node.pins
                    or node.state != READY
                    or (used is not None and node.used >= used)
                    or (lost and any(not child.away for child in node.child_nodes()))
                ):
                    return None
                doomed[node] = space
                below.extend(child for child in node.child_nodes() if child.on_disk)
        return doomed

    def space_of(self, node: Node) -> Space | None:
        """The namespace of a node; None when it was cleared, or cut off."""
        return next((space for space in self._orders if space.nodes.get(node.key) is node), None)

    # ---------------------------------------------------------------- inside

    def _drop_coldest(self, device: int, used: int | None) -> bool:
        best = self._coldest(device)
        if best is None or (used is not None and best[1].used >= used):
            return False
        self._drop(*best)
        return True

    def _coldest(self, device: int) -> tuple[Space, Node] | None:
        best: tuple[Space, Node] | None = None
        for space, orders in self._orders.items():
            node = orders[device].coldest()
            if node is not None and (best is None or node.used < best[1].used):
                best = space, node
        return best

    def _empty_a_segment(self, device: int, extent_bytes: int, used: int) -> bool:
        """A segment's worth went and no extent of this size came free: the emptiest segment of another size that can be
        emptied is."""
        pool = self.extents.pools[device]
        for segment in pool.emptiest_of_other_sizes(extent_bytes, SEGMENTS_LOOKED_AT):
            owners = pool.slab_owners(segment)
            doomed = self.closure(owners, used, PRICE_MAX * len(owners))
            if doomed is not None:
                for node in sorted(doomed, key=lambda node: -node.depth):
                    if droppable(node):
                        self._drop(doomed[node], node)
                return True
        return False


def device_of(node: Node) -> int:
    """The device of a node that has extents."""
    assert node.disk is not None
    return place_of(next(extent for extent in node.disk.extents if extent != ABSENT)).device
