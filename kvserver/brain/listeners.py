"""The two listening sockets for requests (wire/messages.py), with the messages that each accepts, and the sockets to
the supervisor and to the movers.

The supervisor holds the lock of the path, so a socket that is found there was left by an earlier server.
"""

import asyncio
import grp
import logging
import os
import signal
import socket
import stat
import time
from collections import deque
from contextlib import suppress

from kvserver import logs
from kvserver.config.config import Config
from kvserver.errors import ConfigError
from kvserver.ipc.fd_sockets import Receiver, close_all, send
from kvserver.wire.codec import MESSAGE_CHARS_MAX, Malformed, decode_request, encode
from kvserver.wire.messages import Attach, Error, Hello, Lane, Request
from kvserver.wire.orders import ORDER_BYTES_MAX, Alive, Copy, Order, Report, Wish, decode_report

BACKLOG = 4096
"""Connections that wait until they are accepted. They take no descriptor of ours. The kernel may allow fewer
(net.core.somaxconn); a non-blocking client then gets EAGAIN and tries again."""
ACCEPTED_PER_TURN = 8
"""Connections accepted at one door before other events have their turn."""
LINGERING_MODES = ("staged", "server-gather")
LINGER_S = 0.001
"""How long the loop polls after it ordered a copy of GPU memory; movers and clients do the same. A copy of 32 MiB ends
after 0.8 ms. Waking a process takes 50 to 200 us on a virtual machine, and its code is no longer in the CPU's caches
then."""
ORDERS_WAITING_MAX = 100_000
"""Orders that a stopped mover has not read; their jobs are bounded per session."""


def open_door(config: Config, suffix: str, kind: socket.SocketKind) -> socket.socket:
    """A listening socket: the ZeroMQ door (SOCK_STREAM) has no suffix, the local door (SOCK_SEQPACKET) has `.local`."""
    path = f"{config.socket}{suffix}"
    make_way(path)
    listener = socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK)
    try:
        listener.bind(path)
    except OSError as problem:
        raise ConfigError("socket", f"{path}: {problem.strerror}") from problem
    admit(config, path)
    listener.listen(BACKLOG)
    return listener


def read_request(frame: bytes | memoryview, *, local: bool) -> Request:
    """The request in a frame. Raises Malformed if there is none, or if it is not allowed at this door.

    A session begins over ZeroMQ. A local connection attaches it; when that connection ends, the worker has ended."""
    request = decode_request(frame)
    if local and isinstance(request, Hello):
        raise Malformed(Error(request.id, "request", "door", "hello comes over ZeroMQ, not on a local connection"))
    if not local and isinstance(request, Attach | Lane):
        name = type(request).__name__.lower()
        raise Malformed(Error(request.id, "request", "door", f"{name} comes on a local connection, not over ZeroMQ"))
    return request


class SupervisorDoor:
    """The brain's socket to the supervisor. Wishes wait here while the socket's buffer is full."""

    __slots__ = ("_end", "_waiting")

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._waiting: deque[bytes] = deque()
        """Encoded wishes; at most one start and one end for each possible mover."""

    def tell(self, wish: Wish) -> None:
        self._waiting.append(encode(wish))
        self.flush()

    def alive(self) -> None:
        """Sends a sign of life, unless wishes wait or the buffer is full. Waiting wishes are tried again."""
        if self.flush():
            with suppress(OSError):
                self._end.send(encode(Alive()), socket.MSG_DONTWAIT)

    def flush(self) -> bool:
        """Sends the waiting wishes. Whether none waits any more."""
        while self._waiting:
            try:
                self._end.send(self._waiting[0], socket.MSG_DONTWAIT)
            except (BrokenPipeError, ConnectionResetError):
                pass  # whoever receives from the same socket learns that it is gone
            except OSError:
                return False
            self._waiting.popleft()
        return True


def make_way(path: str) -> None:
    """Removes a socket that an earlier server left. Raises ConfigError if the path is anything but a socket."""
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
    """Allows only this user, or also the configured group, to connect."""
    if config.socket_group:
        os.chown(path, -1, grp.getgrnam(config.socket_group).gr_gid)
    os.chmod(path, 0o660 if config.socket_group else 0o600)


class Board:
    """A session's board (memfd with its job state words), and a pidfd of its worker, or -1."""

    __slots__ = ("descriptor", "pidfd")

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.pidfd = -1


class MoverDoor:
    """The brain's end of a mover's socket, and the orders that wait until the mover reads.

    A mover that misses an order is out of step for good: it is killed, and the supervisor reaps it."""

    __slots__ = ("_awake", "_awake_until_s", "_killed", "_loop", "_waiting", "held", "pidfd", "socket")

    def __init__(self, end: socket.socket, pidfd: int, loop: asyncio.AbstractEventLoop) -> None:
        self.socket = end
        self.pidfd = pidfd
        self._loop = loop
        self._waiting: deque[tuple[bytes, list[int]]] = deque()
        self._awake = False
        self._killed = False
        self.held = 0
        """Number of descriptors that waiting orders hold."""
        self._awake_until_s = 0.0

    def send(self, order: Order, descriptors: list[int]) -> None:
        """Sends an order now, or as soon as there is room. Closes the descriptors afterwards."""
        if self._killed:
            close_all(descriptors)
            return
        if isinstance(order, Copy) and order.mode in LINGERING_MODES:
            self._awake_until_s = time.monotonic() + LINGER_S
            if not self._awake:
                self._stay_awake()
        self._waiting.append((encode(order), descriptors))
        self.held += len(descriptors)
        assert len(self._waiting) < ORDERS_WAITING_MAX
        if len(self._waiting) == 1:
            self._flush()

    def close(self) -> None:
        """Releases everything after the mover is gone. Its unread orders are dropped."""
        self._loop.remove_reader(self.socket)
        self._loop.remove_writer(self.socket)
        self._drop_orders()
        self.socket.close()
        os.close(self.pidfd)

    def kill(self, why: str) -> None:
        """Kills the mover and drops its waiting orders. Its reports still count until it is reaped."""
        if not self._killed:
            self._killed = True
            logs.event(logging.ERROR, "mover killed", ("why", why))
            self._drop_orders()
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def report(self, receiver: Receiver) -> Report | None:
        """The next report, None after the last one. A mover whose reports cannot be read is killed.

        Raises BlockingIOError."""
        try:
            frame, descriptors, cut = receiver.receive(self.socket)
            close_all(descriptors)
            if cut:
                raise ValueError(f"one has more than {ORDER_BYTES_MAX} bytes, or descriptors")
            if frame:
                report: Report = decode_report(frame)
                return report
        except BlockingIOError:
            raise
        except (OSError, ValueError, RecursionError) as problem:  # msgspec's errors are ValueErrors
            self.kill(f"its reports cannot be read: {str(problem)[:MESSAGE_CHARS_MAX]}")
        self._loop.remove_reader(self.socket)  # it is ending; the supervisor tells when it is reaped
        return None

    def _drop_orders(self) -> None:
        for _, descriptors in self._waiting:
            close_all(descriptors)
        self._waiting.clear()
        self.held = 0

    def _stay_awake(self) -> None:
        """Keeps the loop polling until LINGER_S after the last order to copy GPU memory."""
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
            except OSError as problem:
                self.kill(f"it cannot be told an order: {problem}")
                break
            close_all(descriptors)
            self._waiting.popleft()
            self.held -= len(descriptors)
        self._loop.remove_writer(self.socket)
