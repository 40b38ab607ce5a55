"""Seeds, one after the other; what happened is counted."""

import os
import traceback
from collections import Counter
from typing import NamedTuple

from .world import World


class Outcome(NamedTuple):
    seed: int
    counts: Counter[str]
    problem: str
    """Empty when all was well."""


def run_seed(seed: int, events: int) -> Outcome:
    """So many events, then the end of everything."""
    done = 0
    try:
        world = World(seed)
        while done < events:
            world.event()
            done += 1
        world.end()
    except Exception as problem:  # whatever it is, the seed must be told
        where = traceback.extract_tb(problem.__traceback__)[-2:]
        at = traceback.format_exc() if os.environ.get("SIM_TRACE") else f"{where[0].name}, {where[-1].name}"
        return Outcome(seed, Counter(), f"event {done}: {type(problem).__name__}: {problem} [{at}]")
    return Outcome(seed, world.counts(), "")
