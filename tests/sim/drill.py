"""`python -m tests.sim.drill`: breaks the service on purpose, one bug at a time, and reports which check noticed.

Each mutation is made in a copy of the package, placed first on the path of a fresh interpreter. The simulator runs
there until a seed fails. If none does, or if it cannot see such a bug, the unit tests of the pure core run. Exit
status 1 if a bug survives.
"""

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from tests.drilling import PACKAGES, Copy, copy_with, refuse_stale, unit_test

from . import mutations_admin, mutations_arc, mutations_disk, mutations_tenants
from .mutations import MUTATIONS as CORE_MUTATIONS
from .mutations import Mutation

MUTATIONS = (
    *CORE_MUTATIONS,
    *mutations_disk.MUTATIONS,
    *mutations_tenants.MUTATIONS,
    *mutations_admin.MUTATIONS,
    *mutations_arc.MUTATIONS,
)
SEED0 = 500_000
"""Not the seeds that `make sim` uses by default."""
UNIT_TESTS = tuple(
    unit_test(name)
    for name in (
        *("arc", "index", "slots", "layout", "marks", "placement", "extents"),
        *("service_timers", "service_namespaces", "service_room", "service_pins", "service_restore", "service_disk"),
        *("service_disk_prefix", "service_tenants_disk", "service_disk_quotas", "service_notes", "service_tenants"),
        *("service_recovery", "service_kv_events", "service_disk_writes", "bad_registrations", "bad_transfers"),
        *("admin_holds", "admin_clears", "admin_notes", "admin_tenants", "admin_drain"),
    )
)

HUNT = """
import sys, kvserver
from tests.sim.run import run_seed
assert kvserver.__file__.startswith(sys.argv[4]), "the mutated package was not imported: " + kvserver.__file__
for number in range(int(sys.argv[2])):
    outcome = run_seed(int(sys.argv[1]) + number, int(sys.argv[3]))
    if outcome.problem:
        print(outcome.seed, number + 1, outcome.problem.replace("\\n", " "), sep="\\t")
        break
"""


class Verdict(NamedTuple):
    mutation: Mutation
    by: str
    """The seed or test that noticed; empty if nothing did."""
    seeds: int
    message: str
    seconds: float


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.drill", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="most seeds for one mutation")
    parser.add_argument("--events", type=int, default=300)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="mutations whose name contains this")
    options = parser.parse_args()
    chosen = [mutation for mutation in MUTATIONS if options.only in mutation.name]
    refuse_stale((PACKAGES["kvserver"], chosen))
    began = time.monotonic()
    survivors = 0
    print(f"{'mutation':<52}{'seeds':>6}{'s':>7}  noticed by", flush=True)
    with ThreadPoolExecutor(options.jobs) as threads:
        for verdict in threads.map(lambda mutation: _try(mutation, options.seeds, options.events), chosen):
            survivors += not verdict.by
            said = f"{verdict.by}: {verdict.message[:150]}" if verdict.by else "NOBODY"
            print(f"{verdict.mutation.name:<52}{verdict.seeds:>6}{verdict.seconds:>7.1f}  {said}", flush=True)
    print(f"{len(chosen)} mutations, {survivors} survived, {time.monotonic() - began:.0f} s")
    return 1 if survivors else 0


def _try(mutation: Mutation, seeds: int, events: int) -> Verdict:
    began = time.monotonic()
    with copy_with(mutation, "kvserver") as copy:
        by, count, message = ("", 0, "") if mutation.unseen else _hunt(copy, seeds, events)
        if not by and (message := copy.failed_test(UNIT_TESTS)):
            by = "unit tests"
    return Verdict(mutation, by, count, message, time.monotonic() - began)


def _hunt(copy: Copy, seeds: int, events: int) -> tuple[str, int, str]:
    run = copy.run("-c", HUNT, str(SEED0), str(seeds), str(events), str(copy.folder))
    if run.returncode:
        raise SystemExit(f"the simulator could not run: {run.stderr[-2000:]}")
    if not run.stdout:
        return "", seeds, ""
    seed, count, message = run.stdout.rstrip("\n").split("\t", 2)
    return f"seed {seed}", int(count), message


if __name__ == "__main__":
    sys.exit(main())
