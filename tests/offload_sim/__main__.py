"""`python -m tests.offload_sim --seeds N --seed0 K [--events 400]`: exit status 1 if a seed failed."""

import argparse
import sys

from tests.rigs.seeds import options_of, run_all

from .run import run_seed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.offload_sim", description=__doc__)
    return run_all(run_seed, parser.prog, **vars(options_of(parser, seeds=1000, seed0=0, events=400)))


if __name__ == "__main__":
    sys.exit(main())
