"""A deliberate bug: which promise it attacks, and how it changes the code."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PROMISES = tuple(f"P{number}" for number in range(1, 9))
SOURCES = {".py", ".cpp", ".h"}


class Stale(Exception):
    """A deliberate bug that no longer fits its code."""


class Bug(NamedTuple):
    promise: str
    name: str
    where: str
    """A file, or a folder in one of whose files it is, below the checkout."""
    find: str
    """A regular expression that is found exactly once there. A space in it stands for any white space."""
    put: str
    """What is put in its place; \\1 is its first group."""
    tests: tuple[str, ...] = ()
    """The tests that are asked first; with none, those of the whole drill are asked."""


class Change(NamedTuple):
    """One file as it is with the bug in it."""

    file: Path
    """Below the checkout."""
    text: str


def change_of(bug: Bug, root: Path = ROOT) -> Change:
    """Finds the place of a bug. Raises Stale when there is none or more than one, or the bug leaves no program."""
    if bug.promise not in PROMISES:
        raise ValueError(f"{bug.name}: promise {bug.promise!r} is none of {', '.join(PROMISES)}")
    place = root / bug.where
    files = sorted(path for path in place.rglob("*") if path.suffix in SOURCES) if place.is_dir() else [place]
    texts = {file: file.read_text() for file in files if file.is_file()}
    pattern = re.compile(bug.find.replace(" ", r"\s+"))
    found = [file for file, text in texts.items() for _ in pattern.finditer(text)]
    if len(found) != 1:
        raise Stale(f"{bug.name}: found {len(found)} times in {bug.where}, expected once: {bug.find}")
    (file,) = found
    text = pattern.sub(bug.put, texts[file])
    if text == texts[file]:
        raise Stale(f"{bug.name}: changes nothing in {file.relative_to(root)}")
    if file.suffix == ".py":
        try:
            compile(text, str(file), "exec")
        except SyntaxError as error:
            raise Stale(f"{bug.name}: leaves no program of {file.relative_to(root)}: {error}") from error
    return Change(file.relative_to(root), text)
