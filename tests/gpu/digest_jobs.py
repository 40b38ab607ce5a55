"""Thousands of errors between a store and its retrieve, in every mode: each noticed, and nothing wrong delivered."""

from collections import Counter

from tests.device.digest_rig import MODES, REACHES, Halves, Scene, many_faults
from tests.device.simulated import Machine
from tests.gpu.report import Report
from tests.gpu.scene import Gpus

FAULTS, SIMULATED_FAULTS = 3000, 100
FAULTS_OF_A_SCENE = 10


def digest_jobs(report: Report, machine: Gpus | Machine) -> None:
    """Random layouts, one after the other in all modes; half of the retrieves are of some blocks of a chunk."""
    faults = SIMULATED_FAULTS if isinstance(machine, Machine) else FAULTS
    places = [(mode, reach) for mode in MODES for reach in REACHES]
    errors: Counter[str] = Counter()
    layouts: Counter[str] = Counter()
    with Halves(machine) as halves:
        for number in range(faults // FAULTS_OF_A_SCENE):
            mode, reach = places[number % len(places)]
            with Scene(halves, mode, reach, number) as scene:
                many_faults(scene, FAULTS_OF_A_SCENE, lambda what: errors.update([what]))
            layouts[f"{mode}, {reach}"] += 1
    report.say(f"layouts: {dict(layouts)}")
    report.say(f"errors, each noticed: {dict(errors)}")
    held = errors.total()
    report.check(
        held >= faults // FAULTS_OF_A_SCENE * FAULTS_OF_A_SCENE, f"{held} errors planted and noticed, 0 delivered"
    )
