"""`python -m tests.sim --seeds N --seed0 K [--events 300] [--jobs 2]`: exit status 1 if any promise was broken.
--remote [N]: each world that compares digests has a remote store, or two of them, whose faults are many."""

import argparse
import sys
from functools import partial

from tests.rigs.seeds import options_of, run_all

from .expected import EXPECTED, SEEDS_FOR_ALL
from .run import run_seed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--remote", type=int, nargs="?", const=1, default=0, choices=(1, 2))
    options = vars(options_of(parser, seeds=1000, seed0=0, events=300, jobs=2))
    if remotes := options.pop("remote"):
        return run_all(partial(run_seed, remotes=remotes), f"{parser.prog} --remote {remotes}", **options)
    expected = EXPECTED if options["seeds"] >= SEEDS_FOR_ALL else ()
    return run_all(run_seed, parser.prog, expected=expected, **options)


if __name__ == "__main__":
    sys.exit(main())
