"""Imports point down. The table below is the architecture; a new arrow in it is a decision, not a convenience."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[3]

# Rooms -> rooms that they may import. A room may also import those to its left in its own row.
BELOW: dict[str, str] = {
    "kvserver.wire": "",
    "kvserver.config": "wire",
    "kvserver.ipc": "config wire",
    "kvserver.transfer kvserver.tiers kvserver.remote": "wire",
    "kvserver.index": "transfer wire",
    "kvserver.service.base": "wire",
    "kvserver.service.telling": "index tiers wire",
    "kvserver.service.holdings": "service.telling index tiers transfer wire",
    "kvserver.service.state": "service.holdings service.telling service.base index config remote tiers transfer wire",
    "kvserver.service.requests": "service.state service.holdings service.telling service.base index tiers transfer "
    "wire",
    "kvserver.service.disk": "service.requests service.state service.holdings service.base index tiers wire",
    "kvserver.service.operators kvserver.service.remote": "service.requests service.state service.holdings "
    "service.base service.telling index remote tiers wire",
    "kvserver.service.report kvserver.service.check": "service.operators service.state service.holdings "
    "service.telling index tiers transfer wire",
    "kvserver.service": "service.base service.telling service.state service.requests service.disk service.operators "
    "service.remote service.report service.check wire",
    "kvserver.movers": "config ipc remote tiers transfer wire",
    "kvserver.supervisor": "movers config ipc transfer wire",
    "kvserver.brain.http": "service.telling config wire",
    "kvserver.brain": "brain.http service service.base service.holdings service.state service.telling config ipc "
    "transfer wire",
    "kvserver.sizing kvserver.cli": "brain kvclient.client kvclient.keys kvclient.values supervisor movers "
    "ipc config remote service service.base service.state service.telling tiers transfer wire",
    "kvserver.__main__": "cli",
    "kvclient.values kvclient.keys kvclient.counters": "wire",
    "kvclient.base kvclient.memory kvclient.identity kvclient.transport": "kvclient.values kvclient.keys "
    "kvclient.counters wire",
    "kvclient.client kvclient.sequences kvclient": "kvclient.transport kvclient.memory kvclient.base kvclient.values "
    "kvclient.keys kvclient.counters wire",
    "kvclient.offload kvclient.vllm kvclient.atom kvclient.atom_hook kvclient.atom_serve": "kvclient.client "
    "kvclient.identity kvclient.transport kvclient.memory kvclient.values kvclient.keys wire",
}
FREE = {"kvserver", "kvserver.errors", "kvserver.units", "kvserver.logs", "kvserver.private_files"}
"""Modules that all may import; they import nothing else of ours."""
ROWS_MAX = 25
FILES_MAX = 12
"""Most files in each top folder, not counting other folders."""

# Modules that are expensive, or tie us to something, and the only importers of each.
DOORS: dict[str, str] = {
    "kvserver._native": "kvserver.transfer.native kvserver.cli.doctor kvclient",
    "zmq": "kvserver.brain.publisher kvserver.brain.zmq_connection_limit kvclient.base kvclient.transport",
    "uvloop": "kvserver.brain.process",
    "asyncio": "kvserver.brain kvserver.remote.objects.clouds",
    "typer": "kvserver.cli.main kvserver.cli.admin kvserver.cli.remote",
    "rich": "kvserver.cli.progress kvserver.cli.top",
    "prometheus_client": "kvserver.brain.http.metrics",
    "glide_sync": "kvserver.remote.valkey",
    "glide_shared": "kvserver.remote.valkey kvserver.remote.valkey_answers",
    "obstore": "kvserver.remote.objects.clouds",
    "torch": "kvclient",
    "vllm": "kvclient",
}

LIBRARIES = {("kvserver.movers.remote_store", f"kvserver.remote.{name}") for name in ("valkey", "objects.clouds")}
"""Imports of modules whose libraries are extras."""

WHEN_ASKED_FOR = {
    ("kvserver.brain.http.server", "kvserver.brain.http.metrics"),
    ("kvserver.brain.process", "kvserver.brain.publisher"),
    ("kvserver.service.service", "kvserver.service.check.memory"),
    ("kvserver.supervisor.supervisor", "kvserver.movers.remote_store"),
}
"""Imports that every start would pay for, and that few servers need."""

STORES = {
    "glide_sync",
    "obstore",
    "mooncake",
    "kvserver.movers.remote_store",
    "kvserver.remote.objects",
    "kvserver.remote.store",
}
"""A server without a remote store needs none of them."""
SETTINGS = {"tomllib"}
"""The command alone reads a file of settings, for all processes."""

QUICK_START = tuple(f"kvserver.cli.{name}" for name in ("main", "admin", "server_connection", "remote"))
"""Modules that `kvserver --help` loads: they import others when a command runs."""

PURE = (
    *("kvserver.service", "kvserver.index", "kvserver.tiers", "kvserver.wire", "kvserver.transfer.layout"),
    *("kvclient.offload.decide", "kvclient.offload.lookups", "kvclient.offload.ranges"),
    *("kvclient.offload.request", "kvclient.offload.values"),
)
WORLD = {"asyncio", "mmap", "os", "pathlib", "random", "select", "selectors", "signal", "socket", "subprocess"} | {
    "threading",
    "time",
}
"""Modules that a room which only decides may not import."""


class Import(NamedTuple):
    importer: str
    imported: str
    line: int
    inside: bool
    """Whether the import is inside a function."""

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def modules() -> Iterator[tuple[str, Path]]:
    for top in (ROOT, ROOT / "client"):
        package = "kvserver" if top == ROOT else "kvclient"
        for path in sorted((top / package).rglob("*.py")):
            parts = path.relative_to(top).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


MODULES = dict(modules())


@cache
def imports() -> list[Import]:
    """All of them. Not read when this file is imported: each process of `make test` does that."""
    return list(_imports())


def _imports() -> Iterator[Import]:
    for module, path in MODULES.items():
        nodes = list(ast.walk(ast.parse(path.read_text())))
        functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        inside = {id(node) for function in functions for node in ast.walk(function)}
        typing = [node for node in nodes if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
        names_only = {id(node) for block in typing for node in ast.walk(block)}
        for node in nodes:
            if id(node) not in names_only:
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


ROOMS = {room: row for row in BELOW for room in row.split()}


def room(module: str) -> str:
    """The longest name in the table that contains the module: kvserver.service.disk.reads -> kvserver.service.disk."""
    parts = module.split(".")
    names = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((name for name in names if name in ROOMS or name in FREE), module)


def seen_from_afar(module: str) -> str:
    """The module's folder; the module itself at the top of a package."""
    folder = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
    return module if folder in ("kvserver", "kvclient") else folder


def within(module: str, packages: str) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages.split())


def allowed(importer: str) -> set[str]:
    """Rooms that a room may import."""
    if importer in FREE:
        return FREE
    row = ROOMS[importer]
    left = row.split()[: row.split().index(importer)]
    below = (name if name.split(".")[0] == "kvclient" else f"kvserver.{name}" for name in BELOW[row].split())
    return {importer, *left, *below, *FREE}


def test_every_room_is_in_the_table() -> None:
    assert {room(module) for module in MODULES} - set(ROOMS) - FREE == set()
    assert len(BELOW) <= ROWS_MAX


def test_every_row_of_the_table_is_of_something() -> None:
    assert set(ROOMS) <= {room(module) for module in MODULES}
    used = {(room(arrow.importer), room(arrow.imported)) for arrow in imports() if arrow.imported in MODULES}
    unused = [
        (importer, imported)
        for importer in ROOMS
        for imported in allowed(importer) - FREE - {importer}
        if imported.startswith("kvserver") and len(ROOMS[importer].split()) == 1 and (importer, imported) not in used
    ]
    assert unused == []


def test_imports_point_down() -> None:
    wrong = [
        str(arrow)
        for arrow in imports()
        if arrow.imported in MODULES and room(arrow.imported) not in allowed(room(arrow.importer))
    ]
    assert wrong == []


def test_heavy_imports_have_one_door_each() -> None:
    wrong = [
        str(arrow)
        for arrow in imports()
        for heavy, doors in DOORS.items()
        if within(arrow.imported, heavy) and not within(arrow.importer, doors)
    ]
    assert wrong == []


def test_rooms_that_decide_do_not_touch_the_world() -> None:
    wrong = [
        str(arrow)
        for arrow in imports()
        if any(within(arrow.importer, pure) for pure in PURE) and arrow.imported.split(".")[0] in WORLD
    ]
    assert wrong == []


def test_no_import_hides_in_a_function() -> None:
    """It would hide a cycle. What few need may, for a quick start; a store's library is an extra."""
    wrong = [
        str(arrow)
        for arrow in imports()
        if arrow.inside
        and within(arrow.imported, "kvserver kvclient")
        and arrow.importer not in QUICK_START
        and (arrow.importer, arrow.imported) not in WHEN_ASKED_FOR
        and (arrow.importer, arrow.imported) not in LIBRARIES
    ]
    assert wrong == []


@pytest.mark.parametrize("of", ["modules", "folders"])
def test_there_are_no_cycles(of: str) -> None:
    """A file at the top of a package counts as a folder of its own."""
    graph: dict[str, set[str]] = {}
    for arrow in imports():
        if arrow.imported in MODULES:
            pair = arrow.importer, arrow.imported
            if of == "folders":
                pair = seen_from_afar(pair[0]), seen_from_afar(pair[1])
            if pair[0] != pair[1]:
                graph.setdefault(pair[0], set()).add(pair[1])
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"cycle: {' <- '.join(error.args[1])}")


@pytest.mark.parametrize("top", ["kvserver", "client/kvclient", "csrc", "csrc/gpu", "tests/unit"])
def test_a_top_folder_is_read_at_a_glance(top: str) -> None:
    files = [path.name for path in (ROOT / top).iterdir() if path.is_file() and path.suffix != ".so"]
    assert len(files) <= FILES_MAX, sorted(files)


def test_importing_the_package_imports_nothing_else() -> None:
    script = (
        "import sys; sys.path += sys.argv[1:]; had = set(sys.modules); import kvserver; print({*sys.modules} - had)"
    )
    done = subprocess.run([sys.executable, "-ISc", script, str(ROOT)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "{'kvserver'}"


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("kvserver.brain.process", {"zmq", "prometheus_client", "kvserver.service.check", *SETTINGS, *STORES}),
        ("kvserver.cli.main, kvserver.supervisor.supervisor", {"asyncio", "email", "zmq", *SETTINGS, *STORES}),
        ("kvserver.movers.mover", {"asyncio", "email", "typer", "zmq", *SETTINGS, *STORES}),
        ("kvserver.movers.disk_mover", {"asyncio", "email", "typer", "zmq", *SETTINGS, *STORES}),
    ],
    ids=["brain", "supervisor", "mover", "disk mover"],
)
def test_a_process_of_a_server_starts_without_what_few_need(module: str, absent: set[str]) -> None:
    script = f"import sys, {module}; print(*sorted({absent!r} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
