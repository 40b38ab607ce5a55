"""How much of the memory's speed do stores and retrieves reach? `python benchmarks/bench_host.py [--json] [--smoke]`

Requests of 256 MiB through the real socket, block ids shuffled, page sizes from 2 KiB to 1 MiB. GB/s = bytes of the
request / time from the call to the completed future. Ceiling: the best contiguous copy of as many bytes over 1, 2 and 4
threads, plain and non-temporal, between touched memfds, measured in turn with our runs; ratio = median / ceiling.
Every byte of every retrieve is compared, outside the timed part.
"""

import argparse
import os
import random
import statistics
import struct
import time
from array import array
from collections.abc import Callable

from benchmarks.rows import Rows, say
from kvclient.client import Cache, Client
from kvclient.values import Blocks, CacheSpec, HostBuffer, Timeouts, full_group
from kvserver._native import Pattern, copy_seconds, create_memfd
from kvserver.replay.served import Served
from kvserver.wire.messages import KEY_BYTES, RegionRun

PAGE_SIZES = (2 << 10, 4 << 10, 16 << 10, 32 << 10, 128 << 10, 1 << 20)
LAYER_REGIONS = 64
"""32 layers, K and V."""
BLOCKS_PER_CHUNK = 16
"""Chunks of 256 tokens, blocks of 16: 2 MiB a chunk at 2 KiB a page, 32 MiB at 32 KiB (Llama-3.1-8B)."""
THREADS = (1, 2, 4)
MIB = 1 << 20
CROSS_LAYER_BYTES_MIN = 256 << 10
"""Pages from here on are whole blocks of a layout that keeps all layers of a block together: one region."""
NAMESPACE_TAIL = struct.Struct(">28sI")
PATIENT = Timeouts(lookup_s=5.0, store_s=60.0, retrieve_s=60.0)


class Pool:
    """A KV pool in shared memory that one request covers whole."""

    def __init__(self, client: Client, page_bytes: int, request_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.regions = LAYER_REGIONS if page_bytes < CROSS_LAYER_BYTES_MIN else 1
        self.blocks_per_chunk = BLOCKS_PER_CHUNK
        self.blocks = request_bytes // (self.regions * page_bytes) // BLOCKS_PER_CHUNK * BLOCKS_PER_CHUNK
        self.chunks = self.blocks // self.blocks_per_chunk
        self.bytes = self.blocks * self.regions * page_bytes
        self.namespace = NAMESPACE_TAIL.pack(b"bench-host", page_bytes)
        self._memory = create_memfd("bench-pool", self.bytes)
        self.pattern = Pattern(self._memory, self.bytes)
        self.cache = self._register(client)

    def _register(self, client: Client) -> Cache:
        run = RegionRun(0, 0, self.regions, self.blocks * self.page_bytes, self.page_bytes, self.page_bytes)
        cache = client.register_cache(
            CacheSpec(
                name=f"pool-{self.page_bytes}",
                namespace=self.namespace,
                chunk_tokens=self.blocks_per_chunk * 16,
                buffers=[HostBuffer(self._memory, self.bytes)],
                groups=[full_group(block_tokens=16, blocks=self.blocks, regions=[run])],
            )
        )
        cache.wait_registered(60)
        return cache

    def ranges(self, content_of: list[int], at: list[int]) -> bytes:
        """Pattern ranges: block at[i] holds what block content_of[i] held when the pool was filled."""
        pack = struct.Struct("<QQQ").pack
        return b"".join(
            pack((region * self.blocks + to) * self.page_bytes, self.page_bytes, region * self.blocks + source + 1)
            for region in range(self.regions)
            for source, to in zip(content_of, at, strict=True)
        )

    def close(self) -> None:
        self.pattern.close()
        os.close(self._memory)


def one_round(client: Client, pool: Pool, seed: int, between: Callable[[], None]) -> tuple[float, float]:
    """GB/s of a store and of a retrieve into other blocks; compares every byte. `between` runs after the pool has been
    filled: it must sweep what the fill left unwritten in the processor's caches."""
    order = list(range(pool.blocks))
    shuffle = random.Random(seed).shuffle
    shuffle(order)
    target = order.copy()
    shuffle(target)
    pool.pattern.fill(pool.ranges(order, order))
    between()
    keys = os.urandom(pool.chunks * KEY_BYTES)
    began = time.perf_counter()
    stored = client.store(pool.cache, 0, b"", keys, [Blocks(0, 0, array("i", order))]).result(120)
    store_s = time.perf_counter() - began
    assert stored.chunks == stored.chunks_written == pool.chunks, stored
    found = client.lookup(pool.namespace, keys)
    assert found.chunks == pool.chunks, found
    assert found.lease is not None
    began = time.perf_counter()
    retrieved = client.retrieve(pool.cache, found.lease, [Blocks(0, 0, array("i", target))]).result(120)
    retrieve_s = time.perf_counter() - began
    assert retrieved.ok, retrieved
    assert retrieved.bytes == stored.bytes == pool.bytes
    wrong = pool.pattern.wrong(pool.ranges(order, target))
    assert wrong == 0, f"{wrong} wrong bytes"
    return pool.bytes / store_s / 1e9, pool.bytes / retrieve_s / 1e9


class Ceiling:
    """The best contiguous copy of this machine, sampled again and again during the run."""

    def __init__(self, copy_bytes: int) -> None:
        self._bytes = copy_bytes
        self._source, self._target = create_memfd("ceiling", copy_bytes), create_memfd("ceiling", copy_bytes)
        self._runs: dict[tuple[int, bool], list[float]] = {(n, nt): [] for n in THREADS for nt in (False, True)}

    def sample(self) -> None:
        for (threads, non_temporal), runs in self._runs.items():
            seconds = copy_seconds(self._source, self._target, self._bytes, threads, non_temporal)
            runs.append(self._bytes / seconds / 1e9)

    def best(self) -> tuple[float, str]:
        medians = {how: statistics.median(runs) for how, runs in self._runs.items()}
        threads, non_temporal = max(medians, key=lambda how: medians[how])
        kind = "non-temporal" if non_temporal else "plain"
        return medians[(threads, non_temporal)], f"{threads} threads {kind}"


def run(*, request_bytes: int, page_sizes: tuple[int, ...], rounds: int, as_json: bool) -> None:
    arena_bytes = 6 * request_bytes
    rows = Rows(
        "host", as_json=as_json, config=f"requests of {request_bytes / MIB:g} MiB, 256-token chunks, shuffled blocks"
    )
    slab = str(arena_bytes // 6)
    with Served(("--http-port", "0", "--slab-bytes", slab), arena_bytes) as served:
        client = Client(str(served.socket), engine="bench-host", timeouts=PATIENT)
        assert client.wait_connected(30), served.last_words()
        wait_for_arena(client)
        for page_bytes in page_sizes:
            pool = Pool(client, page_bytes, request_bytes)
            ceiling = Ceiling(request_bytes)
            one_round(client, pool, 0, lambda: None)
            stores, retrieves = [], []
            for number in range(rounds):
                store, retrieve = one_round(client, pool, number + 1, ceiling.sample)
                stores.append(store)
                retrieves.append(retrieve)
            best, how = ceiling.best()
            say(f"page {page_bytes}: ceiling {best:.2f} GB/s by {how}")
            rows.add(f"store_{page_bytes >> 10}k", stores, "GB/s", ceiling=best)
            rows.add(f"retrieve_{page_bytes >> 10}k", retrieves, "GB/s", ceiling=best)
            client.unregister(pool.cache).result(30)
            client.clear(pool.namespace)
            pool.close()
        client.close()


def wait_for_arena(client: Client) -> None:
    """The whole arena has been touched, so that no page fault is measured."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        arena = client.status()["arena"]
        if arena["ready_bytes"] == arena["total_bytes"]:
            return
        time.sleep(0.1)
    raise RuntimeError("the arena did not grow to its size")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: shows that it runs, measures nothing")
    given = parser.parse_args()
    if given.smoke:
        run(request_bytes=64 * MIB, page_sizes=(2 << 10, 32 << 10), rounds=2, as_json=given.json)
    else:
        run(request_bytes=256 * MIB, page_sizes=PAGE_SIZES, rounds=7, as_json=given.json)


if __name__ == "__main__":
    main()
