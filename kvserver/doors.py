"""The two sockets by which requests come in (wire/messages.py): how they are made, and what may be said at which. And
the sockets by which orders go out.

The supervisor holds the lock of the path, so a socket that lies there is one that an earlier server left.
"""

import asyncio
import grp
import os
import socket
import stat
import time
from collections import deque
from contextlib import suppress

import zmq

from kvserver.config import Config
from kvserver.errors import ConfigError
from kvserver.guests import Guests
from kvserver.passing import close_all, send
from kvserver.wire.codec import Malformed, decode_request, encode
from kvserver.wire.messages import FRAME_BYTES_MAX, Attach, Error, Hello, Lane, Request
from kvserver.wire.orders import Copy, Order

SENT_MAX = 1000
"""Replies that wait for a ZeroMQ peer that does not read; what comes after them is dropped. Each has 4 KiB at most
(router.LONG_BYTES), and most have 30 bytes."""
RECEIVED_MAX = 64
"""Requests of a ZeroMQ peer that wait for the brain; further ones stay with the peer. Bounds the memory that one peer
can take, since each may have ZMQ_FRAME_BYTES_MAX."""
ZMQ_FRAME_BYTES_MAX = 2 * FRAME_BYTES_MAX
"""ZeroMQ closes the connection of whoever sends more; up to here the refusal is a reply."""
CONNECTIONS_PER_SESSION, CONNECTIONS_MIN = 2, 64
"""At the ZeroMQ door: one, and another while a client that has lost its session opens the next."""
LOCAL_BACKLOG = 128
LINGERING_MODES = ("staged", "server-gather")
LINGER_S = 0.001
"""After a copy of GPU memory was ordered, as movers and clients do: the end of 32 MiB comes 0.8 ms later, and to wake a
process takes 50 to 200 us on a virtual machine, after which its code has gone cold."""
ORDERS_WAITING_MAX = 100_000
"""Orders that a stopped mover has not read; the jobs behind them are bounded per session."""


def open_router(config: Config) -> tuple[zmq.Socket[bytes], Guests]:
    """The ZeroMQ door, and who is connected there: look() at them now and then."""
    make_way(config.socket)
    router = zmq.Context(1).socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.SNDHWM, SENT_MAX)
    router.setsockopt(zmq.RCVHWM, RECEIVED_MAX)
    router.setsockopt(zmq.MAXMSGSIZE, ZMQ_FRAME_BYTES_MAX)
    most = max(CONNECTIONS_MIN, config.sessions_max * CONNECTIONS_PER_SESSION)
    guests = Guests(router, "connections refused", "requests", most)
    try:
        router.bind(f"ipc://{config.socket}")
    except zmq.ZMQError as problem:
        raise ConfigError("socket", f"ipc://{config.socket}: {problem}") from problem
    admit(config, config.socket)
    return router, guests


def open_local(config: Config) -> socket.socket:
    """The local door, listening."""
    path = f"{config.socket}.local"
    make_way(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        listener.bind(path)
    except OSError as problem:
        raise ConfigError("socket", f"{path}: {problem.strerror}") from problem
    admit(config, path)
    listener.listen(LOCAL_BACKLOG)
    return listener


def read_request(frame: bytes | memoryview, *, local: bool) -> Request:
    """The request in a frame that came in by this door. Raises Malformed where there is none that may.

    A session begins over ZeroMQ and is attached by a local connection, whose end tells of the worker's end."""
    request = decode_request(frame)
    if local and isinstance(request, Hello):
        raise Malformed(Error(request.id, "request", "door", "hello comes over ZeroMQ, not on a local connection"))
    if not local and isinstance(request, Attach | Lane):
        name = type(request).__name__.lower()
        raise Malformed(Error(request.id, "request", "door", f"{name} comes on a local connection, not over ZeroMQ"))
    return request


def tell(end: socket.socket, frame: bytes, flags: int = 0) -> None:
    """Sends one frame to a supervisor that may be gone: whoever receives from the same socket learns that."""
    with suppress(BrokenPipeError, ConnectionResetError):
        end.send(frame, flags)


def make_way(path: str) -> None:
    """Removes a socket that an earlier server left. Whatever else has that name stays, and stops the start."""
    try:
        mode = os.lstat(path).st_mode
        if stat.S_ISSOCK(mode):
            os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as problem:
        raise ConfigError("socket", f"{path}: {problem.strerror}") from problem
    if not stat.S_ISSOCK(mode):
        raise ConfigError("socket", f"{path} exists and is no socket; remove it, or choose another path")


def admit(config: Config, path: str) -> None:
    """Only this user, or the configured group."""
    if config.socket_group:
        os.chown(path, -1, grp.getgrnam(config.socket_group).gr_gid)
    os.chmod(path, 0o660 if config.socket_group else 0o600)


class Board:
    """A session's job state words."""

    __slots__ = ("descriptor", "pidfd")

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.pidfd = -1


class MoverDoor:
    """The brain's end of a mover's socket, and the orders that wait until the mover reads."""

    __slots__ = ("_awake", "_awake_until_s", "_loop", "_waiting", "pidfd", "socket")

    def __init__(self, end: socket.socket, pidfd: int, loop: asyncio.AbstractEventLoop) -> None:
        self.socket = end
        self.pidfd = pidfd
        self._loop = loop
        self._waiting: deque[tuple[bytes, list[int]]] = deque()
        self._awake = False
        self._awake_until_s = 0.0

    def send(self, order: Order, descriptors: list[int]) -> None:
        """Sends an order, now or as soon as there is room; closes the descriptors afterwards."""
        if isinstance(order, Copy) and order.mode in LINGERING_MODES:
            self._awake_until_s = time.monotonic() + LINGER_S
            if not self._awake:
                self._stay_awake()
        self._waiting.append((encode(order), descriptors))
        assert len(self._waiting) < ORDERS_WAITING_MAX
        if len(self._waiting) == 1:
            self._flush()

    def close(self) -> None:
        """The mover is gone, and so are the orders that it has not read."""
        self._loop.remove_reader(self.socket)
        self._loop.remove_writer(self.socket)
        for _, descriptors in self._waiting:
            close_all(descriptors)
        self.socket.close()
        os.close(self.pidfd)

    def _stay_awake(self) -> None:
        """The loop looks for work instead of sleeping, for a while after the last such order."""
        self._awake = time.monotonic() < self._awake_until_s
        if self._awake:
            self._loop.call_soon(self._stay_awake)

    def _flush(self) -> None:
        while self._waiting:
            frame, descriptors = self._waiting[0]
            try:
                with suppress(BrokenPipeError, ConnectionResetError):  # it is ending, and will be reaped
                    send(self.socket, frame, descriptors)
            except BlockingIOError:
                self._loop.add_writer(self.socket, self._flush)
                return
            close_all(descriptors)
            self._waiting.popleft()
        self._loop.remove_writer(self.socket)
