"""All fault scenarios, many rounds each: python -m tests.process.faults --rounds 50

`make test` runs a few rounds of the same scenarios. Prints a line per scenario. When one fails, prints the failure and
the server's log, and exits with status 1. Scenarios with SIGSTOP run four times as many rounds."""

import argparse
import sys
from collections.abc import Callable
from functools import partial

from tests.process.campaign import counted, run_campaign
from tests.process.faults.scenarios import GIL_S, SCENARIOS, run, run_gil


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
