"""`python -m tests.offload_sim --seeds N --seed0 K [--events 400]`: exit status 1 if a seed failed."""

import argparse
import sys
import time
from collections import Counter

from .run import run_seed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.offload_sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--seed0", type=int, default=0)
    parser.add_argument("--events", type=int, default=400)
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    failed = 0
    began = time.monotonic()
    for seed in range(options.seed0, options.seed0 + options.seeds):
        outcome = run_seed(seed, options.events)
        counts += outcome.counts
        if outcome.problem:
            failed += 1
            print(f"seed {seed}: {outcome.problem}", flush=True)
    for name, count in sorted(counts.items()):
        print(f"{name:<24}{count:>12}")
    print(f"{options.seeds} seeds, {failed} failed, {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
