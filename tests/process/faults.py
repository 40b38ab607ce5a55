"""All fault scenarios, many rounds each: python -m tests.process.faults --rounds 50

`make test` runs a few rounds of the same scenarios. Prints a line per scenario. When one fails, prints the failure and
the server's log, and exits with status 1. Scenarios with SIGSTOP run four times as many rounds."""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from tests.process import deaths, lives, stops
from tests.process.campaign import counted, run_campaign
from tests.process.scene import Scene, open_scene

GIL_S = 120.0
SHORT = {"mover_grace_ms": 700}
LONG = {"mover_grace_ms": 20_000}
"""Long grace: the mover resumes before the brain loses patience, also on a busy machine."""


class Scenario(NamedTuple):
    run: Callable[[Scene, int], None]
    settings: dict[str, int]
    rounds_factor: int


SCENARIOS = {
    "worker-before-register": Scenario(deaths.worker_before_register, SHORT, 1),
    "worker-mid-register": Scenario(deaths.worker_mid_register, SHORT, 1),
    "worker-mid-store": Scenario(deaths.worker_mid_store, SHORT, 1),
    "worker-mid-retrieve": Scenario(deaths.worker_mid_retrieve, SHORT, 1),
    "forked-child-lives-on": Scenario(lives.forked_child_lives_on, SHORT, 1),
    "mover": Scenario(deaths.mover, SHORT, 1),
    "brain": Scenario(deaths.brain, SHORT, 1),
    "brain-while-storing": Scenario(deaths.brain_while_storing, SHORT, 1),
    "server": Scenario(deaths.server, SHORT, 1),
    "mover-killed-by-the-brain": Scenario(stops.mover_killed_by_the_brain, SHORT, 1),
    "stop-lookups": Scenario(stops.lookups_miss, LONG | {"lease_ttl_ms": 1500}, 1),
    "stop-brain-store": Scenario(stops.brain_and_store, LONG, 4),
    "stop-brain-retrieve": Scenario(stops.brain_and_retrieve, LONG, 4),
    "stop-mover-store": Scenario(stops.mover_and_store, LONG, 4),
    "stop-mover-retrieve": Scenario(stops.mover_and_retrieve, LONG, 4),
}


def run(name: str, rounds: int) -> dict[str, int]:
    """Runs one scenario on its own server; returns the counts of its rounds."""
    scenario = SCENARIOS[name]
    with open_scene(**scenario.settings) as scene:
        for round_ in range(rounds):
            scene.begin()
            scenario.run(scene, round_)
            scene.end()
        return dict(scene.seen)


def run_gil(seconds: float) -> dict[str, int]:
    """Runs a worker that holds the GIL for that long, on a server whose shortest patience is far below it."""
    with open_scene(attach_ttl_ms=2000, lease_ttl_ms=2000, mover_grace_ms=2000) as scene:
        scene.begin()
        lives.gil_holder_stays_registered(scene, seconds)
        scene.end()
        return dict(scene.seen)


def main() -> int:
    parser = argparse.ArgumentParser(description="Fault scenarios with real processes.")
    parser.add_argument("--rounds", type=int, default=50, help="rounds of each scenario (4 times that with SIGSTOP)")
    parser.add_argument("--only", default="", help="scenarios whose name contains this")
    parser.add_argument("--gil-seconds", type=float, default=GIL_S, help="how long a worker holds the GIL")
    options = parser.parse_args()
    runs = {name: partial(run, name, options.rounds * scenario.rounds_factor) for name, scenario in SCENARIOS.items()}
    runs["gil-holder"] = partial(run_gil, options.gil_seconds)
    return run_campaign("faults", {name: partial(_told, seen) for name, seen in runs.items()}, only=options.only)


def _told(seen: Callable[[], dict[str, int]]) -> str:
    return counted(seen())


if __name__ == "__main__":
    sys.exit(main())
