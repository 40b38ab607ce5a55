"""`python -m tests.sim --seeds N --seed0 K [--events 300] [--jobs 2]`: exit status 1 if any promise was broken."""

import argparse
import sys

from .expected import EXPECTED, SEEDS_FOR_ALL
from .run import main_loop


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--seed0", type=int, default=0)
    parser.add_argument("--events", type=int, default=300, help="at least so many in each seed")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    return main_loop(
        seed0=options.seed0,
        seeds=options.seeds,
        events=options.events,
        jobs=options.jobs,
        missing_is_wrong=options.seeds >= SEEDS_FOR_ALL,
        expected=EXPECTED,
    )


if __name__ == "__main__":
    sys.exit(main())
