"""The simulated driver itself: its entry points equal the table's, and its counts are right."""

import subprocess
import sys

import pytest

from tests.device.simulated import GRANULE_BYTES, Machine, Vendor, build, symbols

RTC = {"Version", "CreateProgram", "CompileProgram", "GetProgramLogSize", "GetProgramLog", "DestroyProgram"} | {
    "GetErrorString"
}
FOR_TESTS = {"kvsim_host", "kvsim_alloc_vmm", "kvsim_begin_capture", "kvsim_end_capture"}


def exported(vendor: Vendor, without: tuple[str, ...] = ()) -> set[str]:
    command = ["nm", "-D", "--defined-only", str(build(vendor, without))]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    names = {line.split()[-1] for line in lines}
    return {name for name in names if not name.startswith("_Z")}  # instances of the C++ library's templates


def test_entry_points_are_those_of_the_table(vendor: Vendor) -> None:
    table = {getattr(symbol, vendor) for symbol in symbols()} - {None}
    prefix = {"cuda": "nvrtc", "rocm": "hiprtc"}[vendor]
    code = {"cuda": {"nvrtcGetCUBINSize", "nvrtcGetCUBIN"}, "rocm": {"hiprtcGetCodeSize", "hiprtcGetCode"}}[vendor]
    traps = {"hipIpcGetEventHandle", "hipIpcOpenEventHandle"} if vendor == "rocm" else set()
    assert exported(vendor) == table | {prefix + name for name in RTC} | code | traps | FOR_TESTS


def test_a_library_can_lack_a_symbol() -> None:
    assert exported("cuda") - exported("cuda", ("cuMemHostRegister_v2",)) == {"cuMemHostRegister_v2"}


OWNER = """
import os, sys
from tests.device.simulated import Driver
driver = Driver(sys.argv[1], sys.argv[2])
driver.alloc(3 << 20)
print("ready", flush=True)
sys.stdin.read()
"""


def test_memory_is_counted_until_its_owner_is_dead(vendor: Vendor, machine: Machine) -> None:
    command = [sys.executable, "-c", OWNER, vendor, str(machine.library)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "ready\n"
        assert machine.used_bytes() == 2 * GRANULE_BYTES
        owner.kill()
        owner.wait(10)
    assert machine.used_bytes() == 0


@pytest.mark.parametrize("device", [0, 1])
def test_a_process_sees_the_devices_that_it_may(vendor: Vendor, device: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with Machine(vendor, devices=2) as machine:
        for name, value in {**machine.environment, "KVSIM_VISIBLE": str(device)}.items():
            monkeypatch.setenv(name, value)
        command = [sys.executable, "-c", OWNER, vendor, str(machine.library)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
            assert owner.stdout is not None
            assert owner.stdout.readline() == "ready\n"
            assert [machine.used_bytes(each) for each in (0, 1)][device] == 2 * GRANULE_BYTES
            assert machine.used_bytes(1 - device) == 0
            owner.kill()
