"""A real Mooncake Store for tests, on loopback: a master and one data node. PyPI has both in one wheel.

`python -m tests.rigs.mooncake_server PORT BYTES` is the data node: a client that gives memory to the store.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from kvserver.config.remotes import parse
from kvserver.errors import ConfigError
from kvserver.movers.remote_store import check
from kvserver.remote.objects.driver import Named
from kvserver.remote.objects.mooncake import MooncakeObjects, Place, mooncake_store
from kvserver.remote.objects.store import NOTES, ObjectStore, Waits

STARTS_WITHIN_S = 60
NODE_BYTES = 256 << 20
LOCAL_BYTES = 16 << 20
UNHURRIED = Waits(probe_s=20.0, bulk_s=30.0, note_s=20.0, announced_every_s=0.0)
"""Deadlines that no busy machine passes. The client's own are set in kvserver/remote/objects/mooncake.py."""


def binary() -> str:
    """Skips the test where there is none, or where it cannot be loaded."""
    try:
        check(parse("a=mooncake://127.0.0.1")[0])
    except ConfigError as missing:
        pytest.skip(f"there is no Mooncake Store here: {missing.message}")
    found = find_spec("mooncake")
    assert found is not None
    assert found.submodule_search_locations
    return str(Path(found.submodule_search_locations[0]) / "mooncake_master")


class MooncakeServer:
    """A master and a data node, each of which can be stopped, continued, killed and started again."""

    def __init__(self, *, node_bytes: int = NODE_BYTES) -> None:
        self._program = binary()
        self._node_bytes = node_bytes
        self._directory = Path(tempfile.mkdtemp(prefix="kv-mooncake-"))
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            other.bind(("127.0.0.1", 0))
            self.port: int = one.getsockname()[1]
            self._metrics_port: int = other.getsockname()[1]
        self.master = Process(self._start_master)
        self.node = Process(self._start_node)

    @property
    def url(self) -> str:
        return f"mooncake://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        try:
            self.master.start()
            self.node.start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.node.kill()
        self.master.kill()
        shutil.rmtree(self._directory, ignore_errors=True)

    def names(self) -> list[str]:
        """The names of all objects, from the master's page for operators."""
        return sorted(self._page("get_all_keys").split())

    def start_master_again(self) -> None:
        """Until the data node has found it, too."""
        self.master.start()
        until_s = time.monotonic() + STARTS_WITHIN_S
        while not self._page("get_all_segments").split():
            assert time.monotonic() < until_s, (self._directory / "log").read_text()[-3000:]
            time.sleep(0.05)

    def _page(self, name: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._metrics_port}/{name}", timeout=20) as page:
            content: bytes = page.read()
        return content.decode()

    def empty(self) -> None:
        """Removes all that is there."""
        objects = mooncake_objects(self)
        assert objects._client.remove_all(force=True) >= 0
        objects.close()

    def _start_master(self) -> subprocess.Popen[bytes]:
        ports = (f"--rpc_port={self.port}", f"--metrics_port={self._metrics_port}", "--metrics_host=127.0.0.1")
        process = self._run(self._program, "--rpc_interface=lo", *ports)
        self._wait(process, self._listens)
        return process

    def _listens(self) -> bool:
        with socket.socket() as asking:
            return asking.connect_ex(("127.0.0.1", self.port)) == 0

    def _start_node(self) -> subprocess.Popen[bytes]:
        ready = self._directory / "ready"
        ready.unlink(missing_ok=True)
        arguments = (str(self.port), str(self._node_bytes), str(ready))
        process = self._run(sys.executable, "-m", "tests.rigs.mooncake_server", *arguments)
        self._wait(process, ready.exists)
        return process

    def _run(self, *command: str) -> subprocess.Popen[bytes]:
        with open(self._directory / "log", "ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def _wait(self, process: subprocess.Popen[bytes], is_ready: Callable[[], bool]) -> None:
        until_s = time.monotonic() + STARTS_WITHIN_S
        while not is_ready():
            assert process.poll() is None, (self._directory / "log").read_text()[-3000:]
            assert time.monotonic() < until_s, (self._directory / "log").read_text()[-3000:]
            time.sleep(0.05)


class Process:
    """One of the two."""

    def __init__(self, starts: Callable[[], subprocess.Popen[bytes]]) -> None:
        self._starts = starts
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = self._starts()

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _signal(self, number: int) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)


class ListableObjects(MooncakeObjects):
    """What the contract of drivers needs to clean up."""

    def __init__(self, server: MooncakeServer) -> None:
        super().__init__(Place("127.0.0.1", server.port))
        self._server = server

    def listed(self, beginning: str, *, within_s: float) -> Iterator[list[Named]]:
        names = [name for name in self._server.names() if name.startswith(beginning)]
        sizes = self.sizes(names)
        yield [Named(name, size, 0.0) for name, size in zip(names, sizes, strict=True) if isinstance(size, int)]


def mooncake_objects(server: MooncakeServer, arena: memoryview | None = None) -> MooncakeObjects:
    return MooncakeObjects(Place("127.0.0.1", server.port), arena=arena, lasting=NOTES)


def open_mooncake(
    server: MooncakeServer, *, waits: Waits = UNHURRIED, only_looks: bool = False, arena: memoryview | None = None
) -> ObjectStore:
    return mooncake_store(mooncake_objects(server, arena), node=server.url, waits=waits, only_looks=only_looks)


def main() -> None:
    from mooncake.store import MooncakeDistributedStore  # noqa: PLC0415 - an extra

    port, count, ready = sys.argv[1:]
    parent = os.getppid()
    store = MooncakeDistributedStore()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(count), LOCAL_BYTES, "tcp", "", f"127.0.0.1:{port}")
    assert code == 0, code
    Path(ready).touch()
    while os.getppid() == parent:
        time.sleep(0.5)


if __name__ == "__main__":
    main()
