"""Simulated movers and their supervisor.

A mover copies block by block in its own order, so other events can happen between two blocks. A stopped mover
(SIGSTOP) continues where it was when it is resumed. A killed mover reports nothing more, but may still write until
it is reaped. After that none of its copies can run.
"""

from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from kvserver.wire.messages import DeviceKind
from kvserver.wire.orders import (
    ArenaReady,
    Cancel,
    Copy,
    Done,
    DropBoard,
    KillMover,
    MapBoard,
    MapCache,
    MapFailed,
    Mapped,
    Order,
    Ready,
    Report,
    StartMover,
    UnmapCache,
    Unmapped,
    Wish,
)

from .board import DONE, FAILED, Board
from .disk import SimDiskMover
from .memory import Arena, Pool, Wrong

if TYPE_CHECKING:
    from .world import World

BLOCK_BYTES = 11
"""Contribution of one copied block to Done.bytes."""


@dataclass(eq=False)
class Mapping:
    """A cache that a mover has mapped."""

    number: int
    session: int
    pool: Pool
    unmapping: bool = False


@dataclass(eq=False)
class Run:
    """A copy job in a mover."""

    order: Copy
    mapping: Mapping
    board: Board
    begun: bool = False
    left: list[tuple[int, int, int, int]] = field(default_factory=list)
    """(group, block, arena offset, place in the chunk) of each block still to be copied."""
    copied: int = 0


class SimMover:
    """One mover process."""

    def __init__(self, world: "World", number: int, device: DeviceKind) -> None:
        self.number = number
        self.device = device
        self.slabs_ready = 0
        """Slabs that the brain has announced to this mover; used for GPUs only."""
        self.state: Literal["starting", "running", "killed", "reaped"] = "starting"
        self.stopped = False
        self.inbox: deque[tuple[Order, Pool | None, Board | None]] = deque()
        self.reports: deque[Report] = deque()
        self.boards: dict[int, Board] = {}
        self.mappings: dict[int, Mapping] = {}
        self.runs: list[Run] = []
        self._world = world
        self._arena: Arena = world.arena

    @property
    def busy(self) -> bool:
        return bool(self.inbox or self.runs) or self.state == "starting"

    def step(self) -> None:
        """One step of the process on its own."""
        if self.stopped or self.state == "reaped":
            return
        rng = self._world.rng
        if self.state == "starting":
            if self._world.chance("start-fails"):
                self._world.supervisor.died(self)
            else:
                self.state = "running"
                self.reports.append(Ready(1000 + self.number, "simulated", []))
        elif self.state == "running" and self.inbox and (not self.runs or rng.random() < 0.5):
            self._take(*self.inbox.popleft())
        elif self.runs:
            self._progress(self.runs[int(rng.random() * len(self.runs))])

    def maps(self, session: int) -> bool:
        """True if a cache of that session is still mapped, even after an unmap order."""
        return any(mapping.session == session for mapping in self.mappings.values())

    def reap(self) -> None:
        """From now on the mover cannot write."""
        self.state = "reaped"
        for run in self.runs:
            self._world.promises.copy_over(run.order.job)
        for order, _, _ in self.inbox:
            if isinstance(order, Copy):
                self._world.promises.copy_over(order.job)
        self.runs.clear()
        self.inbox.clear()

    # ---------------------------------------------------------------- orders

    def _take(self, order: Order, pool: Pool | None, board: Board | None) -> None:
        match order:
            case MapBoard(session):
                if session in self.boards:
                    raise Wrong(f"board of session {session} was sent to mover {self.number} twice")
                assert board is not None
                self.boards[session] = board
            case DropBoard(session):
                del self.boards[session]
            case MapCache():
                assert pool is not None
                if order.session not in self.boards:
                    raise Wrong(f"cache {order.cache} was sent to mover {self.number} before its session's board")
                if self._world.chance("map-fails"):
                    self.reports.append(MapFailed(order.cache, "descriptor-size", "simulated"))
                else:
                    self.mappings[order.cache] = Mapping(order.cache, order.session, pool)
                    self.reports.append(Mapped(order.cache))
            case UnmapCache(cache):
                if cache in self.mappings:  # else mapping failed, and the brain has been told
                    self.mappings[cache].unmapping = True
                    self._unmap_if_idle(self.mappings[cache])
            case Copy():
                self._begin_copy(order)
            case ArenaReady(slabs):
                self.slabs_ready = slabs
            case Cancel(job):
                for run in self.runs:
                    if run.order.job == job and not run.begun:
                        run.board.cancel(run.order.word, run.order.generation)
                        self._end(run, "abandoned")
                        break

    def _begin_copy(self, order: Copy) -> None:
        mapping = self.mappings.get(order.cache)
        if mapping is None or mapping.unmapping:
            raise Wrong(f"job {order.job} was sent to mover {self.number} for a cache that is not mapped there")
        self.runs.append(Run(order, mapping, self.boards[mapping.session]))

    def _unmap_if_idle(self, mapping: Mapping) -> None:
        if self.state == "running" and mapping.unmapping and not any(run.mapping is mapping for run in self.runs):
            del self.mappings[mapping.number]
            self.reports.append(Unmapped(mapping.number))

    # ---------------------------------------------------------------- copies

    def _progress(self, run: Run) -> None:
        rng = self._world.rng
        if not run.begun:
            self._begin(run)
        elif self._world.chance("copy-waits"):
            pass  # a slow link, or other work first
        elif not run.left:
            self._finish(run)
        elif self._world.chance("copy-fails"):
            if run.board.finish(run.order.word, run.order.generation, FAILED):
                self._end(run, "failed", "io", "simulated")
            else:
                self._end(run, "abandoned")
        else:
            for _ in range(1 + int(rng.random() * 4)):
                if run.left:
                    self._copy(run, *run.left.pop(int(rng.random() * len(run.left))))

    def _begin(self, run: Run) -> None:
        order = run.order
        if not run.board.submit(order.word, order.generation):
            self._end(run, "abandoned")
            return
        run.begun = True
        problem = self._plan(run)
        if problem:
            run.board.finish(order.word, order.generation, FAILED)
            self._end(run, "invalid", *problem)

    def _plan(self, run: Run) -> tuple[str, str] | None:
        """The checks of plan_pieces: block ids are checked before any byte moves."""
        shape = run.mapping.pool.shape
        for group in run.order.groups:
            ids, slots = array("i", group.block_ids).tolist(), array("q", group.slots).tolist()
            per_chunk = shape.blocks_per_chunk(group.group)
            first = group.first_block // per_chunk
            touched = -(-(group.first_block + len(ids)) // per_chunk) - first
            if len(slots) != touched:
                raise Wrong(f"job {run.order.job}: {len(slots)} slots for blocks that touch {touched} chunks")
            if self.device != "host" and max(slots) >= self.slabs_ready * self._world.swarm.bounds.slab_bytes:
                raise Wrong(f"job {run.order.job}: a slot behind the {self.slabs_ready} slabs that the mover knows of")
            if not all(0 <= block < len(run.mapping.pool.blocks[group.group]) for block in ids):
                return "block-range", "simulated"
            if len(set(ids)) != len(ids):
                return "block-duplicate", "simulated"
            for index, block in enumerate(ids):
                chunk, place = divmod(group.first_block + index, per_chunk)
                if slots[chunk - first] >= 0:
                    run.left.append((group.group, block, slots[chunk - first], place))
        return None

    def _copy(self, run: Run, group: int, block: int, offset: int, place: int) -> None:
        pool = run.mapping.pool
        run.copied += 1
        if run.order.kind == "store":
            shape, shard = pool.shape, pool.shape.shard_of(group, pool.rank)
            blocks, slot_bytes = shape.blocks_per_chunk(group), shape.slot_bytes(group, shard)
            self._arena.write(offset, slot_bytes, blocks, place, pool.blocks[group][block])
        else:
            content = self._arena.read(offset, place)
            pool.write(group, block, content or ("nothing",), (run.order.word, run.order.generation))

    def _finish(self, run: Run) -> None:
        if run.board.finish(run.order.word, run.order.generation, DONE):
            self._end(run, "done")
        else:
            self._end(run, "abandoned")

    def _end(
        self, run: Run, status: Literal["done", "abandoned", "failed", "invalid"], code: str = "", message: str = ""
    ) -> None:
        self.runs.remove(run)
        self._world.promises.copy_over(run.order.job)
        if self.state == "running":
            self.reports.append(Done(run.order.job, status, run.copied * BLOCK_BYTES, 1, code, message, run.order.mode))
            self._world.counts[f"done {run.order.kind} {status}"] += 1
        self._unmap_if_idle(run.mapping)


class Supervisor:
    """Starts, kills and reaps movers in the order of the brain's wishes."""

    def __init__(self, world: "World") -> None:
        self.wishes: deque[Wish] = deque()
        self.movers: dict[int, SimMover | SimDiskMover] = {}
        """The present brain's movers that are not yet reaped."""
        self.reaped: deque[tuple[int, str]] = deque()
        """(mover, reason) reports for the brain."""
        self._world = world

    @property
    def busy(self) -> bool:
        return bool(self.wishes) or any(mover.state == "killed" for mover in self.movers.values())

    def step(self) -> None:
        dead = [mover for mover in self.movers.values() if mover.state == "killed"]
        if dead and not self._world.chance("reap-waits"):
            self._reap(dead[0])
        elif self.wishes:
            match self.wishes.popleft():
                case StartMover(number, "disk"):
                    self.movers[number] = SimDiskMover(self._world, number)
                case StartMover(number, device):
                    assert device != "disk"
                    self.movers[number] = SimMover(self._world, number, device)
                case KillMover(number):
                    if number in self.movers:
                        self.movers[number].state = "killed"
                        self.movers[number].stopped = False

    def died(self, mover: SimMover | SimDiskMover) -> None:
        """A mover dies by itself. Like a killed one, it may write until it is reaped."""
        mover.state = "killed"
        mover.stopped = False

    def reap_all(self) -> None:
        """The brain and its movers are dead. Each mover may have written a little more before it ended."""
        for mover in self.movers.values():
            mover.state = "killed"
            mover.stopped = False
            for _ in range(int(self._world.rng.random() * 6)):
                mover.step()
            mover.reap()
        self.movers.clear()
        self.wishes.clear()
        self.reaped.clear()

    def _reap(self, mover: SimMover | SimDiskMover) -> None:
        mover.reap()
        del self.movers[mover.number]
        self.reaped.append((mover.number, "signal 9"))
