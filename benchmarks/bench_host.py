"""How much of the memory's speed do stores and retrieves reach?

`python benchmarks/bench_host.py [--json] [--smoke] [--digests off,on] [--devices host,portable] [--pages 2,128]`

Requests of 256 MiB through the real socket, three in flight, block ids shuffled, page sizes from 2 KiB to 1 MiB. A run
is a burst of 6 requests: GB/s = their bytes / the time from the first call to the last completed future.
Ceiling: the best contiguous copy of as many bytes with 1, 2 and 4 threads, plain and non-temporal, between touched
memfds. It is sampled before and after every run, because the speed of this memory drifts during a measurement. Ratio
= median over the runs of (GB/s / ceiling of that run). Every byte is compared, outside the timed part.

call_store: microseconds of the caller's thread in Client.store() of such a request, median of a burst.

--digests off,on: two servers, one without digests and one with them, take turns in each round.

--devices host,portable: the same pool as memory that the server maps, and as tensors that torch gathers from. They take
turns in each round, too. portable needs torch.
"""

import os
import statistics
import struct
from contextlib import ExitStack

from benchmarks.bursts import Burst
from benchmarks.rows import Rows, option_parser, say
from benchmarks.serving import serving
from kvclient.client import Cache, Client
from kvclient.values import Buffered, CacheSpec, HostBuffer, TensorBuffer, full_group
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
WIPE = struct.Struct("<QQQ")
MIB = 1 << 20
NAMESPACE_TAIL = struct.Struct(">28sI")


class Pool:
    """A KV pool in shared memory (bursts.Pool). Each request covers one third; those in flight never share a block."""

    def __init__(self, client: Client, page_bytes: int, request_bytes: int, device: str = "host") -> None:
        self.page_bytes = page_bytes
        self.device = device
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
                name=f"pool-{self.page_bytes}-{self.device}",
                namespace=self.namespace,
                chunk_tokens=self.blocks_per_chunk * 16,
                buffers=[self._buffer()],
                groups=[full_group(block_tokens=16, blocks=self.blocks, regions=[run])],
                device=self.device,
            )
        )
        cache.wait_registered(60)
        return cache

    def _buffer(self) -> Buffered:
        if self.device == "host":
            return HostBuffer(self._memory, self.bytes)
        import torch  # noqa: PLC0415  # most machines that measure the host have none

        path = f"/proc/self/fd/{self._memory}"
        return TensorBuffer(torch.from_file(path, shared=True, size=self.bytes, dtype=torch.uint8))

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

    def sample(self) -> float:
        """Samples each kind of copy; GB/s of the one that has been best so far."""
        for (threads, non_temporal), samples in self._samples.items():
            seconds = copy_seconds(self._source, self._target, self._bytes, threads, non_temporal)
            samples.append(self._bytes / seconds / 1e9)
        return self._samples[self._best()][-1]

    def median(self) -> float:
        return statistics.median(self._samples[self._best()])

    def best(self) -> str:
        """The kind of copy with the largest median."""
        threads, non_temporal = self._best()
        return f"{threads} threads {'non-temporal' if non_temporal else 'plain'}"

    def _best(self) -> tuple[int, bool]:
        return max(self._samples, key=lambda how: statistics.median(self._samples[how]))

    def close(self) -> None:
        os.close(self._source)
        os.close(self._target)


class Case:
    """Bursts of one pool on one server."""

    def __init__(self, client: Client, page_bytes: int, request_bytes: int, device: str) -> None:
        self.client = client
        self.pool = Pool(client, page_bytes, request_bytes, device)
        self.rates: dict[str, list[float]] = {"store": [], "retrieve": []}
        self.beside: dict[str, list[float]] = {"store": [], "retrieve": []}
        self.call_us: list[float] = []

    def round(self, number: int, ceiling: Ceiling) -> None:
        burst = Burst(self.client, self.pool, number, requests=REQUESTS, in_flight=IN_FLIGHT)
        self.pool.fill()
        before = ceiling.sample()  # this also evicts the fill from the processor's caches
        for name, run in (("store", burst.store), ("retrieve", burst.retrieve)):
            self.rates[name].append(run())
            after = ceiling.sample()
            self.beside[name].append((before + after) / 2)
            before = after
        self.call_us.append(statistics.median(burst.call_s[:REQUESTS]) * 1e6)
        burst.compare()

    def close(self) -> None:
        self.client.unregister(self.pool.cache).result(30)
        self.client.clear(self.pool.namespace)
        self.pool.close()


def run(
    *,
    request_bytes: int,
    page_sizes: tuple[int, ...],
    rounds: int,
    digests: tuple[str, ...],
    devices: tuple[str, ...],
    as_json: bool,
) -> None:
    arena_bytes = 2 * REQUESTS * request_bytes
    config = f"requests of {request_bytes / MIB:g} MiB, 256-token chunks, shuffled blocks"
    rows = Rows("host", as_json=as_json, config=config)
    with ExitStack() as stack:
        clients = {}
        for setting in digests:
            flags = ("--slab-bytes", str(request_bytes), "--digests", setting)
            _, clients[setting] = stack.enter_context(serving(flags, arena_bytes, engine="bench-host"))
        for page_bytes in page_sizes:
            ceiling = Ceiling(request_bytes)
            cases = {
                (setting, device): Case(client, page_bytes, request_bytes, device)
                for setting, client in clients.items()
                for device in devices
            }
            for number in range(rounds + 1):  # the first warms up
                for case in cases.values():
                    case.round(number, ceiling)
            for (setting, device), case in cases.items():
                suffix = (f"_{setting}" if len(clients) > 1 else "") + (f"_{device}" if len(devices) > 1 else "")
                for name, rates in case.rates.items():
                    row = f"{name}_{page_bytes >> 10}k{suffix}"
                    rows.add(row, rates[1:], "GB/s", ceilings=case.beside[name][1:])
                rows.add(f"call_store_{page_bytes >> 10}k{suffix}", case.call_us[1:], "us")
                case.close()
            say(f"page {page_bytes}: ceiling {ceiling.median():.2f} GB/s by {ceiling.best()}")
            ceiling.close()


def main() -> None:
    parser = option_parser(__doc__, smoke="tiny sizes")
    parser.add_argument("--digests", default="on", help="on, off, or off,on: two servers by turns")
    parser.add_argument("--devices", default="host", help="host, portable, or host,portable by turns")
    parser.add_argument("--pages", help="KiB of the pages to measure, as 2,16,128; all without it")
    given = parser.parse_args()
    digests, devices = tuple(given.digests.split(",")), tuple(given.devices.split(","))
    shared = {"digests": digests, "devices": devices, "as_json": given.json}
    if given.smoke:
        pages = (2 << 10, 128 << 10)
        run(request_bytes=16 * MIB, page_sizes=pages, rounds=2, **shared)
    else:
        pages = tuple(int(page) << 10 for page in given.pages.split(",")) if given.pages else tuple(REGIONS_OF_PAGE)
        run(request_bytes=256 * MIB, page_sizes=pages, rounds=7, **shared)


if __name__ == "__main__":
    main()
