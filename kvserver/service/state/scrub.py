"""The scrub, which finds changed chunks before anybody asks for them: how far it has come, what is under way."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvserver.index.space import Node, Space
from kvserver.service.state.movers import Mover
from kvserver.tiers.slots import SlotPool

LOOKS_MAX = 1024
"""Places that are looked at in one event, because other events wait."""
BURST_NS = 100_000_000
"""Time without reads that may be made up for: a turn comes at each tick, or when a read has ended."""

Owner = TypeVar("Owner")


class Walk:
    """Goes round all places of a tier, again and again. It has a place, and no chunk, so chunks may come and go."""

    def __init__(self, now_ns: int) -> None:
        self.round_ns = 0
        """Time that the last full round took; 0 before its end."""
        self._began_ns = now_ns
        self._due_ns = 0
        self._pool = self._offset = 0

    def is_due(self, now_ns: int) -> bool:
        return now_ns >= self._due_ns

    def spend(self, count: int, bytes_per_s: int, now_ns: int) -> None:
        """So many bytes are read now: the next ones are due when the mean rate allows them."""
        self._due_ns = max(self._due_ns, now_ns - BURST_NS) + count * 1_000_000_000 // bytes_per_s

    def places(self, pools: Sequence[SlotPool[Owner]], now_ns: int) -> Iterator[tuple[int, int, Owner | None]]:
        """(pool, offset, owner) of some places, until the end of a round. Who stops early goes on behind the last
        one."""
        looks = LOOKS_MAX
        while self._pool < len(pools):
            pool = self._pool
            for offset, slot_bytes, owner in pools[pool].places(self._offset):
                self._offset = offset + slot_bytes
                yield pool, offset, owner
                looks -= 1
                if not looks:
                    return
            self._pool, self._offset = pool + 1, 0
        self._pool = 0
        self.round_ns, self._began_ns = now_ns - self._began_ns, now_ns

    def stay(self, pool: int, offset: int) -> None:
        """This place is the next one."""
        self._pool, self._offset = pool, offset


@dataclass(slots=True, eq=False)
class Item:
    """A slot that is read."""

    space: Space
    node: Node
    part: int
    slot: int

    def move_to(self, space: Space) -> None:
        """The node was cut off, and hangs in this space now."""
        self.space = space


@dataclass(slots=True, eq=False)
class ScrubJob:
    """Slots that a mover reads. It pins their nodes."""

    number: int
    mover: Mover
    items: list[Item]
    bytes: int


class Scrub:
    """The walks of both tiers, and the job in DRAM. A job on disk is a DiskJob."""

    def __init__(self, now_ns: int) -> None:
        self.dram, self.disk = Walk(now_ns), Walk(now_ns)
        self.job: ScrubJob | None = None

    @property
    def walks(self) -> dict[str, Walk]:
        return {"dram": self.dram, "disk": self.disk}

    def begin(self, job: ScrubJob) -> None:
        assert self.job is None
        self.job = job

    def end(self) -> None:
        self.job = None
