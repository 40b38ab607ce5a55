"""Runs seeds of a simulator until one fails: python -m tests.drill.hunt tests.sim SEED0 SEEDS EVENTS FOLDER

FOLDER is where both packages must have been imported from. Prints the failing seed and its problem, or nothing."""

import sys
from importlib import import_module

import kvclient
import kvserver


def main() -> None:
    simulator, seed0, seeds, events, folder = sys.argv[1:]
    for package in (kvserver, kvclient):
        assert str(package.__file__).startswith(folder), f"the broken package was not imported: {package.__file__}"
    run_seed = import_module(f"{simulator}.run").run_seed
    for seed in range(int(seed0), int(seed0) + int(seeds)):
        if problem := run_seed(seed, int(events)).problem:
            print(f"seed {seed}: {problem}".replace("\n", " "))
            break


if __name__ == "__main__":
    main()
