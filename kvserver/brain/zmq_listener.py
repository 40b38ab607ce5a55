"""The ZeroMQ door: our own listener, with our own implementation of ZMTP (wire/zmtp.py).

libzmq accepts as fast as it can, buffers what it has read without a bound, and aborts a process that runs out of
descriptors. None of that can be bounded from outside. This module has these bounds:

Rule 1: a connection is read when its client's turn has come (fair_turns.py), one message at a time.
Rule 2: connections without a session are few; the one that is silent for longest makes room for a new one.
Rule 3: unfinished requests take UNFINISHED_BYTES_MAX in all. Above that, the connection whose request began first is
closed: a request takes milliseconds to arrive.
Rule 4: unread replies take UNREAD_PEER_BYTES_MAX for one peer and UNREAD_BYTES_MAX in all. Further replies are dropped,
and send() returns False.
"""

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from kvserver.brain.fair_turns import Line
from kvserver.brain.listeners import ACCEPTED_PER_TURN
from kvserver.ipc.fd_sockets import broken, client_of
from kvserver.wire.messages import FRAME_BYTES_MAX
from kvserver.wire.zmtp import Alien, Message, Stream, packed

READ_BYTES = 256 << 10
DROPPED_BYTES_MAX = 2 * FRAME_BYTES_MAX
"""A peer that sends a longer frame loses its connection. Frames between FRAME_BYTES_MAX and this are refused with a
reply."""
UNFINISHED_BYTES_MAX = 32 << 20
SMALL_BYTES = 4096
"""Unfinished requests up to this size are not counted."""
UNREAD_PEER_BYTES_MAX, UNREAD_BYTES_MAX = 1 << 20, 32 << 20
LONG_BYTES = 4096
"""Longer replies are sent only to a peer that reads(); other peers get a short error."""


@dataclass(slots=True, eq=False)
class _Connection:
    end: socket.socket
    peer: int
    client: int
    """Number of the process at the other end (fd_sockets.client_of)."""
    stream: Stream = field(default_factory=lambda: Stream(FRAME_BYTES_MAX, DROPPED_BYTES_MAX))
    waiting: bytearray = field(default_factory=bytearray)
    """Data to be sent as soon as the peer reads. One array, because a small reply as an object takes several times its
    bytes."""
    unfinished: int = 0
    """Counted bytes of the unfinished request; 0 up to SMALL_BYTES."""
    has_more: bool = False
    """The stream may hold another message; the loop or the line will look at it."""
    closed: bool = False


class ZmqDoor:
    """All ZeroMQ connections, by the number of the peer.

    Calls `arrived` for each message, and `gone` when a peer with a session has left."""

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
        """strangers_max: bound on connections without a session; each session has one more connection."""
        self._listener, self._loop, self._line = listener, loop, line
        self._number, self._arrived, self._gone = number, arrived, gone
        self._strangers_max = strangers_max
        self._connections: dict[int, _Connection] = {}
        self._strangers: dict[_Connection, None] = {}
        """Connections without a session; the one that is silent for longest comes first."""
        self._unfinished: dict[_Connection, None] = {}
        self._unfinished_bytes = self._unread_bytes = 0

    def accept(self) -> None:
        """Accepts up to ACCEPTED_PER_TURN connections. Raises OSError when descriptors or memory run out."""
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
        """Sends a reply. False when it was dropped: the peer has gone, or reads too little."""
        connection = self._connections.get(peer)
        return connection is not None and self._send(connection, packed(frame))

    def reads(self, peer: int) -> bool:
        """Whether the kernel has taken all replies of the peer."""
        connection = self._connections.get(peer)
        return connection is not None and not connection.waiting

    def welcome(self, peer: int) -> None:
        """The peer has a session now, so it is no stranger any more."""
        if (connection := self._connections.get(peer)) is not None:
            self._strangers.pop(connection, None)

    def forget(self, peer: int) -> None:
        """The peer's session is over. Its connection becomes a stranger with a new number."""
        if (connection := self._connections.pop(peer, None)) is not None:
            connection.peer = self._number()
            self._connections[connection.peer] = connection
            self._add_stranger(connection)

    def close_broken(self) -> None:
        """Closes connections that have failed (fd_sockets.broken). To be called now and then."""
        by_end = {connection.end: connection for connection in self._connections.values()}
        for end in broken(by_end):
            self._close(by_end[end])

    def _heard(self, stranger: _Connection) -> None:
        """Moves a stranger to the end: all others have been silent for longer."""
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
        """Handles the next message, if it has arrived whole."""
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
        """Reads once into the stream. Whether anything has come. Closes the connection at its end."""
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
        sent = 0
        if not connection.waiting:
            try:
                sent = connection.end.send(data)
            except BlockingIOError:
                pass  # all of it waits
            except OSError:
                self._loop.call_soon(self._close, connection)
                return False
        elif len(connection.waiting) + len(data) > UNREAD_PEER_BYTES_MAX or self._unread_bytes > UNREAD_BYTES_MAX:
            return False
        if sent < len(data):
            if not connection.waiting:
                self._loop.add_writer(connection.end, self._write, connection)
            connection.waiting += memoryview(data)[sent:]
            self._unread_bytes += len(data) - sent
        return True

    def _write(self, connection: _Connection) -> None:
        while connection.waiting:
            try:
                sent = connection.end.send(connection.waiting)
            except BlockingIOError:
                return
            except OSError:
                self._close(connection)
                return
            del connection.waiting[:sent]
            self._unread_bytes -= sent
        connection.waiting = bytearray()  # gives its memory back
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
        self._unread_bytes -= len(connection.waiting)
        self._loop.remove_reader(connection.end)
        self._loop.remove_writer(connection.end)
        connection.end.close()
        if has_session:
            self._gone(connection.peer)
