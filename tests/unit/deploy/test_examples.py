"""The scripts in examples/ start server and engine correctly; stand-ins for both record their arguments."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvclient.vllm.settings import parse
from kvserver.config.config import load

ROOT = Path(__file__).resolve().parents[3]
SERVER = """#!/bin/sh
printf '%s\\n' "$@" > "$SAID/kvserver.new"
mv "$SAID/kvserver.new" "$SAID/kvserver"
exec sleep 60
"""
ENGINE = """#!/bin/sh
printf '%s\\n' "$@" > "$SAID/engine"
until [ "$ALONE" ] || [ -e "$SAID/kvserver" ]; do sleep 0.01; done
"""
VLLM = """import json, os
from types import SimpleNamespace

class LLM:
    def __init__(self, **options):
        with open(os.environ["SAID"] + "/engine", "w") as out:
            json.dump(options, out)
        self.turn = self.held = 0

    def generate(self, prompts, sampling, use_tqdm):
        self.turn += 1
        return [SimpleNamespace(num_cached_tokens=768 * (self.turn - 1), prompt_token_ids=range(900)) for _ in prompts]

    def reset_prefix_cache(self):
        self.held += 1
        return self.held % 2 == 0

def SamplingParams(**options):
    return options
"""


def started(script: str, *arguments: str, said: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a script, which ends when its engine does: here once a server is there, or at once with ALONE set."""
    programs = said / "programs"
    programs.mkdir()
    for name, program in (("kvserver", SERVER), ("python", ENGINE)):
        (programs / name).write_text(program)
        (programs / name).chmod(0o755)
    path = f"{programs}:{os.environ['PATH']}"
    command = [str(ROOT / "examples" / script), *arguments]
    inherited = {**os.environ, "PATH": path, "SAID": str(said), "ALONE": "", "LOAD": "stress", **environment}
    return subprocess.run(command, env=inherited, capture_output=True, text=True, timeout=30, check=False)


def flags_of(said: Path) -> dict[str, str]:
    """The flags of the recorded `kvserver serve`."""
    verb, *flags = (said / "kvserver").read_text().split()
    assert verb == "serve"
    return {
        name.removeprefix("--").replace("-", "_"): value for name, value in zip(flags[::2], flags[1::2], strict=True)
    }


def assert_they_meet(said: Path) -> None:
    """Checks that server and connector accept their options and that both name one socket."""
    config, _ = load(None, flags_of(said))
    words = (said / "engine").read_text()
    words = words[words.index("--kv-transfer-config") :]
    transfer = json.loads(words[words.index("{") : words.rindex("}") + 1])
    assert (transfer["kv_role"], transfer["kv_load_failure_policy"]) == ("kv_both", "recompute")
    assert parse(transfer["kv_connector_extra_config"]).socket == config.socket


@pytest.mark.parametrize(
    ("script", "arguments"), [("vllm/serve.sh", ("MODEL",)), ("mi300x/arm.sh", ("dram",)), ("mi300x/arm.sh", ("nvme",))]
)
def test_server_and_engine_are_started_so_that_they_meet(
    script: str, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    done = started(script, *arguments, said=tmp_path, KVSERVER_SOCKET="/run/other/kv.sock", KVSERVER_DISKS="/a,/b")
    assert done.returncode == 0, done.stderr
    assert_they_meet(tmp_path)
    assert ("disk_paths" in flags_of(tmp_path)) == (arguments == ("nvme",))


def test_the_arm_without_a_cache_starts_the_engine_alone(tmp_path: Path) -> None:
    assert started("mi300x/arm.sh", "hbm", said=tmp_path, ALONE="yes").returncode == 0
    assert "kv-transfer" not in (tmp_path / "engine").read_text()
    assert not (tmp_path / "kvserver").exists()


@pytest.mark.parametrize(("load", "gpu_memory"), [("stress", "0.78"), ("base", "0.85")])
def test_each_load_has_the_gpu_memory_and_the_options_that_were_published(
    load: str, gpu_memory: str, tmp_path: Path
) -> None:
    assert started("mi300x/arm.sh", "hbm", said=tmp_path, ALONE="yes", LOAD=load).returncode == 0
    words = (tmp_path / "engine").read_text().split("\n")
    assert words[words.index("--gpu-memory-utilization") + 1] == gpu_memory
    assert words[words.index("--max-num-batched-tokens") + 1] == "16384"
    assert "--trust-remote-code" in words


def test_the_arm_with_a_cache_has_the_sizes_that_were_published(tmp_path: Path) -> None:
    """Two GPUs, FP8 KV, a CPU tier of 64 GB, chunks of 256 tokens."""
    assert started("mi300x/arm.sh", "dram", said=tmp_path).returncode == 0
    assert load(None, flags_of(tmp_path))[0].arena_bytes == 64 << 30
    words = (tmp_path / "engine").read_text()
    options = words.split("\n")
    assert options[options.index("--tensor-parallel-size") + 1] == "2"
    assert options[options.index("--kv-cache-dtype") + 1] == "fp8"
    transfer = json.loads(words[words.index("{\n") : words.rindex("}") + 1])
    assert parse(transfer["kv_connector_extra_config"]).chunk_tokens == 256


def test_an_unknown_load_starts_nothing(tmp_path: Path) -> None:
    done = started("mi300x/arm.sh", "dram", said=tmp_path, LOAD="calm")
    assert done.returncode == 2
    assert "LOAD=calm is none of stress, base" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["programs"]


def test_an_unknown_arm_starts_nothing(tmp_path: Path) -> None:
    done = started("mi300x/arm.sh", "ssd", said=tmp_path)
    assert done.returncode == 2
    assert "none of hbm, dram, nvme" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["programs"]


def test_the_offline_one_asks_twice_through_the_connector(tmp_path: Path) -> None:
    (tmp_path / "vllm.py").write_text(VLLM)
    script = ROOT / "examples/vllm/offline.py"
    more = ["--engine", '{"enforce_eager": true}', "--connector", '{"min_load_tokens": 0}']
    command = [sys.executable, str(script), "--socket", "/run/other/kv.sock", "--model", "MODEL", *more]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "SAID": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=True)
    computed, found = done.stdout.splitlines()
    assert computed.startswith("computed: ")
    assert computed.endswith(" 0 of 900 tokens cached")
    assert found.startswith("from the server: ")
    assert found.endswith(" 768 of 900 tokens cached")
    said = json.loads((tmp_path / "engine").read_text())
    transfer = said.pop("kv_transfer_config")
    assert said == {"model": "MODEL", "enforce_eager": True}
    assert (transfer["kv_role"], transfer["kv_load_failure_policy"]) == ("kv_both", "recompute")
    options = parse(transfer["kv_connector_extra_config"])
    assert (str(options.socket), options.min_load_tokens) == ("/run/other/kv.sock", 0)
