"""The ZeroMQ door: a listener of our own, and ZMTP spoken by us (wire/zmtp.py).

libzmq accepts as fast as it can, keeps what it has read of everybody, and ends the process that is out of descriptors.
Nothing there can be bounded from outside. Here are the bounds:

Rule 1: a connection is read when its client's turn has come (request_queue.py), one message at a time.
Rule 2: connections without a session are few; the one that is silent for longest makes room for a new one.
Rule 3: unfinished requests take UNFINISHED_BYTES_MAX in all. Beyond that, who began first is closed: a request takes
milliseconds to arrive.
Rule 4: replies that nobody reads take UNREAD_PEER_BYTES_MAX for one peer, UNREAD_BYTES_MAX in all. Further ones are
dropped, and whoever sent them is told so.
"""

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from kvserver.brain.request_queue import Line
from kvserver.ipc.fd_sockets import broken, client_of
from kvserver.wire.messages import FRAME_BYTES_MAX
from kvserver.wire.zmtp import Alien, Message, Stream, packed

READ_BYTES = 256 << 10
ACCEPTED_PER_TURN = 8
DROPPED_BYTES_MAX = 2 * FRAME_BYTES_MAX
"""Whoever sends a longer frame loses the connection; up to here the refusal is a reply."""
UNFINISHED_BYTES_MAX = 32 << 20
SMALL_BYTES = 4096
"""As much of an unfinished request counts as nothing."""
UNREAD_PEER_BYTES_MAX, UNREAD_BYTES_MAX = 1 << 20, 32 << 20
LONG_BYTES = 4096
"""A longer reply is only for a peer that reads(); another is refused in few bytes."""


@dataclass(slots=True, eq=False)
class _Connection:
    end: socket.socket
    peer: int
    client: int
    """Number of the process at the other end (passing.client_of)."""
    stream: Stream = field(default_factory=lambda: Stream(FRAME_BYTES_MAX, DROPPED_BYTES_MAX))
    waiting: deque[memoryview] = field(default_factory=deque)
    """To be sent as soon as the peer reads."""
    unread: int = 0
    """Bytes of it."""
    unfinished: int = 0
    """What counts of what it has begun to ask."""
    has_more: bool = False
    """More has come than the last message, and the loop or the line will look at it."""
    closed: bool = False


class ZmqDoor:
    """Everybody who is connected, by number. Calls `arrived` for each message, `gone` for a peer that had a session and
    left."""

    def __init__(
        self,
        listener: socket.socket,
        loop: asyncio.AbstractEventLoop,
        number: Callable[[], int],
        arrived: Callable[[int, Message], None],
        line: Line,
        *,
        gone: Callable[[int], None],
        strangers_max: int,
    ) -> None:
        """Beside the strangers there is one connection for each session."""
        self._listener, self._loop, self._line = listener, loop, line
        self._number, self._arrived, self._gone = number, arrived, gone
        self._strangers_max = strangers_max
        self._connections: dict[int, _Connection] = {}
        self._strangers: dict[_Connection, None] = {}
        """Those that have been silent for longest come first."""
        self._unfinished: dict[_Connection, None] = {}
        self._unfinished_bytes = self._unread_bytes = 0

    def accept(self) -> None:
        """Takes in who waits at the listener. Raises OSError when there are no descriptors or memory for more."""
        for _ in range(ACCEPTED_PER_TURN):
            try:
                end, _ = self._listener.accept()
            except BlockingIOError:
                return
            end.setblocking(False)
            connection = _Connection(end, self._number(), client_of(end))
            self._connections[connection.peer] = connection
            self._add_stranger(connection)
            self._loop.add_reader(end, self._readable, connection)
            self._send_replies(connection)

    def send(self, peer: int, frame: bytes) -> bool:
        """False when it was dropped: the peer has gone, or reads too little."""
        connection = self._connections.get(peer)
        return connection is not None and self._send(connection, packed(frame))

    def reads(self, peer: int) -> bool:
        """Whether the kernel has taken all replies of the peer."""
        connection = self._connections.get(peer)
        return connection is not None and not connection.waiting

    def welcome(self, peer: int) -> None:
        """It has a session."""
        if (connection := self._connections.get(peer)) is not None:
            self._strangers.pop(connection, None)

    def forget(self, peer: int) -> None:
        """Its session is over. Whoever is connected there is a stranger again, and somebody else."""
        if (connection := self._connections.pop(peer, None)) is not None:
            connection.peer = self._number()
            self._connections[connection.peer] = connection
            self._add_stranger(connection)

    def close_broken(self) -> None:
        """To be called now and then (passing.broken)."""
        by_end = {connection.end: connection for connection in self._connections.values()}
        for end in broken(by_end):
            self._close(by_end[end])

    def _heard(self, stranger: _Connection) -> None:
        """Others have been silent for longer."""
        self._strangers[stranger] = self._strangers.pop(stranger)

    def _add_stranger(self, connection: _Connection) -> None:
        if len(self._strangers) >= self._strangers_max:
            self._close(next(iter(self._strangers)))
        self._strangers[connection] = None

    # ---------------------------------------------------------------- in

    def _readable(self, connection: _Connection) -> None:
        if not connection.has_more:
            self._take_turn(connection)

    def _take_turn(self, connection: _Connection) -> None:
        if connection.closed:
            return
        if self._line.at_once(connection.client):
            self._line.serve(connection.client, partial(self._serve, connection))
        else:
            self._loop.remove_reader(connection.end)
            self._line.wait(connection.client, partial(self._serve_in_line, connection))

    def _serve_in_line(self, connection: _Connection) -> None:
        if not connection.closed:
            self._serve(connection)
        if not connection.closed:
            self._loop.add_reader(connection.end, self._readable, connection)

    def _serve(self, connection: _Connection) -> None:
        """The next message, if there is one as a whole."""
        if not connection.has_more and not self._receive(connection):
            return
        connection.has_more = False
        try:
            message = connection.stream.next()
        except Alien:
            self._close(connection)
            return
        if connection.stream.replies:
            self._send_replies(connection)
        if message is None:
            self._count_unfinished(connection)
            return
        if connection in self._strangers:
            self._heard(connection)
        self._arrived(connection.peer, message)
        if not connection.closed:
            connection.has_more = True
            self._loop.call_soon(self._take_turn, connection)

    def _receive(self, connection: _Connection) -> bool:
        """Whether anything has come."""
        try:
            data = connection.end.recv(READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._close(connection)
            return False
        connection.stream.feed(data)
        return True

    def _count_unfinished(self, connection: _Connection) -> None:
        held = connection.stream.held
        count = held if held > SMALL_BYTES else 0
        self._unfinished_bytes += count - connection.unfinished
        connection.unfinished = count
        if count:
            self._unfinished.setdefault(connection)
            while self._unfinished_bytes > UNFINISHED_BYTES_MAX:
                self._close(next(iter(self._unfinished)))
        else:
            self._unfinished.pop(connection, None)

    # ---------------------------------------------------------------- out

    def _send_replies(self, connection: _Connection) -> None:
        replies, connection.stream.replies = connection.stream.replies, b""
        self._send(connection, replies)

    def _send(self, connection: _Connection, data: bytes) -> bool:
        if connection.closed:
            return False
        rest = memoryview(data)
        if not connection.waiting:
            try:
                rest = rest[connection.end.send(data) :]
            except BlockingIOError:
                pass  # all of it waits
            except OSError:
                self._loop.call_soon(self._close, connection)
                return False
        elif connection.unread + len(rest) > UNREAD_PEER_BYTES_MAX or self._unread_bytes > UNREAD_BYTES_MAX:
            return False
        if rest:
            if not connection.waiting:
                self._loop.add_writer(connection.end, self._write, connection)
            connection.waiting.append(rest)
            connection.unread += len(rest)
            self._unread_bytes += len(rest)
        return True

    def _write(self, connection: _Connection) -> None:
        while connection.waiting:
            data = connection.waiting[0]
            try:
                sent = connection.end.send(data)
            except BlockingIOError:
                return
            except OSError:
                self._close(connection)
                return
            connection.unread -= sent
            self._unread_bytes -= sent
            if sent < len(data):
                connection.waiting[0] = data[sent:]
            else:
                connection.waiting.popleft()
        self._loop.remove_writer(connection.end)

    def _close(self, connection: _Connection) -> None:
        if connection.closed:
            return
        connection.closed = True
        del self._connections[connection.peer]
        has_session = connection not in self._strangers
        self._strangers.pop(connection, None)
        self._unfinished.pop(connection, None)
        self._unfinished_bytes -= connection.unfinished
        self._unread_bytes -= connection.unread
        self._loop.remove_reader(connection.end)
        self._loop.remove_writer(connection.end)
        connection.end.close()
        if has_session:
            self._gone(connection.peer)
