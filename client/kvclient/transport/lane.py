"""The lane: a local connection that a caller's own thread uses, for lookups on the engine's hot path.

A round trip costs two system calls on each side and no thread switch. The background thread opens lanes and callers
only use them, so no caller ever waits for a connection. A lane that fails once is closed and never used again.

ask() waits for its reply. send() does not: take() returns the replies to it, in any order, to whichever thread calls.
"""

import socket
import struct
import threading
import time

from kvclient.base.loop import Lost, Overdue, Trouble
from kvclient.transport.transports import Full, R, refusal
from kvserver.errors import RequestError
from kvserver.wire.codec import decode_reply, encode
from kvserver.wire.messages import FRAME_BYTES_MAX, Error, Found, Lookup, Pledge, Release, Reply, Unpledge

# Plain integers: combining the enumeration's members costs as much as the system call itself.
_TO_END = int(socket.MSG_TRUNC)
"""Makes a reply larger than the buffer report its size."""
_AT_ONCE = int(socket.MSG_DONTWAIT)


class Lane:
    """One lane. Owns the connected socket. Thread-safe; requests take turns."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._lock = threading.Lock()
        self._shut = False
        connected.setblocking(True)
        self._patience_ms = 0
        """Current value of SO_RCVTIMEO. One blocking recv costs less than poll and recv."""
        self._buffer = bytearray(FRAME_BYTES_MAX)
        self._sent: set[int] = set()
        """Requests of send() without a reply yet."""
        self._arrived: list[Reply] = []
        """Replies to send() that were not taken yet."""

    def ask(self, request: Lookup | Release | Pledge | Unpledge, expects: type[R], due_s: float) -> R:
        """Send a request and return its typed reply.

        RequestError: the caller is wrong. Trouble("busy"): other threads used up the time or filled the lane, and
        nothing was sent. Overdue or Lost: the lane does not work any more.
        """
        if not self._takes_turn(due_s):
            raise Trouble("busy", "other threads hold the lane")
        try:
            reply = self._round_trip(request, due_s)
        except Overdue:
            self._shut = True
            raise
        except (OSError, RequestError) as problem:
            raise self._lost(problem) from problem
        finally:
            self._leave()
        if isinstance(reply, expects):
            return reply
        if isinstance(reply, Error):
            raise refusal(reply)
        raise Lost("frame", f"expected {expects.__name__}, the server said {type(reply).__name__}")

    def send(self, request: Lookup | Release | Pledge | Unpledge) -> None:
        """Send a request and return at once.

        Trouble("busy"): another thread has the lane. Full: the server has not read earlier requests yet. Lost: as in
        ask().
        """
        if not self._lock.acquire(blocking=False):
            raise Trouble("busy", "other threads hold the lane")
        try:
            self._send(request)
            self._sent.add(request.id)
        except OSError as problem:
            raise self._lost(problem) from problem
        finally:
            self._leave()

    def take(self, due_s: float = 0.0) -> list[Reply]:
        """New replies to send(). Waits until due_s if there is none, or while other threads hold the lane.

        The caller decides whether a reply is overdue. Lost: as in ask().
        """
        if not self._sent and not self._arrived:
            return []
        if not self._takes_turn(due_s):
            return []
        try:
            while self._sent and self._receive(0.0 if self._arrived else due_s):
                pass
            taken, self._arrived = self._arrived, []  # another thread's ask() may be adding one
            return taken
        except (OSError, RequestError) as problem:
            raise self._lost(problem) from problem
        finally:
            self._leave()

    def shut(self) -> None:
        """End the lane, and any request that waits on it. Callable from any thread."""
        self._shut = True
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # already closed
        if self._lock.acquire(blocking=False):  # otherwise the thread that holds it closes
            self._socket.close()
            self._lock.release()

    def forsake_after_fork(self) -> None:
        """Close a forked child's copy of the descriptor. The parent's connection goes on."""
        self._socket.close()

    # ---------------------------------------------------------------- turns

    def _takes_turn(self, due_s: float) -> bool:
        """Acquire the lane, usually at once, without reading the clock."""
        return self._lock.acquire(blocking=False) or self._lock.acquire(timeout=max(0.0, due_s - time.monotonic()))

    def _leave(self) -> None:
        if self._shut:
            self._socket.close()
        self._lock.release()

    def _lost(self, problem: Exception) -> Lost:
        self._shut = True
        return Lost("connection-lost", str(problem))

    # ---------------------------------------------------------------- frames

    def _round_trip(self, request: Lookup | Release | Pledge | Unpledge, due_s: float) -> Reply:
        self._send(request)
        while (left_s := due_s - time.monotonic()) > 0:
            self._wait_at_most(left_s)
            try:
                reply = self._read(_TO_END)
            except BlockingIOError:
                raise Overdue from None
            if reply.id == request.id:
                return reply
            self._keep(reply)
        raise Overdue

    def _send(self, request: Lookup | Release | Pledge | Unpledge) -> None:
        if self._shut:
            raise ConnectionError("closed")
        try:
            self._socket.send(encode(request), _AT_ONCE)
        except BlockingIOError:
            raise Full("busy", "what was sent before fills the socket") from None

    def _receive(self, due_s: float) -> bool:
        """Read one reply to send(). False if none arrives until due_s."""
        left_s = due_s - time.monotonic() if due_s else 0.0
        if left_s > 0:
            self._wait_at_most(left_s)
        try:
            reply = self._read(_TO_END if left_s > 0 else _TO_END | _AT_ONCE)
        except BlockingIOError:
            return False
        self._keep(reply)
        return True

    def _read(self, flags: int) -> Reply:
        size = self._socket.recv_into(self._buffer, 0, flags)
        if not 0 < size <= len(self._buffer):
            raise ConnectionError("closed by the server" if size == 0 else f"a reply of {size} bytes")
        return decode_reply(memoryview(self._buffer)[:size])

    def _keep(self, reply: Reply) -> None:
        """Keep a reply to send() for take().

        A reply to an ask() whose caller was interrupted (KeyboardInterrupt) belongs to nobody, so its lease is
        released.
        """
        if reply.id in self._sent:
            self._sent.discard(reply.id)
            self._arrived.append(reply)
        elif isinstance(reply, Found) and reply.lease:
            self._socket.send(encode(Release(reply.id, reply.lease)), _AT_ONCE)

    def _wait_at_most(self, left_s: float) -> None:
        """Set the receive timeout, rounded up to whole milliseconds. Most calls need the same value, and no system
        call."""
        patience_ms = int(left_s * 1000) + 1
        if patience_ms != self._patience_ms:
            timeval = struct.pack("ll", patience_ms // 1000, patience_ms % 1000 * 1000)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
            self._patience_ms = patience_ms
