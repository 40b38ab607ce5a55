"""A TCP proxy that damages what passes: flipped, cut, doubled, dropped and late bytes, and connections that end."""

import random
import socket
import threading
import time
from collections import Counter
from contextlib import suppress
from types import TracebackType
from typing import Literal, Self

Fault = Literal["flip", "drop", "double", "late", "cut", "reset"]
FAULTS: tuple[Fault, ...] = ("flip", "drop", "double", "late", "cut", "reset")
PIECE_BYTES = 16_384
LATE_S = 0.03


class FaultProxy:
    """Forwards connections to a port of this machine. chance: of a fault, for each piece that passes."""

    def __init__(self, target_port: int, seed: int, chance: float) -> None:
        self.chance = chance
        self.faults: Counter[Fault] = Counter()
        self._target_port = target_port
        self._dice = random.Random(seed)
        self._dice_lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: set[socket.socket] = set()
        self._hushed: set[socket.socket] = set()
        self._passes = threading.Event()
        self._passes.set()

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._passes.set()
        self._listener.close()
        for end in list(self._open):
            _end(end)

    def hush(self) -> None:
        """From now on nothing passes on the connections that there are, and nobody is told; new ones are served."""
        self._hushed |= self._open

    def cut(self) -> None:
        """From now on nothing passes on any connection, and nobody is told. New ones are accepted in silence."""
        self._passes.clear()

    def mend(self) -> None:
        """All that was sent meanwhile passes now, as after an outage of a network."""
        self._passes.set()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(("127.0.0.1", self._target_port), timeout=5)
                except OSError:
                    client.close()
                    continue
                server.settimeout(None)
                self._open |= {client, server}
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while piece := source.recv(PIECE_BYTES):
                if source in self._hushed:
                    continue
                self._passes.wait()
                damaged = self._damaged(bytearray(piece))
                if damaged is None:
                    break
                sink.sendall(damaged)
        for end in (source, sink):
            _end(end)
        self._open -= {source, sink}

    def _damaged(self, piece: bytearray) -> bytearray | None:
        """The piece as it goes on; None ends both connections. A piece that is cut is the last one."""
        with self._dice_lock:
            if self._dice.random() >= self.chance:
                return piece
            fault = self._dice.choice(FAULTS)
            place = self._dice.randrange(len(piece))
            bit = 1 << self._dice.randrange(8)
            self.faults[fault] += 1
        match fault:
            case "flip":
                piece[place] ^= bit
            case "drop":
                del piece[place : place + 7]
            case "double":
                piece[place:place] = piece[place : place + 7]
            case "late":
                time.sleep(LATE_S)
            case "cut":
                del piece[place:]
            case "reset":
                return None
        return piece


def _end(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
