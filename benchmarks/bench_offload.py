"""How much do offload decisions cost an engine's steps? `python -m benchmarks.bench_offload [--json] [--smoke]`

Calls of kvclient.offload on the scheduler's thread, without server and engine: microseconds per request and step,
median of rounds. A prompt of 128K tokens is 512 chunks of 256 tokens, 8192 blocks of 16.

decode_us: a decoding request's step between two chunks; nearly every call is like this.
waiting_us: match() of a request that is asked for again, its answer known.
store_us: a prefill step that completes two chunks (512 tokens): computed(), store(), and the end of its job.
store_16k_us: the same for 64 chunks (16,384 tokens, a large prefill step).
ask_128k_us: the first match() of a long prompt: the question with its 512 keys.
retrieve_128k_us: found(), match() and allocated() of 8192 blocks, and the end of the job: once per request.
short_us: a whole request of 700 tokens, all miss: begin, match, found, match, admitted, one store, finish.
"""

import os
import statistics
import time
from collections.abc import Callable
from itertools import count

from benchmarks.rows import Rows, option_parser
from kvclient.offload.decide import Offload
from kvclient.offload.values import Group, Options, RetrieveOrder, StoreOrder
from kvclient.values import Found, Lease, RetrieveResult, StoreResult
from kvserver.wire.messages import KEY_BYTES

CHUNK, BLOCK = 256, 16
LONG = 512 * CHUNK
KEYS = os.urandom(LONG // CHUNK * KEY_BYTES)
TABLES = (list(range(1, LONG // BLOCK + 1)),)
LEASE = Lease(1, LONG // CHUNK, 1, 1e12)


class Bench:
    def __init__(self, calls: int) -> None:
        self._calls = calls
        self._names = count()
        self.offload = Offload(Options(chunk_tokens=CHUNK, groups=(Group(BLOCK),), null_block=0))

    def timed(self, once: Callable[[], float]) -> float:
        """Median of the seconds that `once` returns, in microseconds."""
        return statistics.median(once() for _ in range(self._calls)) * 1e6

    def begin(self, tokens: int) -> int:
        name = next(self._names)
        self.offload.begin(name, tokens=tokens, keys=KEYS[: tokens // CHUNK * KEY_BYTES])
        return name

    def answer(self, chunks: int) -> None:
        (order,) = self.offload.take_lookups()
        self.offload.found(order.number, Found(chunks, LEASE if chunks else None))

    def running(self, tokens: int) -> int:
        name = self.begin(tokens)
        self.offload.match(name, tokens=tokens, hbm_tokens=0, now_s=0.0)
        self.answer(0)
        self.offload.admitted(name, hbm_tokens=0)
        return name

    # ---------------------------------------------------------------- cases

    def decode(self) -> float:
        name = self.running(LONG)
        computed = self.offload.computed
        began = time.perf_counter()
        for tokens in range(1, 101):
            computed(name, tokens, 0.0)
        return (time.perf_counter() - began) / 100

    def waiting(self) -> float:
        name = self.begin(LONG)
        match = self.offload.match
        match(name, tokens=LONG, hbm_tokens=0, now_s=0.0)
        self.answer(300)
        began = time.perf_counter()
        for _ in range(100):
            match(name, tokens=LONG, hbm_tokens=0, now_s=0.0)
        took = (time.perf_counter() - began) / 100
        self.offload.finish(name)
        return took

    def store(self, chunks: int) -> float:
        name = self.running(LONG)
        began = time.perf_counter()
        assert self.offload.computed(name, chunks * CHUNK, 0.0)
        order = self.offload.store(name, TABLES)
        assert isinstance(order, StoreOrder)
        self.offload.store_ended(order.job, 0, StoreResult(chunks, chunks, 1, ""))
        took = time.perf_counter() - began
        self.offload.finish(name)
        return took

    def ask(self) -> float:
        name = self.begin(LONG)
        began = time.perf_counter()
        self.offload.match(name, tokens=LONG, hbm_tokens=0, now_s=0.0)
        took = time.perf_counter() - began
        self.answer(0)
        self.offload.finish(name)
        return took

    def retrieve(self) -> float:
        name = self.begin(LONG)
        self.offload.match(name, tokens=LONG, hbm_tokens=0, now_s=0.0)
        began = time.perf_counter()
        self.answer(LONG // CHUNK)
        assert self.offload.match(name, tokens=LONG, hbm_tokens=0, now_s=0.0)
        order = self.offload.allocated(name, hbm_tokens=0, tables=TABLES)
        assert isinstance(order, RetrieveOrder)
        self.offload.retrieve_ended(order.job, 0, RetrieveResult(True, 1, ""))
        took = time.perf_counter() - began
        self.offload.finish(name)
        return took

    def short(self) -> float:
        began = time.perf_counter()
        name = self.begin(700)
        self.offload.match(name, tokens=700, hbm_tokens=0, now_s=0.0)
        self.answer(0)
        self.offload.match(name, tokens=700, hbm_tokens=0, now_s=0.0)
        self.offload.admitted(name, hbm_tokens=0)
        assert self.offload.computed(name, 700, 0.0)
        order = self.offload.store(name, TABLES)
        assert order is not None
        self.offload.finish(name)
        self.offload.store_ended(order.job, 0, StoreResult(2, 2, 1, ""))
        took = time.perf_counter() - began
        self.offload.take_summaries()
        return took


def main() -> None:
    given = option_parser(__doc__, smoke="few calls").parse_args()
    calls, rounds = (3, 2) if given.smoke else (300, 7)
    rows = Rows("offload", as_json=given.json, config=f"{calls} calls a round, chunk {CHUNK}, block {BLOCK}")
    bench = Bench(calls)
    cases: dict[str, Callable[[], float]] = {
        "decode_us": bench.decode,
        "waiting_us": bench.waiting,
        "store_us": lambda: bench.store(2),
        "store_16k_us": lambda: bench.store(64),
        "ask_128k_us": bench.ask,
        "retrieve_128k_us": bench.retrieve,
        "short_us": bench.short,
    }
    for name, case in cases.items():
        rows.add(name, [bench.timed(case) for _ in range(rounds)], "us")


if __name__ == "__main__":
    main()
