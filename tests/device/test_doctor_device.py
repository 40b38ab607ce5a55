"""doctor's checks of GPUs: on machines without a GPU, with one, and with a faulty one."""

import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import kvserver
from kvserver.cli.doctor import device, peers
from kvserver.config.config import Config
from kvserver.wire.messages import PROTOCOL
from tests.device.engine_process import DeviceWorker
from tests.device.simulated import CODE, CORRUPT, Machine

CHECKS = [name for name, _ in device.CHECKS]


@pytest.fixture(params=["cuda", "rocm"])
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    with Machine(request.param) as made:
        yield made


def findings(machine: Machine) -> tuple[int, dict[str, tuple[str, str]]]:
    """Exit status, and (verdict, text) of the checks of devices."""

    def limit() -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))

    command = [
        "doctor",
        "--json",
        "--http-port",
        "0",
        "--device-library",
        str(machine.library),
        "--arena-bytes",
        "4MiB",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "kvserver", *command],
        env={**os.environ, **machine.environment},
        preexec_fn=limit,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    found = {finding["check"]: (finding["verdict"], finding["text"]) for finding in json.loads(done.stdout)}
    assert all("\n" not in text for _, text in found.values())
    return done.returncode, {name: found[name] for name in CHECKS}


SHARING = """
import json, resource, sys
from kvserver.cli.doctor import device as doctor_device
from kvserver.config.config import Config
hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
resource.setrlimit(resource.RLIMIT_MEMLOCK, (int(sys.argv[2]) if int(sys.argv[2]) > 0 else hard, hard))
config = Config(device_library=sys.argv[1], arena_bytes=4 << 20)
print(json.dumps(dict(doctor_device.CHECKS)["gpu sharing"](config)))
"""


def sharing(
    machine: Machine, environment: Mapping[str, str] | None = None, *, memlock_bytes: int = resource.RLIM_INFINITY
) -> tuple[str, str]:
    """Verdict and text of sharing problems, without the trial copies, which take a second."""
    said = subprocess.run(
        [sys.executable, "-c", SHARING, str(machine.library), str(memlock_bytes)],
        env={**os.environ, **machine.environment, **(environment or {})},
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    verdict, text = json.loads(said.stdout)
    return verdict, text


WITHOUT_DRIVERS = """
import json
from kvserver.cli.doctor import device as doctor_device
from kvserver.config.config import Config
print(json.dumps([check(Config()) for _, check in doctor_device.CHECKS]))
"""


def test_no_gpu_is_in_order_and_says_what_was_looked_for() -> None:
    """Runs in its own process: a library loaded by another test would be found."""
    said = subprocess.run(
        [sys.executable, "-c", WITHOUT_DRIVERS], capture_output=True, text=True, check=True, timeout=60
    )
    (verdict, text), *others = json.loads(said.stdout)
    assert verdict == "ok"
    assert "libcuda.so.1" in text
    assert "libamdhip64.so.7" in text
    assert others[:3] == [["ok", "no device"]] * 3
    assert others[3][0] == "ok"


@pytest.mark.parametrize(("arch", "lds_kib"), [("gfx942", 64), ("gfx950", 160)], ids=["MI300X", "MI355X"])
def test_a_report_says_what_a_maintainer_asks_and_no_secret(arch: str, lds_kib: int, tmp_path: Path) -> None:
    secrets = {name: f"s3cret-of-{name}-{number}" * 2 for number, name in enumerate(("file", "variable", "admin"))}
    """Where a secret is -> the secret."""
    for name in ("file", "admin"):
        (tmp_path / name).touch(mode=0o600)
        (tmp_path / name).write_text(secrets[name])
    flags = ["--remotes", f"fleet=valkey://127.0.0.1:1?password_file={tmp_path}/file", "--http-port", "0"]
    flags += ["--admin-token-file", f"{tmp_path}/admin", "--arena-bytes", "4MiB"]
    environment = {"VALKEY_PASSWORD": secrets["variable"], "HIP_VISIBLE_DEVICES": "0", "HF_TOKEN": secrets["variable"]}
    with Machine("rocm", arch=arch, devices=2, without=["hipMemcpyBatchAsync"]) as machine:
        flags += ["--device-library", str(machine.library), "--report", str(tmp_path / "report")]
        subprocess.run(
            [sys.executable, "-m", "kvserver", "doctor", *flags],
            env={**os.environ, **machine.environment, **environment},
            capture_output=True,
            timeout=200,
            check=False,
        )
        ids = [machine.device_id(number) for number in range(2)]
    text = (tmp_path / "report").read_text()
    assert not [name for name, secret in secrets.items() if secret in text]
    assert (tmp_path / "report").stat().st_mode & 0o777 == 0o600
    for said in (
        *(f"rocm {number}: Simulated rocm {number}, {arch}, 4GiB" for number in range(2)),
        *(f"id {name}" for name in ids),
        "rocm: library",
        "version 70200000, 2 devices",
        "rocm: handles of the kind",
        "rocm: without the optional symbols hipMemcpyBatchAsync",
        f"lds_size_in_kb {lds_kib}",
        "HIP_VISIBLE_DEVICES=0",
        "gpu copies: rocm 0: arena by",
        "fail remote store: fleet at valkey://127.0.0.1:1",
        f'admin_token_file = "{tmp_path}/admin" # --admin-token-file',
        "server",
        f"release {kvserver.__version__}, protocol {PROTOCOL}",
    ):
        assert said in text, said


def test_a_gpu_whose_library_is_not_found_fails(tmp_path: Path) -> None:
    """Its kernel module has created a device file, but the GPU cannot be used."""
    (tmp_path / "kfd").touch()
    script = (
        "from kvserver.cli.doctor import device as doctor_device; "
        f"doctor_device.DEVICE_FILES['rocm'] = {str(tmp_path / 'kfd')!r}"
    )
    said = subprocess.run(
        [sys.executable, "-c", script + WITHOUT_DRIVERS], capture_output=True, text=True, check=True, timeout=60
    )
    verdict, text = json.loads(said.stdout)[0]
    assert (verdict, f"{tmp_path / 'kfd'} is there" in text) == ("fail", True)


def test_a_library_that_was_asked_for_must_be_there() -> None:
    verdict, text = device.driver(Config(device_library="/nonexistent/libcuda.so.1"))
    assert (verdict, "/nonexistent/libcuda.so.1" in text) == ("fail", True)


def test_a_gpu_is_tried_as_its_mover_would(machine: Machine) -> None:
    status, found = findings(machine)
    assert status == 0
    assert found["gpu driver"][0] == "ok"
    assert str(machine.library) in found["gpu driver"][1]
    kernels = {"cuda": "sm_90: nvrtc 13.0", "rocm": "gfx942: hiprtc 7.0"}[machine.vendor]
    assert kernels in found["gpu kernels"][1]
    path = {"cuda": "register", "rocm": "bounce"}[machine.vendor]
    assert found["gpu copies"][0] == "ok"
    said = found["gpu copies"][1]
    rate = r"[0-9.]+ GB/s out, [0-9.]+ in"
    assert re.search(
        rf"arena by {path}; another process.* by (server-gather|direct) {rate}; one long copy {rate};", said
    )


def test_kernels_that_could_not_be_compiled_are_warned_of(machine: Machine) -> None:
    with machine.rule("rtc_compile", CODE, code=6):
        status, found = findings(machine)
        assert (status, found["gpu kernels"][0]) == (0, "warn")
        assert "built-in" in found["gpu kernels"][1]
        assert "COMPILATION_ERROR" in found["gpu kernels"][1]


def test_a_gpu_without_kernels_fails(machine: Machine) -> None:
    with machine.rule("module_load", CODE, code=209):
        status, found = findings(machine)
        assert (status, found["gpu kernels"][0], found["gpu copies"][0]) == (1, "fail", "fail")


@pytest.mark.parametrize(
    ("symbol", "says"),
    [("ipc_open", "handle: a transfer for trial: refused"), ("ipc_get", "a second process could not lend memory")],
)
def test_memory_that_processes_cannot_share_fails(machine: Machine, symbol: str, says: str) -> None:
    with machine.rule(symbol, CODE, code=1):
        status, found = findings(machine)
        assert (status, found["gpu copies"][0]) == (1, "fail")
        assert says in found["gpu copies"][1]


def test_bytes_that_come_back_wrong_fail(machine: Machine) -> None:
    with machine.rule("run:copy", CORRUPT):
        status, found = findings(machine)
        assert (status, found["gpu copies"][0]) == (1, "fail")
        assert "bytes came back wrong" in found["gpu copies"][1]


def test_a_driver_that_lacks_a_symbol_fails() -> None:
    with Machine("cuda", without=("cuIpcOpenMemHandle_v2",)) as machine:
        status, found = findings(machine)
        assert (status, found["gpu driver"][0]) == (1, "fail")
        assert "cuIpcOpenMemHandle_v2" in found["gpu driver"][1]


def test_copies_that_go_wrong_fail(machine: Machine) -> None:
    with machine.rule("run:kernel", CODE, code=700):
        status, found = findings(machine)
        assert (status, found["gpu copies"][0]) == (1, "fail")


@pytest.mark.parametrize("variable", peers.ALLOCATOR_SETTINGS)
def test_memory_that_cannot_be_shared_is_warned_of(variable: str) -> None:
    with Machine("cuda") as machine:
        verdict, text = sharing(machine, {variable: "expandable_segments:True"})
        assert verdict == "warn"
        assert variable in text


def test_the_ipc_mode_of_amd_is_shown() -> None:
    with Machine("rocm") as machine:
        _, text = sharing(machine, {"HSA_ENABLE_IPC_MODE_LEGACY": "1"})
        assert "rocm ipc mode legacy" in text


def test_a_limit_of_locked_memory_is_warned_of(machine: Machine) -> None:
    verdict, text = sharing(machine, memlock_bytes=1 << 20)
    assert verdict == "warn"
    assert "memlock limit 1MiB is below the arena's size" in text


# ---------------------------------------------------------------- the other side


def test_engines_whose_settings_break_sharing_are_named(machine: Machine) -> None:
    """The settings are in another process, so only /proc shows them."""
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "backend:native, expandable_segments: True", peers.LEGACY: "1"}
    with DeviceWorker(Path("/nobody"), machine, environment=settings) as engine:
        engine.call("begin_capture")  # it has begun the driver
        verdict, text = sharing(machine)
    assert verdict == "warn"
    assert f"process {engine.pid} (python" in text
    assert re.search(rf"process {engine.pid} [^;]* has PYTORCH_CUDA_ALLOC_CONF=", text)
    mode = re.search(rf"process {engine.pid} [^;]* has {peers.LEGACY}='1', this process ''", text)
    assert bool(mode) == (machine.vendor == "rocm")


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A /proc with ourselves, an engine, a mover, a process without a driver, and one that ends during the scan."""
    for name, arguments, library in (
        ("4711", "vllm serve --enforce-eager", "/usr/lib/libcuda.so.1"),
        ("4712", "python -m kvserver.movers.mover {}", "/usr/lib/libcuda.so.1"),
        ("4713", "bash", "/usr/lib/libc.so.6"),
        ("self", "kvserver doctor", "/usr/lib/libc.so.6"),
    ):
        (tmp_path / name / "ns").mkdir(parents=True)
        (tmp_path / name / "cmdline").write_bytes(arguments.replace(" ", "\0").encode() + b"\0")
        (tmp_path / name / "environ").write_bytes(b"HOME=/root\0PYTORCH_ALLOC_CONF=expandable_segments:False\0")
        (tmp_path / name / "comm").write_text("VLLM::Worker\n")
        (tmp_path / name / "maps").write_text(f"7f0000000000-7f0000001000 r--p 00000000 00:00 0  {library}\n")
        for namespace in ("ipc", "pid", "net"):
            (tmp_path / name / "ns" / namespace).symlink_to(f"{namespace}:[402653183{name == '4711'}]")
    (tmp_path / "4714").mkdir()
    return tmp_path


def test_engines_are_found_by_their_drivers_library(proc: Path) -> None:
    (engine,) = peers.peers("cuda", proc)
    assert str(engine) == "process 4711 (VLLM::Worker)"
    assert list(peers.peers("rocm", proc)) == []
    (said,) = peers.slow_settings(engine)
    assert "--enforce-eager" in said


@pytest.mark.parametrize(
    ("argument", "is_slow"),
    [
        ("--enforce_eager", True),
        ("--enforce-eager=True", True),
        ("-O0", True),
        ('{"cudagraph_mode": "NONE", "level": 3}', True),
        ("--compilation-config.cudagraph_mode=none", True),
        ("--cudagraph-capture-sizes=[]", True),
        ("--enforce-eager=False", False),
        ("--no-enforce-eager", False),
        ('{"cudagraph_mode": "FULL_AND_PIECEWISE"}', False),
        ("-O3", False),
    ],
)
def test_an_engine_without_graphs_is_named_with_the_setting(argument: str, is_slow: bool) -> None:
    said = peers.slow_settings(peers.Peer(4711, "VLLM::Worker", ["vllm", "serve", argument], {}))
    name = "cudagraph_mode none" if argument.startswith("{") else argument
    assert [f"runs with {name}: " in text for text in said] == [True] * is_slow


@pytest.mark.parametrize(("kind", "names"), [("cuda", ["ipc", "pid"]), ("rocm", ["ipc", "pid", "network"])])
def test_engines_in_other_containers_are_named_with_the_option(proc: Path, kind: device.Kind, names: list[str]) -> None:
    (engine,) = peers.peers("cuda", proc)
    said = peers.against_sharing(kind, engine, proc)
    assert [text.rpartition("--")[2] for text in said] == [f"{name}=host" for name in names]
