"""The client's part of the GPU path without any server: runs in its own process, next to its parent's side.

A driver is initialised only once in a process, and each test has its own machine.
"""

import logging
import os
import select
import subprocess
import sys
from array import array
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from kvclient import CacheSpec, DeviceBuffer, RegionRun, full_group
from kvclient.memory.device_cache import DeviceCache
from kvserver._native import EventWatch, RingPeer, export_memory
from kvserver.errors import RequestError
from tests.device.simulated import Driver, Machine, environment_of
from tests.process.harness import WAIT_S, until
from tests.process.worker import Worker

MIB = 1 << 20
STORE, RETRIEVE = 0, 1
TAKEN, DONE, FAULT = 2, 3, 4
PAGE, BLOCKS, REGIONS, PER_CHUNK = 333, 7, 2, 3
POOL_BYTES = REGIONS * BLOCKS * PAGE + 40
INSET = 17
"""Offset of the pool in its allocation."""
SHARD_BYTES = PER_CHUNK * REGIONS * PAGE


class ClientHalf(Worker):
    """The parent's side."""

    def __init__(self, machine: Machine) -> None:
        self._pipe, theirs = Pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno()), machine.vendor, str(machine.library)],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            cwd=Path(__file__).resolve().parents[2],
            env=environment_of(machine),
        )
        theirs.close()


class Remote:
    """The methods that can be called through the pipe."""

    def __init__(self, vendor: str, library: str) -> None:
        self.driver = Driver("rocm" if vendor == "rocm" else "cuda", library)
        self._vendor, self._library = vendor, library
        self._cache: DeviceCache | None = None
        self._peer: RingPeer | None = None
        self._watch: EventWatch | None = None
        self._warned: list[logging.LogRecord] = []
        listener = logging.Handler(logging.WARNING)
        listener.emit = self._warned.append  # type: ignore[method-assign]
        logging.getLogger("kvclient").addHandler(listener)

    def pid(self) -> int:
        return os.getpid()

    def take(self, size: int, kind: str = "alloc") -> int:
        address: int = getattr(self.driver, kind)(size)
        return address

    def handle(self, address: int, size: int) -> bytes:
        """IPC handle of the allocation that contains an address."""
        return export_memory(self._vendor, self._library, address, size)[4]

    def free_pool(self) -> None:
        """Frees the pool of make_staged(), as if the engine slept."""
        self.driver.free(self.cache.memory.bases[0])

    def warnings(self) -> list[str]:
        """Warnings logged by kvclient."""
        return [record.getMessage() for record in self._warned]

    # ---------------------------------------------------------------- a cache

    def make(self, buffers: list[tuple[int, int]], runs: list[tuple[int, ...]], options: dict[str, Any]) -> Any:
        """The registration of a cache as the server would receive it, or the refusal."""
        group = full_group(block_tokens=2, blocks=BLOCKS, regions=[RegionRun(*run) for run in runs])
        spec = CacheSpec(
            name="kv",
            namespace=bytes(32),
            chunk_tokens=2 * PER_CHUNK,
            buffers=[DeviceBuffer(*buffer) for buffer in buffers],
            groups=[group],
            device=self._vendor,
            library=self._library,
            **options,
        )
        try:
            self._cache = DeviceCache(spec)
        except RequestError as refusal:
            return refusal.code, refusal.message
        memory = self._cache.memory
        places = [(run.buffer, run.offset) for group in memory.groups for run in group.regions]
        return memory.device_id, [buffer.bytes for buffer in memory.buffers], places

    def make_staged(self, staging_bytes: int = 16 * MIB) -> Any:
        """Makes a pool of BLOCKS pages in each of two regions, INSET bytes after its allocation's start; and a ring."""
        base = self.driver.alloc(INSET + POOL_BYTES)
        self._pool = self.driver.host(base, INSET + POOL_BYTES)[INSET:]
        self._pool[:] = bytes(at * 7 % 251 for at in range(POOL_BYTES))
        runs = [(0, 0, REGIONS, BLOCKS * PAGE + 40, PAGE, PAGE)]
        made = self.make([(base + INSET, POOL_BYTES)], runs, {"staging_bytes": staging_bytes})
        self.begin_ring()
        return made

    def begin_ring(self) -> None:
        (descriptor,) = self.cache.begin_ring()
        self._peer = RingPeer(descriptor, self.cache.staging([0])[0].segment_bytes)

    def segment_bytes(self) -> int:
        return self.cache.staging([0])[0].segment_bytes

    def exported(self) -> tuple[str, str, bytes, int, bytes]:
        """(device id, ipc mode, pool's handle, its bytes, staging's handle)."""
        memory = self.cache.memory
        (pool,) = memory.buffers
        return memory.device_id, memory.ipc_mode, pool.handle, pool.bytes, self.cache.staging([0])[0].handle

    @property
    def cache(self) -> DeviceCache:
        assert self._cache is not None
        return self._cache

    @property
    def peer(self) -> RingPeer:
        assert self._peer is not None
        return self._peer

    # ---------------------------------------------------------------- the ring, as a mover

    def ask(self, lane: int, segment: int, *block_ids: int) -> None:
        stretch = (0, 0, array("i", block_ids).tobytes(), 64, 0, SHARD_BYTES)
        assert self.peer.ask(lane, segment, 1, [stretch])

    def state(self, lane: int, segment: int) -> tuple[int, int]:
        return self.peer.state(lane, segment), self.peer.fault(lane, segment)

    def reaches(self, lane: int, segment: int, state: int) -> int:
        until(f"state {state}", lambda: self.peer.state(lane, segment) == state)
        return self.peer.fault(lane, segment)

    def recycle(self, lane: int, segment: int) -> None:
        self.peer.recycle(lane, segment)

    def end_ring(self) -> None:
        self.cache.end_ring()

    def free(self) -> bool:
        return self.cache.free

    def becomes_free(self) -> None:
        until("all kernels to end", lambda: self.cache.free)

    def passed(self) -> bool:
        """True if all retrieves taken so far have ended."""
        copier = self.cache._copier
        assert copier is not None
        return copier.passed(RETRIEVE, copier.mark(RETRIEVE))

    def broken(self) -> str:
        copier = self.cache._copier
        assert copier is not None
        return str(until("the copier to give up", lambda: copier.broken))

    def zeroes(self) -> list[int]:
        """Blocks whose pages are all zero: an empty segment was scattered there."""
        size = BLOCKS * PAGE + 40
        pages = [[bytes(self._pool[r * size + b * PAGE :][:PAGE]) for r in range(REGIONS)] for b in range(BLOCKS)]
        return [block for block, regions in enumerate(pages) if not any(map(any, regions))]

    # ---------------------------------------------------------------- events, capture, fork

    def watch(self, ticket: int, event: int) -> None:
        if self._watch is None:
            self._watch = EventWatch(self._vendor, self._library, 0)
        self._watch.watch(ticket, event)

    def completed(self, within_s: float = WAIT_S) -> list[tuple[int, bool]]:
        assert self._watch is not None
        if not select.select([self._watch.eventfd], [], [], within_s)[0]:
            return []
        os.eventfd_read(self._watch.eventfd)
        return self._watch.completed()

    def recorded_event(self) -> int:
        event = self.driver.event()
        self.driver.record(event, self.driver.stream())
        return event

    def capture(self, lane: int) -> int:
        """Runs a transfer while this thread captures; returns the result of ending the capture."""
        self.driver.begin_capture()
        self.ask(lane, 1, 5)
        self.reaches(lane, 1, DONE)
        return self.driver.end_capture()

    def capture_beside_event(self, event: int) -> tuple[list[tuple[int, bool]], int]:
        """Waits for an event while this thread captures. Returns the reports, and the result of ending the capture."""
        self.driver.begin_capture()
        self.watch(1, event)
        told = self.completed()
        return told, self.driver.end_capture()

    def fork(self) -> int:
        """Forks a child that drops everything; returns its exit status."""
        child = os.fork()
        if child == 0:
            self.cache.forsake_after_fork()
            self._cache = self._watch = None
            os._exit(0)
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status)

    def closed_by_a_child(self) -> int:
        """Forks a child that forsakes the cache; returns how many descriptors of others it has closed."""
        others = [os.open(os.devnull, os.O_RDONLY) for _ in range(50)]
        child = os.fork()
        if child == 0:
            with suppress(OSError):
                self.cache.forsake_after_fork()
            os._exit(sum(not os.path.exists(f"/proc/self/fd/{other}") for other in others))
        for other in others:
            os.close(other)
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status)


def main() -> None:
    pipe = Connection(int(sys.argv[1]))
    remote = Remote(sys.argv[2], sys.argv[3])
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        action: Callable[..., Any] = getattr(remote, name)
        try:
            pipe.send((action(*arguments), None))
        except Exception as problem:  # the test must see any failure
            pipe.send((None, f"{type(problem).__name__}: {problem}"))


if __name__ == "__main__":
    main()
