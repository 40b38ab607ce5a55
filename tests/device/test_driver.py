"""The driver table and the kernels on simulated machines: discovery, names, compilation, caching, and every byte."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvserver import _native
from tests.device.simulated import CODE, Machine, Vendor
from tests.gpu import table

VENDORS: tuple[Vendor, ...] = ("cuda", "rocm")
HIP_ERROR_NOT_SUPPORTED = 801


@pytest.fixture(params=VENDORS)
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    with Machine(request.param, devices=2) as made:
        yield made


def call(machine: Machine, function: str, *arguments: object, environment: dict[str, str] | None = None) -> Any:
    """The native function's result, from its own process: a driver is initialised only once in a process."""
    script = (
        "import json, sys; from kvserver import _native\n"
        "function, arguments = json.loads(sys.argv[1])\n"
        "try: print(json.dumps(getattr(_native, function)(*arguments)))\n"
        "except Exception as error: print(json.dumps(f'{type(error).__name__}: {error}'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps([function, arguments])],
        env={**os.environ, **machine.environment, **(environment or {})},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return json.loads(done.stdout)


def kernel_report(machine: Machine, *, rtc: str = "", cache: str = "") -> list[str]:
    report: list[str] = call(machine, "kernel_report", machine.vendor, str(machine.library), 0, rtc, cache)
    return report


# ---------------------------------------------------------------- discovery


WITHOUT_DRIVERS = """
from kvserver import _native
assert "libcuda.so.1" in _native.probe_driver("cuda")[-1]
assert "libamdhip64.so.7" in _native.probe_driver("rocm")[-1]
try:
    _native.device_facts("cuda", "", 0)
except _native.DriverAbsent as absent:
    print(absent)
"""


def test_a_machine_without_drivers_says_what_it_looked_for() -> None:
    """Runs in its own process: a library loaded by another test would be found."""
    said = subprocess.run(
        [sys.executable, "-c", WITHOUT_DRIVERS], capture_output=True, text=True, check=True, timeout=60
    )
    assert re.search(r"no library.*libcuda", said.stdout)


ALREADY_LOADED = """
import ctypes, json, sys
from kvserver import _native
vendor, library = sys.argv[1:]
ctypes.CDLL(library)
print(json.dumps(_native.probe_driver(vendor)[0]))
"""


def test_the_library_that_the_process_has_loaded_is_the_one_that_is_used(machine: Machine, tmp_path: Path) -> None:
    """torch brings its own library in its own folder; a second copy would not know its memory."""
    brought = tmp_path / f"{machine.library.name}.7.2.3"
    shutil.copyfile(machine.library, brought)
    said = subprocess.run(
        [sys.executable, "-c", ALREADY_LOADED, machine.vendor, str(brought)],
        env={**os.environ, **machine.environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert json.loads(said.stdout) == str(brought)


def test_a_usable_driver(machine: Machine) -> None:
    library, version, devices, required, optional, problem = call(
        machine, "probe_driver", machine.vendor, str(machine.library)
    )
    assert (library, devices, required, optional, problem) == (str(machine.library), 2, [], [], "")
    assert version == (13000 if machine.vendor == "cuda" else 70200000)


def test_the_other_vendors_library_is_refused(machine: Machine) -> None:
    other = "rocm" if machine.vendor == "cuda" else "cuda"
    said = call(machine, "device_facts", other, str(machine.library), 0)
    assert said.startswith("DriverAbsent")
    assert "hipInit" in said or "cuInit" in said


@pytest.mark.parametrize(
    ("vendor", "symbol", "required"),
    [
        ("cuda", "cuMemHostRegister_v2", True),
        ("cuda", "cuMemcpyBatchAsync_v2", False),
        ("rocm", "hipIpcOpenMemHandle", True),
        ("rocm", "hipHostRegister", False),
    ],
)
def test_a_missing_symbol_is_named(vendor: Vendor, symbol: str, required: bool) -> None:
    with Machine(vendor, without=(symbol,)) as machine:
        found = call(machine, "probe_driver", vendor, str(machine.library))
        assert (found[3], found[4]) == (([symbol], []) if required else ([], [symbol]))
        assert (symbol in found[5]) == required
        said = call(machine, "device_facts", vendor, str(machine.library), 0)
        assert (isinstance(said, str) and said.startswith("DriverAbsent") and symbol in said) == required


def test_a_driver_without_devices_is_no_driver() -> None:
    with Machine("cuda", devices=0) as machine:
        assert call(machine, "probe_driver", "cuda", str(machine.library))[-1]
        assert call(machine, "device_facts", "cuda", str(machine.library), 0).startswith("DriverAbsent")


def test_a_device_has_one_name_in_every_process(machine: Machine) -> None:
    ids = [call(machine, "device_facts", machine.vendor, str(machine.library), ordinal)[0] for ordinal in (0, 1)]
    assert ids[0] != ids[1]
    for ordinal, device_id in enumerate(ids):
        uuid, _, pci = device_id.partition("@")
        assert (len(uuid), pci) == (32, f"0000:{0x1B + 0x20 * ordinal:02x}:00.0")


def test_ipc_mode_is_what_the_environment_says(machine: Machine) -> None:
    modes = [
        call(machine, "ipc_mode", machine.vendor, environment={"HSA_ENABLE_IPC_MODE_LEGACY": value}) for value in "01"
    ]
    assert modes == (["", ""] if machine.vendor == "cuda" else ["dmabuf", "legacy"])


def test_an_amd_architecture_is_found_by_its_pci_address(tmp_path: Path) -> None:
    for node, (version, location, domain) in enumerate([(0, 0, 0), (90402, 0x1B00, 0), (90010, 0xC308, 1)]):
        (tmp_path / str(node)).mkdir()
        (tmp_path / str(node) / "properties").write_text(
            f"cpu_cores_count 0\ngfx_target_version {version}\nlocation_id {location}\ndomain {domain}\n"
        )
    assert _native.kfd_arch(str(tmp_path), "0000:1b:00.0") == "gfx942"
    assert _native.kfd_arch(str(tmp_path), "0001:c3:01.0") == "gfx90a"
    assert _native.kfd_arch(str(tmp_path), "0000:c3:01.0") == ""
    assert _native.kfd_arch(str(tmp_path / "none"), "0000:1b:00.0") == ""


# ---------------------------------------------------------------- every byte


def copied(machine: Machine) -> dict[str, Any]:
    """Runs the whole table; the last line reports the copies."""
    done = subprocess.run(
        [table.build(), machine.vendor, "--library", machine.library],
        env={**os.environ, **machine.environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    last: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return last


def test_kernels_and_copies_keep_every_byte(machine: Machine) -> None:
    assert copied(machine) == {"copies": "equal", "batch": True, "registered": True}
    field = "copy_batch8" if machine.vendor == "cuda" else "copy_batch9"
    assert machine.calls(field) == 8, "12,001 copies are two calls each way, the others one"


def test_a_driver_without_batches_copies_one_by_one() -> None:
    with (
        Machine("rocm") as machine,
        machine.rule("copy_batch9", CODE, code=HIP_ERROR_NOT_SUPPORTED) as refused,
    ):
        assert copied(machine) == {"copies": "equal", "batch": False, "registered": True}
        assert refused.met() == 1, "asked once, and then never again"


@pytest.mark.parametrize(
    ("vendor", "version", "without", "batch"),
    [
        ("cuda", 12080, ("cuMemcpyBatchAsync_v2",), True),
        ("cuda", 12040, ("cuMemcpyBatchAsync_v2", "cuMemcpyBatchAsync", "cuDeviceGetUuid_v2"), False),
        ("rocm", 60400000, ("hipMemcpyBatchAsync", "hipPointerGetAttribute"), False),
    ],
)
def test_older_drivers_copy_the_same(vendor: Vendor, version: int, without: tuple[str, ...], batch: bool) -> None:
    """CUDA 12.8 has a batch call with another signature; earlier releases and ROCm 6 have none."""
    with Machine(vendor, driver_version=version, without=without) as machine:
        assert copied(machine) == {"copies": "equal", "batch": batch, "registered": True}
        if batch:
            assert machine.calls("copy_batch9") > 0


def test_a_driver_that_cannot_register_does_without() -> None:
    with Machine("rocm", without=("hipHostRegister",)) as machine:
        assert copied(machine) == {"copies": "equal", "batch": True, "registered": False}


# ---------------------------------------------------------------- where kernels come from

COMPILER = {"cuda": "nvrtc 13.0", "rocm": "hiprtc 7.0"}
ARCH = {"cuda": "sm_90", "rocm": "gfx942"}
BUILT_IN = {"cuda": "built-in ptx sm_90", "rocm": "built-in bundle"}


def compiled(machine: Machine) -> list[str]:
    """The report for kernels made by the run-time compiler."""
    return [COMPILER[machine.vendor], ARCH[machine.vendor], ""]


def test_kernels_are_compiled_for_the_device(machine: Machine) -> None:
    assert kernel_report(machine) == compiled(machine)


def test_an_unknown_architecture_takes_the_bundle() -> None:
    with Machine("rocm", arch_known=False) as machine:
        assert kernel_report(machine) == ["built-in bundle", "", "the device's architecture is unknown"]


def test_without_a_compiler_the_built_in_kernels_are_used_and_why_is_said(machine: Machine) -> None:
    provider, arch, note = kernel_report(machine, rtc="/nonexistent/librtc.so")
    assert (provider, arch) == (BUILT_IN[machine.vendor], ARCH[machine.vendor])
    assert "/nonexistent/librtc.so" in note


def test_a_compiler_that_lacks_a_call_is_not_used(machine: Machine) -> None:
    """Here the compiler's library is the driver's: it is no compiler as soon as one call is missing."""
    name = {"cuda": "nvrtcGetCUBIN", "rocm": "hiprtcGetCode"}[machine.vendor]
    with Machine(machine.vendor, without=(name,)) as lacking:
        provider, _, note = kernel_report(lacking)
        assert provider == BUILT_IN[machine.vendor]
        assert note.endswith(f"lacks {name}")


def test_a_compiler_that_fails_is_quoted(machine: Machine) -> None:
    with machine.rule("rtc_compile", CODE, code=6):
        provider, _, note = kernel_report(machine)
        assert provider == BUILT_IN[machine.vendor]
        assert note.startswith(f"{COMPILER[machine.vendor]} for {ARCH[machine.vendor]}: COMPILATION_ERROR: simulated")


def test_code_that_the_driver_does_not_load_is_replaced(machine: Machine) -> None:
    with machine.rule("module_load", CODE, code=209, times=1):
        provider, _, note = kernel_report(machine)
        assert provider == BUILT_IN[machine.vendor]
        assert "(209)" in note


def test_no_kernels_at_all_is_a_refusal(machine: Machine) -> None:
    load = {"cuda": "cuModuleLoadData", "rocm": "hipModuleLoadData"}[machine.vendor]
    with machine.rule("module_load", CODE, code=209):
        said = str(kernel_report(machine))
        assert said.startswith(f"ValueError: kernels: {BUILT_IN[machine.vendor]} on {ARCH[machine.vendor]}: {load}")
        assert f"{COMPILER[machine.vendor]} made code" in said


# ---------------------------------------------------------------- kernels on disk


def test_a_second_start_does_not_compile(machine: Machine, tmp_path: Path) -> None:
    assert kernel_report(machine, cache=str(tmp_path)) == compiled(machine)
    with machine.rule("rtc_compile", CODE, code=6) as recompiled:
        assert kernel_report(machine, cache=str(tmp_path)) == compiled(machine)
        assert recompiled.met() == 0


@pytest.mark.parametrize("changed", ["arch", "compiler"])
def test_code_for_another_device_or_of_another_compiler_is_not_taken(tmp_path: Path, changed: str) -> None:
    """Each has its own file, and both are kept."""
    with Machine("rocm") as first, Machine("rocm", **{changed: {"arch": "gfx90a", "compiler": 6}[changed]}) as second:
        for machine in (first, second, first, second):
            kernel_report(machine, cache=str(tmp_path))
        names = {path.name for path in tmp_path.iterdir()}
        assert len(names) == 2
        with second.rule("rtc_compile", CODE, code=6) as recompiled:
            assert kernel_report(second, cache=str(tmp_path))[2] == ""
            assert recompiled.met() == 0


@pytest.mark.parametrize("damage", ["cut", "flipped", "emptied", "too long", "writable by others"])
def test_damaged_code_is_compiled_again_and_replaced(machine: Machine, tmp_path: Path, damage: str) -> None:
    kernel_report(machine, cache=str(tmp_path))
    (kept,) = tmp_path.iterdir()
    whole = kept.read_bytes()
    match damage:
        case "cut":
            kept.write_bytes(whole[:-1])
        case "flipped":
            kept.write_bytes(whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:])
        case "emptied":
            kept.write_bytes(b"")
        case "too long":
            os.truncate(kept, (64 << 20) + 1)
        case _:
            kept.chmod(0o666)
    with machine.rule("rtc_compile", CODE, code=0) as recompiled:
        assert kernel_report(machine, cache=str(tmp_path)) == compiled(machine)
        assert recompiled.met() == 1
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [whole]
    assert kept.stat().st_mode & 0o777 == 0o600


def test_a_directory_that_cannot_be_written_costs_only_time(machine: Machine) -> None:
    assert kernel_report(machine, cache="/proc/nonexistent") == compiled(machine)


TOO_FEW_BASES = """
import sys
from kvserver._native import StagedCopier
vendor, library = sys.argv[1:]
copier = StagedCopier(vendor, library, 0, 1 << 20, 16, "", "")
try:
    copier.begin_ring([(2, 5, [(1, 0, 1, 0, 8, 8)])], [4096], [4096, 4096])
except ValueError as refusal:
    print(refusal)
"""


def test_a_ring_needs_the_address_of_every_buffer(machine: Machine) -> None:
    said = subprocess.run(
        [sys.executable, "-c", TOO_FEW_BASES, machine.vendor, str(machine.library)],
        env={**os.environ, **machine.environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert said.stdout == "1 bases came for 2 buffers\n"
