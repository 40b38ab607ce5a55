"""Drains of devices: which chunks of a device are looked at next, and which are moving.

The walk goes segment by segment, over and over, until the device holds nothing. So no list of all chunks is made, and
chunks that are pinned or being read now are met again.
"""

from dataclasses import dataclass, field

from kvserver.index.space import Node, Space
from kvserver.service.holdings.place_owners import ExtentOwner
from kvserver.service.state.transitions import DEVICE_DRAIN, DrainState, moved
from kvserver.tiers.slots import SlotPool

PAUSE_NS = 100_000_000
"""Pause after a walk that freed nothing, or when the drain must wait for something."""


@dataclass(slots=True, eq=False)
class Drain:
    """A device that is being drained, or has been drained and takes nothing any more."""

    device: int
    state: DrainState = "draining"
    segment: int = 0
    """Next segment whose chunks are looked at."""
    queue: list[Node] = field(default_factory=list)
    """Chunks of the previous segment that are still to be looked at."""
    moving: dict[Node, Space] = field(default_factory=dict)
    """Chunks that are being moved to another place, or wait for it."""
    used_before: int = -1
    """Bytes taken on the device when the last walk over all segments began; -1 before the first."""
    stuck: bool = False
    """The last walk freed nothing."""
    wait_until_ns: int = 0
    erasing: bool = False
    """The mover was told to remove the device's file."""
    waits: str = ""
    """Why the drain waits; empty while it makes progress."""

    def become_drained(self) -> None:
        self.state = moved(DEVICE_DRAIN, self.state, "drained")

    def wait_for(self, what: str) -> None:
        """what: empty when it goes on."""
        self.waits = what

    def pause(self, now_ns: int) -> None:
        self.wait_until_ns = now_ns + PAUSE_NS

    def begin_erasing(self) -> bool:
        """False when the mover was told already."""
        told, self.erasing = self.erasing, True
        return not told

    def stop_erasing(self) -> None:
        """The mover did not carry it out; the next one is told again."""
        self.erasing = False

    def may_give_up(self) -> bool:
        """One chunk may be given up for each walk that freed nothing."""
        stuck, self.stuck = self.stuck, False
        return stuck

    def walk(self, pool: SlotPool[ExtentOwner], now_ns: int) -> bool:
        """Fills the queue from the next segment when it is empty. False when the walk is over for now."""
        if self.queue:
            return True
        if self.used_before < 0:
            self.used_before = pool.bytes_used
        if self.segment < pool.slabs_total:
            owners = dict.fromkeys(pool.slab_owners(self.segment))
            nodes = [owner for owner in owners if isinstance(owner, Node)]
            self.queue = sorted(nodes, key=lambda node: -node.depth)  # heads move first: the others follow them
            self.segment += 1
            return True
        if not self.moving:
            self.stuck = pool.bytes_used >= self.used_before
            self.segment, self.used_before = 0, pool.bytes_used
            self.pause(now_ns)
        return False
