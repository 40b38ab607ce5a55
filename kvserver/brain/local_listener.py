"""The local door: Unix sockets over which workers attach, pass descriptors and look up.

Rule 1: a connection is read when its client's turn has come (fair_turns.py), one message at a time.
Rule 2: connections are bounded. One without a session makes room for a new one, the oldest first; it is closed anyway
after a while.
"""

import asyncio
import itertools
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from kvserver.brain.fair_turns import Line
from kvserver.brain.listeners import ACCEPTED_PER_TURN
from kvserver.config.descriptor_limit import LOCAL_CONNECTIONS_PER_SESSION, Share
from kvserver.ipc.fd_sockets import Receiver, broken, client_of, close_all, send, widen
from kvserver.wire.codec import encode
from kvserver.wire.messages import FRAME_BYTES_MAX, Error

DESCRIPTORS_MAX = 4
"""Descriptors read with one message; a request has one at most."""


@dataclass(slots=True, eq=False)
class _Peer:
    end: socket.socket
    peer: int
    client: int
    """Number of the process at the other end (fd_sockets.client_of)."""
    came_s: float
    is_lane: bool = False
    """It carries no descriptors; receiving from it is cheaper."""


class LocalDoor:
    """All local connections, by the number of the peer.

    Calls `arrived` for each message with its descriptors, which belong to the callee. Calls `too_long` for one that is
    cut, and `gone` when a connection has ended by itself."""

    def __init__(
        self,
        listener: socket.socket,
        loop: asyncio.AbstractEventLoop,
        number: Callable[[], int],
        arrived: Callable[[int, memoryview | bytes, list[int]], None],
        line: Line,
        *,
        too_long: Callable[[int, str], None],
        gone: Callable[[int], None],
        share: Share,
        patience_s: float,
    ) -> None:
        """patience_s: a connection without a session is closed after this time."""
        self._listener, self._loop, self._line = listener, loop, line
        self._number, self._arrived, self._too_long, self._gone = number, arrived, too_long, gone
        self._share, self._patience_s = share, patience_s
        self._receiver = Receiver(FRAME_BYTES_MAX + 1, DESCRIPTORS_MAX)
        self.peers: dict[int, _Peer] = {}
        """All connections. Others only ask whether a peer is there: a lookup does so twice."""
        self._strangers: dict[int, _Peer] = {}
        """Connections without a session, oldest first."""

    def end_of(self, peer: int) -> socket.socket | None:
        """The connection of a peer."""
        known = self.peers.get(peer)
        return known.end if known is not None else None

    def accept(self) -> None:
        """Accepts up to ACCEPTED_PER_TURN connections. Raises OSError when descriptors or memory run out."""
        most = self._share.sessions * LOCAL_CONNECTIONS_PER_SESSION
        for _ in range(ACCEPTED_PER_TURN):
            try:
                end, _ = self._listener.accept()
            except BlockingIOError:
                return
            if self._strangers and (len(self._strangers) >= self._share.strangers or len(self.peers) >= most):
                self.close(next(iter(self._strangers)))
            if len(self.peers) >= most:
                with end, suppress(OSError):
                    end.send(encode(Error(0, "resource", "connections", f"{most} are open, no more can be")))
                continue
            end.setblocking(False)
            with suppress(OSError):  # replies fit into the default buffer as well
                widen(end)
            peer = _Peer(end, self._number(), client_of(end), time.monotonic())
            self.peers[peer.peer] = self._strangers[peer.peer] = peer
            self._loop.add_reader(end, self._take_turn, peer)

    def admit(self, peer: int, *, is_lane: bool) -> None:
        """The connection belongs to a session from now on."""
        self._strangers.pop(peer).is_lane = is_lane

    def send(self, peer: int, frame: bytes, descriptors: Sequence[int]) -> bool:
        """Sends a reply. False when the peer takes none: its connection will be closed."""
        try:
            send(self.peers[peer].end, frame, descriptors)
        except OSError:
            self._loop.call_soon(self.close, peer)
            return False
        return True

    def close(self, peer: int) -> None:
        """Ends a connection, and says so."""
        if peer in self.peers:
            self.drop(peer)
            self._gone(peer)

    def drop(self, peer: int) -> None:
        """Ends a connection whose session is over."""
        known = self.peers.pop(peer)
        self._strangers.pop(peer, None)
        self._loop.remove_reader(known.end)
        known.end.close()

    def close_broken(self) -> None:
        """Closes connections that have failed (fd_sockets.broken). To be called now and then."""
        by_end = {known.end: peer for peer, known in self.peers.items()}
        for end in broken(by_end):
            self.close(by_end[end])

    def show_strangers_out(self) -> None:
        """Closes connections that have had no session for too long."""
        since = time.monotonic() - self._patience_s
        for peer in list(itertools.takewhile(lambda peer: self._strangers[peer].came_s < since, self._strangers)):
            self.close(peer)

    def _take_turn(self, peer: _Peer) -> None:
        if self._line.at_once(peer.client):
            self._line.serve(peer.client, partial(self._receive, peer))
        else:
            self._loop.remove_reader(peer.end)
            self._line.wait(peer.client, partial(self._receive_in_line, peer))

    def _receive_in_line(self, peer: _Peer) -> None:
        if self.peers.get(peer.peer) is peer:
            self._receive(peer)
        if self.peers.get(peer.peer) is peer:
            self._loop.add_reader(peer.end, self._take_turn, peer)

    def _receive(self, peer: _Peer) -> None:
        """Receives one message. A lane has one request in flight; for a connection with more the loop calls again."""
        descriptors: list[int] = []
        try:
            if peer.is_lane:
                frame, cut = self._receiver.receive_plain(peer.end)
            else:
                frame, descriptors, cut = self._receiver.receive(peer.end)
        except BlockingIOError:
            return
        except OSError:
            self.close(peer.peer)
            return
        if not frame:
            close_all(descriptors)
            self.close(peer.peer)
        elif cut:
            close_all(descriptors)
            most = f"{FRAME_BYTES_MAX} bytes and {DESCRIPTORS_MAX} descriptors"
            self._too_long(peer.peer, f"longer than a message may be: at most {most} are read")
        else:
            self._arrived(peer.peer, frame, descriptors)
