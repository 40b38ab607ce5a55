"""`python -m tests.e2e.scheduler_sim --seeds N --seed0 K [--events 400]`: exit status 1 if a seed failed."""

import argparse
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from .run import run_seed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.scheduler_sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--seed0", type=int, default=0)
    parser.add_argument("--events", type=int, default=400)
    parser.add_argument("--beside", action="store_true", help="another connector in all of them, which fails at times")
    parser.add_argument("--model", type=Path, help="folder of a llama; without it one is made")
    options = parser.parse_args()
    if options.model is not None:
        return _run(options, options.model)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "tests.e2e.models", folder, "llama"], check=True, timeout=120)
        return _run(options, Path(folder) / "llama")


def _run(options: argparse.Namespace, model: Path) -> int:
    counts: Counter[str] = Counter()
    failed = 0
    began = time.monotonic()
    for seed in range(options.seed0, options.seed0 + options.seeds):
        outcome = run_seed(seed, options.events, model, beside=options.beside)
        counts += outcome.counts
        if outcome.problem:
            failed += 1
            print(f"seed {seed}: {outcome.problem}", flush=True)
            again = f"--seeds 1 --seed0 {seed} --events {options.events}{' --beside' * options.beside}"
            print(f"again: SIM_TRACE=1 python -m tests.e2e.scheduler_sim {again}", flush=True)
    for name, count in sorted(counts.items()):
        print(f"{name:<24}{count:>12}")
    print(f"{options.seeds} seeds, {failed} failed, {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
