"""`python -m tests.client_drill`: breaks the client on purpose, one bug at a time, and reports which unit test noticed.

Exit status 1 if a bug survives.
"""

import argparse
import sys
import time

from tests.drilling import PACKAGES, copy_with, refuse_stale, unit_test

from .mutations import MUTATIONS, TESTS, Mutation


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.client_drill", description=__doc__)
    parser.add_argument("--only", default="", help="mutations whose name or file contains this")
    parser.add_argument("--from", type=int, default=0, dest="first", help="leave out so many at the beginning")
    parser.add_argument("--count", type=int, default=len(MUTATIONS))
    options = parser.parse_args()
    chosen = [mutation for mutation in MUTATIONS if options.only in mutation.name or options.only in mutation.file]
    refuse_stale((PACKAGES["kvclient"], chosen))
    chosen = chosen[options.first : options.first + options.count]
    began, survivors = time.monotonic(), 0
    for mutation in chosen:
        noticed = _noticed(mutation)
        survivors += not noticed
        print(f"{mutation.name:<60} {noticed[:150] or 'NOBODY'}", flush=True)
    print(f"{len(chosen)} mutations, {survivors} survived, {time.monotonic() - began:.0f} s")
    return 1 if survivors else 0


def _noticed(mutation: Mutation) -> str:
    """The unit test that noticed; empty if none did."""
    with copy_with(mutation, "kvclient") as copy:
        return copy.failed_test([unit_test(name) for name in TESTS[mutation.file]])


if __name__ == "__main__":
    sys.exit(main())
