"""A copy of the whole tree with a build of its own, for bugs in native code.

It lies in build/drill. The first build takes two minutes on two cores, each later one about ten seconds: only files
that differ are compiled again."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

from tests.drill.bugs import ROOT, Change

COPIED = ("CMakeLists.txt", "pyproject.toml", "csrc", "kvserver", "client", "tests")
SECONDS_MAX = 600


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

    def build(self) -> None:
        """Builds the native module of the present tree."""
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

    def check(self) -> None:
        """Checks that tests would import the copy's packages."""
        script = "import kvserver._native, kvclient; print(kvserver._native.__file__, kvclient.__file__)"
        for path in _run([self._python, "-c", script], dict(os.environ), self.tree).split():
            assert Path(path).is_relative_to(self.tree), f"{path} is not the copy's"

    def failing_test(self, tests: Sequence[str]) -> str:
        """The first failing test of those named "file" or "file -k words"; empty when all pass."""
        for name in tests:
            path, _, words = name.partition(" -k ")
            command = [self._python, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", path]
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
            if failed := [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]:
                return failed[0]
        return ""

    def suffer(self, change: Change, tests: Sequence[str]) -> str:
        """Breaks the tree, builds it, runs the tests, and repairs the tree. Returns the first test that failed."""
        file = self.tree / change.file
        whole = file.read_text()
        file.write_text(change.text)
        try:
            if change.file.is_relative_to("csrc"):
                self.build()
            return self.failing_test(tests)
        finally:
            file.write_text(whole)


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
