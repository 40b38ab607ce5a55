"""The protocol without kvclient: sends any bytes to either door and reads the replies. Every wait is bounded."""

import os
import socket
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zmq

from kvserver.wire import messages as wire
from kvserver.wire.codec import decode_reply, encode
from kvserver.wire.status import Status, decode_status

WAIT_S = 20.0
"""Upper bound of a test's waits, unless the test sets its own."""


class RawPeer:
    """The ZeroMQ door without kvclient. Sends any bytes and reads replies."""

    def __init__(self, path: Path, *, received_max: int = 1000) -> None:
        """received_max: replies that ZeroMQ buffers before they are read."""
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, received_max)
        self.socket.connect(f"ipc://{path}")
        self._last_id = 0

    def next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def send(self, *parts: bytes) -> None:
        self.socket.send_multipart(parts)

    def receive(self, within_s: float = WAIT_S) -> Any:
        """The next reply, decoded; TimeoutError when none comes."""
        if not self.socket.poll(int(within_s * 1000)):
            raise TimeoutError(f"no reply for {within_s:g} s")
        return decode_reply(self.socket.recv())

    def ask(self, request: wire.Frame, within_s: float = WAIT_S) -> Any:
        """The reply to a request; drops replies to earlier ones."""
        self.send(encode(request))
        due_s = time.monotonic() + within_s
        while True:
            reply = self.receive(max(0.0, due_s - time.monotonic()))
            if reply.id == request.id:  # type: ignore[attr-defined]
                return reply

    def close(self) -> None:
        self._context.destroy(linger=0)


class RawLocal:
    """One connection to the local door."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(WAIT_S)
        self.socket.connect(f"{path}.local")

    def send(self, frame: bytes, descriptors: Sequence[int] = ()) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
        self.socket.sendmsg([frame], rights)

    def receive(self, within_s: float = WAIT_S) -> tuple[Any, list[int]]:
        """(reply, descriptors that the caller now owns).

        ConnectionError at the end, TimeoutError when nothing comes in time."""
        self.socket.settimeout(within_s)
        frame, descriptors, _, _ = socket.recv_fds(self.socket, wire.FRAME_BYTES_MAX, 8)
        if not frame:
            raise ConnectionError("closed by the server")
        return decode_reply(frame), list(descriptors)

    def ask(self, request: wire.Frame, descriptors: Sequence[int] = (), within_s: float = WAIT_S) -> Any:
        """The reply; closes any descriptors that come with it."""
        self.send(encode(request), descriptors)
        reply, received = self.receive(within_s)
        for descriptor in received:
            os.close(descriptor)
        return reply

    def close(self) -> None:
        self.socket.close()


class RawSession:
    """Hello and Attach by hand: `zmq` for requests, `local` for descriptors and liveness, `board` a descriptor."""

    def __init__(
        self,
        path: Path,
        *,
        engine: str = "raw",
        epoch: int = 1,
        ranks: int = 1,
        rank: int = 0,
        within_s: float = WAIT_S,
        received_max: int = 1000,
    ) -> None:
        self.zmq = RawPeer(path, received_max=received_max)
        self.board = -1
        self.local: RawLocal | None = None
        due_s = time.monotonic() + within_s
        try:
            while True:  # on a busy machine the server may drop a session that attaches too late
                hello = wire.Hello(self.zmq.next_id(), wire.PROTOCOL, engine, epoch, ranks, rank, "tests")
                self.welcome: wire.Welcome = self.zmq.ask(hello, within_s)
                self.local = RawLocal(path)
                self.local.send(encode(wire.Attach(1, self.welcome.session)))
                reply, descriptors = self.local.receive(within_s)
                late = isinstance(reply, wire.Error) and reply.code == "session-unknown"
                if not late or time.monotonic() > due_s:
                    break
                self.local.close()
            assert isinstance(reply, wire.Attached), reply
            (self.board,) = descriptors
        except BaseException:
            self.close()
            raise

    def status(self) -> Status | None:
        """None when the session is lost or the server does not answer."""
        try:
            reply = self.zmq.ask(wire.Status(self.zmq.next_id()), within_s=1.0)
        except TimeoutError:
            return None
        return decode_status(reply.document) if isinstance(reply, wire.StatusIs) else None

    def close(self) -> None:
        self.zmq.close()
        if self.local is not None:
            self.local.close()
        if self.board >= 0:
            os.close(self.board)
            self.board = -1
