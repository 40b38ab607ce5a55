"""`python -m tests.offload_sim.drill`: breaks the decisions on purpose, one bug at a time, and reports who noticed.

Each mutation is made in a copy of the deciding modules that stands first on the path of a fresh interpreter; seeds run
there until one fails, then, if none did, the unit tests. Exit status 1 when a bug survives.
"""

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from .mutations import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[2]
SEED0 = 500_000
"""Other seeds than those that run by default."""
SECONDS_MAX = 300

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
    for mutation in chosen:
        _mutated(mutation)
    chosen = chosen[options.first : options.first + options.count]
    began, survivors = time.monotonic(), 0
    for mutation in chosen:
        noticed = _try(mutation, options.seeds)
        survivors += not noticed
        print(f"{mutation.name:<58} {noticed[:150] or 'NOBODY'}", flush=True)
    print(f"{len(chosen)} mutations, {survivors} survived, {time.monotonic() - began:.0f} s")
    return 1 if survivors else 0


def _mutated(mutation: Mutation) -> str:
    """The text of the file with the bug in it; an error when the drill no longer fits the code."""
    text = (ROOT / "client/kvclient" / mutation.file).read_text()
    count = text.count(mutation.old)
    if count != 1:
        raise SystemExit(f"{mutation.name}: its text stands {count} times in {mutation.file}, expected once")
    return text.replace(mutation.old, mutation.new)


def _try(mutation: Mutation, seeds: int) -> str:
    """Who noticed; empty when nobody did."""
    with tempfile.TemporaryDirectory(prefix="kvserver-drill-") as folder:
        package = Path(folder) / "kvclient"
        package.mkdir()
        (package / "__init__.py").touch()
        for path in [*(ROOT / "client/kvclient").glob("offload*.py"), ROOT / "client/kvclient/values.py"]:
            shutil.copy(path, package)
        (package / mutation.file).write_text(_mutated(mutation))
        said = _run(folder, "-c", HUNT, str(SEED0), str(seeds), folder)
        if said.returncode:
            raise SystemExit(f"the simulator could not run: {said.stderr[-2000:]}")
        return said.stdout.strip() or _unit_tests(folder)


def _unit_tests(folder: str) -> str:
    tests = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests/unit").glob("test_offload_*.py"))
    said = _run(folder, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests)
    return next((line for line in said.stdout.splitlines() if line.startswith("FAILED")), "")


def _run(folder: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """No site: an editable installation would put the unbroken package first."""
    packages = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    path = os.pathsep.join([folder, str(ROOT), *sorted(packages)])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-S", "-P", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS_MAX, check=False
    )


if __name__ == "__main__":
    sys.exit(main())
