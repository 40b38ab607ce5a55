"""A bound on the connections of a ZeroMQ socket.

ZeroMQ has no such bound, and it aborts a process that runs out of descriptors (libzmq 4.3.5 asserts that accept() does
not fail with that error). So this module shuts down each connection above the bound. ZeroMQ keeps the descriptor until
everything that the peer has sent is read. When connections come faster than they go, the socket is unbound: all of them
are closed, and none is accepted for SHUT_S.
"""

import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvserver import logs

REFUSALS_A_LINE_S = 10.0
CROWD = 4
"""The socket is unbound for SHUT_S when the refused connections reach this many times the bound."""
SHUT_S = 1.0


class Guests:
    """The connections of one socket, as its monitor reports them."""

    def __init__(
        self, bound: "zmq.Socket[bytes]", refused: str, name: str, most: int, bind: Callable[[], None]
    ) -> None:
        """Must be made before the socket is bound.

        refused: log event for refused connections. name: the socket's name in that line. most: the bound. bind: binds
        the socket again, or raises zmq.ZMQError."""
        events = zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
        self.monitor = bound.get_monitor_socket(events)
        self._bound = bound
        self._refused_as, self._name, self._most = refused, name, most
        self._bind = bind
        self._descriptors: set[int] = set()
        self._crowd: set[int] = set()
        """Descriptors of refused connections that have not ended yet."""
        self._shut_until_s: float | None = None
        self._door: str | int = ""
        """The path or port that the socket is bound to."""
        self._refused = 0
        self._said_s = float("-inf")

    def look(self) -> None:
        """Reads the monitor's events and refuses connections above the bound. Never waits."""
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
        """Binds the socket again after SHUT_S.

        By then ZeroMQ has closed all connections without reporting that, so both tables are emptied. Subscribers
        reconnect and ask for what they have missed."""
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
        """Shuts a connection down, and logs at most one line in REFUSALS_A_LINE_S.

        The connection may be closed already and its number reused, so one that is not bound to our door is left
        alone."""
        self._refused += 1
        self._crowd.add(descriptor)
        if time.monotonic() - self._said_s >= REFUSALS_A_LINE_S:
            self._said_s = time.monotonic()
            fields = ("socket", self._name), ("connections", self._most), ("so_far", self._refused)
            logs.event(logging.WARNING, self._refused_as, *fields)
        with suppress(OSError), _borrowed(descriptor) as connection:
            if _door(descriptor) == self._door:
                connection.shutdown(socket.SHUT_RDWR)


def _borrowed(descriptor: int) -> socket.socket:
    """A duplicate of ZeroMQ's descriptor, as a socket. Raises OSError if it is no open socket."""
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
