"""A TCP proxy that can be cut: then nothing passes, nobody is told, and new connections are accepted in silence."""

import select
import socket
import threading
from contextlib import suppress
from types import TracebackType
from typing import Self

PIECE_BYTES = 65_536
LOOK_EVERY_S = 0.02


class CutProxy:
    """Forwards connections to a port of this machine."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._passes = threading.Event()
        self._passes.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._passes.set()
        self._listener.close()

    def cut(self) -> None:
        self._passes.clear()

    def mend(self) -> None:
        """What was sent meanwhile passes now, as after an outage of a network."""
        self._passes.set()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._forward, args=(client,), daemon=True).start()

    def _forward(self, client: socket.socket) -> None:
        self._passes.wait()
        with client, suppress(OSError), socket.create_connection(("127.0.0.1", self._target_port), timeout=5) as server:
            server.settimeout(None)
            other = {client: server, server: client}
            while True:
                for source in select.select(list(other), [], [], LOOK_EVERY_S)[0]:
                    piece = source.recv(PIECE_BYTES)
                    self._passes.wait()
                    if not piece:
                        return
                    other[source].sendall(piece)
