"""The scenarios of the disk tier: kills, stops and failing I/O, as functions that run one for some rounds."""

import errno
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

from tests.process.campaign import counted
from tests.process.disk_faults import io, kills
from tests.process.disk_faults import sigstop as stops
from tests.process.disk_faults.mover import Kind

STALL_S = 14.0
"""Longer than io.ANSWER_S_MAX and HEALTH_S_MAX: a client or a brain that waited for the stall would fail the test."""
PATIENT_MS, IMPATIENT_MS = 20_000, 300


class Fault(NamedTuple):
    kind: Kind
    errno: int = errno.EIO


FAULTS = {
    "eio": Fault("error"),
    "enospc": Fault("error", errno.ENOSPC),
    "short": Fault("short"),
    "torn": Fault("torn"),
    "flip": Fault("flip"),
    "misdirect": Fault("misdirect"),
    "stall": Fault("stall"),
}


def run_kills(count: int, seed: int, targets: Sequence[str] = ("",)) -> str:
    """Kills the targets in turn; an empty target means a random one."""
    began_s = time.monotonic()
    with kills.open_campaign(seed) as campaign:
        for number in range(count):
            campaign.round(targets[number % len(targets)])
        took_s = (time.monotonic() - began_s) / count
    return (
        f"{count} kills, {took_s:.2f} s each, ready again after {median(campaign.ready_s):.2f} s "
        f"(longest {max(campaign.ready_s):.2f}); {counted(campaign.seen)}"
    )


class Workload(NamedTuple):
    filled: Path
    sound: io.Outcome


@contextmanager
def open_workload() -> Iterator[Workload]:
    """Stores the starting content and measures a run without faults, as the reference."""
    with io.filled_store() as filled:
        sound = io.run(filled, None)
        assert not sound.counted, sound
        yield Workload(filled, sound)


def run_io(
    workload: Workload, fault: Fault, *, lasting: bool, stall_s: float, first: int = 1, every: int = 1
) -> io.Table:
    """Makes requests of the workload fail, one per run: every `every`th from `first` on."""
    table = io.Table()
    for nth in range(first, 2 * workload.sound.requests, every):
        plan = io.Plan(nth=nth, kind=fault.kind, errno=fault.errno, lasting=lasting, stall_s=stall_s)
        outcome = io.run(workload.filled, plan)
        table.add(fault.kind, outcome, workload.sound)
        if outcome.requests < nth:
            break
    return table


def run_io_alone(fault: Fault, *, lasting: bool, first: int, every: int) -> io.Table:
    with open_workload() as workload:
        return run_io(workload, fault, lasting=lasting, stall_s=STALL_S, first=first, every=every)


def run_stops(scenario: Callable[[stops.StopScene, int], None], patience_ms: int, rounds: int) -> str:
    with stops.open_stop_scene(patience_ms=patience_ms) as scene:
        for round_ in range(rounds):
            scene.begin(round_)
            scenario(scene, round_)
            scene.end()
    return f"{counted(scene.seen)}; longest /healthz {scene.health_s * 1e3:.0f} ms"
