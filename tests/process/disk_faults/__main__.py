"""The disk tier under every fault: python -m tests.process.disk_faults --kills 300 --rounds 20

`make test` runs a small part of the same scenarios. Prints one line per scenario. When one fails, prints the failure
and the server's log, and exits with status 1. --only takes a part of a name, for example io-flip. --part 2/3 runs the
second third of the kills or of the failing requests, with other seeds and other requests."""

import argparse
import sys
from collections.abc import Callable
from functools import partial

from tests.process.campaign import run_campaign
from tests.process.disk_faults import sigstop
from tests.process.disk_faults.scenarios import (
    FAULTS,
    IMPATIENT_MS,
    PATIENT_MS,
    run_io_alone,
    run_kills,
    run_stops,
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=20, help="of each scenario with SIGSTOP")
    parser.add_argument("--only", default="", help="scenarios whose name contains this")
    parser.add_argument("--seed", type=int, default=1, help="of the kills")
    parser.add_argument("--part", default="1/1", help="a share of the kills and of the requests that fail")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    jobs: dict[str, Callable[[], object]] = {
        "kills": partial(run_kills, options.kills // parts, 1000 * options.seed + part),
        "stop-goes-on": partial(run_stops, sigstop.goes_on, PATIENT_MS, options.rounds),
        "stop-is-replaced": partial(run_stops, sigstop.is_replaced, IMPATIENT_MS, options.rounds),
    }
    for name, fault in FAULTS.items():
        for lasting in (False, True):
            named = f"io-{name}-{'lasting' if lasting else 'once'}"
            jobs[named] = partial(run_io_alone, fault, lasting=lasting, first=part, every=parts)
    return run_campaign("disk faults", jobs, only=options.only)


if __name__ == "__main__":
    sys.exit(main())
