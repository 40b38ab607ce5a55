"""How fast is a device emptied, and how much does that slow lookups down?

`python -m benchmarks.bench_drain [--device-mib 1024] [--page-kib 4] [--rounds 3] [--directory DIR] [--json]
[--smoke]`

A server with two devices in DIR is filled through its socket until both hold about --device-mib, most of it no
longer in DRAM. Then the second device is drained as by `kvserver disk drain`.

`drain`: bytes of that device / time from the order until it is empty and its file is gone. Its ceiling is `write`:
the rate at which the stores, written through, filled both devices before. Both devices are on one file system here,
which a drain reads and writes. Meanwhile chunks are looked up one after another: `lookup_p50_us` and
`lookup_longest_ms`. Afterwards every chunk must be found, and every byte is compared.
"""

import statistics
import tempfile
import time
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

from benchmarks.bench_host import Pool
from benchmarks.bench_streaming import Prompt, until
from benchmarks.bursts import WAIT_S
from benchmarks.rows import Rows, option_parser
from benchmarks.serving import serving
from kvclient import Client

MIB = 1 << 20
DRAINED = 1
REQUEST_MIB = 64
ARENA_BYTES = 256 * MIB
SEGMENT_BYTES = 64 * MIB
LOOKUP_PAUSE_S = 0.002


class Drained(NamedTuple):
    """The result of one round."""

    write_gb_per_s: float
    drain_gb_per_s: float
    lookups_s: list[float]


def filled(client: Client, pool: Pool, device_bytes: int) -> tuple[list[Prompt], float]:
    """Prompts on disk, half of their chunks on each device, and the rate of writing them."""
    pool.fill()
    prompts = [Prompt(client, pool, seed) for seed in range(2 * device_bytes // pool.request_bytes)]
    began = time.perf_counter()
    for number, prompt in enumerate(prompts, 1):
        assert prompt.store().result(WAIT_S).chunks == pool.chunks
        chunks = number * pool.chunks
        until("its chunks to be on disk", lambda chunks=chunks: client.status()["chunks_on_disk"] >= chunks)
    return prompts, len(prompts) * pool.request_bytes / (time.perf_counter() - began) / 1e9


def drained(client: Client, prompts: list[Prompt]) -> tuple[float, list[float]]:
    """The drain's rate, and the durations of the lookups meanwhile."""
    bytes_there = client.status()["disks"][DRAINED]["used_bytes"]
    lookups_s = []
    asking = cycle(prompts)
    began = time.perf_counter()
    client.drain(DRAINED)
    while client.status()["disks"][DRAINED]["drain"] != "drained":
        lookups_s.append(next(asking).look())
        time.sleep(LOOKUP_PAUSE_S)
    return bytes_there / (time.perf_counter() - began) / 1e9, lookups_s


def one_round(parent: Path | None, *, device_bytes: int, page_bytes: int, request_bytes: int) -> Drained:
    with tempfile.TemporaryDirectory(prefix="kvserver-bench-", dir=parent) as name:
        devices = [Path(name) / "0", Path(name) / "1"]
        for device in devices:
            device.mkdir()
        flags = ("--disk-paths", ",".join(map(str, devices)), "--disk-write-policy", "through")
        flags += ("--disk-bytes", str(3 * device_bytes), "--disk-segment-bytes", str(SEGMENT_BYTES))
        flags += ("--slab-bytes", str(SEGMENT_BYTES))
        with serving(flags, ARENA_BYTES, engine="bench-drain") as (_, client):
            until("the disk tier", lambda: client.status()["disk_state"] == "ready")
            pool = Pool(client, page_bytes, request_bytes)
            prompts, write_gb_per_s = filled(client, pool, device_bytes)
            rate, lookups_s = drained(client, prompts)
            assert client.status()["chunks_on_disk"] == len(prompts) * pool.chunks, client.status()["disks"]
            for prompt in prompts:
                prompt.compare()
            client.unregister(pool.cache).result(30)
            pool.close()
    return Drained(write_gb_per_s, rate, lookups_s)


def main() -> None:
    parser = option_parser(__doc__, smoke="tiny")
    parser.add_argument("--device-mib", type=int, default=1024)
    parser.add_argument("--page-kib", type=int, default=4, help="4: chunks of 10 MiB; 32: of 32 MiB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, help="where the devices lie, in directories of their own")
    given = parser.parse_args()
    request_mib = REQUEST_MIB
    if given.smoke:
        given.device_mib, given.rounds, request_mib = 48, 1, 24
        given.page_kib = 128  # chunks of 2 MiB: with eight larger ones, all could be on the other device
    rows = Rows("drain", as_json=given.json, config=f"{given.device_mib} MiB a device, pages of {given.page_kib} KiB")
    rounds = [
        one_round(
            given.directory,
            device_bytes=given.device_mib * MIB,
            page_bytes=given.page_kib << 10,
            request_bytes=request_mib * MIB,
        )
        for _ in range(given.rounds)
    ]
    written = [done.write_gb_per_s for done in rounds]
    rows.add("write", written, "GB/s")
    rows.add("drain", [done.drain_gb_per_s for done in rounds], "GB/s", ceilings=written)
    rows.add("lookup_p50_us", [statistics.median(done.lookups_s) * 1e6 for done in rounds], "us")
    rows.add("lookup_longest_ms", [max(done.lookups_s) * 1e3 for done in rounds], "ms")


if __name__ == "__main__":
    main()
