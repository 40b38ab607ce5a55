"""One simulated client process: its session, its pool and its transfers.

A process keeps kvclient's rules. Blocks of a store may be reused once the word is done, abandoned or failed. Blocks
of a retrieve may be reused only when the word says so or the mover is reaped. Reused blocks are overwritten at once.
"""

from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from kvserver.wire.messages import (
    ALL_RIGHT,
    CHUNKS_MAX,
    PROTOCOL,
    Attach,
    Attached,
    Awaited,
    Clear,
    Drain,
    Error,
    Explain,
    Found,
    GroupBlocks,
    Hello,
    Lane,
    LaneOpen,
    Lookup,
    Offer,
    Offered,
    Pledged,
    Register,
    Registered,
    Reply,
    Request,
    Retrieve,
    Retrieved,
    Status,
    Store,
    Stored,
    Unregister,
    Unregistered,
    Watch,
    Welcome,
)

from .board import ABANDONED, DONE, FAILED, LIVE, SUBMITTED, Board
from .content import Block, Path, block_of, key_of, keys_of
from .ledger import needed
from .memory import Pool, Wrong
from .movers import SimMover
from .shapes import register_frame

if TYPE_CHECKING:
    from .engines import Granted, SimEngine
    from .world import World

MS = 1_000_000


class StoreTask(NamedTuple):
    path: Path
    first: int
    ranges: dict[int, tuple[int, int]]


class RetrieveTask(NamedTuple):
    granted: "Granted"


class Received(NamedTuple):
    """A reply with its extras: the session number of a Welcome's secret, the board of an Attached."""

    reply: Reply
    session: int
    board: Board | None


@dataclass(eq=False)
class Transfer:
    """A store or retrieve that this process has begun and not settled."""

    request: Store | Retrieve
    board: Board
    mover: SimMover
    deadline_ns: int
    blocks: dict[int, list[int]]
    chunks: dict[tuple[int, int], int] = field(default_factory=dict)
    """Retrieve: (group, block) -> its chunk in the prefix."""
    expected: dict[tuple[int, int], Block] = field(default_factory=dict)
    """Retrieve: (group, block) -> content that must be there afterwards."""
    answered: bool = False


class Process:
    """One client process; rank -1 is a scheduler."""

    def __init__(self, world: "World", engine: "SimEngine", rank: int) -> None:
        self.engine = engine
        self.rank = rank
        self.alive = True
        self.stalled = False
        self.registers = rank >= 0 or world.chance("scheduler-registers")
        self.pool = Pool(engine.digest, engine.shape, rank, world.swarm.pool_blocks, world.garbage)
        self.transfers: list[Transfer] = []
        self.came: dict[int, int] = {}
        """Retrieve whose word is not done -> leading chunks of its prefix whose blocks came right."""
        self.todo: deque[StoreTask | RetrieveTask] = deque(maxlen=4)
        self.pledges: list[int] = []
        """Its recent pledges."""
        self.late: list[RetrieveTask] = []
        """Retrieves to try once the process is registered."""
        self._world = world
        self._last_id = 0
        self._caches_named = 0
        self.cache_name = ""
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Forgets the session and everything that belonged to it."""
        self.brain = self._world.brain
        self.peer = self._world.new_peer(self)
        self.local_peer = 0
        self.lane_peer = 0
        self.lane_open = False
        self.token = b""
        self.session = 0
        self.board: Board | None = None
        self.descriptors: list[int] = []
        self.cache = 0
        self.mover: SimMover | None = None
        self.asked: dict[int, Request] = {}
        self.inbox: deque[Received] = deque()
        self.todo.clear()

    def next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    @property
    def ready(self) -> bool:
        return self.alive and not self.stalled and self.session != 0

    def quick_peer(self) -> int:
        """The lane if it is open, or sometimes the main connection."""
        return self.lane_peer if self.lane_open and self._world.rng.random() < 0.6 else self.peer

    def send(
        self, request: Request, peer: int, *, descriptor: int = -1, must_fail: bool = False, sound: bool = False
    ) -> None:
        self.asked[request.id] = request
        self._world.post(peer, request, descriptor=descriptor, must_fail=must_fail, sound=sound)

    def asks(self, *kinds: type) -> bool:
        return any(isinstance(request, kinds) for request in self.asked.values())

    # ---------------------------------------------------------------- its own steps

    def act(self) -> None:
        """One step: settle finished transfers, register, or begin a transfer."""
        if not self.alive or self.stalled:
            return
        if self.brain != self._world.brain and self._world.rng.random() < 0.3:
            self.disconnect()
        while self.inbox:
            self._take(self.inbox.popleft())
        self.settle()
        if not self._world.calm:
            self._advance_or_begin()

    def _advance_or_begin(self) -> None:
        if self.board is None or (self.registers and not self.cache):
            self._advance()
        elif self.todo and self.cache:
            self._begin_task(self.todo.popleft())

    def _advance(self) -> None:
        """Takes the next step towards a registered cache."""
        engine = self.engine
        if not self.session:
            if not self.asks(Hello):
                software = "simulated 1"
                ranks = engine.shape.ranks
                self.send(
                    Hello(self.next_id(), PROTOCOL, engine.name, engine.epoch, ranks, self.rank, software), self.peer
                )
        elif self.board is None:
            if not self.local_peer:
                self.local_peer = self._world.new_peer(self)
            if not self.asks(Attach):
                self.send(Attach(self.next_id(), self.token), self.local_peer)
        elif self.asks(Offer, Unregister):
            pass
        elif len(self.descriptors) < engine.shape.descriptors:
            self.send(Offer(self.next_id()), self.local_peer, descriptor=self._world.new_descriptor())
        elif not self.asks(Register):
            self._caches_named += self._world.rng.random() < 0.5
            self.cache_name = f"kv{self._caches_named}"
            descriptors = self.descriptors[: engine.shape.descriptors]
            frame = register_frame(
                engine.shape,
                self.rank,
                request_id=self.next_id(),
                name=self.cache_name,
                digest=engine.digest,
                blocks=self._world.swarm.pool_blocks,
                descriptors=descriptors,
            )
            self.send(frame, self._world.rng.choice((self.peer, self.local_peer)))

    def open_lane(self) -> None:
        if self.session and not self.lane_peer:
            self.lane_peer = self._world.new_peer(self)
            self.send(Lane(self.next_id(), self.token), self.lane_peer)

    def give_lane_up(self) -> None:
        """Abandons the lane after a slow lookup, as kvclient does. Answers sent there are lost."""
        if self.lane_open:
            peer, self.lane_peer, self.lane_open = self.lane_peer, 0, False
            self.send(Lookup(self.next_id(), self.engine.digest, b"".join(self.engine.keys_to_ask()), 0), peer)
            self._world.lane_closed(peer)

    def unregister(self) -> None:
        if self.cache:
            for _ in range(1 + (self._world.rng.random() < 0.3)):
                self.send(Unregister(self.next_id(), self.cache), self.peer)

    def clear(self, digest: bytes) -> None:
        self.send(Clear(self.next_id(), digest), self.quick_peer())

    def drain(self, device: int, *, exists: bool) -> None:
        self.send(Drain(self.next_id(), device), self.quick_peer(), must_fail=not exists)

    def ask_status(self) -> None:
        self.send(Status(self.next_id()), self.quick_peer())
        keys = self._world.rng.choice((b"", b"".join(self.engine.keys_to_ask())))
        self.send(Explain(self.next_id(), self._world.rng.choice((b"", self.engine.digest)), keys), self.quick_peer())

    def die(self) -> None:
        """The process ends. Its pool lives on while a mover has it mapped, and nobody else writes to it."""
        self.alive = False
        self._world.process_died(self)

    def disconnect(self) -> None:
        """The brain is gone, or does not know this session. Abandons transfers as far as that is possible."""
        if self.brain == self._world.brain:
            self._world.disconnected(self)
        self._begin_anew()
        for transfer in self.transfers:
            transfer.answered = True
        self.settle()

    # ---------------------------------------------------------------- transfers

    def _begin_task(self, task: StoreTask | RetrieveTask) -> None:
        assert self.board is not None
        words = self.board.free_words()
        if not words:
            return
        word = self._world.rng.choice(words)
        if isinstance(task, StoreTask):
            self._store(task, word)
        else:
            self._retrieve(task, word)

    def _store(self, task: StoreTask, word: int) -> None:
        world, shape, pool = self._world, self.engine.shape, self.pool
        blocks: dict[int, list[int]] = {}
        groups: list[GroupBlocks] = []
        for group, (first, end) in task.ranges.items():
            per_chunk = shape.blocks_per_chunk(group)
            ids = pool.take(group, (end - first) * per_chunk)
            blocks[group] = ids
            if len(ids) < (end - first) * per_chunk:
                self._give_back(blocks)
                return
            for index, block in enumerate(ids):
                chunk, place = divmod(index, per_chunk)
                key = key_of(task.path[: first + chunk + 1])
                shard = shape.shard_of(group, self.rank)
                pool.blocks[group][block] = block_of(self.engine.digest, key, group, shard, place)
            groups.append(GroupBlocks(group, first * per_chunk, self._packed(ids)))
        keys = keys_of(task.path, task.first)
        parent = key_of(task.path[: task.first])
        if world.chance("wrong-parent"):
            if task.first:
                parent = key_of(task.path[:-1]) if len(task.path) > task.first + 1 else bytes(range(32))
            else:
                keys = [keys[0]] * len(keys)
        board, deadline_ms = self._live_board(), self._deadline_ms()
        request = Store(
            self.next_id(), self.cache, word, board.begin(word), deadline_ms, task.first, parent, b"".join(keys), groups
        )
        self._begin(Transfer(request, board, self._live_mover(), self._until(deadline_ms), blocks), sound=False)

    def _retrieve(self, task: RetrieveTask, word: int) -> None:
        """Retrieves any of the blocks that the lookup needed, possibly starting and ending inside a chunk."""
        world, shape, pool, granted = self._world, self.engine.shape, self.pool, task.granted
        rng, boundary = world.rng, len(granted.keys)
        blocks: dict[int, list[int]] = {}
        groups: list[GroupBlocks] = []
        expected: dict[tuple[int, int], Block] = {}
        chunks: dict[tuple[int, int], int] = {}
        sound = True
        for group in range(len(shape.groups)):
            if rng.random() < 0.15 and (groups or group + 1 < len(shape.groups)):
                continue
            per_chunk = shape.blocks_per_chunk(group)
            first, end = needed(shape, group, boundary)[0] * per_chunk, boundary * per_chunk
            if rng.random() < 0.5:
                first += int(rng.random() * (end - first))
                end -= int(rng.random() * (end - first))
            if rng.random() < 0.06:
                first, sound = max(0, first - 1), False
            if rng.random() < 0.03:
                end, sound = end + 1, False
            ids = blocks[group] = pool.take(group, end - first)
            if len(ids) < end - first:
                self._give_back(blocks)
                return
            groups.append(GroupBlocks(group, first, self._packed(ids)))
            shard = shape.shard_of(group, self.rank)
            for index, block in enumerate(ids):
                chunk, place = divmod(first + index, per_chunk)
                if chunk < boundary:
                    right = block_of(self.engine.digest, granted.keys[chunk], group, shard, place)
                    expected[group, block], chunks[group, block] = right, chunk
        if not groups:
            return
        board, deadline_ms = self._live_board(), self._deadline_ms()
        generation = board.begin(word)
        for group, block in expected:
            pool.targets[group, block] = (word, generation)
        more = world.chance("more-parts")
        if more:
            self.todo.append(task)
        request = Retrieve(self.next_id(), self.cache, granted.number, word, generation, deadline_ms, groups, more)
        transfer = Transfer(request, board, self._live_mover(), self._until(deadline_ms), blocks, chunks, expected)
        self._begin(transfer, sound=sound)

    def _begin(self, transfer: Transfer, *, sound: bool) -> None:
        self.transfers.append(transfer)
        self.send(transfer.request, self.quick_peer(), sound=sound)

    def repeat(self) -> None:
        """Sends a transfer again under another id, as a confused client might."""
        if self.transfers and self.session and self.cache:
            request = self._world.rng.choice(self.transfers).request
            twin_id = self.next_id()
            if isinstance(request, Store):
                twin: Request = Store(twin_id, *_fields(request))
            else:
                twin = Retrieve(twin_id, *_fields(request))
            self._world.post(self.quick_peer(), twin)

    def abandon(self) -> None:
        """Gives up a transfer before its deadline."""
        if self.transfers:
            self._world.rng.choice(self.transfers).deadline_ns = 0
            self.settle()

    def settle(self) -> None:
        """Takes back the blocks of all finished transfers."""
        for transfer in list(self.transfers):
            if transfer.answered or transfer.deadline_ns <= self._world.now_ns:
                self._give_up(transfer)
            if self._is_over(transfer):
                self._settle(transfer)

    @staticmethod
    def _give_up(transfer: Transfer) -> None:
        word, generation = transfer.request.word, transfer.request.generation
        if isinstance(transfer.request, Store):
            transfer.board.abandon_store(word, generation)
        else:
            transfer.board.abandon_retrieve(word, generation)

    @staticmethod
    def _is_over(transfer: Transfer) -> bool:
        state = transfer.board.state(transfer.request.word, transfer.request.generation)
        return state not in (LIVE, SUBMITTED) or transfer.mover.state == "reaped"

    def _settle(self, transfer: Transfer) -> None:
        word, generation = transfer.request.word, transfer.request.generation
        state = transfer.board.state(word, generation)
        if isinstance(transfer.request, Retrieve):
            if state == DONE:
                self._compare(transfer)
            elif state == FAILED:
                self._note_what_came(transfer)
        elif state == ABANDONED:
            self._world.counts["store abandoned by client"] += 1
        transfer.board.abandon_store(word, generation)  # the mover is reaped: the word may be used again
        self._give_back(transfer.blocks)
        self.transfers.remove(transfer)

    def _compare(self, transfer: Transfer) -> None:
        for (group, block), right in transfer.expected.items():
            got = self.pool.blocks[group][block]
            if got != right:
                raise Wrong(f"{self.engine.name} rank {self.rank} retrieved {got} into block {block}, not {right}")
        self._world.counts["blocks compared"] += len(transfer.expected)

    def _note_what_came(self, transfer: Transfer) -> None:
        got = self.pool.blocks
        wrong = [
            transfer.chunks[group, block]
            for (group, block), right in transfer.expected.items()
            if got[group][block] != right
        ]
        self.came[transfer.request.id] = min(wrong, default=CHUNKS_MAX)

    def _check_what_came(self, reply: Retrieved) -> None:
        """All blocks of the chunks before the first wrong one are right."""
        came = self.came.pop(reply.id, None)
        if reply.wrong_from == ALL_RIGHT or came is None:
            return
        if came < reply.wrong_from:
            raise Wrong(f"chunks before {reply.wrong_from} are said to be right, and {came} is not")
        self._world.counts["prefixes right before a wrong chunk"] += reply.wrong_from > 0

    def _give_back(self, blocks: dict[int, list[int]]) -> None:
        for group, ids in blocks.items():
            self.pool.give_back(group, ids)

    def _packed(self, ids: list[int]) -> bytes:
        if self._world.chance("bad-ids"):
            ids = list(ids)
            ids[-1] = self._world.rng.choice((-1, self._world.swarm.pool_blocks, ids[0]))
        return array("i", ids).tobytes()

    def _deadline_ms(self) -> int:
        steps = self._world.rng.choice((1, 5) if self._world.chance("hasty-client") else (100, 600))
        return self._world.swarm.ms(steps)

    def _until(self, deadline_ms: int) -> int:
        return self._world.now_ns + deadline_ms * MS

    def _live_board(self) -> Board:
        assert self.board is not None
        return self.board

    def _live_mover(self) -> SimMover:
        assert self.mover is not None
        return self.mover

    # ---------------------------------------------------------------- replies

    def hears(self, peer: int) -> bool:
        """True if the process lives and still uses that connection."""
        return self.alive and peer in (self.peer, self.local_peer, self.lane_peer)

    def receive(self, peer: int, received: Received) -> None:
        self.inbox.append(received)
        if not self.stalled:
            while self.inbox:
                self._take(self.inbox.popleft())
            if not self._world.calm and self._world.rng.random() < 0.8:
                self._advance_or_begin()

    def _take(self, received: Received) -> None:
        reply = received.reply
        request = self.asked.pop(reply.id, None)
        match reply:
            case Error():
                self._refused(request, reply)
            case Welcome():
                self.token, self.session, self.brain = reply.session, received.session, self._world.brain
            case Attached():
                self.board = received.board
            case LaneOpen():
                self.lane_open = True
            case Offered():
                self.descriptors.append(reply.descriptor)
            case Registered():
                self.cache, self.mover = reply.cache, self._world.supervisor.movers.get(reply.mover)
                del self.descriptors[: self.engine.shape.descriptors]
                if self.mover is None:
                    self.cache = 0
                else:
                    self.send(Watch(self.next_id(), self.cache), self.local_peer)
                    self.todo.extend(self.late)
                    self.late.clear()
            case Unregistered() if isinstance(request, Unregister) and request.cache == self.cache:
                self.cache = 0
            case Found() if isinstance(request, Lookup):
                self._world.counts["chunks found"] += reply.chunks
                if reply.lease:
                    chunks = reply.chunks + (reply.awaited if isinstance(reply, Awaited) else 0)
                    keys = [request.keys[at : at + 32] for at in range(0, chunks * 32, 32)]
                    self._world.router.finds(self, request, reply)
                    self.engine.granted(request.namespace, keys, reply.lease)
            case Pledged() if reply.pledge:
                self.pledges = [*self.pledges[-3:], reply.pledge]
            case Stored():
                self._answered(reply.id)
            case Retrieved():
                self._answered(reply.id)
                self._check_what_came(reply)
            case _:
                pass

    def _answered(self, request_id: int) -> None:
        for transfer in self.transfers:
            if transfer.request.id == request_id:
                transfer.answered = True
        self.settle()

    def _refused(self, request: Request | None, error: Error) -> None:
        match request:
            case Store() | Retrieve():
                self._answered(request.id)
                if error.code in ("cache-unknown", "cache-not-mapped") and request.cache == self.cache:
                    self.cache = 0
            case None:
                pass
            case _ if isinstance(request, Register) and error.code in ("mover-lost", "descriptor-size"):
                self.descriptors.clear()
            case _ if isinstance(request, Register) and error.code == "descriptor-unknown":
                self.descriptors.clear()
            case Unregister() if request.cache == self.cache:
                self.cache = 0
            case _:
                pass
        if error.code == "session-unknown":
            self.disconnect()


def _fields(request: Store | Retrieve) -> list[object]:
    return [getattr(request, name) for name in request.__struct_fields__[1:]]
