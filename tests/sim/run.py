"""Runs one seed: the events of a world, and then its end."""

from unittest import mock

from kvserver.tiers import placement
from kvserver.tiers.slots import SLOT_ALIGN
from tests.rigs.seeds import Outcome, failure

from .ending import drain
from .world import World

STEPS_PER_EVENT_MAX = 200
"""Limit on idle steps: a world in which nothing reaches the service any more is a simulator bug."""
MEASURED_BYTES = SLOT_ALIGN
"""So many bytes are enough to measure a rate. A world reads too few for a server's own minimum."""


def run_seed(seed: int, events: int, *, remotes: int = 0) -> Outcome:
    """Runs at least `events` events, then the end checks. remotes: with so many hostile remote stores."""
    world: World | None = None
    with mock.patch.object(placement, "RATE_BYTES_MIN", MEASURED_BYTES):
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
