"""The server's two doors as conversations use them: requests go out, replies come in, in any order.

A Door belongs to whichever thread has the loop's turn. It matches replies to requests by id and drops replies that
nobody waits for. If the connection is lost, it ends every wait.
"""

import logging
import math
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, Protocol, TypeVar

import zmq

from kvclient.base.loop import Loop, Lost, Source, Trouble, Waiter
from kvclient.counters import Counters
from kvclient.transport import server_owner
from kvserver.errors import RequestError
from kvserver.wire.codec import decode_reply, encode
from kvserver.wire.messages import FRAME_BYTES_MAX, Error, Found, Frame, Release, Released, Reply, Request

log = logging.getLogger(__name__)

R = TypeVar("R", bound=Frame)

FRAMES_PER_TURN = 64
DESCRIPTORS_MAX = 4
LOCAL_FRAME_BYTES_MAX = 64 << 10
"""Fits several times into a Unix socket's default buffer of 208 KiB."""
ZMQ_RECONNECT_MS = 20
ZMQ_RECONNECT_MS_MAX = 500

RACES = frozenset({"cache-unknown", "cache-not-mapped", "lease-unknown", "lease-used"})
"""Refusals that a correct caller can meet: the server or a mover has just died, a lease has expired, or the last part
of a retrieve has overtaken an earlier one."""
LASTING = frozenset({"slot-size", "prompt-size", "namespace-size", "tenant-size"})
"""Bounds that waiting does not change: cache and server do not fit each other as configured."""


class Full(Trouble):
    """The frame was not sent, because there is no room."""


class Answer(NamedTuple):
    reply: Reply
    descriptors: tuple[int, ...]
    """The receiver has to close these."""


class Transport(Protocol):
    """A connection that moves frames without blocking. Raises OSError if it cannot any more."""

    for_guests: bool
    """Whether a guest may send while the loop's own thread polls."""

    @property
    def source(self) -> Source: ...
    def send(self, frame: bytes, descriptor: int) -> None:
        """Send a frame. BlockingIOError if it cannot be sent this way now."""

    def receive(self) -> tuple[bytes, tuple[int, ...]] | None:
        """The next frame, or None if none has come. ConnectionError at the end of the stream."""

    def close(self) -> None: ...


class ZmqTransport:
    """A DEALER connection, new for each session, so that nothing of an earlier session can arrive on it."""

    for_guests = False

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", path: str) -> None:
        try:
            self._socket = context.socket(zmq.DEALER)
        except zmq.ZMQError as problem:  # out of descriptors
            raise OSError(problem.errno, problem.strerror) from problem
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, ZMQ_RECONNECT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, ZMQ_RECONNECT_MS_MAX)
        self._socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_MAX)
        self._socket.connect(f"ipc://{path}")

    @property
    def source(self) -> Source:
        return self._socket

    def send(self, frame: bytes, descriptor: int) -> None:
        assert descriptor < 0
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            raise BlockingIOError("the ZeroMQ queue is full") from None

    def receive(self) -> tuple[bytes, tuple[int, ...]] | None:
        try:
            return self._socket.recv(zmq.NOBLOCK), ()
        except zmq.Again:
            return None

    def close(self) -> None:
        self._socket.close()


class LocalTransport:
    """A SOCK_SEQPACKET connection, which carries descriptors."""

    for_guests = True

    def __init__(self, path: str) -> None:
        """OSError if nobody listens. RequestError if the listener may not be the server."""
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            self.socket.connect(path)
            server_owner.check(self.socket, path)
        except (OSError, RequestError):
            self.socket.close()
            raise

    @property
    def source(self) -> Source:
        return self.socket.fileno()

    def send(self, frame: bytes, descriptor: int) -> None:
        if len(frame) > LOCAL_FRAME_BYTES_MAX:
            raise BlockingIOError(f"a frame of {len(frame)} bytes goes by ZeroMQ")
        socket.send_fds(self.socket, [frame], [descriptor] if descriptor >= 0 else [])

    def receive(self) -> tuple[bytes, tuple[int, ...]] | None:
        try:
            frame, descriptors, flags, _ = socket.recv_fds(
                self.socket, FRAME_BYTES_MAX, DESCRIPTORS_MAX, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None
        if not frame or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            close_all(descriptors)
            raise ConnectionError("cut off" if frame else "closed by the server")
        return frame, tuple(descriptors)

    def close(self) -> None:
        self.socket.close()


class Door:
    """One connection to the server. `on_lost` is called once, when it cannot be used any more."""

    def __init__(self, loop: Loop, counters: Counters, transport: Transport, on_lost: Callable[[Lost], None]) -> None:
        self._loop = loop
        self._counters = counters
        self._transport = transport
        self._on_lost = on_lost
        self._asks: dict[int, Waiter] = {}
        self._lost: Lost | None = None
        self.heard_s = -math.inf
        """Time of the last received frame."""
        loop.watch(transport.source, self._readable)

    async def ask(self, request: Request, expects: type[R], due_s: float, *, descriptor: int = -1) -> R:
        """Send a request and return its typed reply. RequestError: the caller is wrong. Trouble: everything else."""
        reply, descriptors = await self.ask_for_descriptor(request, expects, due_s, descriptor=descriptor)
        close_all(descriptors)
        return reply

    async def ask_for_descriptor(
        self, request: Request, expects: type[R], due_s: float, *, descriptor: int = -1
    ) -> tuple[R, tuple[int, ...]]:
        if not self._transport.for_guests:
            await self._loop.own_thread()
        if self._lost is not None:
            raise self._lost
        waiter = self._asks[request.id] = Waiter(due_s)
        try:
            self._transport.send(encode(request), descriptor)
            answer: Answer = await waiter
        except BlockingIOError:
            raise Full("busy", "the server does not read") from None
        except OSError as cause:
            await self._loop.own_thread()
            raise self.lose(Lost("connection-lost", str(cause))) from cause
        finally:
            del self._asks[request.id]
        if isinstance(answer.reply, expects):
            return answer.reply, answer.descriptors
        close_all(answer.descriptors)
        if isinstance(answer.reply, Error):
            problem = refusal(answer.reply)
            raise self.lose(problem) if isinstance(problem, Lost) else problem
        raise self.lose(Lost("frame", f"expected {expects.__name__}, the server said {type(answer.reply).__name__}"))

    def lose(self, lost: Lost) -> Lost:
        """End the connection and every wait on it. Returns the first loss, for raising."""
        if self._lost is None:
            self._lost = lost
            self._loop.unwatch(self._transport.source)
            self._transport.close()
            for waiter in self._asks.values():
                self._loop.fail(waiter, lost)
            self._on_lost(lost)
        return self._lost

    def detach(self) -> None:
        """Stop watching the connection, which lives on elsewhere."""
        assert not self._asks
        self._loop.unwatch(self._transport.source)
        self._lost = Lost("detached")

    def forsake_after_fork(self) -> None:
        """Close a forked child's copy of the descriptor and nothing else. The parent's connection goes on."""
        self._transport.close()

    def _readable(self) -> None:
        try:
            for _ in range(FRAMES_PER_TURN):
                received = None if self._lost else self._transport.receive()
                if received is None:
                    return
                self.heard_s = time.monotonic()
                self._take(*received)
        except OSError as problem:
            self.lose(Lost("connection-lost", str(problem)))

    def _take(self, frame: bytes, descriptors: tuple[int, ...]) -> None:
        try:
            reply = decode_reply(frame)
        except RequestError as error:
            close_all(descriptors)
            self.lose(Lost("frame", error.message))
            return
        waiter = self._asks.get(reply.id)
        if waiter is None or waiter.settled:
            close_all(descriptors)
            self._drop(reply)
            return
        self._loop.settle(waiter, Answer(reply, descriptors))

    def _drop(self, reply: Reply) -> None:
        """Drop a reply that nobody waits for. A lease that comes too late is released."""
        if isinstance(reply, Released):
            return  # the reply to the Release sent below
        self._counters.add("replies_late")
        match reply:
            case Found(lease=lease) if lease:
                with suppress(BlockingIOError):  # on failure the lease expires by itself
                    self._transport.send(encode(Release(reply.id, lease)), -1)
            case Error(id=0):
                log.warning("the server could not read a request code=%s message=%s", reply.code, reply.message)


def refusal(error: Error) -> RequestError | Trouble:
    """The exception for an Error frame: the caller's mistake, the end of the session, or a passing problem."""
    if error.code == "session-unknown":
        return Lost(error.code, error.message)
    if error.code in LASTING or (error.family == "request" and error.code not in RACES):
        return RequestError(error.code, error.message)
    return Trouble(error.code, error.message, unchanged=error.family == "resource")


def close_all(descriptors: tuple[int, ...] | list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
