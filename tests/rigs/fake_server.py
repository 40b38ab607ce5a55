"""A small server for tests of the client: it speaks the protocol, moves no bytes, and fails on demand.

    with FakeServer(path) as fake:
        fake.hold.add(wire.Store)                  # kept, not answered
        request = fake.wait_for(wire.Store)        # what the client sent
        fake.set_word(request, DONE)               # what a mover would do
        fake.answer(request, wire.Stored(...))     # late, wrong or twice, as a test likes

One thread owns all sockets; every public method may be called from the test's thread. Its mover is a sleeping process.
"""

import itertools
import mmap
import os
import queue
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import zmq

from kvserver._native import DONE, create_memfd
from kvserver.wire import messages as wire
from kvserver.wire.codec import decode_request, encode
from tests.rigs.pauses import pause_s

WAIT_S = 30.0
LIMITS = wire.Limits(chunks_max=100, blocks_max=1000, jobs_max=5, lease_ttl_ms=30_000)

Peer = bytes | socket.socket
T = TypeVar("T")


def until(what: str, probe: Callable[[], T]) -> T:
    """Polls `probe` until it returns a true value, and returns that."""
    began_s = time.monotonic()
    while not (value := probe()):
        if (waited_s := time.monotonic() - began_s) > WAIT_S:
            raise TimeoutError(f"waited {WAIT_S:g} s for {what}")
        time.sleep(pause_s(waited_s))
    return value


class FakeServer:
    def __init__(self, path: Path, *, incarnation: int = 1, limits: wire.Limits = LIMITS) -> None:
        self.path = path
        self.incarnation = incarnation
        self.limits = limits
        self.hold: set[type] = set()
        """Requests of these types are kept and not answered."""
        self.refuse: dict[type, tuple[str, str]] = {}
        """Request type -> (family, code) of the Error that answers it."""
        self.raw: dict[type, bytes] = {}
        """Request type -> frame that answers it, valid or not."""
        self.before: dict[type, Callable[[Any], None]] = {}
        """Request type -> called in the server's thread just before the answer."""
        self.stored: dict[bytes, set[bytes]] = {}
        """Namespace -> keys that lookups find."""
        self.requests: list[tuple[str, Any]] = []
        """(door, request) in order of arrival; door is "zmq" or "local"."""
        self.chunks_stored_max = sys.maxsize
        self.chunks_on_disk = 0
        """Bound for one request; a store of more chunks comes back short, as from a full server."""
        self.coming = 0
        """Chunks that a remote store may bring, after those that a lookup finds."""
        self.awaited = 0, ""
        """Chunks that another engine computes, and its name."""
        self.mover = _start_mover()
        self.sessions: dict[bytes, mmap.mmap] = {}
        """Token -> the words of its board, as the mover sees them."""
        self.caches: dict[int, tuple[bytes, str]] = {}
        """Registered caches that are not lost: number -> (session, name)."""
        self.descriptors: list[int] = []
        """Offered descriptors, which the fake server closes; the index is the number that Offered gave."""
        self._names: dict[Peer, bytes] = {}
        self._asked: dict[int, Peer] = {}
        self._boards: dict[int, mmap.mmap] = {}
        self._all_boards: list[mmap.mmap] = []
        self._numbers = itertools.count(1)
        self._arrived = threading.Condition()
        self._actions: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._running = False

    def __enter__(self) -> "FakeServer":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.kill_mover()
        for descriptor in self.descriptors:
            os.close(descriptor)
        for board in self._all_boards:
            board.close()

    # ---------------------------------------------------------------- life

    def start(self) -> None:
        for path in (self.path, Path(f"{self.path}.local")):
            path.unlink(missing_ok=True)
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.bind(f"ipc://{self.path}")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"{self.path}.local")
        self._listener.listen()
        self._wake = os.eventfd(0)
        self._locals: dict[int, socket.socket] = {}
        self._running = True
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Closes everything, like the end of the process; the mover lives on."""
        if not self._running:
            return
        self._do(lambda: setattr(self, "_running", False))
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        os.close(self._wake)

    def restart(self) -> None:
        """Restarts as another incarnation, without any earlier state."""
        self.stop()
        self.incarnation += 1
        self.sessions.clear()
        self.caches.clear()
        self._names.clear()
        self.start()

    def kill_mover(self) -> None:
        """Kills the mover with its caches. Its pidfd is readable when this returns; a registration starts another."""
        self.mover.kill()
        self.mover.wait(WAIT_S)
        if self._running:
            self._do(self.caches.clear)

    # ---------------------------------------------------------------- a test's actions

    def count(self, kind: type, door: str | None = None) -> int:
        with self._arrived:
            return sum(isinstance(request, kind) and door in (None, at) for at, request in self.requests)

    def wait_for(self, kind: type[T], number: int = 1) -> T:
        """Waits for the number-th request of that type."""
        with self._arrived:
            if not self._arrived.wait_for(lambda: len(self._of(kind)) >= number, WAIT_S):
                raise TimeoutError(f"waited {WAIT_S:g} s for {kind.__name__} number {number}")
            return self._of(kind)[number - 1]

    def answer(self, request: Any, reply: wire.Reply) -> None:
        self._do(lambda: self._send(self._asked[request.id], encode(reply)))

    def answer_as_usual(self, request: Any) -> None:
        self._do(lambda: self._serve(self._asked[request.id], request, -1))

    def close_attached(self) -> None:
        """Closes the connection that carries the client's liveness."""
        self._do(lambda: self._close_local(wire.Attach))

    def close_lanes(self) -> None:
        self._do(lambda: self._close_local(wire.Lane))

    def word(self, request: wire.Store | wire.Retrieve) -> tuple[int, int]:
        """(generation, state) of the request's word."""
        (raw,) = struct.unpack_from("<Q", self._boards[request.id], request.word * 8)
        return raw >> 8, raw & 0xFF

    def set_word(self, request: wire.Store | wire.Retrieve, state: int) -> None:
        """Sets the word of a job as a mover does. Refuses another generation, as the mover's compare-and-swap would."""
        generation, _ = self.word(request)
        assert generation == request.generation
        struct.pack_into("<Q", self._boards[request.id], request.word * 8, generation << 8 | state)

    # ---------------------------------------------------------------- thread

    def _do(self, action: Callable[[], None]) -> None:
        """Runs a call in the server's thread; returns when it is done."""
        done = threading.Event()
        self._actions.put(lambda: (action(), done.set()))  # type: ignore[arg-type]
        os.eventfd_write(self._wake, 1)
        assert done.wait(WAIT_S)

    def _run(self) -> None:
        while self._running:
            poller = zmq.Poller()
            for source in (self._router, self._listener.fileno(), self._wake, *self._locals):
                poller.register(source, zmq.POLLIN)
            for source, _ in poller.poll(1000):
                if source is self._router:
                    identity, frame = self._router.recv_multipart()
                    self._take("zmq", identity, frame, [])
                elif source == self._listener.fileno():
                    accepted, _ = self._listener.accept()
                    self._locals[accepted.fileno()] = accepted
                elif source == self._wake:
                    os.eventfd_read(self._wake)
                    while not self._actions.empty():
                        self._actions.get()()
                elif source in self._locals:
                    self._read_local(self._locals[source])
        self._listener.close()
        for connection in self._locals.values():
            connection.close()
        self._context.destroy(linger=0)

    def _read_local(self, connection: socket.socket) -> None:
        try:
            frame, descriptors, _, _ = socket.recv_fds(connection, wire.FRAME_BYTES_MAX, 8)
        except ConnectionError:
            frame, descriptors = b"", []
        if frame:
            self._take("local", connection, frame, descriptors)
        else:
            del self._locals[connection.fileno()]
            connection.close()

    def _close_local(self, kind: type) -> None:
        """Closes the connections whose first message was of that type."""
        first = {id(self._asked[request.id]) for _, request in self.requests if isinstance(request, kind)}
        for number, connection in list(self._locals.items()):
            if id(connection) in first:
                del self._locals[number]
                connection.close()

    def _take(self, door: str, peer: Peer, frame: bytes, descriptors: Sequence[int]) -> None:
        request: Any = decode_request(frame)
        self._asked[request.id] = peer
        if isinstance(request, wire.Store | wire.Retrieve) and peer in self._names:
            self._boards[request.id] = self.sessions[self._names[peer]]
        with self._arrived:
            self.requests.append((door, request))
            self._arrived.notify_all()
        if type(request) in self.hold:
            assert not descriptors
        elif type(request) in self.raw:
            self._send(peer, self.raw[type(request)])
        elif type(request) in self.refuse:
            family, code = self.refuse[type(request)]
            for descriptor in descriptors:
                os.close(descriptor)
            self._send(peer, encode(wire.Error(request.id, family, code, "as the test wants it")))  # type: ignore[arg-type]
        else:
            self._serve(peer, request, descriptors[0] if descriptors else -1)

    def _serve(self, peer: Peer, request: Any, descriptor: int) -> None:
        if type(request) in self.before:
            self.before[type(request)](request)
        reply = self._reply(peer, request, descriptor)
        match request:
            case wire.Attach():
                board = create_memfd("board", wire.BOARD_WORDS * 8)
                self.sessions[request.session] = mmap.mmap(board, wire.BOARD_WORDS * 8)
                self._all_boards.append(self.sessions[request.session])
                self._send(peer, encode(reply), board)
                os.close(board)
            case wire.Watch() if isinstance(reply, wire.Watched):
                pidfd = os.pidfd_open(self.mover.pid)
                self._send(peer, encode(reply), pidfd)
                os.close(pidfd)
            case _:
                self._send(peer, encode(reply))

    def _reply(self, peer: Peer, request: Any, descriptor: int) -> wire.Reply:
        match request:
            case wire.Hello():
                token = os.urandom(wire.SESSION_BYTES)
                self._names[peer] = token
                return wire.Welcome(request.id, token, "fake", self.incarnation, self.limits)
            case wire.Attach(session=token) | wire.Lane(session=token):
                if token not in self._names.values():
                    return wire.Error(request.id, "request", "session-unknown", "of an earlier life")
                self._names[peer] = token
                return wire.Attached(request.id) if isinstance(request, wire.Attach) else wire.LaneOpen(request.id)
            case _ if peer not in self._names:
                return wire.Error(request.id, "request", "session-unknown", "say hello first")
            case wire.Offer():
                assert descriptor >= 0
                self.descriptors.append(descriptor)
                return wire.Offered(request.id, len(self.descriptors) - 1)
            case wire.Register():
                entry = (self._names[peer], request.name)
                if entry in self.caches.values():
                    return wire.Error(request.id, "request", "registered-twice", request.name)
                if self.mover.poll() is not None:
                    self.mover = _start_mover()
                number = next(self._numbers)
                self.caches[number] = entry
                return wire.Registered(request.id, number, 1)
            case wire.Watch():
                if request.cache not in self.caches or self.mover.poll() is not None:
                    return wire.Error(request.id, "request", "cache-unknown", "lost with its mover")
                return wire.Watched(request.id, 1)
            case wire.Unregister():
                self.caches.pop(request.cache, None)
                return wire.Unregistered(request.id)
            case _:
                return self._transfer_reply(request)

    def _transfer_reply(self, request: Any) -> wire.Reply:
        match request:
            case wire.Lookup():
                keys = [request.keys[at : at + 32] for at in range(0, len(request.keys), 32)]
                held = self.stored.get(request.namespace, set())
                chunks = len(list(itertools.takewhile(held.__contains__, keys)))
                lease = next(self._numbers) if chunks >= request.chunks_wanted_min else 0
                away = min(chunks, self.chunks_on_disk)
                ttl_ms = self.limits.lease_ttl_ms if lease else 0
                if isinstance(request, wire.Await):
                    return wire.Awaited(request.id, chunks, lease, ttl_ms, away, "", self.coming, *self.awaited)
                return wire.Found(request.id, chunks, lease, ttl_ms, away, "", self.coming)
            case wire.Release():
                return wire.Released(request.id)
            case wire.Pledge():
                return wire.Pledged(request.id, next(self._numbers), 0, len(request.keys) // 32)
            case wire.Unpledge():
                return wire.Unpledged(request.id)
            case wire.Store():
                chunks = min(len(request.keys) // 32, self.chunks_stored_max)
                self.set_word(request, DONE)
                why = "full" if chunks < len(request.keys) // 32 else ""
                return wire.Stored(request.id, chunks, chunks, 7 * chunks, why)  # type: ignore[arg-type]
            case wire.Retrieve():
                self.set_word(request, DONE)
                return wire.Retrieved(request.id, 11, wire.ALL_RIGHT)
            case wire.Clear():
                return wire.Cleared(request.id, len(self.stored.pop(request.namespace, set())))
            case wire.Status():
                return wire.StatusIs(request.id, b'{"server": "fake"}')
        raise AssertionError(request)

    # ---------------------------------------------------------------- helpers

    def _send(self, peer: Peer, frame: bytes, descriptor: int = -1) -> None:
        if isinstance(peer, bytes):
            self._router.send_multipart([peer, frame])
            return
        try:
            socket.send_fds(peer, [frame], [descriptor] if descriptor >= 0 else [])
        except OSError:
            return  # the client has closed it

    def _of(self, kind: type[T]) -> list[T]:
        return [request for _, request in self.requests if isinstance(request, kind)]


def _start_mover() -> "subprocess.Popen[bytes]":
    return subprocess.Popen(["sleep", "600"])


def descriptors_open() -> set[str]:
    """Descriptors that this process holds open, by number and target."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
        except FileNotFoundError:
            continue  # the listing's own descriptor
    return found
