"""How soon does a server answer? `python benchmarks/bench_start.py [--json] [--smoke] [--arena-bytes N]`

answer_ms: from starting the process to the first answered lookup of another process. ready_at_answer_gib: usable
bytes of the arena at that moment. grown_ms: until the whole arena is usable. Each start is a new server with a new
arena.

stop_ms, kept_answer_ms: a stop in order of a server whose arena, kept on tmpfs (arena_path), is full; and from the next
start to the first lookup that finds a chunk of it.
"""

import os
import shutil
import struct
import tempfile
import time
from array import array
from contextlib import closing

from benchmarks.bench_service import brain_rss_mib
from benchmarks.replay.served import Served
from benchmarks.rows import Rows, option_parser
from benchmarks.serving import PATIENT, serving
from kvclient.client import Client
from kvclient.values import Blocks, CacheSpec, HostBuffer, full_group
from kvserver._native import create_memfd
from kvserver.wire.messages import RegionRun

GIB = 1 << 30
PAGE_BYTES = 2 << 20
FILL_BYTES = 16 * PAGE_BYTES
"""Bytes of one prompt; its chunks have one page each."""
NAMESPACE = b"bench-start".ljust(32, b".")


def one_start(arena_bytes: int) -> tuple[float, float, float, float]:
    """(ms to the first answer, GiB usable then, ms to the whole arena, MiB of the empty brain)."""
    began = time.perf_counter()
    with closing(Served(("--http-port", "0"), arena_bytes)) as served:
        client = Client(str(served.socket), engine="bench-start", rank=-1, timeouts=PATIENT)
        assert client.wait_connected(60), served.last_words()
        found = client.lookup(bytes(32), bytes(32))
        answer_ms = (time.perf_counter() - began) * 1e3
        assert (found.chunks, found.why) == (0, ""), found
        ready_gib = client.status()["arena"]["ready_bytes"] / GIB
        while True:
            arena = client.status()["arena"]
            assert not arena["problem"], arena
            if arena["ready_bytes"] == arena["total_bytes"]:
                break
            time.sleep(0.02)
        grown_ms = (time.perf_counter() - began) * 1e3
        rss_mib = brain_rss_mib(served.pid)
        client.close()
    return answer_ms, ready_gib, grown_ms, rss_mib


def fill(client: Client, arena_bytes: int) -> list[bytes]:
    """Stores one prompt for each FILL_BYTES of the arena. Returns their keys."""
    memory = create_memfd("bench-start", FILL_BYTES)
    blocks = FILL_BYTES // PAGE_BYTES
    pages = RegionRun(0, 0, 1, FILL_BYTES, PAGE_BYTES, PAGE_BYTES)
    group = full_group(block_tokens=16, blocks=blocks, regions=[pages])
    buffers = [HostBuffer(memory, FILL_BYTES)]
    spec = CacheSpec(name="start", namespace=NAMESPACE, chunk_tokens=16, buffers=buffers, groups=[group])
    cache = client.register_cache(spec)
    cache.wait_registered(60)
    prompts = [
        b"".join(struct.pack(">QQ16x", prompt, block) for block in range(blocks))
        for prompt in range(arena_bytes // FILL_BYTES)
    ]
    for keys in prompts:
        stored = client.store(cache, 0, b"", keys, [Blocks(0, 0, array("i", range(blocks)))]).result(60)
        assert stored.chunks == blocks, stored
    client.unregister(cache).result(60)
    os.close(memory)
    return prompts


def kept(rows: Rows, arena_bytes: int, turns: int) -> None:
    """Stops and starts a server over a full arena."""
    stops, answers = list[float](), list[float]()
    memory = tempfile.mkdtemp(dir="/dev/shm", prefix="bench-start-")
    flags = ("--arena-path", memory, "--chunks-max", str(arena_bytes // PAGE_BYTES))
    try:
        with serving(flags, arena_bytes, engine="bench-start") as (served, client):
            prompts = fill(client, arena_bytes)
            for _ in range(turns):
                began = time.perf_counter()
                served.stop()
                stops.append((time.perf_counter() - began) * 1e3)
                began = time.perf_counter()
                served.start()
                while not client.lookup(NAMESPACE, prompts[0]).chunks:
                    time.sleep(0.001)
                answers.append((time.perf_counter() - began) * 1e3)
    finally:
        shutil.rmtree(memory)
    rows.add("stop_ms", stops, "ms")
    rows.add("kept_answer_ms", answers, "ms")


def main() -> None:
    parser = option_parser(__doc__, smoke="a tiny arena")
    parser.add_argument("--arena-bytes", type=int, default=16 * GIB)
    given = parser.parse_args()
    arena_bytes = GIB // 16 if given.smoke else given.arena_bytes
    rows = Rows("start", as_json=given.json, config=f"arena {arena_bytes / GIB:g} GiB")
    turns = 2 if given.smoke else 5
    answers, readies, growns, sizes = zip(*(one_start(arena_bytes) for _ in range(turns)), strict=True)
    rows.add("answer_ms", answers, "ms")
    rows.add("ready_at_answer_gib", readies, "GiB")
    rows.add("grown_ms", growns, "ms")
    rows.add("brain_rss_empty_mib", sizes, "MiB")
    kept(rows, arena_bytes, turns)


if __name__ == "__main__":
    main()
