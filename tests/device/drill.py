"""`python -m tests.device.drill`: breaks the GPU part on purpose, one bug at a time, and reports which test noticed.

A copy of the tree is built in build/drill: completely at first, which takes two minutes on two cores, then only the
files that a mutation changes, about ten seconds each. The tests named by a mutation run in an environment whose
packages are that copy. They all run on the unbroken copy first, and must pass there. Exit status 1 if a bug
survives.
"""

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
from pathlib import Path
from typing import NamedTuple

from tests.device.mutations import MUTATIONS, Mutation
from tests.drilling import ROOT, refuse_stale, text_with

COPIED = ("CMakeLists.txt", "pyproject.toml", "csrc", "kvserver", "client", "tests")
SECONDS_MAX = 600


class Verdict(NamedTuple):
    by: str
    """The test that failed; empty if none did."""
    build_s: float
    tests_s: float


class Workshop:
    """The copy of the tree, its build and its environment, below one directory."""

    def __init__(self, folder: Path) -> None:
        self.tree = folder / "tree"
        self._build = folder / "build"
        self._python = folder / "venv" / "bin" / "python"
        for name in COPIED:
            _mirror(ROOT / name, self.tree / name)
        if not self._python.exists():
            venv.create(folder / "venv", symlinks=True)
        (packages,) = (folder / "venv").glob("lib/python*/site-packages")
        # An editable installation's hooks are in .pth files, which Python does not read in directories added by a
        # .pth file.
        outer = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        (packages / "drill.pth").write_text("\n".join([str(self.tree), str(self.tree / "client"), *sorted(outer)]))

    def build(self) -> float:
        """Builds the native module of the present tree; returns the seconds."""
        began = time.monotonic()
        scripts = {sysconfig.get_path("scripts"), *os.environ["PATH"].split(":")}
        environment = {**os.environ, "PATH": os.pathsep.join(scripts)}
        if not (self._build / "build.ninja").exists():
            command = ["cmake", "-S", self.tree, "-B", self._build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"]
            _run([*command, f"-DPython_EXECUTABLE={sys.executable}"], environment)
        _run(["cmake", "--build", self._build], environment)
        (module,) = self._build.glob("_native*.so")
        partial = self.tree / "kvserver" / "partial"
        shutil.copy2(module, partial)
        partial.rename(self.tree / "kvserver" / module.name)  # not overwritten: a process that ends late still maps it
        return time.monotonic() - began

    def check(self) -> None:
        """Checks that tests would import the copy's packages."""
        script = "import kvserver._native, kvclient; print(kvserver._native.__file__, kvclient.__file__)"
        for path in _run([self._python, "-c", script], dict(os.environ), self.tree).split():
            assert Path(path).is_relative_to(self.tree), f"{path} is not the copy's"

    def test(self, *names: str) -> tuple[str, float]:
        """The first failing test among those named "file" or "file -k words", and the seconds."""
        began = time.monotonic()
        for name in names:
            path, _, words = name.partition(" -k ")
            command = [self._python, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/{path}"]
            done = subprocess.run(
                [*command, "-k", words] if words else command,
                cwd=self.tree,
                capture_output=True,
                text=True,
                timeout=SECONDS_MAX,
                check=False,
            )
            if done.returncode not in (0, 1):
                raise SystemExit(f"{name} could not run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
            failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
            if failed:
                return failed[0], time.monotonic() - began
        return "", time.monotonic() - began

    def suffer(self, mutation: Mutation) -> Verdict:
        """Breaks the tree, runs the tests, and repairs the tree."""
        file = self.tree / mutation.file
        whole = file.read_text()
        file.write_text(text_with(mutation, ROOT))
        try:
            native = mutation.file.startswith("csrc/")
            build_s = self.build() if native else 0.0
            return Verdict(*_swapped(build_s, self.test(*mutation.tests)))
        finally:
            file.write_text(whole)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.device.drill", description=__doc__)
    parser.add_argument("--only", nargs="+", default=[""], help="mutations whose name contains one of these")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "drill", help="where the copy is made")
    options = parser.parse_args()
    chosen = [mutation for mutation in MUTATIONS if any(words in mutation.name for words in options.only)]
    refuse_stale((ROOT, chosen))
    workshop = Workshop(options.folder)
    print(f"built in {workshop.build():.0f} s", flush=True)
    workshop.check()
    failed, seconds = workshop.test(*sorted({test for mutation in chosen for test in mutation.tests}))
    if failed:
        print(f"on the unbroken copy: {failed}")
        return 1
    print(f"the named tests pass on the unbroken copy in {seconds:.0f} s")
    survivors = 0
    print(f"{'mutation':<58}{'build s':>8}{'tests s':>8}  noticed by", flush=True)
    for mutation in chosen:
        verdict = workshop.suffer(mutation)
        survivors += not verdict.by
        said = verdict.by[:150] or "NOBODY"
        print(f"{mutation.name:<58}{verdict.build_s:>8.0f}{verdict.tests_s:>8.0f}  {said}", flush=True)
    print(f"{len(chosen)} mutations, {survivors} survived")
    return 1 if survivors else 0


def _swapped(build_s: float, tested: tuple[str, float]) -> tuple[str, float, float]:
    return tested[0], build_s, tested[1]


def _mirror(source: Path, target: Path) -> None:
    """Copies a tree. Unchanged files keep their time, so that only changes are compiled again."""
    if source.is_dir():
        names = {path.name for path in source.iterdir()} - {"__pycache__"}
        target.mkdir(parents=True, exist_ok=True)
        for gone in {path.name for path in target.iterdir()} - names:
            if not gone.startswith("_native") and gone != "__pycache__":
                shutil.rmtree(target / gone) if (target / gone).is_dir() else (target / gone).unlink()
        for name in names:
            _mirror(source / name, target / name)
    elif not target.exists() or source.read_bytes() != target.read_bytes():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


def _run(command: list[str | Path], environment: dict[str, str], folder: Path = ROOT) -> str:
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
