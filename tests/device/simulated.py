"""The simulated driver, built from tests/simdriver: one simulated machine, and faults on it.

    with Machine("cuda", devices=2) as machine:
        machine.library                     # replaces libcuda.so.1 or libamdhip64.so.7
        machine.environment                 # variables with which a process sees this machine
        machine.used_bytes(0)               # the driver's own count
        with machine.rule("cuEventQuery", HANG, pid=pid) as rule:
            until("a process to hang", rule.met)

A Machine is a file that all its processes map; state.h is the other side of the struct formats here.
"""

import ctypes
import fcntl
import hashlib
import mmap
import os
import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

Vendor = Literal["cuda", "rocm"]

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "tests" / "simdriver"
BUILT = ROOT / "build" / "simdriver"
INCLUDED = ("driver/symbols.h", "kernels/piece.h", "kernels/kernel_source.h")
FLAGS = ("-O1", "-g", "-std=c++20", "-fPIC", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra")
LIBRARY = {"cuda": "libcuda.so.1", "rocm": "libamdhip64.so.7"}
COMPILER = {"cuda": "libnvrtc.so.13", "rocm": "libhiprtc.so.7"}

CODE, STICKY, HANG, DELAY, CORRUPT = range(1, 6)
"""Actions of a rule: the call returns a code; it and all later calls do; it hangs until the rule is removed; it takes
longer; its copy flips a byte.
"""
ALWAYS = 2**31 - 1
GRANULE_BYTES = 2 << 20
GFX_TARGET_VERSION = {"gfx90a": 90010, "gfx942": 90402, "gfx950": 90500}
"""The architecture in the format of AMD's kernel module."""
LDS_KIB = {"gfx90a": 64, "gfx942": 64, "gfx950": 160}
"""Local memory of a compute unit, as that module says it."""


# ---------------------------------------------------------------- the library


def build(vendor: Vendor, without: Sequence[str] = ()) -> Path:
    """The library's path; compiles it if its sources have changed. `without`: names that it must not export."""
    inputs = sorted([*SOURCES.glob("*.*"), *(ROOT / "csrc/gpu" / name for name in INCLUDED)])
    digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in inputs)).hexdigest()[:16]
    variant = "-".join([vendor, *without])
    target = BUILT / digest / variant
    target.mkdir(parents=True, exist_ok=True)
    with (BUILT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (target / LIBRARY[vendor]).exists():
            _link(vendor, _objects(vendor, BUILT / digest), target, without)
    return target / LIBRARY[vendor]


def build_redirect() -> Path:
    """Path of the library that shows a process a simulated machine's /sys/class/kfd."""
    source = SOURCES / "sysfs" / "redirect.cpp"
    target = BUILT / hashlib.sha256(source.read_bytes()).hexdigest()[:16] / "libkvsim-sysfs.so"
    target.parent.mkdir(parents=True, exist_ok=True)
    with (BUILT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            partial = target.with_suffix(".partial")
            subprocess.run(["g++", *FLAGS, "-shared", str(source), "-o", str(partial)], check=True)
            partial.rename(target)
    return target


def _objects(vendor: Vendor, folder: Path) -> list[Path]:
    define = ["-DSIM_HIP"] if vendor == "rocm" else []

    def compile_one(source: Path) -> Path:
        made = folder / f"{vendor}-{source.stem}.o"
        if not made.exists():
            partial = made.with_suffix(".partial")
            command = ["g++", *FLAGS, *define, f"-I{ROOT / 'csrc'}", "-c", str(source), "-o", str(partial)]
            subprocess.run(command, check=True)
            partial.rename(made)
        return made

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(compile_one, sorted(SOURCES.glob("*.cpp"))))


def _link(vendor: Vendor, objects: list[Path], target: Path, without: Sequence[str]) -> None:
    script = target / "exports"
    hidden = "".join(f"{name}; " for name in without)
    script.write_text(f"{{ global: *; {f'local: {hidden}' if hidden else ''}}};\n")
    partial = target / "partial"
    command = ["g++", *FLAGS, "-shared", *map(str, objects), f"-Wl,--version-script={script}", "-o", str(partial)]
    subprocess.run(command, check=True)
    (target / COMPILER[vendor]).unlink(missing_ok=True)
    (target / COMPILER[vendor]).symlink_to(LIBRARY[vendor])
    partial.rename(target / LIBRARY[vendor])


class Symbol(NamedTuple):
    """One line of the driver table."""

    field: str
    cuda: str | None
    rocm: str | None
    required: str


def symbols() -> list[Symbol]:
    """The table of csrc/gpu/driver/symbols.h."""
    text = (ROOT / "csrc/gpu/driver/symbols.h").read_text()
    lines = re.findall(r'X\((\w+), raw::\w+, ("\w+"|nullptr), ("\w+"|nullptr), (\w+)\)', text)
    plain = [[None if part == "nullptr" else part.strip('"') for part in line] for line in lines]
    return [Symbol(str(field), cuda, rocm, str(required)) for field, cuda, rocm, required in plain]


def name_in(vendor: Vendor, field: str) -> str:
    """A vendor's name for an entry of the table."""
    name: str | None = next(getattr(symbol, vendor) for symbol in symbols() if symbol.field == field)
    assert name is not None, f"{vendor} has no {field}"
    return name


# ---------------------------------------------------------------- the machine

MAGIC = 0x31304D4953564B00
HEADER = struct.Struct("<QIiQQQI20x")
DEVICE = struct.Struct("<16s16s32s16sQII")
PROCESS = struct.Struct("<I4xQ")
ALLOCATION = struct.Struct("<QQII")
RULE = struct.Struct("<40sIIiiIiQI4x")
COUNTER = struct.Struct("<40sQ")
DEVICES, ALLOCATIONS, IMPORTERS, RULES, COUNTERS = 4, 512, 16, 32, 80
ALLOCATION_BYTES = ALLOCATION.size + (1 + IMPORTERS) * PROCESS.size
DEVICES_AT = HEADER.size
ALLOCATIONS_AT = DEVICES_AT + DEVICES * DEVICE.size
RULES_AT = ALLOCATIONS_AT + ALLOCATIONS * ALLOCATION_BYTES
COUNTERS_AT = RULES_AT + RULES * RULE.size
STATE_BYTES = COUNTERS_AT + COUNTERS * COUNTER.size
COPY_RATE_AT, DELAY_AT = 16, 24
RULE_ACTIVE_AT, RULE_MET_AT = 44, 72


class Rule:
    """One fault, while the rule exists."""

    def __init__(self, state: mmap.mmap, offset: int) -> None:
        self._state = state
        self._offset = offset

    def met(self) -> int:
        """How often the fault occurred."""
        return int(struct.unpack_from("<I", self._state, self._offset + RULE_MET_AT)[0])

    def remove(self) -> None:
        struct.pack_into("<I", self._state, self._offset + RULE_ACTIVE_AT, 0)


class Machine:
    """A simulated machine with `devices` devices. Use as a context manager."""

    def __init__(
        self,
        vendor: Vendor,
        *,
        devices: int = 1,
        device_bytes: int = 4 << 30,
        driver_version: int | None = None,
        without: Sequence[str] = (),
        arch: str = "",
        arch_known: bool = True,
        compiler: int = 0,
    ) -> None:
        """arch_known: AMD's kernel module tells the devices' architecture (NVIDIA's driver always does).
        compiler: major version of the run-time compiler.
        """
        self.vendor: Vendor = vendor
        self.library = build(vendor, without)
        self._folder = tempfile.TemporaryDirectory(prefix="kvsim-")
        self.environment = {
            "KVSIM_STATE": f"{self._folder.name}/state",
            "XDG_CACHE_HOME": f"{self._folder.name}/cache",  # the user's cache gets no kernels for simulated devices
        }
        """Variables with which a process sees this machine."""
        if vendor == "rocm" and arch_known:
            preloaded = f"{os.environ.get('LD_PRELOAD', '')} {build_redirect()}".strip()
            self.environment |= {"KVSIM_KFD": f"{self._folder.name}/kfd", "LD_PRELOAD": preloaded}
        with Path(self.environment["KVSIM_STATE"]).open("w+b") as file:
            file.truncate(STATE_BYTES)
            self._state = mmap.mmap(file.fileno(), STATE_BYTES)
        version = driver_version or (13000 if vendor == "cuda" else 70200000)
        compiler = compiler or (13 if vendor == "cuda" else 7)
        HEADER.pack_into(self._state, 0, MAGIC, devices, version, 0, 0, 0, compiler)
        for number in range(devices):
            self._describe(number, device_bytes, arch or ("sm_90" if vendor == "cuda" else "gfx942"))

    def __enter__(self) -> "Machine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for rule in range(RULES):
            Rule(self._state, RULES_AT + rule * RULE.size).remove()  # lets hanging processes go
        self._state.close()
        self._folder.cleanup()

    def device_id(self, device: int) -> str:
        """The device's name in kvserver."""
        uuid, pci, *_ = DEVICE.unpack_from(self._state, DEVICES_AT + device * DEVICE.size)
        return f"{uuid.hex()}@{pci.rstrip(bytes(1)).decode().lower()}"

    @property
    def devices(self) -> int:
        return int(HEADER.unpack_from(self._state)[1])

    def _describe(self, number: int, device_bytes: int, arch: str) -> None:
        uuid = hashlib.sha256(f"{self.vendor} {number}".encode()).digest()[:16]
        pci = f"0000:{0x1B + 0x20 * number:02X}:00.0".encode()
        name = f"Simulated {self.vendor} {number}".encode()
        values = (uuid, pci, name, arch.encode(), device_bytes, 7, 90)
        DEVICE.pack_into(self._state, DEVICES_AT + number * DEVICE.size, *values)
        if self.vendor == "cuda":
            return
        node = Path(self._folder.name) / "kfd" / "kfd" / "topology" / "nodes" / str(1 + number)
        node.mkdir(parents=True)
        location = (0x1B + 0x20 * number) << 8
        (node / "properties").write_text(
            f"gfx_target_version {GFX_TARGET_VERSION[arch]}\nlds_size_in_kb {LDS_KIB[arch]}\n"
            f"wave_front_size 64\nlocation_id {location}\ndomain 0\n"
        )

    # ---------------------------------------------------------------- usage

    def used_bytes(self, device: int = 0, owner: int = 0) -> int:
        """Device memory that a live process owns or has imported; with `owner`, only that process's, dead or alive."""
        return sum(
            -(-size // GRANULE_BYTES) * GRANULE_BYTES
            for number, size, on, processes in self._allocations()
            if number and on == device and owner in (0, processes[0][0])
            if any(_lives(*process) for process in processes)
        )

    def importers(self) -> list[int]:
        """Pid of each open import."""
        return [
            pid
            for number, _, _, (_, *importers) in self._allocations()
            for pid, started in importers
            if number and _lives(pid, started)
        ]

    def _allocations(self) -> Iterator[tuple[int, int, int, list[tuple[int, int]]]]:
        for index in range(ALLOCATIONS):
            offset = ALLOCATIONS_AT + index * ALLOCATION_BYTES
            number, size, device, _ = ALLOCATION.unpack_from(self._state, offset)
            inside = offset + ALLOCATION.size
            yield (
                number,
                size,
                device,
                [PROCESS.unpack_from(self._state, inside + nth * PROCESS.size) for nth in range(1 + IMPORTERS)],
            )

    def calls(self, field: str) -> int:
        """How often all processes together have made a call of the table."""
        wanted = name_in(self.vendor, field)
        for index in range(COUNTERS):
            name, count = COUNTER.unpack_from(self._state, COUNTERS_AT + index * COUNTER.size)
            if name.rstrip(b"\0").decode() == wanted:
                return int(count)
        return 0

    # ---------------------------------------------------------------- faults

    @contextmanager
    def rule(
        self,
        symbol: str,
        action: int,
        *,
        code: int = 0,
        pid: int = 0,
        skip: int = 0,
        times: int = ALWAYS,
        delay_us: int = 0,
    ) -> Iterator[Rule]:
        """Adds a fault until the block's end. `symbol`: a table entry, or "run:copy", "run:kernel", "rtc_compile".

        "run:report" is the report of a kernel that sums. With a code it is not written."""
        known = {entry.field for entry in symbols()}
        name = name_in(self.vendor, symbol) if symbol in known else symbol
        offset = self._free_rule()
        values = (name.encode(), pid, 0, skip, times, action, code, delay_us, 0)
        RULE.pack_into(self._state, offset, *values)
        struct.pack_into("<I", self._state, offset + RULE_ACTIVE_AT, 1)
        rule = Rule(self._state, offset)
        try:
            yield rule
        finally:
            rule.remove()

    def _free_rule(self) -> int:
        for index in range(RULES):
            offset = RULES_AT + index * RULE.size
            if struct.unpack_from("<I", self._state, offset + RULE_ACTIVE_AT)[0] == 0:
                return offset
        raise AssertionError("no rule is free")

    def throttle(self, bytes_per_s: int) -> None:
        """Limits the rate of each copy from now on; 0: no limit."""
        struct.pack_into("<Q", self._state, COPY_RATE_AT, bytes_per_s)

    def delay_operations(self, delay_us: int) -> None:
        struct.pack_into("<Q", self._state, DELAY_AT, delay_us)


def _lives(pid: int, started: int) -> bool:
    if pid == 0:
        return False
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return fields[0] not in "ZX" and int(fields[19]) == started


# ---------------------------------------------------------------- inside a process that uses it


class Driver:
    """The library as an engine uses it, in this process, whose environment selects the machine."""

    def __init__(self, vendor: Vendor, library: str, ordinal: int = 0) -> None:
        self.vendor: Vendor = vendor
        self._library = ctypes.CDLL(library)
        self._library.kvsim_host.restype = ctypes.c_void_p
        self._check("init", 0)
        self.use(ordinal)

    def use(self, ordinal: int) -> None:
        """Selects the device for this thread."""
        if self.vendor == "rocm":
            self._check("set_device", ordinal)
            return
        context = ctypes.c_void_p()
        self._check("primary_retain", ctypes.byref(context), ordinal)
        self._check("ctx_push", context)

    def alloc(self, size: int) -> int:
        address = ctypes.c_uint64()
        self._check("alloc", ctypes.byref(address), ctypes.c_size_t(size))
        return address.value

    def alloc_vmm(self, size: int) -> int:
        """Allocates memory like torch's expandable segments, which cannot be exported."""
        address = ctypes.c_uint64()
        assert self._library.kvsim_alloc_vmm(ctypes.byref(address), ctypes.c_size_t(size)) == 0
        return address.value

    def free(self, address: int) -> None:
        self._check("free", ctypes.c_uint64(address))

    def host(self, address: int, size: int) -> memoryview:
        """Device memory, to fill and to compare; invalid after free()."""
        pointer = self._library.kvsim_host(ctypes.c_uint64(address))
        assert pointer, hex(address)
        return memoryview((ctypes.c_ubyte * size).from_address(pointer)).cast("B")

    def stream(self) -> int:
        made = ctypes.c_void_p()
        self._check("stream_create", ctypes.byref(made), 1, 0)
        return made.value or 0

    def event(self) -> int:
        made = ctypes.c_void_p()
        self._check("event_create", ctypes.byref(made), 2)
        return made.value or 0

    def record(self, event: int, stream: int) -> None:
        self._check("event_record", ctypes.c_void_p(event), ctypes.c_void_p(stream))

    def begin_capture(self) -> None:
        self._library.kvsim_begin_capture()

    def end_capture(self) -> int:
        """Ends the capture: 0, or 901 if a call invalidated it."""
        return int(self._library.kvsim_end_capture())

    def _check(self, field: str, *arguments: object) -> None:
        code = self._library[name_in(self.vendor, field)](*arguments)
        assert code == 0, f"{name_in(self.vendor, field)}: {code}"


def environment_of(machine: Machine) -> dict[str, str]:
    """The environment for a child process."""
    return {**os.environ, **machine.environment}
