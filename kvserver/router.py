"""The ZeroMQ door at work: messages in, replies out, and who is behind each connection.

libzmq takes one message of each connection in turn. It says with a message over which descriptor it came and from which
process; that is asked once for each connection.
"""

import select
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import zmq

LONG_BYTES = 4 << 10
"""A longer reply is only for a peer that reads. Of shorter ones libzmq keeps doors.SENT_MAX for one that does not."""
PARTS_PER_TURN = 256
"""Parts of a message are thrown away, as a request has one."""


class Guest:
    """One ZeroMQ connection."""

    __slots__ = ("client", "descriptor", "identity", "peer", "stays")

    def __init__(self, peer: int, identity: bytes, client: int, descriptor: int) -> None:
        self.peer = peer
        self.identity = identity
        self.client = client
        """Number of the process at the other end; negative where it cannot be seen, and then of this connection."""
        self.descriptor = descriptor
        """libzmq's; -1: not known."""
        self.stays = False
        """It has a session. Others are forgotten after each answer."""


class Received(NamedTuple):
    """A message, or what could be read of it in one go."""

    guest: Guest
    frame: bytes
    parts: int
    whole: bool


class Router:
    """Owns what is known of the connections; the socket is somebody else's to close."""

    def __init__(self, socket: "zmq.Socket[bytes]", next_peer: Callable[[], int]) -> None:
        self._socket = socket
        self._next_peer = next_peer
        self._by_identity: dict[bytes, Guest] = {}
        self._by_peer: dict[int, Guest] = {}
        self._unfinished: Received | None = None
        """A message whose other parts are still to be thrown away."""

    @property
    def descriptor(self) -> int:
        """Readable when something may have come. Edge-triggered: after each use of the socket ask has_messages."""
        return int(self._socket.FD)

    @property
    def has_messages(self) -> bool:
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def receive(self) -> Received | None:
        """The next message; None when none has come."""
        if self._unfinished is not None:
            return self._throw_away(self._unfinished)
        try:
            identity = self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        guest = self._by_identity.get(identity)
        if guest is None:
            part = self._socket.recv(zmq.NOBLOCK, copy=False)
            guest = self._meet(identity, part)
            frame, more = part.bytes, part.more
        else:
            frame, more = self._socket.recv(zmq.NOBLOCK), bool(self._socket.getsockopt(zmq.RCVMORE))
        received = Received(guest, frame, 1, not more)
        return self._throw_away(received) if more else received

    def knows(self, peer: int) -> bool:
        return peer in self._by_peer

    def reads(self, peer: int) -> bool:
        """Whether the peer has read so much that the kernel takes more for it. What libzmq has on the way is not known,
        so this is asked for long replies alone: for short ones a peer may be late."""
        guest = self._by_peer.get(peer)
        return guest is None or has_room(guest.descriptor)

    def send(self, peer: int, frame: bytes) -> bool:
        """False when the reply is lost: the peer is gone, or does not read."""
        guest = self._by_peer.get(peer)
        if guest is None:
            return False
        try:
            self._socket.send(guest.identity, zmq.SNDMORE | zmq.NOBLOCK)
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def keep(self, peer: int) -> None:
        """The peer has a session."""
        if (guest := self._by_peer.get(peer)) is not None:
            guest.stays = True

    def forget(self, peer: int) -> None:
        guest = self._by_peer.pop(peer, None)
        if guest is not None:
            del self._by_identity[guest.identity]

    def _meet(self, identity: bytes, part: zmq.Frame) -> Guest:
        client, descriptor = _sender(part)
        guest = Guest(self._next_peer(), identity, client, descriptor)
        self._by_identity[identity] = self._by_peer[guest.peer] = guest
        return guest

    def _throw_away(self, received: Received) -> Received:
        """A message can have any number of parts, and libzmq gives no other before all of them were taken."""
        parts, more = received.parts, True
        while more and parts < received.parts + PARTS_PER_TURN:
            more = self._socket.recv(zmq.NOBLOCK, copy=False).more
            parts += 1
        received = received._replace(parts=parts, whole=not more)
        self._unfinished = received if more else None
        return received


def has_room(descriptor: int) -> bool:
    """Whether a socket can be written to; True where that cannot be said."""
    if descriptor < 0:
        return True
    asked = select.poll()
    asked.register(descriptor, select.POLLOUT)
    return bool(asked.poll(0))


def _sender(part: zmq.Frame) -> tuple[int, int]:
    """(client, descriptor) of a message, from what libzmq says with it: the address is HOST:USER:GROUP:PROCESS."""
    descriptor = -1
    with suppress(zmq.ZMQError):
        descriptor = int(part.get(zmq.SRCFD))
    process = ""
    with suppress(zmq.ZMQError):
        _, _, process = str(part.get("Peer-Address")).rpartition(":")
    return client_of(int(process) if process.isdigit() else 0, descriptor), descriptor


def client_of(process: int, descriptor: int) -> int:
    """The number by which a client has its turns. A process in another process namespace has number 0."""
    return process or -1 - descriptor
