"""Checks that need a real GPU: `python -m tests.gpu.checks [--only NAME,NAME] [--simulated]`, from the checkout's root.

Prints a line for each result, goes on after a failure, and exits 1 if there was one. Every wait is bounded, and no
process stays behind. Needs kvserver, a GPU, and torch for `refused`, `captured`, `atom_blocks` and `against_torch`.
--simulated: the same on the simulated driver, where that makes sense; it keeps these checks from rotting.
"""

import argparse
import sys
from collections.abc import Callable

from tests.device.simulated import Machine
from tests.gpu import bytes_equal, deaths, digest, digest_jobs, gil, processes, users
from tests.gpu.report import Report
from tests.gpu.scene import Gpus, environment

Check = Callable[[Report, Gpus | Machine], None]

CHECKS: dict[str, Check] = {
    "doctor": processes.doctor,
    "refused": processes.refused,
    "digest": digest.digest,
    "digest-jobs": digest_jobs.digest_jobs,
    "layouts": bytes_equal.layouts,
    "against_torch": bytes_equal.against_torch,
    "crowded": bytes_equal.crowded,
    "captured": processes.captured,
    "atom_blocks": processes.atom_blocks,
    "one_gpu": bytes_equal.one_gpu,
    "two_gpus": bytes_equal.two_gpus,
    "two_users": users.two_users,
    "gil_held": gil.gil_held,
    "engine_killed": deaths.engine_killed,
    "mover_killed": deaths.mover_killed,
    "mover_stopped": deaths.mover_stopped,
    "mover_broken": deaths.mover_broken,
    "engine_broken": deaths.engine_broken,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CHECKS), help="names, with commas between")
    parser.add_argument("--simulated", action="store_true")
    given = parser.parse_args()
    report = Report()
    for name in given.only.split(","):
        with report.part(name):
            if given.simulated:
                with Machine("cuda", device_bytes=8 << 30, devices=2) as machine, environment(machine.environment):
                    CHECKS[name](report, machine)
            else:
                CHECKS[name](report, Gpus())
    report.say(f"{report.held} held, {report.failed} failed")
    sys.exit(report.failed > 0)


if __name__ == "__main__":
    main()
