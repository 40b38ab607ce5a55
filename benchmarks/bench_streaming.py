"""Do disk and device work at the same time?

`python -m benchmarks.bench_streaming [--device host|cuda] [--directory DIR] [--request-mib 512]
[--engine auto|uring|threads] [--json]`; cuda needs torch and a GPU.

Prompts that are only on disk, in turn. For one prompt, the two stages are timed separately: `disk`, from the lookup,
whose lease starts the read, until the whole prompt is in DRAM; then `copy`, from the call of retrieve to the
completed future. For the next prompt, both together: `both`, from the lookup to the completed future of an immediate
retrieve.

The ceiling of `both` is the slower stage of the prompt before; the ratio is their quotient. Blocks are shuffled,
pages are 32 KiB in 64 regions (an 8B model). Every byte of every prompt is compared, outside the timed part.
"""

import random
import tempfile
import time
from collections.abc import Callable

from benchmarks import bench_host
from benchmarks.bursts import WAIT_S, Pool, Request
from benchmarks.rows import Rows, option_parser, say
from benchmarks.serving import serving
from kvclient import Client, Lease
from kvserver.wire.messages import KEY_BYTES

MIB = 1 << 20
PAGE_BYTES = 32 << 10
PROMPTS = 6
"""The arena holds half of them, so each has left it when its turn comes again."""
ARENA_PROMPTS = 3
ROUNDS = 4
"""Passes through all prompts; the first one warms up."""
SEGMENT_BYTES = 256 * MIB
SLAB_BYTES_MAX = 512 * MIB
POLL_S = 0.001


def pool_of(device: str, client: Client, request_bytes: int) -> Pool:
    if device == "host":
        return bench_host.Pool(client, PAGE_BYTES, request_bytes)
    from benchmarks import bench_copy  # noqa: PLC0415  (torch is only needed here)

    return bench_copy.Pool(client, PAGE_BYTES >> 10, request_bytes, "staged")


class Prompt(Request):
    """A request with any blocks of the pool."""

    def __init__(self, client: Client, pool: Pool, seed: int) -> None:
        sources, targets = list(range(pool.request_blocks)), list(range(pool.request_blocks))
        random.Random(seed).shuffle(sources)
        random.Random(seed + 1000).shuffle(targets)
        super().__init__(client, pool, sources, targets)

    def look(self) -> float:
        """Seconds of a lookup of its first chunk, which hits and is not retrieved."""
        began = time.perf_counter()
        found = self._client.lookup(self._pool.namespace, self._keys[:KEY_BYTES])
        took_s = time.perf_counter() - began
        assert found.chunks == 1, found
        assert found.lease is not None
        self._client.release(found.lease)
        return took_s

    def read(self) -> float:
        """Seconds until the whole prompt is in DRAM."""
        began = time.perf_counter()
        lease = self._from_disk()
        while (left := self.lease()).chunks_on_disk:
            self._client.release(left)
            time.sleep(POLL_S)
        took_s = time.perf_counter() - began
        self._client.release(left)
        self._client.release(lease)
        return took_s

    def copy(self) -> float:
        """Seconds to retrieve a prompt that is in DRAM."""
        lease = self.lease()
        assert lease.chunks_on_disk == 0, lease
        began = time.perf_counter()
        self._bring(lease)
        return time.perf_counter() - began

    def both(self) -> float:
        began = time.perf_counter()
        self._bring(self._from_disk())
        return time.perf_counter() - began

    def _from_disk(self) -> Lease:
        lease = self.lease()
        assert lease.chunks_on_disk == self._pool.chunks, f"some of it was in DRAM: {lease}"
        return lease

    def _bring(self, lease: Lease) -> None:
        result = self.retrieve(lease).result(WAIT_S)
        assert result.ok, result
        assert result.bytes == self._pool.request_bytes


def until(what: str, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {WAIT_S:g} s for {what}")
        time.sleep(0.01)


def store_all(client: Client, pool: Pool) -> list[Prompt]:
    """Stores all prompts; each is on disk before the next is stored."""
    prompts = [Prompt(client, pool, seed) for seed in range(PROMPTS)]
    pool.fill()
    for number, prompt in enumerate(prompts, 1):
        assert prompt.store().result(WAIT_S).chunks == pool.chunks
        chunks = number * pool.chunks
        until("its chunks to be on disk", lambda chunks=chunks: client.status()["chunks_on_disk"] >= chunks)
    return prompts


def measure(rows: Rows, device: str, prompts: list[Prompt], request_bytes: int) -> None:
    reads, copies, boths, slower = [], [], [], []
    for number in range(ROUNDS):
        for alone, together in zip(prompts[::2], prompts[1::2], strict=True):
            times = alone.read(), alone.copy(), together.both()
            if number:
                reads.append(times[0])
                copies.append(times[1])
                slower.append(max(times[:2]) * 1e3)
                boths.append(times[2] * 1e3)
    rows.add(f"{device}_disk", [request_bytes / seconds / 1e9 for seconds in reads], "GB/s")
    rows.add(f"{device}_copy", [request_bytes / seconds / 1e9 for seconds in copies], "GB/s")
    rows.add(f"{device}_both", boths, "ms", ceilings=slower)
    for prompt in prompts:
        prompt.compare()


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--device", choices=("host", "cuda"), default="host")
    parser.add_argument("--directory", help="where the disk tier lies, in a directory of its own; a temporary one")
    parser.add_argument("--request-mib", type=int, default=512)
    parser.add_argument("--engine", choices=("auto", "uring", "threads"), default="auto")
    given = parser.parse_args()
    request_bytes = given.request_mib * MIB
    rows = Rows("streaming", as_json=given.json, config=f"{given.request_mib} MiB of 32 KiB pages, shuffled blocks")
    with tempfile.TemporaryDirectory(prefix="kvserver-bench-", dir=given.directory) as directory:
        disk_bytes = PROMPTS * request_bytes * 5 // 4 + 2 * SEGMENT_BYTES  # a segment holds seven chunks of 32 MiB
        disk = ("--disk-paths", directory, "--disk-bytes", str(disk_bytes))
        disk += ("--disk-segment-bytes", str(SEGMENT_BYTES), "--disk-write-policy", "through")
        disk += ("--disk-engine", given.engine, "--slab-bytes", str(min(request_bytes, SLAB_BYTES_MAX)))
        with serving(disk, ARENA_PROMPTS * request_bytes, engine="bench-streaming") as (_, client):
            until("the disk tier", lambda: client.status()["disk_state"] == "ready")
            pool = pool_of(given.device, client, request_bytes)
            measure(rows, given.device, store_all(client, pool), pool.request_bytes)
            say(str(client.status()["counters"]["disk_faults"]))
            client.unregister(pool.cache).result(30)
            pool.close()


if __name__ == "__main__":
    main()
