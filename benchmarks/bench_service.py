"""How long does a scheduler wait for a lookup? `python benchmarks/bench_service.py [--json] [--smoke]`

One server, an index filled by real stores, and lookups of a whole prompt from another process through kvclient.
Every chunk hits and a lease is granted (and released outside the timed part); each lookup uses another random
prompt. Then the same while other processes store at a bounded rate. `handle` is the time inside Service.handle, from
the server's own metrics.

lookup_512_p50_us etc.: time of Client.lookup(). store_4_p50_us: Client.store() of 4 chunks, to the completed future.
"""

import multiprocessing
import os
import random
import time
import urllib.request
from array import array
from collections.abc import Callable
from multiprocessing.synchronize import Event

from benchmarks.replay.served import Served
from benchmarks.rows import Rows, option_parser, say
from benchmarks.serving import HOST, free_port, serving
from kvclient.client import Client
from kvclient.values import Blocks, CacheSpec, HostBuffer, Timeouts, full_group
from kvserver._native import create_memfd
from kvserver.wire.messages import KEY_BYTES, RegionRun

CHAIN_CHUNKS = 512
PAUSE_S = 0.0005
PATIENT = Timeouts(lookup_s=2.0)


def cache_spec(name: str, namespace: bytes, *, blocks: int, blocks_per_chunk: int, page_bytes: int) -> CacheSpec:
    """A spec for a pool with one region."""
    pool = create_memfd("bench-pool", blocks * page_bytes)
    run = RegionRun(0, 0, 1, blocks * page_bytes, page_bytes, page_bytes)
    return CacheSpec(
        name=name,
        namespace=namespace,
        chunk_tokens=blocks_per_chunk * 4,
        buffers=[HostBuffer(pool, blocks * page_bytes)],
        groups=[full_group(block_tokens=4, blocks=blocks, regions=[run])],
    )


def fill(client: Client, namespace: bytes, chains: int) -> list[bytes]:
    """Stores `chains` prompts of CHAIN_CHUNKS chunks of 4 KiB; returns their keys."""
    spec = cache_spec("fill", namespace, blocks=CHAIN_CHUNKS * 4, blocks_per_chunk=4, page_bytes=1024)
    cache = client.register_cache(spec)
    cache.wait_registered(30)
    ids = array("i", range(CHAIN_CHUNKS * 4))
    prompts = []
    for number in range(chains):
        keys = os.urandom(CHAIN_CHUNKS * KEY_BYTES)
        result = client.store(cache, 0, b"", keys, [Blocks(0, 0, ids)]).result(60)
        assert result.chunks == CHAIN_CHUNKS, result
        prompts.append(keys)
        if number % 200 == 199:
            say(f"{(number + 1) * CHAIN_CHUNKS} chunks stored")
    client.unregister(cache).result(60)
    return prompts


def lookups(client: Client, namespace: bytes, prompts: list[bytes], count: int, seed: int) -> list[float]:
    """Microseconds of each lookup."""
    choose = random.Random(seed)
    taken = []
    for _ in range(count):
        keys = choose.choice(prompts)
        began = time.perf_counter()
        found = client.lookup(namespace, keys)
        taken.append((time.perf_counter() - began) * 1e6)
        assert found.chunks == CHAIN_CHUNKS, found
        assert found.lease is not None
        client.release(found.lease)
        time.sleep(PAUSE_S)
    return taken


def storer(socket: str, number: int, ready: Event, stop: Event) -> None:
    """Stores 4 chunks of 64 KiB every 20 ms until `stop` is set."""
    client = Client(socket, engine=f"bench-storer-{number}", timeouts=PATIENT)
    assert client.wait_connected(30)
    spec = cache_spec("store", bytes(31) + b"\x02", blocks=16, blocks_per_chunk=4, page_bytes=16384)
    cache = client.register_cache(spec)
    cache.wait_registered(30)
    ids = array("i", range(16))
    ready.set()
    next_at = time.monotonic()
    while not stop.is_set():
        client.store(cache, 0, b"", os.urandom(4 * KEY_BYTES), [Blocks(0, 0, ids)]).result(30)
        next_at = max(next_at + 0.02, time.monotonic())
        time.sleep(max(0.0, next_at - time.monotonic()))
    client.close()


def handle_us(http_port: int, before: tuple[float, float]) -> tuple[float, tuple[float, float]]:
    """Mean microseconds inside Service.handle since `before`, and the totals now."""
    time.sleep(0.6)  # the brain publishes its counters every 250 ms
    with urllib.request.urlopen(f"http://{HOST}:{http_port}/metrics", timeout=5) as page:
        lines = page.read().decode().splitlines()
    total = {
        line.split()[0]: float(line.split()[1]) for line in lines if line.startswith("kvserver_lookup_handle_seconds_")
    }
    now = total["kvserver_lookup_handle_seconds_sum"], total["kvserver_lookup_handle_seconds_count"]
    return (now[0] - before[0]) / max(1.0, now[1] - before[1]) * 1e6, now


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


def brain_rss_mib(supervisor: int) -> float:
    """Resident memory of the brain, shared pages included; it never maps the arena."""
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/cmdline", "rb") as command, open(f"/proc/{entry}/status") as status:
                fields = dict(line.split(":", 1) for line in status if ":" in line)
                if b"kvserver.brain.process" in command.read() and int(fields["PPid"]) == supervisor:
                    return int(fields["VmRSS"].split()[0]) / 1024
        except OSError:
            continue  # the process has ended meanwhile
    raise RuntimeError("no brain runs")


def run(*, chains: int, count: int, rounds: int, storers: int, spare_bytes: int, as_json: bool) -> None:
    """spare_bytes: part of the arena for the stores of storers."""
    arena_bytes = (chains * CHAIN_CHUNKS * 4096 >> 20 << 20) + spare_bytes
    rows = Rows("service", as_json=as_json, config=f"{chains * CHAIN_CHUNKS} chunks, arena {arena_bytes >> 20} MiB")
    http_port = free_port()
    with serving(("--http-port", str(http_port)), arena_bytes, engine="bench", timeouts=PATIENT) as (served, client):
        namespace = bytes(31) + b"\x01"
        empty_mib = brain_rss_mib(served.pid)
        prompts = fill(client, namespace, chains)
        time.sleep(1.5)
        rows.add("brain_rss_empty_mib", [empty_mib], "MiB")
        rows.add("brain_rss_growth_mib", [brain_rss_mib(served.pid) - empty_mib], "MiB")

        def look(number: int) -> list[float]:
            return lookups(client, namespace, prompts, count, number)

        look(-1)
        medians, tails, handles = [], [], []
        _, totals = handle_us(http_port, (0.0, 0.0))
        for number in range(rounds):
            taken = look(number)
            medians.append(percentile(taken, 0.5))
            tails.append(percentile(taken, 0.99))
            mean, totals = handle_us(http_port, totals)
            handles.append(mean)
        rows.add("lookup_512_p50_us", medians, "us")
        rows.add("lookup_512_p99_us", tails, "us")
        rows.add("lookup_512_handle_us", handles, "us")
        rows.add("lookup_512_busy_p50_us", busy(served, storers, look, rounds), "us")
        rows.add("store_4_p50_us", stores(client, count // 4, rounds), "us")


def busy(served: Served, storers: int, look: Callable[[int], list[float]], rounds: int) -> list[float]:
    """Medians of `look(round)` while `storers` processes store."""
    spawn = multiprocessing.get_context("spawn")
    stop = spawn.Event()
    readies = [spawn.Event() for _ in range(storers)]
    helpers = [spawn.Process(target=storer, args=(str(served.socket), n, readies[n], stop)) for n in range(storers)]
    for helper in helpers:
        helper.start()
    for ready in readies:
        assert ready.wait(60)
    medians = [percentile(look(number), 0.5) for number in range(rounds)]
    stop.set()
    for helper in helpers:
        helper.join(30)
        assert helper.exitcode == 0
    return medians


def stores(client: Client, count: int, rounds: int) -> list[float]:
    spec = cache_spec("small", bytes(31) + b"\x03", blocks=16, blocks_per_chunk=4, page_bytes=1024)
    cache = client.register_cache(spec)
    cache.wait_registered(30)
    ids = array("i", range(16))
    medians = []
    for _ in range(rounds):
        taken = []
        for _ in range(count):
            keys = os.urandom(4 * KEY_BYTES)
            began = time.perf_counter()
            result = client.store(cache, 0, b"", keys, [Blocks(0, 0, ids)]).result(30)
            taken.append((time.perf_counter() - began) * 1e6)
            assert result.chunks_written == 4, result
        medians.append(percentile(taken, 0.5))
    return medians


def main() -> None:
    given = option_parser(__doc__, smoke="tiny sizes").parse_args()
    if given.smoke:
        run(chains=8, count=40, rounds=2, storers=2, spare_bytes=80 << 20, as_json=given.json)
    else:
        run(chains=1954, count=1000, rounds=5, storers=8, spare_bytes=9 << 28, as_json=given.json)


if __name__ == "__main__":
    main()
