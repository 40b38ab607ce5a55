"""Runs one seed: the events of a world, and then its end."""

from tests.rigs.seeds import Outcome, failure

from .ending import drain
from .world import World

STEPS_PER_EVENT_MAX = 200
"""Limit on idle steps: a world in which nothing reaches the service any more is a simulator bug."""


def run_seed(seed: int, events: int, *, remotes: int = 0) -> Outcome:
    """Runs at least `events` events, then the end checks. remotes: with so many hostile remote stores."""
    world: World | None = None
    try:
        world = World(seed, remotes=remotes)
        for _ in range(events * STEPS_PER_EVENT_MAX):
            if world.events >= events:
                break
            world.step()
        assert world.events >= events, "the simulated world stands still"
        drain(world)
    except Exception as problem:  # any failure must be reported with its seed
        return failure(seed, world.events if world is not None else 0, problem)
    return Outcome(seed, world.events, world.counts, "")
