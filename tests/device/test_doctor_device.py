"""What doctor says of GPUs: on machines without, with, and with one that is not as it should be."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping

import pytest

from kvserver import doctor_device
from kvserver.config import Config
from tests.device.simulated import CODE, Machine

CHECKS = [name for name, _ in doctor_device.CHECKS]


@pytest.fixture(params=["cuda", "rocm"])
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    with Machine(request.param) as made:
        yield made


def findings(machine: Machine, environment: Mapping[str, str] | None = None) -> tuple[int, dict[str, tuple[str, str]]]:
    """Exit status, and (verdict, text) of the checks of devices."""
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
        env={**os.environ, **machine.environment, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    found = {finding["check"]: (finding["verdict"], finding["text"]) for finding in json.loads(done.stdout)}
    assert all("\n" not in text for _, text in found.values())
    return done.returncode, {name: found[name] for name in CHECKS}


WITHOUT_DRIVERS = """
import json
from kvserver import doctor_device
from kvserver.config import Config
print(json.dumps([check(Config()) for _, check in doctor_device.CHECKS]))
"""


def test_no_gpu_is_in_order_and_says_what_was_looked_for() -> None:
    """In a process of its own: a library that another test has loaded would be found."""
    said = subprocess.run(
        [sys.executable, "-c", WITHOUT_DRIVERS], capture_output=True, text=True, check=True, timeout=60
    )
    (verdict, text), *others = json.loads(said.stdout)
    assert verdict == "ok"
    assert "libcuda.so.1" in text
    assert "libamdhip64.so.7" in text
    assert others == [["ok", "no device"]] * 3


def test_a_library_that_was_asked_for_must_be_there() -> None:
    verdict, text = doctor_device.driver(Config(device_library="/nonexistent/libcuda.so.1"))
    assert (verdict, "/nonexistent/libcuda.so.1" in text) == ("fail", True)


def test_a_gpu_is_tried_as_its_mover_would(machine: Machine) -> None:
    status, found = findings(machine)
    assert status == 0
    assert found["gpu driver"][0] == "ok"
    assert str(machine.library) in found["gpu driver"][1]
    kernels = {"cuda": "sm_90: nvrtc 13.0", "rocm": "built-in bundle because"}[machine.vendor]
    assert kernels in found["gpu kernels"][1]
    path = {"cuda": "register", "rocm": "bounce"}[machine.vendor]
    assert found["gpu copies"][0] == "ok"
    assert f"arena by {path}, link" in found["gpu copies"][1]


def test_a_driver_that_lacks_a_symbol_fails() -> None:
    with Machine("cuda", without=("cuIpcOpenMemHandle_v2",)) as machine:
        status, found = findings(machine)
        assert (status, found["gpu driver"][0]) == (1, "fail")
        assert "cuIpcOpenMemHandle_v2" in found["gpu driver"][1]


def test_copies_that_go_wrong_fail(machine: Machine) -> None:
    with machine.rule("run:kernel", CODE, code=700):
        status, found = findings(machine)
        assert (status, found["gpu copies"][0]) == (1, "fail")


@pytest.mark.parametrize("variable", doctor_device.ALLOCATOR_SETTINGS)
def test_memory_that_cannot_be_shared_is_warned_of(variable: str) -> None:
    with Machine("cuda") as machine:
        _, found = findings(machine, {variable: "expandable_segments:True"})
        assert found["gpu sharing"][0] == "warn"
        assert variable in found["gpu sharing"][1]


def test_the_ipc_mode_of_amd_is_shown() -> None:
    with Machine("rocm") as machine:
        _, found = findings(machine, {"HSA_ENABLE_IPC_MODE_LEGACY": "1"})
        assert "rocm ipc mode legacy" in found["gpu sharing"][1]
