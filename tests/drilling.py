"""Shared code of the drills: copies of both packages with a deliberate bug in one, and interpreters for them."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Protocol

import kvserver._native as native

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"kvserver": ROOT / "kvserver", "kvclient": ROOT / "client" / "kvclient"}
SECONDS_MAX = 600

Package = Literal["kvserver", "kvclient"]


class Bug(Protocol):
    """A deliberate bug: `old` stands exactly once in `file`, a path below its package, and becomes `new`."""

    @property
    def name(self) -> str: ...
    @property
    def file(self) -> str: ...
    @property
    def old(self) -> str: ...
    @property
    def new(self) -> str: ...


class Copy:
    """Both packages, one of them broken. `folder` is the place of import, which a program can check."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Runs Python with these arguments.

        Site is off: an editable installation would put the intact packages first."""
        outer = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
        path = os.pathsep.join([str(self.folder), str(ROOT), *outer])
        return subprocess.run(
            [sys.executable, "-S", "-P", *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=SECONDS_MAX,
            check=False,
        )

    def failed_test(self, tests: Sequence[str]) -> str:
        """The first failing test of these files; empty when all pass. An error when they cannot run."""
        said = self.run("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout", "30", *tests)
        failed = [line for line in said.stdout.splitlines() if line.startswith("FAILED")]
        if said.returncode and not failed:
            raise SystemExit(f"the unit tests could not run: {(said.stdout + said.stderr)[-2000:]}")
        return failed[0] if failed else ""


class Stale(Exception):
    """A deliberate bug that no longer fits its code."""


def text_with(bug: Bug, folder: Path) -> str:
    """The text of the file with the bug in it."""
    text = (folder / bug.file).read_text()
    if text.count(bug.old) != 1:
        raise Stale(f"{bug.name}: its text stands {text.count(bug.old)} times in {bug.file}, expected once")
    broken = text.replace(bug.old, bug.new)
    if broken == text:
        raise Stale(f"{bug.name}: it changes nothing in {bug.file}")
    if bug.file.endswith(".py"):
        try:
            compile(broken, bug.file, "exec")
        except SyntaxError as error:
            raise Stale(f"{bug.name}: what it leaves of {bug.file} is no program: {error}") from error
    return broken


def refuse_stale(*drills: tuple[Path, Iterable[Bug]]) -> None:
    """Ends the program with status 1 when a bug is stale, and names each stale one."""
    stale = []
    for folder, bugs in drills:
        for bug in bugs:
            try:
                text_with(bug, folder)
            except Stale as error:
                stale.append(str(error))
    if stale:
        raise SystemExit("\n".join([*stale, f"deliberate bugs that no longer fit the code: {len(stale)}"]))


def unit_test(name: str) -> str:
    """The path of tests/unit/*/test_NAME.py."""
    (path,) = (ROOT / "tests/unit").glob(f"*/test_{name}.py")
    return str(path.relative_to(ROOT))


@contextmanager
def copy_with(bug: Bug, package: Package) -> Iterator[Copy]:
    with tempfile.TemporaryDirectory(prefix="kvserver-drill-") as folder:
        for name, source in PACKAGES.items():
            shutil.copytree(source, Path(folder) / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(native.__file__, Path(folder) / "kvserver")
        (Path(folder) / package / bug.file).write_text(text_with(bug, PACKAGES[package]))
        yield Copy(Path(folder))
