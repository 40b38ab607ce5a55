"""`python -m tests.gpu.capture SOCKET`: an engine that captures CUDA graphs while its KV is stored and retrieved.

In mode `global`, a capture breaks if any thread of the process makes a call that might wait. So a client that polls
events or launches kernels in the usual way would break it. Prints `ok: …` or `FAILED: …`, and exits 1 if anything
failed. Numbers are small integers, so every order of additions gives the same float.
"""

import os
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from kvclient import Blocks, CacheSpec, Client, DeviceBuffer, Timeouts, full_group
from kvclient.memory.layouts import describe
from kvserver.wire.messages import KEY_BYTES

CHUNKS, PER_CHUNK, LAYERS = 7, 3, 5
HALF = CHUNKS * PER_CHUNK
BLOCKS = 2 * HALF
PAGE = (5, 8, 128)
"""Tokens of a block, heads, head; with bf16 a page has 10,240 bytes."""
NAMESPACE = b"capture".ljust(32, b"\0")
DURING = 6
"""Transfers that must end while a capture is open."""
WAIT_S = 20.0
PATIENT = Timeouts(lookup_s=5.0, register_s=60.0)
WIDTH, DEPTH = 512, 40
REPLAYS = 20


class Traffic:
    """Repeatedly stores the first half of the pool and retrieves it into the second, in a thread."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.pool = torch.zeros((LAYERS, 2, BLOCKS, *PAGE), dtype=torch.bfloat16, device="cuda")
        self.pool[:, :, :HALF] = torch.randn_like(self.pool[:, :, :HALF])
        described = describe(list(self.pool), blocks=BLOCKS, block_dim=1)
        self._cache = client.register_cache(
            CacheSpec(
                name="kv",
                namespace=NAMESPACE,
                chunk_tokens=PAGE[0] * PER_CHUNK,
                buffers=[DeviceBuffer(*extent) for extent in described.extents],
                groups=[full_group(block_tokens=PAGE[0], blocks=BLOCKS, regions=described.regions)],
                device="cuda",
            )
        )
        assert self._cache.wait_registered(60), self._cache
        self._event = torch.cuda.Event()  # recording one while another thread captures would be this test's own error
        self._event.record()
        torch.cuda.synchronize()
        self.transfers = 0
        self.problem = ""
        self._stop = threading.Event()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Runs traffic in the block. Afterwards the second half must equal the first."""
        self.pool[:, :, HALF:] = 0
        torch.cuda.synchronize()
        self._stop.clear()
        thread = threading.Thread(target=self._work)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join(2 * WAIT_S)

    def wait_for(self, more: int) -> int:
        """Waits until `more` transfers have ended; returns how many did."""
        before, due_s = self.transfers, time.monotonic() + WAIT_S
        while self.transfers - before < more and not self.problem and time.monotonic() < due_s:
            time.sleep(0.002)
        return self.transfers - before

    def arrived(self) -> bool:
        return torch.equal(self.pool[:, :, HALF:], self.pool[:, :, :HALF])

    def _work(self) -> None:
        sources, targets = (array("i", range(begin, begin + HALF)) for begin in (0, HALF))
        while not self._stop.is_set():
            keys = os.urandom(CHUNKS * KEY_BYTES)
            stored = self._client.store(
                self._cache, 0, b"", keys, [Blocks(0, 0, sources)], after=self._event, timeout_s=WAIT_S
            ).result(2 * WAIT_S)
            found = self._client.lookup(NAMESPACE, keys)
            if stored.chunks != CHUNKS or found.lease is None:
                self.problem = f"{stored} {found}"
                return
            retrieved = self._client.retrieve(self._cache, found.lease, [Blocks(0, 0, targets)], after=self._event)
            if not (result := retrieved.result(2 * WAIT_S)).ok:
                self.problem = str(result)
                return
            self.transfers += 2


class Allocations:
    """Takes and frees memory from torch in a thread, some of it new to torch each time."""

    def __init__(self) -> None:
        self.rounds = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work)

    def __enter__(self) -> "Allocations":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(WAIT_S)

    def _work(self) -> None:
        held: list[Tensor] = []
        while not self._stop.is_set():
            held.append(torch.empty(1 + 700_001 * (self.rounds % 61), dtype=torch.uint8, device="cuda"))
            if len(held) > 17:
                held = held[9:]
            self.rounds += 1


def model(weights: Tensor) -> Callable[[Tensor], Tensor]:
    def compute(values: Tensor) -> Tensor:
        for _ in range(DEPTH):
            values = torch.remainder(values @ weights + 1, 7)
        return values

    return compute


def capture(mode: str, traffic: Traffic, compute: Callable[[Tensor], Tensor]) -> bool:
    given = torch.zeros((WIDTH, WIDTH), device="cuda")
    graph = torch.cuda.CUDAGraph()
    during = 0
    with traffic.running():
        traffic.wait_for(2)
        try:
            with torch.cuda.graph(graph, capture_error_mode=mode):
                half = compute(given)
                during = traffic.wait_for(DURING)
                whole = compute(half)
        except RuntimeError as problem:
            return say(False, f"{mode}: the capture broke: {problem}")
        with Allocations() as allocations:
            right = 0
            for _ in range(REPLAYS):
                given.random_(0, 7)
                expected = compute(compute(given))
                graph.replay()
                right += torch.equal(whole, expected)
                traffic.wait_for(1)
            torch.cuda.synchronize()
    good = say(during >= DURING, f"{mode}: {during} transfers ended while the capture was open {traffic.problem}")
    good &= say(right == REPLAYS, f"{mode}: {right} of {REPLAYS} replays right, {traffic.transfers} transfers so far")
    good &= say(allocations.rounds > 0, f"{mode}: torch allocated {allocations.rounds} times beside them")
    return good & say(traffic.arrived(), f"{mode}: what was retrieved meanwhile is what was stored")


def say(holds: bool, text: str) -> bool:
    print(f"{'ok' if holds else 'FAILED'}: {text}", flush=True)
    return holds


def main() -> None:
    weights = torch.randint(0, 2, (WIDTH, WIDTH), device="cuda").float()
    compute = model(weights)
    compute(torch.zeros((WIDTH, WIDTH), device="cuda"))  # libraries are loaded before a capture
    with Client(sys.argv[1], engine="capture", timeouts=PATIENT) as client:
        assert client.wait_connected(30)
        traffic = Traffic(client)
        outcomes = [capture(mode, traffic, compute) for mode in ("global", "thread_local", "relaxed")]
    sys.exit(not all(outcomes))


if __name__ == "__main__":
    main()
