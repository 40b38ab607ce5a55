"""An engine with its KV cache on a GPU, in its own process: tests/device/engine_process.py with plain driver calls.

`python -m tests.gpu.engine_process FD OPTIONS` is the process; it ends when its pipe closes.
"""

import ctypes
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from kvclient import Lease
from tests.device.engine_process import DeviceWorker, Remote, main
from tests.device.shapes import BLOCK_TOKENS, CHUNK_TOKENS, SHAPES, Shape
from tests.gpu import illegal
from tests.gpu.plain_driver import PlainDriver
from tests.process.engine import prompt

LARGE_CHUNKS, SMALL_CHUNKS = 64, 6
"""Chunks of the longest prompt that fits large_cache and small_cache, with some blocks to spare."""
ANSWER_S = 90.0
"""Timeout: Python needs a while to make and compare half a gigabyte."""


def _cache(name: str, chunks: int) -> Shape:
    blocks = chunks * CHUNK_TOKENS // BLOCK_TOKENS + 8
    shape = Shape(name, blocks=[blocks])
    for _ in range(8):
        shape.add((2, blocks, BLOCK_TOKENS, 11, 298), block_axis=1, element_bytes=8)
    return shape


def large_cache() -> Shape:
    """Pages of 131,120 bytes in 16 regions, chunks of 6.3 MB: 64 of them copy long enough to be interrupted."""
    return _cache("large_cache", LARGE_CHUNKS)


def small_cache() -> Shape:
    """Like large_cache with fewer blocks, for a simulated device."""
    return _cache("small_cache", SMALL_CHUNKS)


class GpuWorker(DeviceWorker):
    """The parent's side."""

    MODULE = __name__

    def call(self, name: str, *arguments: object, within_s: float = ANSWER_S) -> Any:
        return super().call(name, *arguments, within_s=within_s)

    def end(self, within_s: float = ANSWER_S) -> Any:
        return super().end(within_s)


class GpuRemote(Remote):
    """Further methods that can be called through the pipe."""

    DRIVER = PlainDriver
    SHAPES: ClassVar[Mapping[str, Callable[[], Shape]]] = {
        **SHAPES,
        "large_cache": large_cache,
        "small_cache": small_cache,
    }
    driver: PlainDriver

    def free_bytes(self) -> int:
        return self.driver.free_bytes()

    def user(self) -> int:
        return os.geteuid()

    def connects(self, within_s: float) -> bool:
        return self._client.wait_connected(within_s)

    def allocate_densely(self) -> None:
        """From now on, several small allocations may share one exported block."""
        self.driver.granule_bytes = 1

    def lookups(self, seed: int, chunks: int, count: int) -> tuple[int, float]:
        """The fewest chunks that any of `count` lookups found, and the longest lookup in milliseconds."""
        fewest, longest_s = chunks, 0.0
        for _ in range(count):
            began = time.perf_counter()
            found = self._lookup(seed, chunks)
            longest_s = max(longest_s, time.perf_counter() - began)
            fewest = min(fewest, found.chunks)
            if found.lease is not None:
                self._client.release(found.lease)
        return fewest, longest_s * 1e3

    def begin_and_hold_the_gil(self, verb: str, seed: int, chunks: int, seconds: int) -> bool:
        """Begins a transfer, then blocks all Python threads of this process for `seconds`.

        Returns True if the transfer was already done before.
        """
        getattr(self, verb)(seed, chunks)
        done = self.is_done()
        ctypes.PyDLL(None).sleep(seconds)
        return done

    def write_nowhere(self) -> None:
        """Breaks this process's context."""
        illegal.load()()

    def begin_retrieve_unprepared(self, seed: int, chunks: int, timeout_s: float) -> None:
        """Begins a retrieve in an engine whose device context is broken."""
        story = prompt(seed, chunks, CHUNK_TOKENS)
        found = self._lookup(seed, chunks)
        assert isinstance(found.lease, Lease), found
        self._where = self._place(story.head(found.chunks))
        self._future = self._begin_retrieve(found.lease, timeout_s)

    def _lookup(self, seed: int, chunks: int) -> Any:
        return self._client.lookup(self.namespace, prompt(seed, chunks, CHUNK_TOKENS).keys)


if __name__ == "__main__":
    main(GpuRemote)
