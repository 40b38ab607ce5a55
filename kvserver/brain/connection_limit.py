"""Who is connected to a ZeroMQ socket, and that they are not too many.

ZeroMQ has no bound for that, and a process that is out of descriptors it ends (libzmq 4.3.5 asserts that accept() does
not fail so). So a connection too many is closed from here. ZeroMQ keeps its descriptor until all that it has sent was
read; where many come faster than they go, all are closed, and nobody is let in for a while.
"""

import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress

import zmq
from zmq.utils.monitor import parse_monitor_message

REFUSALS_A_LINE_S = 10.0
CROWD = 4
"""Times as many connections as there may be, and the door is shut for SHUT_S."""
SHUT_S = 1.0


class Guests:
    """Of one socket, as its monitor tells."""

    def __init__(
        self, bound: "zmq.Socket[bytes]", refused: str, name: str, most: int, bind: Callable[[], None]
    ) -> None:
        """Before the socket is bound. refused, name: the event of the line that says so, and which socket it was. bind
        binds it again, or raises zmq.ZMQError."""
        events = zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
        self.monitor = bound.get_monitor_socket(events)
        self._bound = bound
        self._refused_as, self._name, self._most = refused, name, most
        self._bind = bind
        self._descriptors: set[int] = set()
        self._crowd: set[int] = set()
        """Those too many that have not gone yet."""
        self._shut_until_s: float | None = None
        self._door: str | int = ""
        """Where connections come in: a path, or a port."""
        self._refused = 0
        self._said_s = float("-inf")

    def look(self) -> None:
        """Takes in who has come and gone."""
        while self.monitor.poll(0):
            told = parse_monitor_message(self.monitor.recv_multipart())
            match told["event"]:
                case zmq.Event.LISTENING:
                    self._door = _door(told["value"])
                case zmq.Event.DISCONNECTED:
                    self._descriptors.discard(told["value"])
                    self._crowd.discard(told["value"])
                case zmq.Event.ACCEPTED if len(self._descriptors) < self._most:
                    self._descriptors.add(told["value"])
                case zmq.Event.ACCEPTED:
                    self._refuse(told["value"])
                    self._shut_in_a_crowd()
        self._open_again()

    def _shut_in_a_crowd(self) -> None:
        if self._shut_until_s is None and len(self._crowd) >= CROWD * self._most:
            self._shut_until_s = time.monotonic() + SHUT_S
            self._bound.unbind(bytes(self._bound.getsockopt(zmq.LAST_ENDPOINT)).decode().rstrip("\0"))

    def _open_again(self) -> None:
        """ZeroMQ has closed everybody who came in by then, and tells nothing of that. Subscribers connect again, and
        ask for what they have missed."""
        if self._shut_until_s is None or time.monotonic() < self._shut_until_s:
            return
        self._descriptors.clear()
        self._crowd.clear()
        try:
            self._bind()
        except zmq.ZMQError:  # its last listener has not ended yet
            self._shut_until_s = time.monotonic() + SHUT_S
        else:
            self._shut_until_s = None

    def close(self) -> None:
        self._bound.disable_monitor()

    def _refuse(self, descriptor: int) -> None:
        """It may be closed already and its number be another's: what did not come in by this door is left alone."""
        self._refused += 1
        self._crowd.add(descriptor)
        if time.monotonic() - self._said_s >= REFUSALS_A_LINE_S:
            self._said_s = time.monotonic()
            fields = ("socket", self._name), ("connections", self._most), ("so_far", self._refused)
            logging.getLogger("kvserver").warning(self._refused_as, extra={"fields": fields})
        with suppress(OSError), _borrowed(descriptor) as connection:
            if _door(descriptor) == self._door:
                connection.shutdown(socket.SHUT_RDWR)


def _borrowed(descriptor: int) -> socket.socket:
    """A socket that is ZeroMQ's to close. Raises OSError where it is none."""
    ours = os.dup(descriptor)
    try:
        return socket.socket(fileno=ours)
    except OSError:
        os.close(ours)
        raise


def _door(descriptor: int) -> str | int:
    with _borrowed(descriptor) as found:
        name = found.getsockname()
    return name if isinstance(name, str) else int(name[1])
