"""Requests of a benchmark's engine: each has keys of its own, and blocks of the pool in an order of its own."""

import os
import random
import time
from array import array
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

from kvclient.client import Cache, Client
from kvclient.values import Blocks, Lease, RetrieveResult, StoreResult
from kvserver.wire.messages import KEY_BYTES

WAIT_S = 120.0
T = TypeVar("T")


class Pool(Protocol):
    """The engine's KV memory, and the expected content of its blocks."""

    cache: Cache
    namespace: bytes
    chunks: int
    """Chunks of a request."""
    request_blocks: int
    request_bytes: int

    def fill(self) -> None:
        """Gives every block its own content."""

    def wipe(self) -> None: ...

    def wrong(self, sources: list[int], targets: list[int]) -> int:
        """Number of bytes in `targets` that differ from the original content of `sources`."""

    def close(self) -> None: ...


class Request:
    """A prompt: stored from some blocks of the pool, retrieved into others."""

    def __init__(self, client: Client, pool: Pool, sources: list[int], targets: list[int]) -> None:
        self._client, self._pool = client, pool
        self._sources, self._targets = sources, targets
        self._keys = b""
        self.renew()

    def renew(self) -> None:
        """Takes keys that the server does not know."""
        self._keys = os.urandom(self._pool.chunks * KEY_BYTES)

    def store(self, after: object = None) -> "Future[StoreResult]":
        blocks = [Blocks(0, 0, array("i", self._sources))]
        return self._client.store(self._pool.cache, 0, b"", self._keys, blocks, after=after)

    def lease(self) -> Lease:
        found = self._client.lookup(self._pool.namespace, self._keys)
        assert found.chunks == self._pool.chunks, found
        assert found.lease is not None
        return found.lease

    def retrieve(self, lease: Lease | None = None) -> "Future[RetrieveResult]":
        """lease: of an earlier lookup; otherwise this looks up, too."""
        blocks = [Blocks(0, 0, array("i", self._targets))]
        return self._client.retrieve(self._pool.cache, lease or self.lease(), blocks)

    def compare(self) -> None:
        """Retrieves into a wiped pool, and compares every byte."""
        self._pool.wipe()
        assert self.retrieve().result(WAIT_S).ok
        wrong = self._pool.wrong(self._sources, self._targets)
        assert wrong == 0, f"{wrong} wrong bytes"


class Burst:
    """Consecutive requests, `in_flight` at a time, each with as large a part of the pool's blocks for itself."""

    def __init__(self, client: Client, pool: Pool, seed: int, *, requests: int, in_flight: int) -> None:
        self._pool, self._in_flight = pool, in_flight
        self.call_s: list[float] = []
        """What each call took of the caller's thread."""
        shuffle = random.Random(seed).shuffle

        def orders() -> list[list[int]]:
            places = (at % in_flight * pool.request_blocks for at in range(requests))
            orders = [list(range(first, first + pool.request_blocks)) for first in places]
            for order in orders:
                shuffle(order)
            return orders

        self.requests = [Request(client, pool, *each) for each in zip(orders(), orders(), strict=True)]

    def store(self) -> float:
        """GB/s over all requests, from blocks that were filled before."""
        results, gb_per_s = self._timed(Request.store)
        for stored in results:
            assert stored.chunks == stored.chunks_written == self._pool.chunks, stored
            assert stored.bytes == self._pool.request_bytes
        return gb_per_s

    def retrieve(self) -> float:
        """GB/s over all requests, which were stored before; including the lookups."""
        results, gb_per_s = self._timed(Request.retrieve)
        for retrieved in results:
            assert retrieved.ok, retrieved
            assert retrieved.bytes == self._pool.request_bytes
        return gb_per_s

    def compare(self) -> None:
        for request in self.requests:
            request.compare()

    def _timed(self, begin: "Callable[[Request], Future[T]]") -> tuple[list[T], float]:
        """Runs all requests. Returns their results, and GB/s."""
        results: list[T] = []
        running: deque[Future[T]] = deque()
        began = time.perf_counter()
        for request in self.requests:
            if len(running) == self._in_flight:
                results.append(running.popleft().result(WAIT_S))
            called = time.perf_counter()
            running.append(begin(request))
            self.call_s.append(time.perf_counter() - called)
        results.extend(future.result(WAIT_S) for future in running)
        moved_bytes = len(self.requests) * self._pool.request_bytes
        return results, moved_bytes / (time.perf_counter() - began) / 1e9
