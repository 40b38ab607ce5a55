"""Imports point down. The table below is the architecture; a new arrow in it is a decision, not a convenience."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Room -> rooms that it may import, besides itself. index and tiers know nothing of each other: they meet in service.
BELOW: dict[str, str] = {
    "kvserver.errors": "",
    "kvserver.wire": "errors",
    "kvserver.transfer": "errors wire",
    "kvserver.index": "errors wire transfer",
    "kvserver.tiers": "errors wire transfer",
    "kvserver.service": "errors wire transfer index tiers",
    "kvserver.sizes": "",
    "kvserver.quotas": "errors sizes wire",
    "kvserver.paths": "errors",
    "kvserver.config": "config_file config_keys errors paths quotas sizes wire",
    "kvserver.config_keys": "errors quotas sizes",
    "kvserver.config_file": "errors sizes",
    "kvserver.logs": "",
    "kvserver.memory": "",
    "kvserver.passing": "config errors wire",
    "kvserver.metrics": "service wire",
    "kvserver.page": "",
    "kvserver.environment": "",
    "kvserver.http": "admin_door environment errors metrics page service wire",
    "kvserver.admin_tokens": "errors",
    "kvserver.admin_door": "admin_tokens config errors wire",
    "kvserver.doors": "config errors guests passing wire",
    "kvserver.guests": "",
    "kvserver.bounds": "config quotas service",
    "kvserver.disk_check": "config disk_leave errors paths sizes",
    "kvserver.disk_drain": "errors",
    "kvserver.disk_hits": "",
    "kvserver.disk_leave": "disk_hits disk_notes",
    "kvserver.disk_notes": "",
    "kvserver.disk_quiet": "logs",
    "kvserver.disk_tool": "config disk_hits disk_leave disk_notes errors figures paths tiers transfer sizes",
    "kvserver.disk_mover": "config disk_hits disk_leave disk_notes errors logs passing transfer wire",
    "kvserver.event_replays": "wire",
    "kvserver.publisher": "config doors errors event_replays guests wire",
    "kvserver.turns": "",
    "kvserver.router": "",
    "kvserver.server": "publisher admin_door bounds config doors errors http logs passing router service transfer "
    "turns wire",
    "kvserver.mover": "config errors logs passing transfer wire",
    "kvserver.systemd": "",
    "kvserver.arena_files": "config errors paths",
    "kvserver.arena_sums": "logs passing transfer",
    "kvserver.holding": "arena_files config errors logs memory systemd transfer",
    "kvserver.supervisor": "admin_tokens arena_files config disk_check errors holding logs passing systemd transfer "
    "wire",
    "kvserver.doctor": "config disk_check doctor_device memory sizes",
    "kvserver.doctor_device": "config doctor_peers errors sizes",
    "kvserver.doctor_peers": "",
    "kvserver.doctor_trial": "errors transfer",
    "kvserver.figures": "",
    "kvserver.overview": "figures sizes wire",
    "kvserver.rates": "service wire",
    "kvserver.top": "errors figures rates wire",
    "kvserver.explaining": "errors wire kvclient",
    "kvserver.showing": "",
    "kvserver.replay": "errors wire kvclient",
    "kvserver.sizing": "errors replay service tiers wire",
    "kvserver.cli": "config config_keys disk_drain disk_tool doctor errors explaining logs overview replay showing "
    "sizes paths sizing supervisor top wire kvclient cli_admin",
    "kvserver.cli_admin": "admin_client config errors explaining kvclient wire",
    "kvserver.admin_client": "admin_tokens errors",
    "kvserver.__main__": "cli",
    "kvserver": "",
    "kvclient": "errors wire",
}

# Modules that are expensive, or tie us to something, and who alone may import them.
DOORS: dict[str, str] = {
    "kvserver._native": "kvserver.transfer.engines kvserver.doctor_device kvserver.doctor_trial kvserver.replay "
    "kvclient",
    "zmq": "kvserver.publisher kvserver.doors kvserver.guests kvserver.router kvclient",
    "uvloop": "kvserver.server",
    "asyncio": "kvserver.server kvserver.http kvserver.admin_door kvserver.doors",
    "typer": "kvserver.cli kvserver.cli_admin",
    "rich": "kvserver.showing kvserver.top",
    "prometheus_client": "kvserver.metrics",
    "torch": "kvclient",
    "vllm": "kvclient",
}

PURE = (
    *("kvserver.service", "kvserver.index", "kvserver.tiers", "kvserver.wire", "kvserver.transfer.layout"),
    *("kvclient.offload", "kvclient.offload_jobs", "kvclient.offload_questions", "kvclient.offload_ranges"),
    *("kvclient.offload_request", "kvclient.offload_tiers", "kvclient.offload_values"),
)
WORLD = {"asyncio", "mmap", "os", "pathlib", "random", "select", "selectors", "signal", "socket", "subprocess"} | {
    "threading",
    "time",
}
"""What a room that only decides has no business with."""


class Import(NamedTuple):
    importer: str
    imported: str
    line: int
    inside: bool
    """In a function."""

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def modules() -> Iterator[tuple[str, Path]]:
    for top in (ROOT, ROOT / "client"):
        package = "kvserver" if top == ROOT else "kvclient"
        for path in sorted((top / package).rglob("*.py")):
            parts = path.relative_to(top).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


MODULES = dict(modules())


def imports() -> Iterator[Import]:
    for module, path in MODULES.items():
        tree = ast.parse(path.read_text())
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        inside = {id(node) for function in functions for node in ast.walk(function)}
        for node in ast.walk(tree):
            for name in _imported(node):
                yield Import(module, name, node.lineno, id(node) in inside)  # type: ignore[attr-defined]


def _imported(node: ast.AST) -> list[str]:
    """Full names; `from package import module` names the module."""
    match node:
        case ast.Import(names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module=str(module), names=names, level=0):
            full = [f"{module}.{alias.name}" for alias in names]
            return sorted({name if name in MODULES or name == "kvserver._native" else module for name in full})
        case ast.ImportFrom(level=level):
            raise AssertionError(f"relative import of level {level}: write the whole name")
        case _:
            return []


IMPORTS = list(imports())


def room(module: str) -> str:
    """kvserver.service.state -> kvserver.service; all of kvclient is one room."""
    parts = module.split(".")
    return parts[0] if parts[0] != "kvserver" else ".".join(parts[:2])


def within(module: str, packages: str) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages.split())


def test_every_room_is_in_the_table() -> None:
    assert {room(module) for module in MODULES} - set(BELOW) == set()


def test_imports_point_down() -> None:
    allowed = {
        above: {name if name == "kvclient" else f"kvserver.{name}" for name in below.split()} | {above, "kvserver"}
        for above, below in BELOW.items()
    }
    wrong = [
        str(arrow)
        for arrow in IMPORTS
        if arrow.imported.split(".")[0] in ("kvserver", "kvclient")
        and arrow.imported != "kvserver._native"
        and room(arrow.imported) not in allowed[room(arrow.importer)]
    ]
    assert wrong == []


def test_heavy_imports_have_one_door_each() -> None:
    wrong = [
        str(arrow)
        for arrow in IMPORTS
        for heavy, doors in DOORS.items()
        if within(arrow.imported, heavy) and not within(arrow.importer, doors)
    ]
    assert wrong == []


def test_rooms_that_decide_do_not_touch_the_world() -> None:
    wrong = [
        str(arrow)
        for arrow in IMPORTS
        if any(within(arrow.importer, pure) for pure in PURE) and arrow.imported.split(".")[0] in WORLD
    ]
    assert wrong == []


def test_no_import_hides_in_a_function() -> None:
    """It would hide a cycle. Only the command line does it, and HTTP for its metrics, so that a start is quick."""
    wrong = [
        str(arrow)
        for arrow in IMPORTS
        if arrow.inside
        and within(arrow.imported, "kvserver kvclient")
        and arrow.importer not in ("kvserver.cli", "kvserver.cli_admin")
        and (arrow.importer, arrow.imported) != ("kvserver.http", "kvserver.metrics")
    ]
    assert wrong == []


def test_modules_have_no_cycles() -> None:
    graph: dict[str, set[str]] = {module: set() for module in MODULES}
    for arrow in IMPORTS:
        if arrow.imported in MODULES and arrow.imported != arrow.importer:
            graph[arrow.importer].add(arrow.imported)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"cycle: {' <- '.join(error.args[1])}")


def test_importing_the_package_imports_nothing_else() -> None:
    script = (
        "import sys; sys.path += sys.argv[1:]; had = set(sys.modules); import kvserver; print({*sys.modules} - had)"
    )
    done = subprocess.run([sys.executable, "-ISc", script, str(ROOT)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "{'kvserver'}"
