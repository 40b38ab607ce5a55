"""The chain that is being written to disk, the chains that wait for a device, and when the next chain is chosen."""

from collections.abc import Iterable

from kvserver.index.eviction import NO_ROOM, PARKED
from kvserver.index.space import Node, Space
from kvserver.tiers.placement import Touched


class WriteQueue:
    """One chain at a time, head first."""

    def __init__(self, keys_max: int) -> None:
        """keys_max: keys that are remembered for admission at the second touch; 0: none."""
        self.touched = Touched(keys_max)
        self.chain: dict[Node, Space] = {}
        """Chunks to write, in this order."""
        self.used = 0
        """Last use of the leaf for which the chain is written. Chunks used before it may go for the chain."""
        self.parked: dict[int, dict[Node, Space]] = {}
        """Device -> leaves whose chains cannot be written until the device has emptied a segment."""
        self.behind: dict[int, dict[Node, Space]] = {}
        """Device -> leaves whose chains wait until writes to the device have ended, so that other devices write too."""
        self.wait_until_ns = 0
        """No chain is chosen before this time."""
        self.hurry_until_ns = 0
        """Until this time every chunk that may be written is: records that move to empty a segment need DRAM that can
        be taken without loss."""

    def choose(self, space: Space, chain: Iterable[Node], used: int) -> None:
        self.chain, self.used = dict.fromkeys(chain, space), used

    def next(self) -> tuple[Space, Node]:
        node, space = next(iter(self.chain.items()))
        return space, node

    def skip(self, node: Node) -> None:
        """The chunk is being written, or need not be."""
        del self.chain[node]

    def give_up(self, until_ns: int, *, no_room: bool) -> None:
        """Drops the chain, and pauses. no_room: its leaf is not chosen again until somebody asks for it; otherwise what
        is evicted for it would be written, and evicted, for ever."""
        if no_room:
            next(reversed(self.chain)).mark(NO_ROOM)
        self.chain, self.wait_until_ns = {}, until_ns

    def park(self, device: int) -> None:
        """Puts the chain aside until the device has emptied a segment."""
        self._put_aside(self.parked, device)

    def fall_behind(self, device: int) -> None:
        """Puts the chain aside until writes to the device have ended."""
        self._put_aside(self.behind, device)

    def unpark(self, device: int) -> dict[Node, Space]:
        """Takes back the chains that wait for a segment of this device, by their leaves."""
        return self._take_back(self.parked, device)

    def catch_up(self, device: int) -> dict[Node, Space]:
        """Takes back the chains that wait for the end of writes to this device, by their leaves."""
        return self._take_back(self.behind, device)

    def _put_aside(self, table: dict[int, dict[Node, Space]], device: int) -> None:
        leaf, space = self.chain.popitem()
        leaf.mark(PARKED)
        table.setdefault(device, {})[leaf] = space
        self.chain = {}

    def _take_back(self, table: dict[int, dict[Node, Space]], device: int) -> dict[Node, Space]:
        leaves = table.pop(device, {})
        for leaf in leaves:
            leaf.unmark(PARKED)
        return leaves

    def wait(self, until_ns: int) -> None:
        self.wait_until_ns = until_ns

    def hurry(self, until_ns: int) -> None:
        self.hurry_until_ns = until_ns
