"""The lane: a local connection on which a caller's own thread asks and waits, for lookups on the engine's hot path.

A round trip costs two system calls on each side and no thread hop. The background thread opens lanes; callers only use
them, so no caller ever waits for a connection. A lane that fails once is closed and never used again.
"""

import socket
import struct
import threading
import time

from kvclient.doors import R, refusal
from kvclient.loop import Lost, Overdue, Trouble
from kvserver.errors import RequestError
from kvserver.wire.codec import decode_reply, encode
from kvserver.wire.messages import FRAME_BYTES_MAX, Error, Found, Lookup, Release, Reply


class Lane:
    """Owns the connected socket. Thread-safe; requests take turns."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._lock = threading.Lock()
        self._shut = False
        connected.setblocking(True)
        self._patience_ms = 0
        """What SO_RCVTIMEO is set to: one blocking recv costs less than poll and recv."""
        self._buffer = bytearray(FRAME_BYTES_MAX)

    def ask(self, request: Lookup | Release, expects: type[R], due_s: float) -> R:
        """The typed reply. RequestError when the caller is wrong. Trouble("busy") when other threads used all the time
        up: nothing was sent then. Overdue or Lost when the lane does not work any more."""
        if not self._lock.acquire(timeout=max(0.0, due_s - time.monotonic())):
            raise Trouble("busy", "other threads hold the lane")
        try:
            reply = self._round_trip(request, due_s)
        except Overdue:
            self._shut = True
            raise
        except (OSError, RequestError) as problem:
            self._shut = True
            raise Lost("connection-lost", str(problem)) from problem
        finally:
            if self._shut:
                self._socket.close()
            self._lock.release()
        if isinstance(reply, expects):
            return reply
        if isinstance(reply, Error):
            raise refusal(reply)
        raise Lost("frame", f"expected {expects.__name__}, the server said {type(reply).__name__}")

    def shut(self) -> None:
        """From any thread: ends the lane, and a request that waits on it."""
        self._shut = True
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # closed already
        if self._lock.acquire(blocking=False):  # otherwise the thread that holds it closes
            self._socket.close()
            self._lock.release()

    def forsake_after_fork(self) -> None:
        """In a forked child: closes its copy of the descriptor; the connection stays the parent's."""
        self._socket.close()

    def _round_trip(self, request: Lookup | Release, due_s: float) -> Reply:
        if self._shut:
            raise ConnectionError("closed")
        try:
            self._socket.send(encode(request), socket.MSG_DONTWAIT)
        except BlockingIOError:
            raise Overdue from None  # what was sent before fills the socket: the server has not read for long
        while (left_s := due_s - time.monotonic()) > 0:
            self._wait_at_most(left_s)
            try:
                size = self._socket.recv_into(self._buffer, 0, socket.MSG_TRUNC)
            except BlockingIOError:
                raise Overdue from None
            if not 0 < size <= len(self._buffer):
                raise ConnectionError("closed by the server" if size == 0 else f"a reply of {size} bytes")
            reply = decode_reply(memoryview(self._buffer)[:size])
            if reply.id == request.id:
                return reply
            self._drop(reply)
        raise Overdue

    def _drop(self, reply: Reply) -> None:
        """The reply to a request whose caller was interrupted (KeyboardInterrupt) while it waited; or to what is sent
        here. Nobody knows of the lease that it brings."""
        if isinstance(reply, Found) and reply.lease:
            self._socket.send(encode(Release(reply.id, reply.lease)), socket.MSG_DONTWAIT)

    def _wait_at_most(self, left_s: float) -> None:
        """To the next whole millisecond, which is the same for most calls and then needs no system call."""
        patience_ms = int(left_s * 1000) + 1
        if patience_ms != self._patience_ms:
            timeval = struct.pack("ll", patience_ms // 1000, patience_ms % 1000 * 1000)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
            self._patience_ms = patience_ms
