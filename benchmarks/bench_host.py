"""How much of the memory's speed do stores and retrieves reach? `python benchmarks/bench_host.py [--json] [--smoke]`

Requests of 256 MiB through the real socket, three in flight, block ids shuffled, page sizes from 2 KiB to 1 MiB. A run
is a burst of 6 requests: GB/s = their bytes / the time from the first call to the last completed future.
Ceiling: the best contiguous copy of as many bytes with 1, 2 and 4 threads, plain and non-temporal, between touched
memfds. It is sampled before and after every run, because the speed of this memory drifts during a measurement. Ratio
= median over the runs of (GB/s / ceiling of that run). Every byte is compared, outside the timed part.
"""

import itertools
import os
import statistics
import struct

from benchmarks.bursts import Burst
from benchmarks.rows import Rows, option_parser, say
from benchmarks.serving import serving
from kvclient.client import Cache, Client
from kvclient.values import CacheSpec, HostBuffer, full_group
from kvserver._native import Pattern, copy_seconds, create_memfd
from kvserver.wire.messages import RegionRun

REGIONS_OF_PAGE = {
    2 << 10: 160,  # Llama-3.1-70B, fp8, one rank of 8: 80 layers, K and V, 1 KV head of 128
    4 << 10: 160,  # the same in bf16
    16 << 10: 160,  # the same in bf16, one rank of 2
    32 << 10: 64,  # Llama-3.1-8B, bf16
    128 << 10: 1,  # all layers of a block side by side: a small model
    1 << 20: 1,
}
"""Page size in bytes -> regions, in real shapes; blocks have 16 tokens."""
BLOCKS_PER_CHUNK = 16
"""Chunks of 256 tokens."""
THREADS = (1, 2, 4)
REQUESTS = 6
"""Requests in a burst."""
IN_FLIGHT = 3
SAMPLES = 3
"""Samples of the ceiling in a round."""
WIPE = struct.Struct("<QQQ")
MIB = 1 << 20
NAMESPACE_TAIL = struct.Struct(">28sI")


class Pool:
    """A KV pool in shared memory (bursts.Pool). Each request covers one third; those in flight never share a block."""

    def __init__(self, client: Client, page_bytes: int, request_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.regions = REGIONS_OF_PAGE[page_bytes]
        self.blocks_per_chunk = BLOCKS_PER_CHUNK
        self.chunks = request_bytes // (self.regions * page_bytes) // BLOCKS_PER_CHUNK
        self.request_blocks = self.chunks * BLOCKS_PER_CHUNK
        self.request_bytes = self.request_blocks * self.regions * page_bytes
        self.blocks = IN_FLIGHT * self.request_blocks
        self.bytes = IN_FLIGHT * self.request_bytes
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

    def _ranges(self, content_of: list[int], at: list[int]) -> bytes:
        """Pattern ranges: block at[i] holds the original content of block content_of[i]."""
        pack = struct.Struct("<QQQ").pack
        return b"".join(
            pack((region * self.blocks + to) * self.page_bytes, self.page_bytes, region * self.blocks + source + 1)
            for region in range(self.regions)
            for source, to in zip(content_of, at, strict=True)
        )

    def fill(self) -> None:
        everything = list(range(self.blocks))
        self.pattern.fill(self._ranges(everything, everything))

    def wipe(self) -> None:
        self.pattern.fill(WIPE.pack(0, self.bytes, 0))

    def wrong(self, sources: list[int], targets: list[int]) -> int:
        return self.pattern.wrong(self._ranges(sources, targets))

    def close(self) -> None:
        self.pattern.close()
        os.close(self._memory)


class Ceiling:
    """Contiguous copies on this machine, sampled repeatedly during the run."""

    def __init__(self, copy_bytes: int) -> None:
        self._bytes = copy_bytes
        self._source, self._target = create_memfd("ceiling", copy_bytes), create_memfd("ceiling", copy_bytes)
        self._samples: dict[tuple[int, bool], list[float]] = {(n, nt): [] for n in THREADS for nt in (False, True)}

    def sample(self) -> None:
        for (threads, non_temporal), samples in self._samples.items():
            seconds = copy_seconds(self._source, self._target, self._bytes, threads, non_temporal)
            samples.append(self._bytes / seconds / 1e9)

    def best(self) -> tuple[list[float], str]:
        """All samples of the kind with the largest median, and its name."""
        threads, non_temporal = max(self._samples, key=lambda how: statistics.median(self._samples[how]))
        kind = "non-temporal" if non_temporal else "plain"
        return self._samples[(threads, non_temporal)], f"{threads} threads {kind}"

    def close(self) -> None:
        os.close(self._source)
        os.close(self._target)


def run(*, request_bytes: int, page_sizes: tuple[int, ...], rounds: int, as_json: bool) -> None:
    arena_bytes = 2 * REQUESTS * request_bytes
    rows = Rows(
        "host", as_json=as_json, config=f"requests of {request_bytes / MIB:g} MiB, 256-token chunks, shuffled blocks"
    )
    with serving(("--slab-bytes", str(request_bytes)), arena_bytes, engine="bench-host") as (_, client):
        for page_bytes in page_sizes:
            pool = Pool(client, page_bytes, request_bytes)
            ceiling = Ceiling(request_bytes)
            stores, retrieves = [], []
            for number in range(rounds + 1):  # the first warms up
                burst = Burst(client, pool, number, requests=REQUESTS, in_flight=IN_FLIGHT)
                pool.fill()
                ceiling.sample()  # this also evicts the fill from the processor's caches
                stores.append(burst.store())
                ceiling.sample()
                retrieves.append(burst.retrieve())
                ceiling.sample()
                burst.compare()
            samples, how = ceiling.best()
            say(f"page {page_bytes}: ceiling {statistics.median(samples):.2f} GB/s by {how}")
            beside = [(before + after) / 2 for before, after in itertools.pairwise(samples)]
            rows.add(f"store_{page_bytes >> 10}k", stores[1:], "GB/s", ceilings=beside[SAMPLES::SAMPLES])
            rows.add(f"retrieve_{page_bytes >> 10}k", retrieves[1:], "GB/s", ceilings=beside[SAMPLES + 1 :: SAMPLES])
            client.unregister(pool.cache).result(30)
            client.clear(pool.namespace)
            pool.close()
            ceiling.close()


def main() -> None:
    given = option_parser(__doc__, smoke="tiny sizes").parse_args()
    if given.smoke:
        run(request_bytes=16 * MIB, page_sizes=(2 << 10, 128 << 10), rounds=2, as_json=given.json)
    else:
        run(request_bytes=256 * MIB, page_sizes=tuple(REGIONS_OF_PAGE), rounds=7, as_json=given.json)


if __name__ == "__main__":
    main()
