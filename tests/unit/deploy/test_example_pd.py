"""The files in examples/pd fit each other: script, units and pod start a server, two equal engines, and the proxy.

The proxy itself: tests/process/programs/test_pd_proxy.py. All of it with real vLLM: tests/e2e/test_pd.py."""

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvclient.vllm.settings import parse
from kvserver.config.config import Config, load

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "examples" / "pd"
SERVER = """#!/bin/sh
printf '%s\\0' "$@" > "$SAID/new"
mv "$SAID/new" "$SAID/kvserver"
exec sleep 60
"""
PYTHON = """#!/bin/sh
case "$1" in
*proxy.py) cd "$SAID"
    until [ -e kvserver ] && [ -e engine-8100 ] && [ -e engine-8200 ]; do sleep 0.01; done
    printf '%s\\0' "$@" > proxy;;
*) for word; do [ "$last" = --port ] && port=$word; last=$word; done
    printf '%s\\0' "$CUDA_VISIBLE_DEVICES" "$@" > "$SAID/new-$port"
    mv "$SAID/new-$port" "$SAID/engine-$port"
    exec sleep 60;;
esac
"""


def flags(words: list[str]) -> dict[str, str]:
    """Values of --name value and --name=value."""
    found = {}
    for word, value in zip(words, [*words[1:], ""], strict=True):
        if word.startswith("--"):
            name, equals, rest = word.removeprefix("--").partition("=")
            found[name] = rest if equals else value
    return found


def said(file: Path) -> list[str]:
    """Arguments as a stand-in recorded them."""
    return file.read_text().split("\0")[:-1]


def assert_a_pair(socket: str, engines: list[list[str]], proxy: list[str]) -> None:
    """One socket, two engines that differ in their port alone, and a proxy that knows both ports."""
    ports = {}
    for side, words in zip(("prefill", "decode"), engines, strict=True):
        told = flags(words)
        transfer = json.loads(told["kv-transfer-config"])
        assert (transfer["kv_connector"], transfer["kv_connector_module_path"]) == (
            "KvServerConnector",
            "kvclient.vllm",
        )
        assert (transfer["kv_role"], transfer["kv_load_failure_policy"]) == ("kv_both", "recompute")
        assert parse(transfer["kv_connector_extra_config"]).socket == socket
        assert told["host"] == "127.0.0.1", "only the proxy reaches it"
        ports[side] = told["port"]
    assert ports["prefill"] != ports["decode"]
    one, other = (
        [word.replace(port, "PORT") for word in words] for words, port in zip(engines, ports.values(), strict=True)
    )
    assert one == other
    told = flags(proxy)
    assert {side: told[side] for side in ports} == {side: f"http://127.0.0.1:{port}" for side, port in ports.items()}
    known = re.findall(r'"([a-z-]+)": ', (FOLDER / "proxy.py").read_text())
    assert set(told) <= set(known)


# ---------------------------------------------------------------- serve.sh


def test_the_script_starts_a_server_two_engines_and_the_proxy_so_that_they_meet(tmp_path: Path) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, program in (("kvserver", SERVER), ("python", PYTHON)):
        (programs / name).write_text(program)
        (programs / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "SAID": str(tmp_path)}
    environment |= {
        "KVSERVER_SOCKET": "/run/other/kv.sock",
        "DECODE_GPUS": "5,7",
        "PREFILL_OPTIONS": "--seed 3",
        "PORT": "81",
    }
    command = [str(FOLDER / "serve.sh"), "MODEL", "--block-size", "32"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    verb, *words = said(tmp_path / "kvserver")
    assert verb == "serve"
    config, _ = load(None, {name.replace("-", "_"): value for name, value in flags(words).items()})
    engines, gpus = [], []
    for port in (8100, 8200):
        first, *words = said(tmp_path / f"engine-{port}")
        gpus.append(first)
        engines.append(words)
    assert gpus == ["0", "5,7"]
    assert all(flags(words)["model"] == "MODEL" and flags(words)["block-size"] == "32" for words in engines)
    at = engines[0].index("--seed")
    assert engines[0][at : at + 2] == ["--seed", "3"]
    del engines[0][at : at + 2]
    proxy = said(tmp_path / "proxy")
    assert_a_pair(config.socket, engines, proxy)
    assert flags(proxy)["port"] == "81"


# ---------------------------------------------------------------- systemd


def unit(name: str) -> str:
    """A unit as systemd reads it: lines that go on are one."""
    return (FOLDER / name).read_text().replace("\\\n", " ")


def setting(name: str, key: str) -> str:
    (value,) = re.findall(rf"^{key}=(.*)$", unit(name), re.MULTILINE)
    return str(value)


def environment_of(side: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in (FOLDER / f"{side}.env").read_text().splitlines())


def test_the_units_start_two_engines_on_gpus_of_their_own_and_the_proxy_so_that_they_meet() -> None:
    assert setting("vllm-pd@.service", "EnvironmentFile") == "/etc/kvserver/pd/%i.env"
    engines = []
    for side in ("prefill", "decode"):
        line = setting("vllm-pd@.service", "ExecStart").replace("${PORT}", environment_of(side)["PORT"])
        engines.append(shlex.split(line))
    assert_a_pair(Config().socket, engines, shlex.split(setting("pd-proxy.service", "ExecStart")))
    gpus = [environment_of(side)["CUDA_VISIBLE_DEVICES"] for side in ("prefill", "decode")]
    assert gpus[0] != gpus[1]


@pytest.mark.parametrize("name", ["vllm-pd@.service", "pd-proxy.service"])
def test_systemd_finds_nothing_wrong_with_the_units(name: str, tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    file = tmp_path / name.replace("@", "@prefill")
    file.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", (FOLDER / name).read_text(), flags=re.MULTILINE))
    done = subprocess.run([analyze, "verify", str(file)], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


# ---------------------------------------------------------------- Kubernetes


def documents() -> tuple[dict[str, Any], dict[str, Any]]:
    service, deployment = yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())
    return service, deployment


def pod() -> dict[str, Any]:
    spec = documents()[1]["spec"]["template"]["spec"]
    assert isinstance(spec, dict)
    return spec


def containers() -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in [*pod()["initContainers"], *pod()["containers"]]}


def test_the_pod_starts_a_server_two_engines_and_the_proxy_so_that_they_meet() -> None:
    parts = containers()
    verb, *words = parts["kvserver"]["args"]
    assert verb == "serve"
    config, _ = load(None, {name.replace("-", "_"): value for name, value in flags(words).items()})
    engines = []
    for side in ("prefill", "decode"):
        environment = {entry["name"]: entry["value"] for entry in parts[side]["env"]}
        engines.append([word.replace("$(PORT)", environment["PORT"]) for word in parts[side]["args"]])
        assert parts[side]["resources"]["limits"] == {"nvidia.com/gpu": 1}
    assert_a_pair(config.socket, engines, parts["proxy"]["command"])
    (port,) = parts["proxy"]["ports"]
    assert str(port["containerPort"]) == flags(parts["proxy"]["command"])["port"]
    assert parts["proxy"]["readinessProbe"]["httpGet"]["port"] == port["name"]


def test_the_pod_is_the_sidecars_with_a_second_engine_and_a_proxy() -> None:
    """The server's container is the same; comments there say why."""
    sidecar = yaml.safe_load((ROOT / "deploy/kubernetes/sidecar.yaml").read_text())["spec"]
    assert pod()["initContainers"] == sidecar["initContainers"]
    assert pod()["shareProcessNamespace"] is True
    assert containers()["prefill"]["image"] == sidecar["containers"][0]["image"]


def test_every_volume_of_the_pod_is_mounted_and_the_service_finds_the_pod() -> None:
    assert {mount["name"] for one in containers().values() for mount in one["volumeMounts"]} == {
        volume["name"] for volume in pod()["volumes"]
    }
    service, deployment = documents()
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"] == labels
    (port,) = containers()["proxy"]["ports"]
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]
    assert "--from-file=examples/pd/proxy.py" in (FOLDER / "kubernetes.yaml").read_text()


def test_bodies_of_all_requests_that_a_proxy_takes_fit_into_the_memory_that_it_has() -> None:
    """Each is there three times: as it came, for prefill, and for decode."""
    limits = dict(re.findall(r'"([a-z-]+)": (\d+)', (FOLDER / "proxy.py").read_text()))
    usual = {name: int(text) for name, text in limits.items()}
    given = {name: int(text) for name, text in flags(containers()["proxy"]["command"]).items() if name in usual}
    for chosen, room in (
        (usual, setting("pd-proxy.service", "MemoryMax")),
        ({**usual, **given}, containers()["proxy"]["resources"]["limits"]["memory"]),
    ):
        (gibibytes,) = re.findall(r"^(\d+)Gi?$", room)
        assert 3 * chosen["requests-max"] * chosen["body-mib-max"] <= 0.9 * int(gibibytes) * 1024
