"""Runs seeds one after another, and counts what happened."""

import os
import traceback
from collections import Counter
from typing import NamedTuple

from .world import World


class Outcome(NamedTuple):
    seed: int
    counts: Counter[str]
    problem: str
    """Empty if the seed passed."""


def run_seed(seed: int, events: int) -> Outcome:
    """Runs `events` events, then the end checks."""
    done = 0
    try:
        world = World(seed)
        while done < events:
            world.event()
            done += 1
        world.end()
    except Exception as problem:  # any failure must be reported with its seed
        where = traceback.extract_tb(problem.__traceback__)[-2:]
        at = traceback.format_exc() if os.environ.get("SIM_TRACE") else f"{where[0].name}, {where[-1].name}"
        return Outcome(seed, Counter(), f"event {done}: {type(problem).__name__}: {problem} [{at}]")
    return Outcome(seed, world.counts(), "")
