"""`python -m tests.sim --seeds N --seed0 K [--events 300] [--jobs 2]`: exit status 1 if any promise was broken."""

import argparse
import sys

from tests.rigs.seeds import options_of, run_all

from .expected import EXPECTED, SEEDS_FOR_ALL
from .run import run_seed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    options = options_of(parser, seeds=1000, seed0=0, events=300, jobs=2)
    expected = EXPECTED if options.seeds >= SEEDS_FOR_ALL else ()
    return run_all(run_seed, parser.prog, expected=expected, **vars(options))


if __name__ == "__main__":
    sys.exit(main())
