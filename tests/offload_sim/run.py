"""Runs one seed: the events of a world, and then its end."""

from tests.rigs.seeds import Outcome, failure

from .world import World


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
        return failure(seed, done, problem)
    return Outcome(seed, done, world.counts(), "")
