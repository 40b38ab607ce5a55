"""The table of vLLM's releases: who is let in, and how a release's sources are read."""

import ast
import json
import re
import tomllib
from pathlib import Path

import pytest

from kvclient.vllm import release_table
from kvclient.vllm.release_differences import READ_UNCHECKED, READ_WHILE_SERVING
from kvclient.vllm.release_table import Row, check_release, newest, table
from kvserver.errors import RequestError
from tools import vllm_releases as tool

ROOT = Path(__file__).resolve().parents[3]
CLASSES = READ_WHILE_SERVING | READ_UNCHECKED


def test_the_manual_shows_the_table() -> None:
    manual = tool.MANUAL.read_text()
    assert tool.written_into(manual, table()) == manual
    assert tool.rendered(table()).count("\n") == len(table()) + 2
    assert tool.kept(table()) == tool.TABLE.read_text()


def test_what_may_be_installed_is_what_the_table_has() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest, last = (list(map(int, release.split(".")[:2])) for release in (next(iter(table())), newest()))
    bounds = f"vllm>={oldest[0]}.{oldest[1]},<{last[0]}.{last[1] + 1}"
    assert project["optional-dependencies"]["vllm"] == [bounds]


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"0.98.0": Row(), "0.98.1": Row(lacks=("vllm.x.Y has no 'z'",)), "0.99.0": Row(refused="it answers wrong")}
    monkeypatch.setattr(release_table, "table", lambda: rows)


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize(("build", "why"), [("0.98.1", "vllm.x.Y has no 'z'"), ("0.99.0+cpu", "it answers wrong")])
def test_a_broken_release_is_refused_by_its_name(build: str, why: str) -> None:
    with pytest.raises(RequestError, match=f"vllm-release: vLLM {build.replace('+', '.')} .*{why}"):
        check_release(build)


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize(
    ("build", "is_listed"),
    [("0.98.0", True), ("0.98.0+cu129", True), ("0.98.0.post2", True)]
    + [(build, False) for build in ("0.100.0", "0.98.7", "0.98.0rc1", "0.98.1.dev7+g0123", "dev", "")],
)
def test_a_release_out_of_the_table_is_let_in_and_known_to_be_new(build: str, is_listed: bool) -> None:
    assert check_release(build) == is_listed


# ---------------------------------------------------------------- reading sources

PLACED = "size: int\n    layers: list\n    layer_stride: int\n    block_stride: int\n    offset: int = 0"
SHARED = "size: int\n    shared_by: list"


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Sources with just what the connector needs."""
    ours = {name: ast.unparse(node.args) for name, node in tool._methods(tool._our_class()).items()}
    theirs = {name: taken.replace("**_", "**kwargs") for name, taken in ours.items() if name in tool.READ_HOOKS}
    hooks = "".join(f"    def {name}({taken}): ...\n" for name, taken in theirs.items())
    parts: dict[str, list[str]] = {tool.BASE: [f"class KVConnectorBase_V1:\n{hooks}"]}
    for path, names in CLASSES.items():
        module, _, name = path.rpartition(".")
        fields = "".join(f"    {field}: int\n" for field in names)
        parts.setdefault(module, []).append(f"@dataclass\nclass {name}:\n{fields}")
    kv_cache = parts[tool.KV_CACHE]
    kv_cache[:] = [each for each in kv_cache if "class KVCache" not in each]
    of_config = "num_blocks: int\n    kv_cache_tensors: list\n    kv_cache_groups: list"
    of_group = "layer_names: list\n    kv_cache_spec: object"
    described = {"KVCacheTensor": PLACED, "KVCacheGroupSpec": of_group, "KVCacheConfig": of_config}
    kv_cache += [f"@dataclass\nclass {name}:\n    {fields}\n" for name, fields in described.items()]
    for file in tool.OURS.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                bound = [f"if 1:\n    {item.name}: int\n" for item in node.names]
                parts.setdefault(str(node.module), []).extend(each for each in bound if each not in parts)
    for module, texts in parts.items():
        path = tmp_path / (module.replace(".", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(sorted(texts, key=lambda text: "class" not in text)))
    return tmp_path


def changed(sources: Path, module: str, old: str, new: str) -> Row:
    path = sources / (module.replace(".", "/") + ".py")
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    return tool.read(tool.Sources(sources))


def test_a_release_that_has_all_fits(sources: Path) -> None:
    row = tool.read(tool.Sources(sources))
    assert (row.lacks, row.hooks) == ((), ())
    assert "register_kv_caches" in row.uncalled, "nothing here calls anything"


@pytest.mark.parametrize(
    ("module", "old", "new", "named"),
    [
        ("vllm.v1.core.sched.output", "resumed_req_ids", "resumed", "has no 'resumed_req_ids'"),
        ("vllm.config.kv_transfer", "class KVTransferConfig", "class Transfer", "there is no .*KVTransferConfig"),
        ("vllm.platforms", "current_platform", "platform", "vllm.platforms has no 'current_platform'"),
        (tool.BASE, "request: Any, num_computed_tokens", "req: Any, num_computed_tokens", "get_num_new_matched_tokens"),
        (tool.BASE, "    def shutdown", "    @abstractmethod\n    def begin(self): ...\n    def shutdown", "begin"),
        (tool.KV_CACHE, PLACED, SHARED.replace("shared_by", "of"), "cannot be described: .*shared_by"),
        (tool.KV_CACHE, "layer_stride: int", "stride: int", "cannot be described: .*layer_stride"),
    ],
)
def test_what_a_release_lacks_is_named(sources: Path, module: str, old: str, new: str, named: str) -> None:
    assert re.search(named, changed(sources, module, old, new).why_broken)


def test_earlier_ways_to_describe_a_kv_cache_are_read(sources: Path) -> None:
    assert changed(sources, tool.KV_CACHE, PLACED, SHARED).lacks == ()
    packed = f"{SHARED}\n    offset: int = 0\n    block_stride: int = 0"
    assert changed(sources, tool.KV_CACHE, SHARED, packed).lacks == ()


def test_a_hook_that_nobody_has_read_is_reported_and_breaks_nothing(sources: Path) -> None:
    row = changed(sources, tool.BASE, "    def shutdown", "    def prefetch(self): ...\n    def shutdown")
    assert (row.hooks, row.why_broken) == (("prefetch",), "")


def test_the_outcome_of_a_run_names_what_failed(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    case = '<testcase name="{}">{}</testcase>'
    cases = [case.format("test_a[llama]", ""), case.format("test_b[llama]", "<failure/>")]
    cases += [case.format("test_c", "<skipped/>"), case.format("test_d", "<error/>"), case.format("test_d", "<error/>")]
    report.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    assert tool.ran(report) == "1 of 3; not test_b, test_d"


def test_the_table_keeps_what_is_not_empty() -> None:
    text = tool.kept({"0.98.0": Row(), "0.99.0": Row(cpu="3 of 3", uncalled=("a", "b"))})
    assert json.loads(text) == {"0.98.0": {}, "0.99.0": {"cpu": "3 of 3", "uncalled": ["a", "b"]}}
