"""A server for this machine's GPUs, with an engine that lives through everything, for the checks in this folder."""

import itertools
import os
import socket
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from kvserver._native import device_facts, probe_driver
from tests.device.simulated import Machine, Vendor
from tests.gpu.engine_process import LARGE_CHUNKS, SMALL_CHUNKS, GpuWorker
from tests.process.harness import Server, until

MIB = 1 << 20
POISON = Path(__file__).parent / "poison"
MODES = ("staged", "server-gather", "direct")
MET_S = 3.0
"""How long a copy that was asked for is waited for."""
PREPARED_S = 40.0
"""Timeout for an engine that fills its memory before it asks."""
BACK_S = 40.0
"""Timeout of a mover's start, with its driver and self-test."""


class Gpus:
    """The real GPUs, in the place of a simulated Machine."""

    def __init__(self, vendor: Vendor = "cuda") -> None:
        self.vendor: Vendor = vendor
        self.library = ""
        self.environment: dict[str, str] = {}
        _, _, self.devices, *_, problem = probe_driver(vendor)
        assert not problem, problem

    def device_id(self, device: int) -> str:
        return device_facts(self.vendor, self.library, device)[0]


class GpuServer(Server):
    """A server whose compiled kernels and measurements are kept for all servers of a run."""

    CACHE = tempfile.TemporaryDirectory(prefix="kv-gpu-")

    def __init__(self, machine: Gpus | Machine, **settings: Any) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.http_port = probe.getsockname()[1]
        simulated = isinstance(machine, Machine)
        super().__init__(
            **{
                "arena_bytes": (512 if simulated else 6144) * MIB,
                "slab_bytes": (32 if simulated else 256) * MIB,
                "touch_threads": 1 if simulated else 4,
                "device_library": machine.library,
                "cache_dir": self.CACHE.name,
                "http_port": self.http_port,
                **settings,
            }
        )

    def health_ms(self, count: int) -> float:
        """The longest of `count` answers of /healthz, in milliseconds. Raises OSError if one is not 200."""
        longest_s = 0.0
        for _ in range(count):
            began = time.perf_counter()
            with urllib.request.urlopen(f"http://127.0.0.1:{self.http_port}/healthz", timeout=5) as answer:
                answer.read()
            longest_s = max(longest_s, time.perf_counter() - began)
        return longest_s * 1e3


class Scene:
    """A machine, a server, and the engine `lives`, which has stored prompt 1. Use as a context manager."""

    def __init__(self, machine: Gpus | Machine, *, lives: str = "staged") -> None:
        self.machine = machine
        self.simulated = isinstance(machine, Machine)
        self.shape, self.chunks = ("small_cache", SMALL_CHUNKS) if self.simulated else ("large_cache", LARGE_CHUNKS)
        self._mode = lives
        self._seeds = itertools.count(2)
        self._stack = ExitStack()

    def __enter__(self) -> "Scene":
        with poisonable():
            self.server = self._stack.enter_context(GpuServer(self.machine))
        try:
            self.lives = self._stack.enter_context(self.worker(self._mode, "lives"))
            self.lives.call("ready")
            until("the arena", self._arena_is_ready, 120)
            stored = self.lives.call("store", 1, self.chunks)
            assert stored["chunks"] == self.chunks, stored
        except BaseException as problem:
            self._stack.__exit__(type(problem), problem, problem.__traceback__)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def worker(self, mode: str, name: str) -> GpuWorker:
        return GpuWorker(
            self.server.path, self.machine, shape=self.shape, mode=mode, name=name, staging_bytes=256 * MIB
        )

    def fresh(self) -> int:
        """The seed of a prompt that nobody has stored."""
        return next(self._seeds)

    def in_flight(self) -> int:
        status = self.server.status()
        return status.stores + status.retrieves

    def wait_alone(self) -> None:
        """Waits until the server has forgotten all engines but `lives`."""
        until("the other engines to be gone", lambda: self.server.status().caches == 1)

    def free_bytes(self) -> int:
        freed: int = self.lives.call("free_bytes")
        return freed

    @contextmanager
    def watching(self, within_s: float = MET_S) -> Iterator[Callable[[], bool]]:
        """Looks at the sessions' boards from now on. The callable returns True at once when a copy is under way, and
        False when none began in time."""
        boards = self.server.boards()

        def met() -> bool:
            due_s = time.monotonic() + within_s
            while time.monotonic() < due_s:
                if boards.any_submitted():
                    return True
            return False

        try:
            yield met
        finally:
            boards.close()

    def met(self) -> bool:
        """True if a copy began in time. Returns at once, because copies take milliseconds."""
        with self.watching() as met:
            return met()

    def wait_mapped(self, old_mover: int) -> None:
        """Waits until `lives` has registered with another mover by itself."""

        def mapped() -> bool:
            status = self.server.status()
            movers = {mover.mover: mover.pid for mover in status.movers}
            states = {movers.get(cache.mover, old_mover): cache.state for cache in status.shown_caches}
            return any(pid != old_mover and state == "mapped" for pid, state in states.items())

        until("the engine to register again", mapped, BACK_S)

    def _arena_is_ready(self) -> bool:
        arena = self.server.status().arena
        return arena.ready_bytes == arena.total_bytes


@contextmanager
def environment(added: Mapping[str, str]) -> Iterator[None]:
    """Adds these variables for processes that are started inside."""
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def poisonable() -> AbstractContextManager[None]:
    """Lets a signal break movers of servers that are started inside (poison/sitecustomize.py)."""
    behind = os.environ.get("PYTHONPATH")
    return environment({"PYTHONPATH": os.pathsep.join([str(POISON), *([behind] if behind else [])])})
