"""One session: from Hello until one of its two connections is lost. Every loss leads to a new session.

The attached connection shows the server that this process lives. It is opened first: if nobody listens, connecting
fails at once. The end of the server ends it.
"""

import itertools
import os
from collections import deque
from contextlib import ExitStack, suppress
from typing import NamedTuple

from kvclient.base.loop import Loop, Lost, Waiter
from kvclient.counters import Counters
from kvclient.transport.transports import Door, Full, LocalTransport, R, ZmqTransport
from kvserver._native import Board
from kvserver.wire.messages import BOARD_WORDS, PROTOCOL, Attach, Attached, Hello, Request, Welcome


class Identity(NamedTuple):
    """The client's identity for the server."""

    engine: str
    epoch: int
    ranks: int
    rank: int
    software: str


class Session:
    """One session. `welcome`, `board` and `words` are set once open() has returned. Belongs to the loop's thread."""

    welcome: Welcome
    board: Board
    """The job board. Stays mapped while a job refers to it, also after the session is lost."""
    words: deque[int]
    """Free job words, longest unused first. A word comes back when its job has ended, never before."""

    def __init__(self, loop: Loop, counters: Counters, path: str, ids: "itertools.count[int]") -> None:
        """Lost if nobody listens. RequestError if the listener may not be the server."""
        self.lost: Lost | None = None
        self.ready = False
        """True after open() has returned, until the session is lost."""
        self.names: set[str] = set()
        """Names of the caches that this session has ever registered."""
        self.ids = ids
        self._loop = loop
        self._tied: set[Waiter] = set()
        self._asks_by_zmq = 0
        with ExitStack() as undo:
            try:
                local = LocalTransport(local_path(path))
                undo.callback(local.close)
                by_zmq = ZmqTransport(loop.context, path)
            except OSError as problem:
                raise Lost("not-connected", str(problem)) from problem
            undo.pop_all()
        self.local = Door(loop, counters, local, self.lose)
        self.zmq = Door(loop, counters, by_zmq, self.lose)

    async def open(self, identity: Identity, due_s: float) -> None:
        """Send Hello, then Attach. RequestError if the server refuses the client, Trouble if it is not there."""
        hello = Hello(next(self.ids), PROTOCOL, *identity)
        self.welcome = await self.zmq.ask(hello, Welcome, due_s)
        attach = Attach(next(self.ids), self.welcome.session)
        _, descriptors = await self.local.ask_for_descriptor(attach, Attached, due_s)
        try:
            if len(descriptors) != 1:
                raise Lost("frame", f"Attached came with {len(descriptors)} descriptors, expected the job board's")
            self.board = Board(descriptors[0], BOARD_WORDS)
        except (ValueError, OSError) as problem:
            raise Lost("frame", f"the job board cannot be mapped: {problem}") from problem
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self.words = deque(range(BOARD_WORDS))
        self.ready = True

    async def ask(self, request: Request, expects: type[R], due_s: float) -> R:
        """Send a job's request and return its reply, over the local connection, which saves two thread switches each
        way.

        A request that is too long for it, or finds it full, goes over ZeroMQ, which has more room. While one does, all
        others follow it, because a store must not arrive before the store that it continues.
        """
        if not self._asks_by_zmq:
            with suppress(Full):
                return await self.local.ask(request, expects, due_s)
        self._asks_by_zmq += 1
        try:
            return await self.zmq.ask(request, expects, due_s)
        finally:
            self._asks_by_zmq -= 1

    @property
    def heard_s(self) -> float:
        """Time of the server's last message on either connection."""
        return max(self.local.heard_s, self.zmq.heard_s)

    def lose(self, lost: Lost) -> None:
        """End both connections and everything that waits on the session."""
        if self.lost is not None:
            return
        self.lost, self.ready = lost, False
        for door in (self.local, self.zmq):
            door.lose(lost)
        for waiter in self._tied:
            self._loop.fail(waiter, lost)
        self._tied.clear()

    def tie(self, waiter: Waiter) -> None:
        """Make the waiter fail if the session is lost."""
        if self.lost is not None:
            self._loop.fail(waiter, self.lost)
        else:
            self._tied = {other for other in self._tied if not other.settled}
            self._tied.add(waiter)

    def forsake_after_fork(self) -> None:
        """Close a forked child's copy of the attached connection.

        The child cannot reach the DEALER's copy. That copy keeps nothing alive, because the server watches the attached
        connection and the process itself.
        """
        self.local.forsake_after_fork()

    async def wait(self, waiter: Waiter) -> None:
        """Wait until the waiter is settled. Raises Lost if the session is lost before."""
        self.tie(waiter)
        await waiter


def local_path(path: str) -> str:
    return f"{path}.local"
