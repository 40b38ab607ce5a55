"""`python -m tests.offload_sim.drill`: breaks the decisions on purpose, one bug at a time, and reports what noticed.

Each mutation is made in a copy of the package, placed first on the path of a fresh interpreter. Seeds run there
until one fails; if none does, the unit tests run. Exit status 1 if a bug survives.
"""

import argparse
import sys
import time

from tests.drilling import PACKAGES, ROOT, copy_with, refuse_stale

from .mutations import MUTATIONS, Mutation

SEED0 = 500_000
"""Not the seeds that run by default."""
UNIT_TESTS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests/unit/offload").glob("test_offload_*.py"))

HUNT = """
import sys, kvclient.offload
from tests.offload_sim.run import run_seed
assert kvclient.offload.__file__.startswith(sys.argv[3]), "the mutated package was not imported"
for number in range(int(sys.argv[2])):
    outcome = run_seed(int(sys.argv[1]) + number, 400)
    if outcome.problem:
        print(f"seed {outcome.seed} (number {number + 1}): {outcome.problem}".replace("\\n", " "))
        break
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.offload_sim.drill", description=__doc__)
    parser.add_argument("--seeds", type=int, default=60, help="most seeds for one mutation")
    parser.add_argument("--only", default="", help="mutations whose name contains this")
    parser.add_argument("--from", type=int, default=0, dest="first", help="leave out so many at the beginning")
    parser.add_argument("--count", type=int, default=len(MUTATIONS))
    options = parser.parse_args()
    chosen = [mutation for mutation in MUTATIONS if options.only in mutation.name]
    refuse_stale((PACKAGES["kvclient"], chosen))
    chosen = chosen[options.first : options.first + options.count]
    began, survivors = time.monotonic(), 0
    for mutation in chosen:
        noticed = _try(mutation, options.seeds)
        survivors += not noticed
        print(f"{mutation.name:<58} {noticed[:150] or 'NOBODY'}", flush=True)
    print(f"{len(chosen)} mutations, {survivors} survived, {time.monotonic() - began:.0f} s")
    return 1 if survivors else 0


def _try(mutation: Mutation, seeds: int) -> str:
    """The seed or test that noticed; empty if nothing did."""
    with copy_with(mutation, "kvclient") as copy:
        said = copy.run("-c", HUNT, str(SEED0), str(seeds), str(copy.folder))
        if said.returncode:
            raise SystemExit(f"the simulator could not run: {said.stderr[-2000:]}")
        return said.stdout.strip() or copy.failed_test(UNIT_TESTS)


if __name__ == "__main__":
    sys.exit(main())
