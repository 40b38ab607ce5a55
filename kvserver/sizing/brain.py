"""One service with an engine connected to it, and movers that move nothing.

The server's own code decides which chunks are found, stored and evicted. There are no sockets and no bytes, and time
stands still while a request is handled. A copy ends when end_oldest_copy() is called. What a remote store is asked for
has happened when a call returns.
"""

import random
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvserver.errors import ConfigError
from kvserver.service.base.effects import Answer, AnswerWithBoard, Ask, Effect, Instruct
from kvserver.service.base.events import ArenaGrew, Arrived, Event, Reported, Tick
from kvserver.service.service import Service
from kvserver.service.state.bounds import Bounds
from kvserver.service.state.core import MILLISECOND_NS
from kvserver.sizing.engine import Ended, Hit
from kvserver.sizing.store import RemoteOrder, SharedStore, StoreMover
from kvserver.wire.admin import Changed, Held, LetGo, TenantCleared
from kvserver.wire.messages import (
    KEY_BYTES,
    PROTOCOL,
    Attach,
    Attached,
    Buffer,
    Error,
    Found,
    GroupBlocks,
    GroupSpec,
    Hello,
    Lookup,
    Offer,
    RegionRun,
    Register,
    Registered,
    Release,
    Reply,
    Request,
    Retrieve,
    Retrieved,
    Store,
    Stored,
    Welcome,
)
from kvserver.wire.orders import Copy, Done, MapCache, Mapped, Ready, RemoteIs, StartMover

NAMESPACE = bytes(31) + b"\1"
ROUTER, LOCAL = 1, 2
"""Peers for the two connections: ZeroMQ and local socket."""
DESCRIPTOR = 3
STEP_NS = MILLISECOND_NS
"""Time between two events, so that each has its own time of last use."""
DEADLINE_MS = 10_000
PAGES_SPAN = 1 << 40
LOOKUPS_MAX = 64
"""Lookups of one prompt whose chunks come from a remote store: one for each 256 chunks, and some to spare."""


class Brain:
    """A server as engine.Link, for any number of engines of one kind."""

    def __init__(
        self,
        bounds: Bounds,
        *,
        block_tokens: int,
        blocks_per_chunk: int,
        token_bytes: int,
        store: SharedStore | None = None,
    ) -> None:
        """store: what bounds.remotes stands for. Raises ConfigError if the arena cannot hold a chunk."""
        bounds = replace(bounds, remote_tell_ms=0, remote_listen_ms=0)
        self.service = Service(bounds, random.Random(0).randbytes)
        self.copies: deque[tuple[int, Copy]] = deque()
        """(mover, order) of copies in flight, oldest first."""
        self._store = StoreMover(store) if store is not None else None
        self._asked: deque[tuple[int, RemoteOrder]] = deque()
        """(mover, order) of what the remote store has not answered yet."""
        self._blocks_per_chunk = blocks_per_chunk
        self._now_ns = STEP_NS
        self._requests = 0
        self._waiting: dict[int, Callable[[Reply], None]] = {}
        self._register(block_tokens, block_tokens * token_bytes)
        for _ in ("its mover starts", "the namespace gets its epoch", "announcements are read"):
            self._let_store_work()

    # ---------------------------------------------------------------- engine.Link

    def lookup(self, keys: Sequence[bytes], chunks_wanted_min: int) -> Hit:
        self._let_store_work()  # what other machines have told is known
        found = self._look_up(keys, chunks_wanted_min)
        for _ in range(LOOKUPS_MAX):
            if not found.coming:
                break
            if found.lease:
                self.release(found.lease)
            found = self._look_up(keys, chunks_wanted_min)
        return Hit(found.chunks, found.lease or None)

    def release(self, lease: object) -> None:
        assert isinstance(lease, int)
        self._ask(Release(self._number(), lease))

    def retrieve(self, lease: object, first_block: int, blocks: Sequence[int], done: Callable[[Ended], None]) -> None:
        assert isinstance(lease, int)
        groups = [GroupBlocks(0, first_block, array("i", blocks).tobytes())]
        self._begin(
            Retrieve(self._number(), self._cache, lease, 0, 1, DEADLINE_MS, groups, False),
            lambda reply: done(_ended(reply)),
        )

    def store(
        self,
        first_chunk: int,
        parent: bytes,
        keys: Sequence[bytes],
        blocks: Sequence[int],
        done: Callable[[Ended], None],
    ) -> None:
        groups = [GroupBlocks(0, first_chunk * self._blocks_per_chunk, array("i", blocks).tobytes())]
        self._begin(
            Store(self._number(), self._cache, 0, 1, DEADLINE_MS, first_chunk, parent, b"".join(keys), groups),
            lambda reply: done(_ended(reply)),
        )

    def end_oldest_copy(self) -> None:
        """Ends the copy that began first, and answers its request."""
        mover, order = self.copies.popleft()
        self._handle(Reported(mover, Done(order.job, "done", 0, 0, "", "", order.mode)))
        self._let_store_work()

    # ---------------------------------------------------------------- inside

    def _look_up(self, keys: Sequence[bytes], chunks_wanted_min: int) -> Found:
        found = self._ask(Lookup(self._number(), NAMESPACE, b"".join(keys), chunks_wanted_min))
        assert isinstance(found, Found), found
        self._let_store_work()
        return found

    def _let_store_work(self) -> None:
        """Lets the service order what it wants from the remote store, until it wants no more."""
        if self._store is None:
            return
        for _ in ("what is wanted", "what came of it is told"):
            self._handle(Tick())
            while self._asked:
                mover, order = self._asked.popleft()
                self._handle(Reported(mover, self._store.answer(order)))

    def _register(self, block_tokens: int, page_bytes: int) -> None:
        """Registers one cache of full attention with one rank, large enough for any block id."""
        self._handle(ArenaGrew(self.service.status(0).arena.slabs_total, ""))
        welcome = self._ask(Hello(self._number(), PROTOCOL, "sizing", 1, 1, 0, "kvserver size"))
        assert isinstance(welcome, Welcome), welcome
        attached = self._ask(Attach(self._number(), welcome.session), peer=LOCAL)
        assert isinstance(attached, Attached), attached
        self._ask(Offer(self._number()), peer=LOCAL, descriptor=DESCRIPTOR)
        blocks = PAGES_SPAN // page_bytes
        run = RegionRun(0, 0, 1, PAGES_SPAN, page_bytes, page_bytes)
        group = GroupSpec(block_tokens, blocks, "full", 0, 1, 0, 1, 0, [run])
        buffers = [Buffer(DESCRIPTOR, b"", PAGES_SPAN)]
        chunk_tokens = block_tokens * self._blocks_per_chunk
        reply = self._ask(
            Register(
                self._number(), "kv", NAMESPACE, chunk_tokens, "host", "", "", "direct", "", buffers, [group], [], 0, ""
            )
        )
        if isinstance(reply, Error):
            raise ConfigError("sizing", reply.message)
        assert isinstance(reply, Registered), reply
        self._cache = reply.cache

    def _number(self) -> int:
        self._requests += 1
        return self._requests

    def _ask(self, request: Request, *, peer: int = ROUTER, descriptor: int = -1) -> Reply:
        """The reply to a request that is answered at once."""
        replies: list[Reply] = []
        self._begin(request, replies.append, peer=peer, descriptor=descriptor)
        return replies[0]

    def _begin(
        self, request: Request, heard: Callable[[Reply], None], *, peer: int = ROUTER, descriptor: int = -1
    ) -> None:
        self._waiting[request.id] = heard
        self._handle(Arrived(peer, request, descriptor))

    def _handle(self, event: Event) -> None:
        self._now_ns += STEP_NS
        for effect in self.service.handle(event, self._now_ns):
            self._carry_out(effect)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Answer(_, reply) | AnswerWithBoard(_, reply, _):
                assert not isinstance(reply, Held | LetGo | Changed | TenantCleared), (
                    "operators are answered so, and here are none"
                )
                self._waiting.pop(reply.id)(reply)
            case Ask(StartMover(mover, device)):
                self._handle(Reported(mover, Ready(mover, "none", [])))
                if device == "remote":
                    self._handle(Reported(mover, RemoteIs("", [])))
            case Instruct(mover, asked) if isinstance(asked, RemoteOrder):
                self._asked.append((mover, asked))
            case Instruct(mover, MapCache(cache)):
                self._handle(Reported(mover, Mapped(cache)))
            case Instruct(mover, Copy() as order):
                self.copies.append((mover, order))
            case _:
                pass  # ledger, log and descriptors do not exist here


def _ended(reply: Reply) -> Ended:
    match reply:
        case Stored():
            return Ended(reply.why, 0, chunks_held=reply.chunks, bytes=reply.bytes)
        case Retrieved():
            return Ended("", 0, bytes=reply.bytes)
        case _:
            return Ended(str(reply), 0)


def key_of(block: int) -> bytes:
    """The key of the prefix that ends in this block: block ids already stand for whole prefixes.

    Never all zeros, which is no parent's name.
    """
    return (block + 1).to_bytes(KEY_BYTES, "little")
