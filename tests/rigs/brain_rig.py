"""A Service with a shell and movers that obey at once, so that a test is a list of requests.

The rig holds the shell's state: which offered descriptors are open, and the reply to every request. It checks the
service's invariants after every event."""

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvserver.brain.bounds import bounds_from
from kvserver.config.config import Config
from kvserver.service.base.effects import (
    Answer,
    AnswerWithBoard,
    AnswerWithMover,
    Ask,
    CloseDescriptors,
    CloseSession,
    Effect,
    Instruct,
    Withdraw,
)
from kvserver.service.base.events import ArenaGrew, Arrived, Event, MoverGone, PeerGone, Reported, Tick, WorkerGone
from kvserver.service.service import Service
from kvserver.service.state.core import Core
from kvserver.wire.messages import (
    KEY_BYTES,
    PROTOCOL,
    Attach,
    Buffer,
    Error,
    Found,
    GroupBlocks,
    GroupSpec,
    Hello,
    Lookup,
    Offer,
    Offered,
    RegionRun,
    Register,
    Registered,
    Release,
    Request,
    Retrieve,
    Store,
    Stored,
)
from kvserver.wire.orders import (
    Copy,
    Done,
    DropBoard,
    KillMover,
    MapCache,
    Mapped,
    Order,
    Ready,
    Report,
    StartMover,
    UnmapCache,
    Unmapped,
)

SLAB_BYTES = 64 << 10
ARENA_BYTES = 16 * SLAB_BYTES
BOUNDS = replace(bounds_from(Config()), arena_bytes=ARENA_BYTES, slab_bytes=SLAB_BYTES, request_lines="none")
CHUNK_TOKENS = 6
BLOCKS = 11
PAGE_BYTES = 129
REGIONS = 2
NAMESPACE = bytes(range(100, 132))
BUFFER_BYTES = 5003

FULL = GroupSpec(2, BLOCKS, "full", 0, 1, 0, 1, 0, [RegionRun(0, 13, REGIONS, BLOCKS * 130, 130, PAGE_BYTES)])
"""Three blocks per chunk."""
WINDOW = GroupSpec(3, 7, "window", 7, 1, 0, 1, 0, [RegionRun(0, 3000, 1, 0, 67, 65)])
STATE = GroupSpec(6, 5, "state", 0, 1, 0, 1, 0, [RegionRun(0, 3600, 1, 0, 255, 254)])


def chain(seed: int, chunks: int) -> bytes:
    """Packed keys of a prompt."""
    return random.Random(seed).randbytes(KEY_BYTES * chunks)


def key(keys: bytes, chunk: int) -> bytes:
    return keys[chunk * KEY_BYTES : (chunk + 1) * KEY_BYTES]


def ids(*blocks: int) -> bytes:
    return b"".join(block.to_bytes(4, "little", signed=True) for block in blocks)


def withdrawn(effects: list[Effect]) -> int:
    """Number of slots that were taken out of the ledger."""
    return sum(len(array("q", effect.offsets)) for effect in effects if isinstance(effect, Withdraw))


class Rig:
    events_a_check = 1
    """After every such event the invariants are checked. More where there are many chunks: a check looks at each."""

    def __init__(self, **bounds: Any) -> None:
        self.bounds = replace(BOUNDS, **bounds)
        self.service = self.new_service()
        self.now_ns = 1_000_000_000
        self.movers_map = True
        """False: MapCache stays unanswered."""
        self.movers_copy = True
        """False: jobs stay under way until finish()."""
        self.copies: list[tuple[int, Copy]] = []
        """(mover, order) of jobs that are under way."""
        self.orders: list[Order] = []
        self.effects: list[Effect] = []
        """All effects, in order."""
        self.kills = 0
        self.open: set[int] = set()
        """Descriptors that the shell has to keep."""
        self.answers: dict[tuple[int, int], Any] = {}
        """(peer, id) -> reply."""
        self._unmaps: list[tuple[int, int]] = []
        self._last = 0
        self._events = 0
        self.handle(ArenaGrew(self.bounds.arena_bytes // SLAB_BYTES, ""))

    def new_service(self) -> Service:
        return Service(self.bounds, random.Random(7).randbytes)

    @property
    def core(self) -> Core:
        """The service's state, for set-ups that no list of requests reaches, and for counts that no status shows."""
        return self.service._core

    def number(self) -> int:
        """A peer, descriptor or request id that was not used before."""
        self._last += 1
        return self._last

    # ---------------------------------------------------------------- events

    def handle(self, event: Event) -> None:
        effects = self.service.handle(event, self.now_ns)
        self._events += 1
        if self._events % self.events_a_check == 0:
            self.service.check()
        self.effects += effects
        for effect in effects:
            match effect:
                case Answer(peer, reply) | AnswerWithBoard(peer, reply, _) | AnswerWithMover(peer, reply, _):
                    assert (peer, reply.id) not in self.answers, "one reply to a request"
                    self.answers[(peer, reply.id)] = reply
                case CloseDescriptors(numbers):
                    self._close(numbers)
                case Ask(StartMover(mover)):
                    self.handle(Reported(mover, Ready(4000 + mover, "rig", [])))
                case Ask(KillMover(mover)):
                    self.kills += 1
                    self.copies = [entry for entry in self.copies if entry[0] != mover]
                    self.handle(MoverGone(mover, "signal 9"))
                case Instruct(mover, order, descriptors):
                    self._close(descriptors)
                    self.orders.append(order)
                    self._obey(mover, order)
                case CloseSession():
                    pass

    def ask(self, peer: int, request: Request, descriptor: int = -1) -> Any:
        """Sends a request; returns the reply, or None when it has not come yet."""
        if descriptor >= 0:
            self.open.add(descriptor)
        self.handle(Arrived(peer, request, descriptor))
        return self.answers.get((peer, request.id))

    def report(self, mover: int, report: Report) -> None:
        self.handle(Reported(mover, report))

    def finish(self, status: str = "done", code: str = "", message: str = "") -> None:
        """Ends the jobs that are under way."""
        copies, self.copies = self.copies, []
        for mover, order in copies:
            self.report(mover, Done(order.job, status, 7, 11, code, message, order.mode))  # type: ignore[arg-type]
        unmaps, self._unmaps = self._unmaps, []
        for mover, cache in unmaps:
            self.report(mover, Unmapped(cache))

    def wait_ms(self, milliseconds: int, *, step_ms: int = 50) -> None:
        """Lets time pass in the shell's small steps, or in longer ones where minutes go by."""
        until_ns = self.now_ns + milliseconds * 1_000_000
        while self.now_ns < until_ns:
            self.now_ns = min(until_ns, self.now_ns + step_ms * 1_000_000)
            self.handle(Tick())

    def peer_gone(self, peer: int) -> None:
        self.handle(PeerGone(peer))

    def worker_gone(self, session: int) -> None:
        self.handle(WorkerGone(session))

    def _obey(self, mover: int, order: Order) -> None:
        match order:
            case MapCache(cache) if self.movers_map:
                self.report(mover, Mapped(cache))
            case Copy():
                self.copies.append((mover, order))
                if self.movers_copy:
                    self.finish()
            case UnmapCache(cache):
                if self.copies:
                    self._unmaps.append((mover, cache))
                else:
                    self.report(mover, Unmapped(cache))

    def _close(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.open.remove(number)

    # ---------------------------------------------------------------- the service's state

    def facts(self) -> dict[str, int]:
        """Counts that a refused request must leave unchanged."""
        now = self.service.status(self.now_ns)
        return {
            "namespaces": now.namespaces,
            "chunks": now.chunks,
            "used_bytes": now.arena.used_bytes,
            "sessions": now.sessions,
            "caches": now.caches,
            "leases": now.leases,
            "pins": now.pins,
            "stores": now.stores,
            "retrieves": now.retrieves,
            "movers": len(now.movers),
            "descriptors": len(self.open),
        }

    def boards_dropped(self) -> int:
        return sum(isinstance(order, DropBoard) for order in self.orders)


@dataclass
class Client:
    """A session: `peer` is its ZeroMQ identity, `local` the connection that it has attached."""

    rig: Rig
    engine: str = "engine"
    epoch: int = 1
    ranks: int = 1
    rank: int = 0
    peer: int = field(init=False)
    local: int = field(init=False)
    token: bytes = field(init=False)
    cache: int = 0

    def __post_init__(self) -> None:
        self.peer, self.local = self.rig.number(), self.rig.number()
        welcome = self.ask(self.hello())
        self.token = welcome.session
        self.rig.ask(self.local, Attach(self.rig.number(), self.token))

    def ask(self, request: Request) -> Any:
        return self.rig.ask(self.peer, request)

    def hello(self) -> Hello:
        return Hello(self.rig.number(), PROTOCOL, self.engine, self.epoch, self.ranks, self.rank, "rig")

    def offer(self) -> int:
        """The number of a descriptor that Register may name."""
        descriptor = self.rig.number()
        reply = self.rig.ask(self.local, Offer(self.rig.number()), descriptor)
        assert reply == Offered(reply.id, descriptor)
        return descriptor

    def registration(
        self,
        groups: Sequence[GroupSpec] = (FULL,),
        *,
        name: str = "kv",
        namespace: bytes = NAMESPACE,
        chunk_tokens: int = CHUNK_TOKENS,
        descriptors: Sequence[int] | None = None,
        buffer_bytes: int = BUFFER_BYTES,
        tokens_max: int = 0,
        tenant: str = "",
        model: str = "",
    ) -> Register:
        numbers = [self.offer()] if descriptors is None else descriptors
        buffers = [Buffer(number, b"", buffer_bytes) for number in numbers]
        head = self.rig.number(), name, namespace, chunk_tokens
        return Register(*head, "host", "", "", "direct", tenant, buffers, list(groups), [], tokens_max, model)

    def register(self, *args: Any, **kwargs: Any) -> "Client":
        reply = self.ask(self.registration(*args, **kwargs))
        assert isinstance(reply, Registered), reply
        self.cache = reply.cache
        return self

    def storing(self, keys: bytes, *groups: GroupBlocks) -> Store:
        return Store(self.rig.number(), self.cache, 5, 1, 10_000, 0, b"", keys, list(groups))

    def store(self, keys: bytes) -> None:
        """Stores all chunks of a prompt into a cache whose only group is FULL."""
        chunks = len(keys) // KEY_BYTES
        reply = self.ask(self.storing(keys, GroupBlocks(0, 0, ids(*range(3 * chunks)))))
        assert isinstance(reply, Stored)
        assert (reply.chunks, reply.why) == (chunks, "")

    def lookup(self, keys: bytes, namespace: bytes = NAMESPACE) -> Found:
        reply = self.ask(Lookup(self.rig.number(), namespace, keys, 1))
        assert isinstance(reply, Found), reply
        return reply

    def release(self, found: Found) -> None:
        self.ask(Release(self.rig.number(), found.lease))

    def retrieving(self, lease: int, *groups: GroupBlocks, more: bool = False) -> Retrieve:
        return Retrieve(self.rig.number(), self.cache, lease, 5, 1, 10_000, list(groups), more)


def is_refusal(reply: object, family: str, code: str, *says: str) -> bool:
    """Asserts that the reply is a typed error whose message contains all of these."""
    assert isinstance(reply, Error), reply
    assert (reply.family, reply.code) == (family, code), reply
    for text in says:
        assert text in reply.message, (text, reply.message)
    return True
