"""How much does an engine that is bound by kernel launches slow down while its own process stores and retrieves?

`python -m benchmarks.bench_launches [--request-mib 256] [--page-kib 64] [--json]`; needs torch and a GPU.

The engine is the main thread. A step copies eight small inputs to the device, launches 32 layers of twelve small
kernels, like a decoder without graphs, copies a result back, and waits for it. It is timed alone, and with
continuous background work:

    store        stores by this process, each begun between two steps, ordered after an event of the last step
    retrieve     retrieves by this process
    elsewhere    stores by another process on the same GPU
    to_host, to_device    contiguous copies of 256 MiB by this process without a server: the GPU's own cost

Rows: median and ninth decile of the steps in ms; the ceiling is the same value of the steps alone in that round (100
% = nothing lost). The last store of each round and the retrieves after it are compared, byte by byte, outside the
timed part.
"""

import multiprocessing
import random
import statistics
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.synchronize import Event as ProcessEvent
from typing import Any

import torch

from benchmarks.bench_copy import MIB, Pool
from benchmarks.bursts import WAIT_S, Request
from benchmarks.rows import Rows, option_parser, say
from benchmarks.serving import PATIENT, serving
from kvclient import Client

LAYERS, KERNELS, INPUTS = 32, 12, 8
LINK_BYTES = 256 * MIB
WIDTH = 4096
STEPS = 60
ROUNDS = 7
"""The first one warms up."""


class Engine:
    """Steps of an engine without graphs: some inputs to the device, many small kernels, a result back."""

    def __init__(self) -> None:
        self._hidden = torch.zeros((32, WIDTH), device="cuda", dtype=torch.bfloat16)
        self._here = [torch.zeros(2048, dtype=torch.int64, pin_memory=True) for _ in range(INPUTS)]
        self._there = [torch.zeros(2048, dtype=torch.int64, device="cuda") for _ in range(INPUTS)]
        self._result = torch.zeros(32, dtype=torch.bfloat16, pin_memory=True)

    def step(self) -> float:
        """Seconds from the first input until the result is on the host."""
        began = time.perf_counter()
        for there, here in zip(self._there, self._here, strict=True):
            there.copy_(here, non_blocking=True)
        for _ in range(LAYERS * KERNELS):
            self._hidden.add_(1.0)
        self._result.copy_(self._hidden[:, 0], non_blocking=True)
        torch.cuda.current_stream().synchronize()
        return time.perf_counter() - began

    def steps(self, between: Callable[[], None]) -> tuple[float, float]:
        """Median and ninth decile of the steps, in ms."""
        times = []
        for _ in range(STEPS):
            between()
            times.append(self.step() * 1e3)
        return statistics.median(times), statistics.quantiles(times, n=10)[-1]


class Link:
    """Contiguous copies of this process, two ahead, as in an engine that offloads by itself."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._here = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True)
        self._there = torch.empty(LINK_BYTES, dtype=torch.uint8, device="cuda")
        self._events: deque[torch.cuda.Event] = deque()

    def to_host(self) -> None:
        self._copy(self._here, self._there)

    def to_device(self) -> None:
        self._copy(self._there, self._here)

    def finish(self) -> None:
        self._stream.synchronize()

    def _copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        while self._events and self._events[0].query():
            self._events.popleft()
        while len(self._events) < 2:
            with torch.cuda.stream(self._stream):
                to.copy_(source, non_blocking=True)
                self._events.append(torch.cuda.Event())
                self._events[-1].record()


class Requests:
    """Stores or retrieves, one at a time."""

    def __init__(self, client: Client, pool: Pool) -> None:
        blocks = list(range(pool.request_blocks))
        random.Random(7).shuffle(blocks)
        self._request = Request(client, pool, blocks, blocks)
        self._running: Future[Any] | None = None
        self.done = 0

    def store(self) -> None:
        """Begins the next store, ordered after all launches so far, unless one is running."""
        if self._ended():
            self._request.renew()
            event = torch.cuda.Event()
            event.record()
            self._running = self._request.store(after=event)

    def retrieve(self) -> None:
        """Begins to retrieve what was stored last, unless a request is running."""
        if self._ended():
            self._running = self._request.retrieve()

    def finish(self) -> None:
        if self._running is not None:
            result = self._running.result(WAIT_S)
            assert not result.why, result
            self._running = None

    def compare(self) -> None:
        self._request.compare()

    def _ended(self) -> bool:
        if self._running is not None:
            if not self._running.done():
                return False
            self.finish()
            self.done += 1
        return True


def store_elsewhere(socket: str, page_kib: int, request_bytes: int, go: ProcessEvent, over: ProcessEvent) -> None:
    """Another engine, which stores while `go` is set."""
    client = Client(socket, engine="bench-launches-elsewhere", timeouts=PATIENT)
    assert client.wait_connected(30)
    pool = Pool(client, page_kib, request_bytes, "staged")
    pool.fill()
    requests = Requests(client, pool)
    while not over.is_set():
        if go.wait(0.1):
            requests.store()
            requests.finish()
    client.close()


def measure(rows: Rows, client: Client, pool: Pool, go: ProcessEvent) -> None:
    engine, requests, link = Engine(), Requests(client, pool), Link()
    rounds: list[dict[str, tuple[float, float]]] = []
    for number in range(ROUNDS):
        pool.fill()
        times = {"alone": engine.steps(lambda: None)}
        for name, copy in (("to_host", link.to_host), ("to_device", link.to_device)):
            times[name] = engine.steps(copy)
            link.finish()
        times["store"] = engine.steps(requests.store)
        requests.finish()
        requests.compare()
        times["retrieve"] = engine.steps(requests.retrieve)
        requests.finish()
        requests.compare()
        go.set()
        time.sleep(0.2)
        times["elsewhere"] = engine.steps(lambda: None)
        go.clear()
        time.sleep(0.2)
        if number:
            rounds.append(times)
    for at, which in enumerate(("", "_p90")):
        alone = [times["alone"][at] for times in rounds]
        rows.add(f"step_alone{which}", alone, "ms")
        for name in ("to_host", "to_device", "store", "retrieve", "elsewhere"):
            rows.add(f"step_{name}{which}", [times[name][at] for times in rounds], "ms", ceilings=alone)
    say(f"requests done beside steps: {requests.done}")


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--request-mib", type=int, default=256)
    parser.add_argument("--page-kib", type=int, default=64, choices=(2, 4, 8, 16, 32, 64))
    given = parser.parse_args()
    request_bytes = given.request_mib * MIB
    device = torch.cuda.get_device_name(0)
    config = f"{device}, torch {torch.__version__}, {given.request_mib} MiB of {given.page_kib} KiB"
    rows = Rows("launches", as_json=given.json, config=config)
    context = multiprocessing.get_context("spawn")
    go, over = context.Event(), context.Event()
    flags = ("--slab-bytes", str(512 * MIB))
    with serving(flags, 12 * request_bytes, engine="bench-launches") as (served, client):
        arguments = str(served.socket), given.page_kib, request_bytes, go, over
        other = context.Process(target=store_elsewhere, args=arguments)
        other.start()
        try:
            measure(rows, client, Pool(client, given.page_kib, request_bytes, "staged"), go)
        finally:
            over.set()
            other.join(30)


if __name__ == "__main__":
    main()
