"""Copies of both packages with a deliberate bug in one, and interpreters that import the copy."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import kvserver._native as native
from tests.drill.bugs import ROOT, Bug, Change, change_of

SECONDS_MAX = 900


class Copy:
    """Both packages below one folder, which comes first on the path of the interpreters."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Runs Python with these arguments.

        Site is off: an editable installation would put the intact packages first."""
        outer = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
        path = os.pathsep.join([str(self.folder), str(self.folder / "client"), str(ROOT), *outer])
        return subprocess.run(
            [sys.executable, "-S", "-P", *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=SECONDS_MAX,
            check=False,
        )

    def failing_seed(self, simulator: str, *, seed0: int, seeds: int, events: int) -> str:
        """The first seed of a simulator (its package) that fails, and its problem; empty when none does."""
        said = self.run("-m", "tests.drill.hunt", simulator, str(seed0), str(seeds), str(events), str(self.folder))
        if said.returncode:
            raise SystemExit(f"{simulator} could not run: {said.stderr[-2000:]}")
        return said.stdout.strip()

    def failing_test(self, tests: Sequence[str]) -> str:
        """The first failing test of these files and folders; empty when all pass. An error when they cannot run."""
        said = self.run("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout", "60", *tests)
        failed = [line for line in said.stdout.splitlines() if line.startswith("FAILED")]
        if said.returncode and not failed:
            raise SystemExit(f"the tests could not run: {(said.stdout + said.stderr)[-2000:]}")
        return failed[0] if failed else ""


@contextmanager
def copy_with(change: Change) -> Iterator[Copy]:
    with tempfile.TemporaryDirectory(prefix="kvserver-drill-") as name:
        folder = Path(name)
        for package in ("kvserver", "client/kvclient"):
            shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(native.__file__, folder / "kvserver")
        (folder / change.file).write_text(change.text)
        yield Copy(folder)


def noticed_by(bug: Bug, hunt: Callable[[Copy], str]) -> str:
    """Who notices the bug: its own tests, or else whom `hunt` asks. Empty when nobody does."""
    with copy_with(change_of(bug)) as copy:
        return (copy.failing_test(bug.tests) if bug.tests else "") or hunt(copy)
