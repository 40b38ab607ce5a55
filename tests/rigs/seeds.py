"""Seeds of any simulator, in one process or several: counts what happened, tells how to see a failure again."""

import argparse
import multiprocessing
import os
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SEEDS_PER_TASK = 10
TOLD_EVERY_S = 5.0
REPLAY = "import sys; from {}.run import run_seed; print(sorted(run_seed({}, {}).counts.items()))"


class Outcome(NamedTuple):
    """The result of one seed."""

    seed: int
    events: int
    counts: Counter[str]
    problem: str
    """Empty if every promise was kept; else the broken promise and its place."""


def failure(seed: int, event: int, problem: Exception, *, more: str = "") -> Outcome:
    """The outcome of a seed that failed at an event. With SIM_TRACE=1 it has the whole traceback."""
    frames = traceback.extract_tb(problem.__traceback__)
    places = " < ".join(f"{os.path.basename(f.filename)}:{f.lineno} {f.line}" for f in reversed(frames[-3:]))
    where = traceback.format_exc() if os.environ.get("SIM_TRACE") else places
    return Outcome(seed, event, Counter(), f"event {event}: {type(problem).__name__}: {problem} [{where}]{more}")


def options_of(
    parser: argparse.ArgumentParser, *, seeds: int, seed0: int, events: int, jobs: int = 1
) -> argparse.Namespace:
    """Parses the command line of a simulator; the arguments are its defaults."""
    parser.add_argument("--seeds", type=int, default=seeds)
    parser.add_argument("--seed0", type=int, default=seed0)
    parser.add_argument("--events", type=int, default=events, help="at least so many in each seed")
    parser.add_argument("--jobs", type=int, default=jobs, help="processes")
    return parser.parse_args()


def run_all(
    run_seed: Callable[[int, int], Outcome],
    command: str,
    *,
    seeds: int,
    seed0: int,
    events: int,
    jobs: int = 1,
    expected: Sequence[str] = (),
) -> int:
    """Runs the seeds, prints the results, and returns the exit status.

    command: what runs one seed of this simulator again. expected: what must have been counted at least once."""
    began = told = time.monotonic()
    total, done, handled, failed = Counter[str](), 0, 0, 0
    for outcome in _outcomes(run_seed, range(seed0, seed0 + seeds), events, jobs):
        done += 1
        handled += outcome.events
        total.update(outcome.counts)
        if outcome.problem:
            failed += 1
            again = f"{command} --seeds 1 --seed0 {outcome.seed} --events {events} --jobs 1"
            print(f"seed {outcome.seed} FAILED at {outcome.problem}\n  again: SIM_TRACE=1 {again}", flush=True)
        if (now := time.monotonic()) - told > TOLD_EVERY_S:
            told = now
            print(f"{done}/{seeds} seeds, {handled} events, {done / (now - began):.1f} seeds/s", flush=True)
    for name, count in sorted(total.items()):
        print(f"{name:<40}{count:>12}")
    seconds = time.monotonic() - began
    print(f"{done} seeds, {failed} failed, {handled} events, {seconds:.1f} s, {done / seconds:.1f} seeds/s")
    if missing := [name for name in expected if not total[name]]:
        print(f"never happened: {', '.join(missing)}", file=sys.stderr)
    return 1 if failed or missing else 0


def _outcomes(run_seed: Callable[[int, int], Outcome], seeds: range, events: int, jobs: int) -> Iterator[Outcome]:
    """Yields all outcomes, in no particular order when jobs > 1."""
    if jobs == 1:
        yield from (run_seed(seed, events) for seed in seeds)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(partial(_called, run_seed, events), seeds, SEEDS_PER_TASK)


def _called(run_seed: Callable[[int, int], Outcome], events: int, seed: int) -> Outcome:
    return run_seed(seed, events)


def counts_in_other_processes(simulator: str, seed: int, events: int) -> set[bytes]:
    """What a seed counts in processes with other values of PYTHONHASHSEED and other addresses."""
    return {
        subprocess.run(
            [sys.executable, "-c", REPLAY.format(simulator, seed, events)],
            cwd=ROOT,
            env={"PYTHONPATH": f"{ROOT}:{ROOT / 'client'}", "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            check=True,
            timeout=60,
        ).stdout
        for hash_seed in ("0", "1", "4242")
    }
