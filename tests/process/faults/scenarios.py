"""The fault scenarios, and the settings of the server that each runs on."""

from collections.abc import Callable
from typing import NamedTuple

from tests.process.faults import awaits
from tests.process.faults import lifetimes as lives
from tests.process.faults import sigkill as deaths
from tests.process.faults import sigstop as stops
from tests.process.faults.scene import Scene, open_scene

GIL_S = 120.0
SHORT = {"mover_grace_ms": 700}
LONG = {"mover_grace_ms": 20_000}
"""Long grace: the mover resumes before the brain loses patience, also on a busy machine."""


class Scenario(NamedTuple):
    run: Callable[[Scene, int], None]
    settings: dict[str, int]
    rounds_factor: int


AWAITS = LONG | {
    "pledge_patience_ms": awaits.PATIENCE_MS,
    "lease_ttl_ms": awaits.PATIENCE_MS,
    "lease_extended_ms": awaits.PATIENCE_MS,
    "job_ttl_ms": awaits.PATIENCE_MS,
}
"""Nothing that somebody should have ended ends by itself while a test waits for it."""
IMPATIENT = AWAITS | {"pledge_patience_ms": awaits.SHORT_PATIENCE_MS}
SLOW = AWAITS | {"pledge_patience_ms": awaits.SLOW_PATIENCE_MS}
STUCK = AWAITS | {"mover_grace_ms": awaits.STUCK_GRACE_MS}
CRAMPED = AWAITS | {"arena_bytes": 64 << 20}

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
    "await-producer-killed": Scenario(awaits.producer_killed, AWAITS, 1),
    "await-scheduler-killed": Scenario(awaits.scheduler_killed, AWAITS, 1),
    "await-producer-restarted": Scenario(awaits.producer_restarted, AWAITS, 1),
    "await-producer-stopped": Scenario(awaits.producer_stopped, IMPATIENT, 1),
    "await-producer-aborts": Scenario(awaits.producer_aborts, AWAITS, 1),
    "await-producer-preempted": Scenario(awaits.producer_preempted, AWAITS, 1),
    "await-producer-out-of-room": Scenario(awaits.producer_out_of_room, CRAMPED, 1),
    "await-no-store": Scenario(awaits.pledge_without_store, IMPATIENT, 1),
    "await-slow-store": Scenario(awaits.store_slow, SLOW, 1),
    "await-stored-by-another": Scenario(awaits.stored_by_another, AWAITS, 1),
    "await-two-producers": Scenario(awaits.two_producers, AWAITS, 1),
    "await-consumer-killed": Scenario(awaits.consumer_killed, AWAITS, 1),
    "await-consumer-aborts": Scenario(awaits.consumer_aborts, AWAITS, 1),
    "await-consumer-out-of-time": Scenario(awaits.consumer_out_of_time, AWAITS, 1),
    "await-consumer-amid-its-copy": Scenario(awaits.consumer_out_of_time_amid_its_copy, AWAITS, 1),
    "await-consumer-mover-stuck": Scenario(awaits.consumer_out_of_time_mover_stuck, STUCK, 1),
    "await-brain": Scenario(awaits.brain, AWAITS, 1),
    "await-mover": Scenario(awaits.mover, AWAITS, 1),
    "await-supervisor": Scenario(awaits.supervisor, AWAITS, 1),
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
