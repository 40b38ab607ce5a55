"""Simulated movers and their supervisor.

A mover sums what it copies. It tells the sums of a store, and ends a retrieve as failed if a shard differs from the
ledger's sum. Faults change bytes and sums (faults.py).

A mover copies block by block in its own order, so other events can happen between two blocks. A stopped mover
(SIGSTOP) continues where it was when it is resumed. A killed mover reports nothing more, but may still write until
it is reaped. After that none of its copies can run.
"""

from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from kvserver.tiers.records import NO_SUM, Record
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
    Scrub,
    StartMover,
    UnmapCache,
    Unmapped,
    Wish,
)

from . import faults
from .board import DONE, FAILED, Board
from .content import Block, block_of
from .disk import SimDiskMover
from .memory import Arena, Pool, Wrong
from .remote import SimRemoteMover
from .scrub import scrubbed
from .sums import NOTHING, PRIME, packed, part_of

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
class Shard:
    """One slot of a copy."""

    offset: int
    entry: Record | None
    """Of a retrieve: what the ledger says of the slot."""
    sum: int = 0
    came: dict[int, Block] = field(default_factory=dict)
    """Retrieve: place -> the content that the mover has seen there."""
    asked: set[int] = field(default_factory=set)
    """Retrieve: places whose blocks the engine wants."""
    faults: set[str] = field(default_factory=set)
    """Kinds of the faults because of which the sum may differ."""

    @property
    def is_known(self) -> bool:
        return self.entry is not None and self.entry.sum != NO_SUM

    @property
    def differs(self) -> bool:
        return self.entry is not None and self.is_known and self.sum % PRIME != self.entry.sum

    def wrong_places(self) -> set[int]:
        assert self.entry is not None
        _, namespace, key, _, group, shard, *_ = self.entry
        return {place for place, got in self.came.items() if got != block_of(namespace, key, group, shard, place)}


@dataclass(eq=False)
class Run:
    """A copy job in a mover."""

    order: Copy
    mapping: Mapping
    board: Board
    begun: bool = False
    left: list[tuple[int, int, Shard, int]] = field(default_factory=list)
    """(group, block, shard, place in the chunk) of each block still to be copied. Block -1 is only summed."""
    shards: list[Shard] = field(default_factory=list)
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
            case Scrub():
                self.reports.append(scrubbed(self._world, order))
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
        run = Run(order, mapping, self.boards[mapping.session])
        for group in order.groups:
            offsets = array("q", group.slots).tolist()
            entries: list[Record | None] = [None] * len(offsets)
            if order.kind == "retrieve":
                entries = self._world.ledger.named(offsets, group.names)
            elif group.names:
                raise Wrong(f"job {order.job} is a store and brings names")
            run.shards += [Shard(at, entry) for at, entry in zip(offsets, entries, strict=True) if at >= 0]
        self.runs.append(run)

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
        shards = iter(run.shards)
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
            for chunk, slot in enumerate(slots, first):
                if slot >= 0:
                    begin = chunk * per_chunk - group.first_block
                    blocks = [ids[at] if 0 <= at < len(ids) else -1 for at in range(begin, begin + per_chunk)]
                    self._plan_shard(run, group.group, next(shards), blocks)
        return None

    def _plan_shard(self, run: Run, group: int, shard: Shard, blocks: list[int]) -> None:
        """blocks: of each place in the chunk, -1 if the engine does not want it. A shard is summed as a whole."""
        shard.asked.update(place for place, block in enumerate(blocks) if block >= 0)
        sums_all = self._world.verifies and shard.is_known
        run.left += [(group, block, shard, place) for place, block in enumerate(blocks) if block >= 0 or sums_all]

    def _copy(self, run: Run, group: int, block: int, shard: Shard, place: int) -> None:
        run.copied += block >= 0
        if run.order.kind == "store":
            self._store_block(run, group, block, shard, place)
        else:
            self._retrieve_block(run, group, block, shard, place)

    def _store_block(self, run: Run, group: int, block: int, shard: Shard, place: int) -> None:
        pool, world = run.mapping.pool, self._world
        blocks = pool.shape.blocks_per_chunk(group)
        slot_bytes = pool.shape.slot_bytes(group, pool.shape.shard_of(group, pool.rank))
        content = pool.blocks[group][block]
        self._add(shard, place, content, faults.SUM_STORE)
        self._arena.write(shard.offset, slot_bytes, blocks, place, content)
        sent, fault = faults.on_the_way(world, content, faults.WAY_STORE)
        if fault:
            self._arena.spoil(shard.offset, place, sent, fault)

    def _retrieve_block(self, run: Run, group: int, block: int, shard: Shard, place: int) -> None:
        content = self._arena.read(shard.offset, place) or NOTHING
        shard.faults.update(self._arena.faults_at(shard.offset, place))
        if shard.is_known:
            content, fault = faults.on_the_way(self._world, content, faults.WAY_RETRIEVE)
            shard.faults.update({fault} - {""})
            self._add(shard, place, content, faults.SUM_RETRIEVE)
        shard.came[place] = content
        if block >= 0:
            run.mapping.pool.write(group, block, content, (run.order.word, run.order.generation))

    def _add(self, shard: Shard, place: int, content: Block, kind: str) -> None:
        extra = faults.false_share(self._world, kind)
        shard.sum += part_of(place, content) + extra
        shard.faults.update({kind} if extra else ())

    def _finish(self, run: Run) -> None:
        wrong = self._compare(run) if run.order.kind == "retrieve" else ()
        if not run.board.finish(run.order.word, run.order.generation, FAILED if wrong else DONE) and not wrong:
            self._end(run, "abandoned")
        elif wrong:
            self._end(run, "failed", "digest", "simulated", wrong=wrong)
        else:
            self._end(run, "done")

    def _compare(self, run: Run) -> tuple[int, ...]:
        """The shards whose sum is not the ledger's. All others are right, and none is wrong without a fault."""
        wrong = tuple(index for index, shard in enumerate(run.shards) if self._world.verifies and shard.differs)
        for index, shard in enumerate(run.shards):
            if index in wrong and not shard.faults:
                raise Wrong(f"job {run.order.job} found a shard wrong that no fault has touched: {shard}")
            if index not in wrong and shard.wrong_places() & shard.asked:
                raise Wrong(f"job {run.order.job} brings wrong bytes, and their sum fits: {shard}")
            for kind in shard.faults if index in wrong else ():
                self._world.counts[f"noticed {kind}"] += 1
        return wrong

    def _end(
        self,
        run: Run,
        status: Literal["done", "abandoned", "failed", "invalid"],
        code: str = "",
        message: str = "",
        wrong: tuple[int, ...] = (),
    ) -> None:
        self.runs.remove(run)
        self._world.promises.copy_over(run.order.job)
        if self.state == "running":
            sums, unverified = self._told(run) if status == "done" else (b"", 0)
            self._world.promises.digests.found(run.order.job, [run.shards[index].entry for index in wrong])
            copied = run.copied * BLOCK_BYTES
            order = run.order
            report = Done(order.job, status, copied, 1, code, message, order.mode, sums, wrong, unverified)
            self.reports.append(report)
            self._world.counts[f"done {run.order.kind} {status}"] += 1
        self._unmap_if_idle(run.mapping)

    def _told(self, run: Run) -> tuple[bytes, int]:
        """(sums, number of shards that were not compared) of a copy that ended well."""
        verifies = self._world.verifies
        if run.order.kind == "retrieve":
            return b"", sum(not shard.is_known for shard in run.shards) if verifies else 0
        for shard in run.shards:
            told = shard.sum % PRIME if verifies else NO_SUM
            self._arena.tell(shard.offset, told, is_false=bool(shard.faults))
        return packed([shard.sum % PRIME for shard in run.shards]) if verifies else b"", 0


AnyMover = SimMover | SimDiskMover | SimRemoteMover


class Supervisor:
    """Starts, kills and reaps movers in the order of the brain's wishes."""

    def __init__(self, world: "World") -> None:
        self.wishes: deque[Wish] = deque()
        self.movers: dict[int, AnyMover] = {}
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
                case StartMover(number, "remote", name):
                    self.movers[number] = SimRemoteMover(self._world, number, self._world.stores[name])
                case StartMover(number, device):
                    assert device not in ("disk", "remote")
                    self.movers[number] = SimMover(self._world, number, device)
                case KillMover(number):
                    if number in self.movers:
                        self.movers[number].state = "killed"
                        self.movers[number].stopped = False

    def died(self, mover: AnyMover) -> None:
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

    def _reap(self, mover: AnyMover) -> None:
        mover.reap()
        del self.movers[mover.number]
        self.reaped.append((mover.number, "signal 9"))
