"""Runs one seed, or many in several processes. Events are counted; an expected one that never happened is a failure."""

import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from .ending import drain
from .world import World

SEEDS_PER_TASK = 10
STEPS_PER_EVENT_MAX = 200
"""Limit on idle steps: a world in which nothing reaches the service any more is a simulator bug."""


class Outcome(NamedTuple):
    """The result of one seed."""

    seed: int
    events: int
    counts: Counter[str]
    problem: str
    """Empty if every promise was kept; else the broken promise and its place."""


def run_seed(seed: int, events: int) -> Outcome:
    """Runs at least `events` events, then the end checks."""
    world: World | None = None
    try:
        world = World(seed)
        for _ in range(events * STEPS_PER_EVENT_MAX):
            if world.events >= events:
                break
            world.step()
        assert world.events >= events, "the simulated world stands still"
        drain(world)
        world.count_what_the_brain_counted()
    except Exception as problem:  # any failure must be reported with its seed
        at = world.events if world is not None else 0
        where = traceback.format_exc() if os.environ.get("SIM_TRACE") else _where(problem)
        return Outcome(seed, at, Counter(), f"event {at}: {type(problem).__name__}: {problem} [{where}]")
    return Outcome(seed, world.events, world.counts, "")


def run_seeds(seed0: int, seeds: int, events: int, jobs: int) -> Iterator[Outcome]:
    """Yields all outcomes, in no particular order when jobs > 1."""
    if jobs == 1:
        for seed in range(seed0, seed0 + seeds):
            yield run_seed(seed, events)
        return
    tasks = [
        (first, min(SEEDS_PER_TASK, seed0 + seeds - first), events)
        for first in range(seed0, seed0 + seeds, SEEDS_PER_TASK)
    ]
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for outcomes in pool.imap_unordered(_run_task, tasks):
            yield from outcomes


def _run_task(task: tuple[int, int, int]) -> list[Outcome]:
    first, seeds, events = task
    return [run_seed(seed, events) for seed in range(first, first + seeds)]


def _where(problem: Exception) -> str:
    """The innermost lines, which name the assertion when it has no message."""
    frames = traceback.extract_tb(problem.__traceback__)
    return " < ".join(f"{os.path.basename(f.filename)}:{f.lineno} {f.line}" for f in reversed(frames[-3:]))


def main_loop(
    *, seed0: int, seeds: int, events: int, jobs: int, missing_is_wrong: bool, expected: tuple[str, ...]
) -> int:
    """Runs the seeds, prints the results, and returns the exit status."""
    began, total, done, handled, failed = time.monotonic(), Counter[str](), 0, 0, []
    told = began
    for outcome in run_seeds(seed0, seeds, events, jobs):
        done += 1
        handled += outcome.events
        total.update(outcome.counts)
        if outcome.problem:
            failed.append(outcome)
            print(
                f"seed {outcome.seed} FAILED at {outcome.problem}\n  again: {again(outcome.seed, events)}", flush=True
            )
        now = time.monotonic()
        if now - told > 5:
            told = now
            print(f"{done}/{seeds} seeds, {handled} events, {done / (now - began):.1f} seeds/s", flush=True)
    for name in sorted(total):
        print(f"{total[name]:>12}  {name}")
    seconds = time.monotonic() - began
    missing = [name for name in expected if not total[name]]
    print(f"{done} seeds, {handled} events, {seconds:.1f} s, {done / seconds:.1f} seeds/s, {len(failed)} failed")
    if missing and missing_is_wrong:
        print(f"never happened: {', '.join(missing)}", file=sys.stderr)
    return 1 if failed or (missing and missing_is_wrong) else 0


def again(seed: int, events: int) -> str:
    return f"python -m tests.sim --seeds 1 --seed0 {seed} --events {events} --jobs 1"
