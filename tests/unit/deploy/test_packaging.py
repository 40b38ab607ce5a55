"""The contents of an installation: few dependencies, all bounded, and no engine's framework."""

import re
import subprocess
import sys
import tomllib
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import kvserver

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

HEAVY = ("torch", "numpy", "vllm", "transformers", "opentelemetry", "grpcio", "protobuf", "fastapi", "pydantic")
FRAMEWORKS = ("torch", "vllm", "numpy", "cuda", "hip")
NEED_AN_ENGINE = (
    *("kvclient.atom.connector", "kvclient.vllm.connector", "kvclient.vllm.memory", "kvclient.vllm.self_test"),
    "kvclient.vllm.stats",
)
"""Modules that an engine loads; nothing else imports them."""
IMPORTS = """
import importlib.abc, pkgutil, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in sys.argv[1].split():
            raise ImportError(f"{name} is not installed on this machine")

sys.meta_path.insert(0, Absent())
import kvclient, kvserver
walks = [pkgutil.walk_packages(package.__path__, package.__name__ + ".") for package in (kvserver, kvclient)]
left_out = {"kvserver.__main__", *sys.argv[2].split()}
names = [module.name for walk in walks for module in walk if module.name not in left_out]
for name in names:
    __import__(name)
print(len(names))
"""


def name_of(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found is not None
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def installed_with(names: list[str]) -> set[str]:
    """All packages that an installation of these brings, without extras."""
    known: set[str] = set()
    while names:
        name = names.pop()
        if name not in known:
            known.add(name)
            with suppress(metadata.PackageNotFoundError):  # dependencies of other systems only
                names += [name_of(text) for text in metadata.requires(name) or () if "extra ==" not in text]
    return known


def test_every_dependency_has_a_lower_and_an_upper_bound() -> None:
    """A future release that breaks us must not reach today's installations."""
    extras = [text for group in PROJECT["optional-dependencies"].values() for text in group]
    assert len(extras) > 5
    wanted = r">=[^,]+,<|==[^*]+$"
    assert [text for text in PROJECT["dependencies"] + extras if not re.search(wanted, text)] == []


def test_the_version_is_written_in_one_place() -> None:
    places = ("kvserver", "client", "csrc", "deploy", "examples", ".ci", "pyproject.toml", "CMakeLists.txt", "Makefile")
    paths = [path for place in places for path in (ROOT / place, *(ROOT / place).rglob("*")) if path.is_file()]
    texts = {path: path.read_bytes() for path in paths if path.suffix not in (".pyc", ".so", ".zst")}
    assert len(texts) > 200
    pattern = re.compile(rb"(?<![\d.])" + re.escape(kvserver.__version__).encode() + rb"(?![\d.])")
    assert [path for path, content in texts.items() if pattern.search(content)] == [ROOT / "kvserver" / "__init__.py"]


def test_the_server_brings_no_framework() -> None:
    brought = installed_with([name_of(text) for text in PROJECT["dependencies"]])
    assert brought & {name_of(name) for name in HEAVY} == set()


def test_every_module_can_be_imported_where_no_framework_is() -> None:
    command = [sys.executable, "-c", IMPORTS, " ".join(FRAMEWORKS), " ".join(NEED_AN_ENGINE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 60
