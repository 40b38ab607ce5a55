"""What does a lost device cost, and from how many devices is one prompt read at a time?

`python -m benchmarks.bench_placement [--devices 2,4,8] [--run-tokens 256,4096,16384,65536] [--rounds 5]
[--directory DIR] [--json] [--smoke]`; needs root, loop devices and control groups (version 1); exits
with 77 where one of them is missing.

Each device is an ext4 of its own, limited to LIMIT bytes read per second. Prompts of 16K tokens fill half of the
devices, and three prompts of 100K tokens follow. All is written to disk. Each round has other prompts, and loses
another device.

`fill`: chunks on the fullest device - those on the emptiest one, divided by the mean.
`read`: the server is started again, and a lookup has a 100K prompt read into an empty DRAM. Bytes / time, in devices:
divided by the rate at which one of them is then read by itself. The ceiling is the number of devices.
`found`: the server is started without one device. Prompts of 16K tokens that it finds whole / all of them. The ceiling
is the share of the other devices, (N - 1) / N.
"""

import mmap
import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.bench_streaming import POLL_S, until
from benchmarks.limited_disks import limited_disks
from benchmarks.rows import Rows, option_parser
from benchmarks.serving import serving
from kvclient import Blocks, CacheSpec, Client, HostBuffer, RegionRun, full_group
from kvserver.wire.messages import KEY_BYTES

MIB = 1 << 20
LIMIT = 8 * MIB
BLOCK_TOKENS = 16
CHUNK_TOKENS = 256
CHUNK_BLOCKS = CHUNK_TOKENS // BLOCK_TOKENS
PAGE_BYTES = 2048
CHUNK_BYTES = CHUNK_BLOCKS * PAGE_BYTES
PROMPT_CHUNKS = 64
"""16K tokens."""
PROMPTS_A_DEVICE = 14
LONG_CHUNKS = 400
"""100K tokens."""
LONG_PROMPTS = 3
DEVICE_BYTES = 64 * MIB
DISK_BYTES = 2 * DEVICE_BYTES
"""Bytes of the file system: the store, its notes, and what ext4 keeps."""
SEGMENT_BYTES = MIB
ARENA_BYTES = 64 * MIB
NAMESPACE = b"bench-placement".ljust(32, b".")
WAIT_S = 60.0


class Result(NamedTuple):
    """The result of one round."""

    fill: float
    read: float
    found: float


@contextmanager
def serving_from(directories: Sequence[Path], run_tokens: int) -> Iterator[Client]:
    flags = ("--disk-paths", ",".join(map(str, directories)), "--disk-write-policy", "through")
    flags += ("--disk-bytes", str(DEVICE_BYTES), "--disk-segment-bytes", str(SEGMENT_BYTES))
    flags += ("--disk-run-tokens", str(run_tokens))
    with serving(flags, ARENA_BYTES, engine="bench-placement") as (_, client):
        until("the disk tier", lambda: client.status()["disk_state"] == "ready")
        yield client


def store_all(client: Client, prompts: Sequence[bytes]) -> None:
    """Stores prompts; each is on disk before the next is stored."""
    blocks = LONG_CHUNKS * CHUNK_BLOCKS
    pool = os.memfd_create("bench-placement")
    os.ftruncate(pool, blocks * PAGE_BYTES)
    group = full_group(
        block_tokens=BLOCK_TOKENS, blocks=blocks, regions=[RegionRun(0, 0, 1, 0, PAGE_BYTES, PAGE_BYTES)]
    )
    buffers = [HostBuffer(pool, blocks * PAGE_BYTES)]
    cache = client.register_cache(
        CacheSpec(name="pool", namespace=NAMESPACE, chunk_tokens=CHUNK_TOKENS, buffers=buffers, groups=[group])
    )
    assert cache.wait_registered(WAIT_S)
    stored = client.status()["chunks_on_disk"]
    for keys in prompts:
        chunks = len(keys) // KEY_BYTES
        ids = [Blocks(0, 0, list(range(chunks * CHUNK_BLOCKS)))]
        assert client.store(cache, 0, b"", keys, ids).result(WAIT_S).chunks == chunks
        stored += chunks
        until("its chunks to be on disk", lambda stored=stored: client.status()["chunks_on_disk"] >= stored)
    client.unregister(cache).result(WAIT_S)
    os.close(pool)


def read_rate(client: Client, keys: bytes) -> float:
    """Bytes per second by which a prompt comes from disk into DRAM."""
    began = time.perf_counter()
    found = client.lookup(NAMESPACE, keys)
    assert found.lease is not None
    assert found.lease.chunks_on_disk == LONG_CHUNKS, found
    while (left := client.lookup(NAMESPACE, keys)).lease is not None and left.lease.chunks_on_disk:
        client.release(left.lease)
        time.sleep(POLL_S)
    return LONG_CHUNKS * CHUNK_BYTES / (time.perf_counter() - began)


def device_rate(directory: Path) -> float:
    """Bytes per second by which one device reads, with as many requests as half a long prompt."""
    store = max(directory.iterdir(), key=lambda path: path.stat().st_size)
    count = LONG_CHUNKS // 2
    descriptor = os.open(store, os.O_RDONLY | os.O_DIRECT)
    try:
        with mmap.mmap(-1, CHUNK_BYTES) as memory:
            began = time.perf_counter()
            for number in range(count):
                assert os.preadv(descriptor, [memory], number * CHUNK_BYTES) == CHUNK_BYTES
            return count * CHUNK_BYTES / (time.perf_counter() - began)
    finally:
        os.close(descriptor)


def one_round(directories: Sequence[Path], run_tokens: int, seed: int) -> Result:
    rng = random.Random(seed)
    prompts = [rng.randbytes(PROMPT_CHUNKS * KEY_BYTES) for _ in range(PROMPTS_A_DEVICE * len(directories))]
    long = [rng.randbytes(LONG_CHUNKS * KEY_BYTES) for _ in range(LONG_PROMPTS)]
    with serving_from(directories, run_tokens) as client:
        store_all(client, prompts)
        held = [disk["used_bytes"] for disk in client.status()["disks"]]
        store_all(client, long)
    with serving_from(directories, run_tokens) as client:
        rates = [read_rate(client, keys) for keys in long]
    alone = device_rate(directories[0])
    lost = seed % len(directories)
    with serving_from([each for number, each in enumerate(directories) if number != lost], run_tokens) as client:
        whole = sum(client.lookup(NAMESPACE, keys).chunks == PROMPT_CHUNKS for keys in prompts)
    spread = (max(held) - min(held)) * len(held) / sum(held)
    return Result(spread, sum(rates) / len(rates) / alone, whole / len(prompts))


def main() -> None:
    parser = option_parser(__doc__, smoke="two devices, one width, one round")
    parser.add_argument("--devices", default="2,4,8")
    parser.add_argument("--run-tokens", default="256,4096,16384,65536")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="where the images of the devices lie")
    given = parser.parse_args()
    if given.smoke:
        given.devices, given.run_tokens, given.rounds = "2", "16384", 1
    rows = Rows(
        "placement", as_json=given.json, config=f"chunks of {CHUNK_BYTES >> 10} KiB, {LIMIT // MIB} MiB/s a device"
    )
    for devices in map(int, given.devices.split(",")):
        for run_tokens in map(int, given.run_tokens.split(",")):
            rounds = []
            for seed in range(given.rounds):
                with limited_disks(
                    devices, size_bytes=DISK_BYTES, read_bytes_per_s=LIMIT, parent=given.directory
                ) as directories:
                    rounds.append(one_round(directories, run_tokens, seed))
            name = f"{devices} devices, runs of {run_tokens}"
            rows.add(f"{name}: fill", [each.fill for each in rounds], "of mean")
            rows.add(f"{name}: read", [each.read for each in rounds], "devices", ceilings=[devices] * len(rounds))
            left = (devices - 1) / devices
            rows.add(f"{name}: found", [each.found for each in rounds], "of all", ceilings=[left] * len(rounds))


if __name__ == "__main__":
    main()
