"""Thousands of errors between a store and its retrieve, in every mode: each noticed, and nothing wrong delivered.

`python -m tests.gpu.digest_jobs [--faults 2000] [--seed0 K]`: more of them, on the simulated driver.
"""

import argparse
import sys
from collections import Counter

from tests.device.digest_rig import MODES, REACHES, Halves, Scene, many_faults
from tests.device.simulated import Machine
from tests.gpu.report import Report
from tests.gpu.scene import Gpus, environment

FAULTS, SIMULATED_FAULTS = 3000, 100
FAULTS_OF_A_SCENE = 10


def digest_jobs(report: Report, machine: Gpus | Machine) -> None:
    plant_faults(report, machine, SIMULATED_FAULTS if isinstance(machine, Machine) else FAULTS)


def plant_faults(report: Report, machine: Gpus | Machine, faults: int, seed0: int = 0) -> None:
    """Random layouts, one after the other in all modes; half of the retrieves are of some blocks of a chunk."""
    places = [(mode, reach) for mode in MODES for reach in REACHES]
    errors: Counter[str] = Counter()
    layouts: Counter[str] = Counter()
    with Halves(machine) as halves:
        for number in range(-(-faults // FAULTS_OF_A_SCENE)):
            mode, reach = places[number % len(places)]
            with Scene(halves, mode, reach, seed0 + number) as scene:
                many_faults(scene, FAULTS_OF_A_SCENE, lambda what: errors.update([what]))
            layouts[f"{mode}, {reach}"] += 1
    report.say(f"layouts: {dict(layouts)}")
    report.say(f"errors, each noticed: {dict(errors)}")
    held = errors.total()
    report.check(held >= faults > 0, f"{held} errors planted and noticed, 0 delivered")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=2000)
    parser.add_argument("--seed0", type=int, default=0)
    given = parser.parse_args()
    report = Report()
    machine = Machine("cuda", device_bytes=8 << 30, devices=2)
    with report.part("digest-jobs"), machine, environment(machine.environment):
        plant_faults(report, machine, given.faults, given.seed0)
    sys.exit(report.failed > 0)


if __name__ == "__main__":
    main()
