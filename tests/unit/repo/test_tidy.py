"""Ratchets: practices that this code base has agreed to avoid. Each names the alternative."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FILE_LINES_MAX = 800

EXCEPT_EXCEPTION = {
    "kvserver/cli/main.py": 1,
    "kvserver/supervisor/supervisor.py": 1,
    "kvserver/movers/remote_engine.py": 1,
    "kvserver/movers/remote_mover.py": 1,
    "kvserver/remote/secrets.py": 1,
    "kvserver/remote/objects/clouds.py": 1,
    "kvserver/remote/objects/contract.py": 4,
    "kvserver/remote/objects/plugin.py": 3,
    "client/kvclient": 5,
}
"""Outermost handlers that turn any failure into something else.

A message for a person; a new brain under a supervisor that holds the arena; the end of a mover of which a thread has
ended; an error of a store, for whatever a driver of others or a library has raised, whose text may fail as well; a
check of the contract that is broken by it; a miss for an engine, by the client's loop
and by a connector's guard; a failed job for a copy that torch was to make; the answer of a thread that hashes."""

CODE = (".py", ".pyi", ".cpp", ".h", ".sh", ".toml", ".yml", ".yaml", ".js", ".css", ".html")
TEXT = (*CODE, ".md", ".txt", "Makefile", ".ci/run")


def listed() -> list[str]:
    """Files that are, or would be, under version control. Without git (an unpacked archive): all that could be."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        ignored = {".venv", "build", ".git"}
        names = [
            str(path.relative_to(ROOT))
            for path in ROOT.rglob("*")
            if path.is_file() and not ignored & set(path.relative_to(ROOT).parts)
        ]
    ours = [name for name in names if not name.startswith(("LICENSE", "csrc/vendor/"))]
    return sorted(name for name in ours if (ROOT / name).is_file())


FILES = listed()


def lines(endings: tuple[str, ...]) -> Iterator[tuple[str, int, str]]:
    for name in FILES:
        if name.endswith(endings):
            for number, line in enumerate((ROOT / name).read_text().splitlines(), 1):
                yield name, number, line


def found(pattern: str, endings: tuple[str, ...]) -> list[str]:
    """Lines that match the pattern, except in this file."""
    wanted = re.compile(pattern)
    return [
        f"{name}:{number}: {line.strip()}"
        for name, number, line in lines(endings)
        if wanted.search(line) and not name.endswith("test_tidy.py")
    ]


def test_files_are_found() -> None:
    assert len([name for name in FILES if name.endswith(".py")]) > 30


def test_no_notes_to_self() -> None:
    """Missing work belongs in an issue that says what breaks until then."""
    assert found(r"\b(TODO|FIXME|XXX|HACK)\b", TEXT) == []


def test_files_are_rooms() -> None:
    """A file grows until it has a second subject. At 800 lines it has one: move that to its own file."""
    long = {name: (ROOT / name).read_text().count("\n") for name in FILES if name.endswith(CODE)}
    assert {name: count for name, count in long.items() if count > FILE_LINES_MAX} == {}


def test_everything_is_caught_only_at_the_edges() -> None:
    """`except Exception` hides bugs. Catch what can happen, or let the process stop."""
    caught: dict[str, int] = dict.fromkeys(EXCEPT_EXCEPTION, 0)
    elsewhere = []
    for name in FILES:
        if not name.endswith(".py") or not name.startswith(("kvserver/", "client/")):
            continue
        for node in ast.walk(ast.parse((ROOT / name).read_text())):
            if isinstance(node, ast.ExceptHandler) and _catches_all(node):
                edge = next((edge for edge in EXCEPT_EXCEPTION if name == edge or name.startswith(edge + "/")), None)
                if edge is None:
                    elsewhere.append(f"{name}:{node.lineno}")
                else:
                    caught[edge] += 1
    assert elsewhere == []
    assert {edge: count for edge, count in caught.items() if count > EXCEPT_EXCEPTION[edge]} == {}


def _catches_all(handler: ast.ExceptHandler) -> bool:
    names = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(
        name is None or (isinstance(name, ast.Name) and name.id in ("Exception", "BaseException")) for name in names
    )


def test_no_error_is_passed_over_in_silence() -> None:
    """`except: pass` needs its reason on the same line, so that a reader can check it."""
    silent = []
    for name in FILES:
        if not name.endswith(".py") or not name.startswith(("kvserver/", "client/")):
            continue
        text = (ROOT / name).read_text().splitlines()
        for node in ast.walk(ast.parse("\n".join(text))):
            bare = isinstance(node, ast.ExceptHandler) and [type(line) for line in node.body] == [ast.Pass]
            if bare and "#" not in text[node.body[0].lineno - 1]:
                silent.append(f"{name}:{node.lineno}")
    assert silent == []


def test_lines_end_where_their_text_does_and_nothing_is_left_of_a_merge() -> None:
    assert found(r"[ \t\r]$", TEXT) == []
    assert found(r"^(<{7}|>{7}|={7})( |$)", TEXT) == []
    unended = [name for name in FILES if name.endswith(TEXT) and not (ROOT / name).read_text().endswith(("\n", ""))]
    assert [name for name in unended if (ROOT / name).stat().st_size] == []


def test_no_path_of_somebodys_machine() -> None:
    assert found(r"(?<![\w.$])/(home|root|Users|work)/\w", TEXT) == []


def test_printing_is_for_the_command_line() -> None:
    """All other code logs, or returns."""
    python = (ROOT / "kvserver").rglob("*.py")
    printing = {
        str(path.relative_to(ROOT))
        for path in python
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    }
    assert printing <= {"kvserver/cli/main.py"}


@pytest.mark.parametrize("name", [".ci/run"])
def test_scripts_can_be_run(name: str) -> None:
    assert (ROOT / name).stat().st_mode & 0o111


def test_no_test_is_imported_by_another() -> None:
    """pytest knows a test by another name than an import does: its classes would be there twice. See tests/rigs."""
    imports = re.compile(r"^\s*from (?:[\w.]*\.)?test_\w+ import", re.MULTILINE)
    files = [name for name in listed() if name.startswith("tests/") and name.endswith(".py")]
    assert [name for name in files if imports.search((ROOT / name).read_text())] == []
