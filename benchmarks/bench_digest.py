"""How fast does one core compute digests? `python -m benchmarks.bench_digest [--json] [--smoke]`

Payloads of 256 KiB, which stay in the core's cache, and of 64 MiB, which come from memory (or from the last cache of a
large machine). A run takes 50 ms or more; GB/s = bytes / the thread's own processor time. `best`: with AVX-512, if the
processor has it; `portable`: without vectors. Ceiling: XXH3, 64 bits, of the same bytes, measured beside each run.
"""

import mmap
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Literal

from benchmarks.rows import Rows, option_parser
from kvserver._native import digest_sum, xxh3

PATHS: tuple[Literal["best", "avx2", "portable"], ...] = ("best", "avx2", "portable")
ROUNDS = 7
RUN_S = 0.05
KIB = 1 << 10
MIB = 1 << 20


def gbps(function: Callable[[], object], payload_bytes: int, least_s: float) -> float:
    began = time.thread_time()
    calls = 0
    while (passed_s := time.thread_time() - began) < least_s or not calls:
        function()
        calls += 1
    return calls * payload_bytes / passed_s / 1e9


def main() -> None:
    given = option_parser(__doc__, smoke="one short run of a small payload").parse_args()
    rows = Rows("digest", as_json=given.json, config=f"one thread, runs of {RUN_S * 1e3:g} ms")
    rounds, least_s = (1, 0.0) if given.smoke else (ROUNDS, RUN_S)
    for name, payload_bytes in (("256k", 256 * KIB), ("64m", KIB if given.smoke else 64 * MIB)):
        payload = random.Random(7).randbytes(payload_bytes)
        memory = memoryview(mmap.mmap(-1, payload_bytes))  # begins with a page, as a slot does
        memory[:] = payload
        for path in PATHS:
            runs, ceilings = [], []
            for number in range(rounds + 1):  # the first makes the tables
                ceiling = gbps(partial(xxh3, payload), payload_bytes, least_s)
                run = gbps(partial(digest_sum, memory, 0, payload_bytes, 0, path), payload_bytes, least_s)
                if number:
                    runs.append(run)
                    ceilings.append(ceiling)
            rows.add(f"{path}_{name}", runs, "GB/s", ceilings=ceilings)


if __name__ == "__main__":
    main()
