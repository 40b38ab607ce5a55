"""Models, servers and engines for the tests with real vLLM. Without vLLM nothing here is collected."""

import fcntl
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvclient.identity.file_times import CLOCK_NS
from tests.process.checked import CheckedServer
from tests.process.harness import Server

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]

MODELS = ("llama", "experts", "gemma3", "mistral", "mla", "lfm2", "qwen3-next")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny models, made once; KVSERVER_E2E_MODELS keeps it from one run to the next."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    folder = Path(os.environ.get("KVSERVER_E2E_MODELS") or shared / "models")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        missing = [name for name in MODELS if not (folder / name / "config.json").exists()]
        if missing:
            command = [sys.executable, "-m", "tests.e2e.models", str(folder), *missing]
            subprocess.run(command, cwd=Path(__file__).resolve().parents[2], check=True, timeout=120)
            time.sleep(CLOCK_NS / 1e9)  # an engine that begins sooner cannot know that it has loaded these very files
    return folder


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One server for all tests of a module, with room for all their chunks.

    Each wait for a resting server also checks its state against every invariant.
    """
    with CheckedServer(arena_bytes=256 << 20) as running:
        yield running
