"""How much of the link do stores and retrieves of GPU memory reach, and how much does the engine slow down?

`python -m benchmarks.bench_copy [--modes staged,direct,server-gather] [--pages-kib 2,4,32] [--request-mib 256]
[--engine idle,compute,memory] [--digests off,on] [--rounds 5] [--burst-gib 6]`; needs torch and a GPU.

The engine is this process: a pool of GPU memory, kvclient, and (busy) a thread that launches bf16 matrix products or
a memory-bound kernel back to back. Requests go through the real socket; block ids are shuffled.

A burst is about --burst-gib of requests, four in flight; GB/s = its bytes / the time from its first call to its last
completed future. `single_*`: one request at a time, in ms, from the call (for a retrieve: after its lookup) to the
completed future; the medians of the rounds, of at most 47 each. Its ceiling is one contiguous copy of the same bytes.

Ceiling: one contiguous asynchronous copy of 256 MiB between pinned host memory and the device, the best of three
next to each burst, with the engine idle; `link_*`: the same with the engine busy. `engine_*`: the engine's rate
during the burst, relative to its rate alone just before.

--digests off,on: two servers of one machine, one without digests and one with them, take turns in each round. Names of
cases end with `off` or `on` then.

Every byte of the first and the last burst is compared on the device, outside the timed part.
"""

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import TypeVar

import torch

from benchmarks.bursts import Burst
from benchmarks.rows import Rows, option_parser, say
from benchmarks.serving import serving
from kvclient import CacheSpec, Client, DeviceBuffer, RegionRun, full_group

MIB = 1 << 20
BLOCKS_PER_CHUNK = 16
REGIONS_OF_PAGE_KIB = {2: 160, 4: 160, 8: 160, 16: 160, 18: 61, 32: 64, 64: 64} | dict.fromkeys(
    (128, 256, 512, 1024, 4096), 1
)
"""Page size -> regions in real shapes (bench_host names them; 18 KiB is MLA with 61 layers)."""
IN_FLIGHT = 4
REQUESTS_MIN, REQUESTS_MAX = 6, 200
SINGLES = 48
T = TypeVar("T")


class Pool:
    """A KV pool on the device (bursts.Pool); each request covers a quarter."""

    def __init__(self, client: Client, page_kib: int, request_bytes: int, burst_bytes: int, mode: str) -> None:
        page = page_kib << 10
        self.regions = REGIONS_OF_PAGE_KIB[page_kib]
        self.chunks = max(1, request_bytes // (self.regions * page) // BLOCKS_PER_CHUNK)
        self.request_blocks = self.chunks * BLOCKS_PER_CHUNK
        self.request_bytes = self.request_blocks * self.regions * page
        self.blocks = IN_FLIGHT * self.request_blocks
        self.requests = max(REQUESTS_MIN, min(REQUESTS_MAX, burst_bytes // self.request_bytes))
        self.namespace = f"{mode}-{page_kib}-{self.request_bytes}".encode().ljust(32, b"\0")
        self.memory = torch.empty((self.regions, self.blocks, page), dtype=torch.uint8, device="cuda")
        self.truth = torch.randint(0, 256, self.memory.shape, dtype=torch.uint8, device="cuda")
        run = RegionRun(0, 0, self.regions, self.blocks * page, page, page)
        self.cache = client.register_cache(
            CacheSpec(
                name=f"pool-{mode}-{page_kib}",
                namespace=self.namespace,
                chunk_tokens=BLOCKS_PER_CHUNK * 16,
                buffers=[DeviceBuffer(self.memory.data_ptr(), self.memory.nbytes)],
                groups=[full_group(block_tokens=16, blocks=self.blocks, regions=[run])],
                device="cuda",
                mode=mode,  # type: ignore[arg-type]
            )
        )
        assert self.cache.wait_registered(120), self.cache

    def fill(self) -> None:
        self.memory.copy_(self.truth)
        torch.cuda.synchronize()

    def wipe(self) -> None:
        self.memory.zero_()
        torch.cuda.synchronize()

    def wrong(self, sources: list[int], targets: list[int]) -> int:
        to, source = (torch.tensor(blocks, device="cuda") for blocks in (targets, sources))
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")  # read only once: each read waits for the device
        for region in range(self.regions):
            wrong += (self.memory[region, to] != self.truth[region, source]).sum()
        return int(wrong)

    def burst(self, client: Client, seed: int) -> Burst:
        return Burst(client, self, seed, requests=self.requests, in_flight=IN_FLIGHT)

    def close(self) -> None:
        """Does nothing: the memory goes with this object."""


def singles(burst: Burst, kind: str) -> list[float]:
    """Milliseconds of each request, one at a time; the first one warms up."""
    times_ms = []
    for request in burst.requests[:SINGLES]:
        begin = request.store if kind == "store" else partial(request.retrieve, request.lease())
        began = time.perf_counter()
        begin().result(60)
        times_ms.append((time.perf_counter() - began) * 1e3)
    return times_ms[1:]


class Link:
    """Contiguous copies between pinned memory and the device."""

    def __init__(self, copy_bytes: int) -> None:
        self._host = torch.empty(copy_bytes, dtype=torch.uint8, pin_memory=True)
        self._device = torch.empty(copy_bytes, dtype=torch.uint8, device="cuda")

        self._stream = torch.cuda.Stream()

    def sample(self, kind: str) -> float:
        """GB/s. Waits only for its own copies, so that an engine may work at the same time."""
        to, source = (self._host, self._device) if kind == "store" else (self._device, self._host)
        rates = []
        for _ in range(3):
            self._stream.synchronize()
            began = time.perf_counter()
            with torch.cuda.stream(self._stream):
                to.copy_(source, non_blocking=True)
            self._stream.synchronize()
            rates.append(to.nbytes / (time.perf_counter() - began) / 1e9)
        return max(rates)


class Engine:
    """The engine's own work, back to back, and its rate."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._stop = threading.Event()
        self._done = 0
        self._thread = threading.Thread(target=self._work, daemon=True)
        if kind != "idle":
            self._thread.start()

    def _work(self) -> None:
        torch.cuda.set_device(0)
        stream = torch.cuda.Stream()
        events: deque[torch.cuda.Event] = deque()
        with torch.cuda.stream(stream):
            if self._kind == "compute":
                left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
                out = torch.empty_like(left)
                work: Callable[[], object] = lambda: torch.matmul(left, right, out=out)  # noqa: E731
            else:
                wide = torch.zeros(1 << 29, device="cuda", dtype=torch.bfloat16)
                work = lambda: wide.add_(1)  # noqa: E731
            while not self._stop.is_set():
                work()
                event = torch.cuda.Event(blocking=True)
                event.record(stream)
                events.append(event)
                if len(events) > 4:
                    events.popleft().synchronize()
                    self._done += 1

    def rate(self, during: Callable[[], T]) -> tuple[T, float]:
        """Runs `during`. Returns its result, and units of work per second meanwhile."""
        before, began = self._done, time.perf_counter()
        result = during()
        return result, (self._done - before) / (time.perf_counter() - began)

    def close(self) -> None:
        self._stop.set()
        if self._kind != "idle":
            self._thread.join()


class Case:
    """One mode and size on one server: its pool, and what its bursts came to."""

    def __init__(self, client: Client, name: str, mode: str, *, kib: int, request_bytes: int, burst_bytes: int) -> None:
        self.client = client
        self.pool = Pool(client, kib, request_bytes, burst_bytes, mode)
        self.name = f"{kib}k_{self.pool.request_bytes // MIB}m{name}"
        self.speeds: dict[str, list[float]] = {"store": [], "retrieve": []}
        self.ceilings: dict[str, list[float]] = {"store": [], "retrieve": []}
        self.kept: dict[str, list[float]] = {"store": [], "retrieve": []}
        self.singles: dict[str, list[float]] = {"store": [], "retrieve": []}

    def round(self, number: int, last: int, link: Link, engine: Engine, engine_kind: str) -> None:
        """Round 0 warms up; it and the last one are compared."""
        burst = self.pool.burst(self.client, number)
        self.pool.fill()
        for kind in ("store", "retrieve"):
            ceiling = link.sample(kind) if engine_kind == "idle" else 0.0
            alone = engine.rate(lambda: time.sleep(0.3))[1] if engine_kind != "idle" else 0.0
            speed, rate = engine.rate(burst.store if kind == "store" else burst.retrieve)
            if number:
                self.speeds[kind].append(speed)
                self.ceilings[kind].append(ceiling or CEILINGS[kind])
                self.kept[kind].append(rate / alone if alone else 1.0)
        if number in (0, last):
            burst.compare()
        self.client.clear(self.pool.namespace)
        if engine_kind == "idle":
            burst = self.pool.burst(self.client, last + 1 + number)
            self.pool.fill()
            for kind, medians in self.singles.items():
                took_ms = statistics.median(singles(burst, kind))
                if number:
                    medians.append(took_ms)
            self.client.clear(self.pool.namespace)

    def report(self, rows: Rows, mode: str, engine_kind: str) -> None:
        for kind in ("store", "retrieve"):
            case = f"{mode}_{engine_kind}_{kind}_{self.name}"
            rows.add(case, self.speeds[kind], "GB/s", ceilings=self.ceilings[kind])
            if engine_kind == "idle":
                link_gbps = statistics.median(self.ceilings[kind])
                CEILINGS[kind] = max(CEILINGS[kind], link_gbps)
                link_ms = self.pool.request_bytes / link_gbps / 1e6
                rows.add(f"single_{case}", self.singles[kind], "ms", ceilings=[link_ms] * len(self.singles[kind]))
            else:
                rows.add(f"engine_{case}", self.kept[kind], "of alone")
        self.client.unregister(self.pool.cache).result(60)


def measure(
    clients: Mapping[str, Client],
    rows: Rows,
    link: Link,
    *,
    mode: str,
    engine_kind: str,
    rounds: int,
    **sizes: int,
) -> None:
    """clients: end of the case's name -> client of a server. They take turns. sizes: of a Case."""
    cases = [Case(client, name, mode, **sizes) for name, client in clients.items()]
    engine = Engine(engine_kind)
    for number in range(1 + rounds):
        for case in cases if number % 2 else reversed(cases):
            case.round(number, rounds, link, engine, engine_kind)
    engine.close()
    for case in cases:
        case.report(rows, mode, engine_kind)


def measure_link(rows: Rows, link: Link, engine_kind: str, rounds: int) -> None:
    """Measures one contiguous copy while the engine works."""
    engine = Engine(engine_kind)
    time.sleep(0.3)
    for kind in ("store", "retrieve"):
        rates = [link.sample(kind) for _ in range(rounds)]
        rows.add(f"link_{engine_kind}_{kind}", rates, "GB/s", ceilings=[CEILINGS[kind]] * rounds)
    engine.close()


CEILINGS: dict[str, float] = {}
"""Ceilings with the idle engine, also used for the busy rows."""


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--modes", default="staged")
    parser.add_argument("--pages-kib", default=",".join(map(str, REGIONS_OF_PAGE_KIB)))
    parser.add_argument("--request-mib", default="256")
    parser.add_argument("--engine", default="idle")
    parser.add_argument("--digests", default="on", help="off, on, or off,on: both in turns")
    parser.add_argument("--burst-gib", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=5, help="of which each row gives the median; one more warms up")
    given = parser.parse_args()
    burst_bytes = given.burst_gib << 30
    requests = [int(mib) * MIB for mib in given.request_mib.split(",")]
    device = torch.cuda.get_device_name(0)
    rows = Rows("copy", as_json=given.json, config=f"{device}, torch {torch.__version__}, 256-token chunks, shuffled")
    arena = 2 * max(burst_bytes, REQUESTS_MIN * max(requests))
    variants = given.digests.split(",")
    with ExitStack() as stack:
        clients = {}
        for digests in variants:
            flags = "--slab-bytes", str(512 * MIB), "--digests", digests
            _, client = stack.enter_context(serving(flags, arena, engine="bench-copy"))
            clients[f"_{digests}" if len(variants) > 1 else ""] = client
        link = Link(256 * MIB)
        CEILINGS.update({kind: link.sample(kind) for kind in ("store", "retrieve")})
        say(f"link {CEILINGS}")
        for engine_kind in given.engine.split(","):
            if engine_kind != "idle":
                measure_link(rows, link, engine_kind, given.rounds)
            for mode in given.modes.split(","):
                for kib in map(int, given.pages_kib.split(",")):
                    for request_bytes in requests:
                        sizes = {"kib": kib, "request_bytes": request_bytes, "burst_bytes": burst_bytes}
                        measure(clients, rows, link, mode=mode, engine_kind=engine_kind, rounds=given.rounds, **sizes)
            for client in clients.values():
                say(str([mover["facts"] for mover in client.status()["movers"]]))


if __name__ == "__main__":
    main()
