"""Containers, compose files and manifests in deploy/ start the server with valid flags, and with what GPUs need.

No image is built or run: a test reads the files as text or as YAML, and starts a Valkey as they do."""

import copy
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvserver.brain.http.server import Pages, SnapshotBoard
from kvserver.config.config import KEYS, Config, load
from kvserver.config.remotes import Remote, parse
from tests.rigs.valkey_server import binary

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
COMPOSE, COMPOSE_AMD = "container/compose.yml", "container/compose-amd.yml"
PODS = ("kubernetes/sidecar.yaml", "kubernetes/daemonset.yaml")
DAEMONSET_REMOTE = "kubernetes/daemonset-remote.yaml"
COMPOSE_REMOTE, VALKEY = "container/compose-remote.yml", "kubernetes/valkey.yaml"
PODS_AMD = ("kubernetes/sidecar-amd.yaml", "kubernetes/daemonset-amd.yaml")
FILES = (COMPOSE, COMPOSE_AMD, COMPOSE_REMOTE, *PODS, *PODS_AMD, DAEMONSET_REMOTE)
FLAGS = {key.flag for key in KEYS} | {"--http-host"}
SHARED_MEMORY = {"ipc": "host", "pid": "host"}
"""Namespaces that GPU memory of another process needs."""


def text(name: str) -> str:
    return (DEPLOY / name).read_text()


def parsed(name: str) -> dict[str, Any]:
    document = yaml.safe_load(text(name))
    assert isinstance(document, dict)
    return document


def commands(name: str) -> list[list[str]]:
    """Arguments of each `serve`."""
    lists = re.findall(r'\[("serve"[^\]]*)\]', text(name))
    return [re.findall(r'"([^"]*)"', arguments) for arguments in lists]


def flags_of(name: str) -> dict[str, str]:
    ((verb, *arguments),) = commands(name)
    assert verb == "serve"
    return dict(zip(arguments[::2], arguments[1::2], strict=True))


def pod_of(name: str) -> dict[str, Any]:
    spec = parsed(name)["spec"]
    return spec.get("template", {}).get("spec") or spec


def server_of(pod: dict[str, Any]) -> dict[str, Any]:
    (server,) = [one for one in [*pod.get("initContainers", []), *pod["containers"]] if one["name"] == "kvserver"]
    return server


@pytest.mark.parametrize("name", ["container/Containerfile", *FILES])
def test_the_server_is_started_with_flags_that_it_has_and_accepts(name: str) -> None:
    flags = flags_of(name)
    assert set(flags) <= FLAGS
    load(None, {flag.removeprefix("--").replace("-", "_"): value for flag, value in flags.items()})


@pytest.mark.parametrize("name", ["container/Containerfile", *FILES])
def test_a_container_with_a_network_of_its_own_answers_from_outside_and_no_other_does(name: str) -> None:
    assert flags_of(name).get("--http-host") == (None if name == COMPOSE_AMD else "0.0.0.0")


@pytest.mark.parametrize("name", FILES)
def test_engines_are_told_the_socket_that_the_server_opens(name: str) -> None:
    opened = flags_of(name).get("--socket", "/run/kvserver/kvserver.sock")
    assert set(re.findall(r'"socket": "([^"]+)"', text(name))) <= {opened}
    assert Path(opened).is_relative_to("/run/kvserver"), "the volume that both have"


@pytest.mark.parametrize("name", FILES)
def test_probes_ask_for_pages_that_there_are(name: str) -> None:
    paths = set(re.findall(r"(?:path: |127\.0\.0\.1:9710)(/\w*z)\b", text(name)))
    assert paths
    pages = Pages(SnapshotBoard(), {}, lambda: 0.0)
    assert all(pages.answer(f"GET {path} HTTP/1.1\r\n\r\n".encode()).status != 404 for path in paths)
    assert str(Config().http_port) in text(name) or "port: metrics" in text(name)


@pytest.mark.parametrize("name", [*PODS, *PODS_AMD, DAEMONSET_REMOTE])
def test_every_volume_that_a_pod_mounts_is_there(name: str) -> None:
    pod = pod_of(name)
    volumes = {volume["name"] for volume in pod["volumes"]}
    mounted = {
        mount["name"] for one in [*pod.get("initContainers", []), *pod["containers"]] for mount in one["volumeMounts"]
    }
    assert mounted == volumes


# ---------------------------------------------------------------- the image


def stages(image: str) -> list[list[tuple[str, str]]]:
    """For each stage of a Containerfile its instructions and their arguments, FROM first."""
    whole = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", image, flags=re.MULTILINE))
    found: list[list[tuple[str, str]]] = []
    for line in filter(None, map(str.strip, whole.splitlines())):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            found.append([])
        if found:
            found[-1].append((word, rest))
    return found


def of(stage: list[tuple[str, str]], word: str) -> Iterator[str]:
    return (rest for found, rest in stage if found == word)


def test_the_image_takes_the_wheel_of_its_first_stage_and_no_compiler() -> None:
    building, running = stages(text("container/Containerfile"))
    assert next(of(building, "FROM")).endswith(" AS build")
    assert any("install" in line and "g++" in line for line in of(building, "RUN"))
    assert any(
        re.search(r'pip wheel .*--wheel-dir /wheels "/source\[valkey,object-stores\]"$', line)
        for line in of(building, "RUN")
    )
    assert list(of(running, "COPY")) == ["--from=build /wheels /wheels"], "nothing of the sources"
    shell = " ".join(of(running, "RUN"))
    assert re.search(r'pip install \S+ --no-index --find-links /wheels "kvserver\[valkey,object-stores\]"', shell), (
        "nothing is downloaded"
    )
    assert not re.search(r"\b(g\+\+|gcc|clang|cmake|ninja|build-essential)", shell)


def test_the_image_runs_as_somebody_else_than_root_and_ends_by_sigterm() -> None:
    _, running = stages(text("container/Containerfile"))
    (user,) = of(running, "USER")
    assert int(user.split(":")[0]) > 0
    (entry,) = of(running, "ENTRYPOINT")
    assert entry.startswith("["), "a shell in between would keep SIGTERM to itself"


@pytest.mark.parametrize("name", [COMPOSE, COMPOSE_AMD])
def test_the_engines_image_takes_the_wheels_of_the_image_that_is_built_here(name: str) -> None:
    """Named by its tag, the base image might be built too late, or be another image with that tag."""
    build = parsed(name)["services"]["engine"]["build"]
    (source,) = re.findall(r"COPY --from=(\S+) /wheels", build["dockerfile_inline"])
    assert build["additional_contexts"] == {source: "service:kvserver"}


def test_an_image_is_built_from_the_sources_and_not_from_what_was_built_beside_them() -> None:
    root = DEPLOY.parent
    left_out = set((root / ".dockerignore").read_text().splitlines())
    ignored = (root / ".gitignore").read_text().split()
    assert {".git", *(f"**/{pattern.rstrip('/')}" for pattern in ignored)} <= left_out


# ---------------------------------------------------------------- privileges and GPUs


@pytest.mark.parametrize("name", [*PODS, DAEMONSET_REMOTE])
def test_pods_have_the_least_that_they_need(name: str) -> None:
    context = server_of(pod_of(name))["securityContext"]
    assert "privileged" not in context
    assert context["allowPrivilegeEscalation"] is False
    assert context["readOnlyRootFilesystem"] is True
    assert context["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}


@pytest.mark.parametrize("service", ["kvserver", "engine", "engine-hbm"])
def test_each_container_of_amd_has_the_flags_that_were_published(service: str) -> None:
    """--ipc=host --network=host --device=/dev/kfd --device=/dev/dri --group-add video --cap-add SYS_PTRACE."""
    given = parsed(COMPOSE_AMD)["services"][service]
    assert given["devices"] == ["/dev/kfd", "/dev/dri"]
    assert given["network_mode"] == "host"
    assert given["group_add"] == ["video"]
    assert given["cap_add"] == ["SYS_PTRACE"]
    assert given["environment"] == {"HSA_ENABLE_IPC_MODE_LEGACY": "1"}
    assert {name: given[name] for name in SHARED_MEMORY} == SHARED_MEMORY
    assert given["ulimits"]["memlock"] == -1


@pytest.mark.parametrize("service", ["kvserver", "engine"])
def test_containers_of_nvidia_share_the_namespaces_and_see_the_gpus(service: str) -> None:
    given = parsed(COMPOSE)["services"][service]
    assert {name: given[name] for name in SHARED_MEMORY} == SHARED_MEMORY
    (device,) = given["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia"


def test_the_disk_tier_of_amd_lies_on_a_mounted_drive() -> None:
    mounts = parsed(COMPOSE_AMD)["services"]["kvserver"]["volumes"]
    bound = [mount["target"] for mount in mounts if mount["type"] == "bind" and mount["source"].startswith("/mnt/nvme")]
    assert bound == [flags_of(COMPOSE_AMD)["--disk-paths"]]


def test_the_arm_with_hbm_alone_is_the_engine_without_the_connector_and_starts_no_server() -> None:
    services = parsed(COMPOSE_AMD)["services"]
    with_cache, alone = services["engine"], services["engine-hbm"]
    dropped = [argument for argument in with_cache["command"] if argument not in alone["command"]]
    assert [argument.split("=")[0] for argument in dropped] == ["--kv-transfer-config"]
    assert "depends_on" not in alone
    assert alone["profiles"], "it starts only when it is named"
    differ = {"command", "depends_on", "profiles"}
    assert {key: value for key, value in with_cache.items() if key not in differ} == {
        key: value for key, value in alone.items() if key not in differ
    }


def without_gpus(pod: dict[str, Any]) -> dict[str, Any]:
    """The parts of a pod that do not depend on the vendor of its GPUs."""
    rest = copy.deepcopy(pod)
    for name in ("nodeSelector", "tolerations"):
        rest.pop(name, None)
    for one in [*rest.get("initContainers", []), *rest["containers"]]:
        one["image"] = one["image"].replace("-rocm:", ":")
        one.pop("env", None)
        context = one.get("securityContext", {})
        for name in ("privileged", "allowPrivilegeEscalation", "capabilities", "seccompProfile"):
            context.pop(name, None)
        for vendor in ("nvidia.com/gpu", "amd.com/gpu"):
            one.get("resources", {}).get("limits", {}).pop(vendor, None)
    return rest


@pytest.mark.parametrize(("nvidia", "amd"), list(zip(PODS, PODS_AMD, strict=True)))
def test_pods_of_both_vendors_differ_in_nothing_but_the_gpus(nvidia: str, amd: str) -> None:
    assert without_gpus(pod_of(nvidia)) == without_gpus(pod_of(amd))
    assert "nvidia" not in text(amd).lower()


@pytest.mark.parametrize("name", PODS_AMD)
def test_pods_of_amd_reach_the_devices_and_say_the_mode_of_their_memory(name: str) -> None:
    pod = pod_of(name)
    context = server_of(pod)["securityContext"]
    assert context["privileged"] is True
    assert "allowPrivilegeEscalation" not in context, "Kubernetes refuses both together"
    legacy = {"name": "HSA_ENABLE_IPC_MODE_LEGACY", "value": "1"}
    assert all(legacy in one["env"] for one in [*pod.get("initContainers", []), *pod["containers"]])


# ---------------------------------------------------------------- a remote store


def remote_of(name: str) -> Remote:
    flags = flags_of(name)
    (remote,) = parse(flags["--remotes"])
    return remote


def store_of(name: str) -> tuple[dict[str, Any], str]:
    """The Valkey of a file, and the shell text that starts it."""
    if name == COMPOSE_REMOTE:
        store = parsed(name)["services"]["valkey"]
    else:
        (pod,) = [one for one in yaml.safe_load_all(text(name)) if one["kind"] == "Deployment"]
        (store,) = pod["spec"]["template"]["spec"]["containers"]
    _, _, script = store["command"]
    return store, script


def test_servers_that_share_a_store_differ_in_nothing_but_what_is_their_own() -> None:
    services = parsed(COMPOSE_REMOTE)["services"]
    one, other = services["kvserver-a"], services["kvserver-b"]
    assert {key for key in one if one[key] != other[key]} == {"volumes", "ports"}
    assert not {mount["source"] for mount in one["volumes"]} & {mount["source"] for mount in other["volumes"]}
    of_one = parsed(COMPOSE)["services"]["kvserver"]
    differ = {key for key in of_one if of_one[key] != one[key]}
    assert differ == {"command", "volumes"}, "otherwise they are as the server of compose.yml"


def test_the_daemonset_with_a_store_is_the_other_with_a_flag_and_a_secret() -> None:
    pod, plain = pod_of(DAEMONSET_REMOTE), pod_of("kubernetes/daemonset.yaml")
    server = server_of(pod)
    assert server["args"][-2] == "--remotes"
    del server["args"][-2:]
    for entries in (server["volumeMounts"], pod["volumes"]):
        entries[:] = [entry for entry in entries if entry["name"] != "password"]
    assert pod == plain


@pytest.mark.parametrize(("servers", "store"), [(COMPOSE_REMOTE, COMPOSE_REMOTE), (DAEMONSET_REMOTE, VALKEY)])
def test_servers_find_the_store_by_its_name_and_its_password_where_it_is_mounted(servers: str, store: str) -> None:
    remote = remote_of(servers)
    assert remote.addresses == (("valkey", 6379),), "a service of that name"
    _, script = store_of(store)
    assert f"`cat {remote.password_file}`" in script
    directory, _, file = remote.password_file.rpartition("/")
    if servers == COMPOSE_REMOTE:
        whole = parsed(servers)
        assert (directory, [file]) == ("/run/secrets", list(whole["secrets"]))
        assert all(service["secrets"] == [file] for service in whole["services"].values())
    else:
        (mount,) = [one for one in server_of(pod_of(servers))["volumeMounts"] if one["name"] == "password"]
        (volume,) = [one for one in pod_of(servers)["volumes"] if one["name"] == "password"]
        assert mount["mountPath"] == directory
        assert volume["secret"] == {"secretName": file, "defaultMode": 0o400}, "the server refuses what others can read"
        service, policy, deployment = yaml.safe_load_all(text(store))
        assert service["metadata"]["name"] == "valkey"
        assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]
        allowed = policy["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"]
        assert allowed == parsed(servers)["spec"]["template"]["metadata"]["labels"]


@pytest.mark.parametrize("name", [COMPOSE_REMOTE, VALKEY])
def test_the_store_starts_with_its_password_makes_room_and_saves_nothing(name: str, tmp_path: Path) -> None:
    """The shell text of the file is run, with the password elsewhere."""
    store, script = store_of(name)
    assert "healthcheck" in store or {"readinessProbe", "livenessProbe"} < set(store)
    (tmp_path / "password").write_text("xyzzy\n")
    script = re.sub(r"/run/secrets/[\w/-]+", str(tmp_path / "password"), script)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = script.replace("valkey-server ", f"{binary()} --bind 127.0.0.1 --port {port} --dir {tmp_path} ", 1)
    with subprocess.Popen(["sh", "-c", script], stdout=subprocess.DEVNULL) as running:
        try:
            assert "NOAUTH" in _asked(port, "PING")
            said = _asked(port, "AUTH xyzzy", "CONFIG GET maxmemory*", "CONFIG GET save")
            assert {"allkeys-lru", str(32 << 30)} < set(said.split("\r\n"))
            assert "3600" not in said, "the default saves"
            assert b"xyzzy" not in Path(f"/proc/{running.pid}/cmdline").read_bytes()
        finally:
            running.terminate()


def _asked(port: int, *commands: str) -> str:
    """Answers of a Valkey to commands; waits until it has started."""
    until_s = time.monotonic() + 20
    while True:
        try:
            link = socket.create_connection(("127.0.0.1", port), timeout=5)
            break
        except OSError:
            assert time.monotonic() < until_s
            time.sleep(0.05)
    with link, link.makefile("rb") as answers:
        link.sendall("".join(f"{command}\r\n" for command in (*commands, "QUIT")).encode())
        return answers.read().decode()
