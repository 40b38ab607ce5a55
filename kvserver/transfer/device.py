"""Opens the copy engine of a GPU for its mover: finds the kernels' compiler, remembers what was measured, tests.

A measurement is kept in a file of the cache directory whose name is a digest of device, driver and library: whatever
could change the result gives another name. A file that cannot be read or written is no error, it costs 150 ms.
"""

import contextlib
import hashlib
import os
import sys
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from kvserver.errors import DeviceError
from kvserver.transfer.native import DeviceEngine, DriverAbsent, DriverError, Measured, probe_driver

GATHER_SEGMENT_BYTES = 256 << 20
"""Bytes of a segment of the mover's own staging, for caches that bring none. There are four. Kernels of two processes
take turns on a GPU, so each turn should do much. Halved where the device has less to give."""

NVRTC_WHEELS = ("nvidia/cu13/lib/libnvrtc.so.13", "nvidia/cuda_nvrtc/lib/libnvrtc.so.12")
"""Places of the compiler that comes with torch."""


class Settings(Protocol):
    """The keys of kvserver.config.config.Config that matter here."""

    @property
    def arena_bytes(self) -> int: ...
    @property
    def slab_bytes(self) -> int: ...
    @property
    def copy_threads(self) -> int: ...
    @property
    def device_library(self) -> str: ...
    @property
    def arena_reach(self) -> Literal["auto", "register", "bounce"]: ...
    @property
    def cache_dir(self) -> str: ...


def open_device(
    kind: Literal["cuda", "rocm"],
    device_id: str,
    arena: int,
    settings: Settings,
    *,
    gather_segment_bytes: int = GATHER_SEGMENT_BYTES,
) -> DeviceEngine:
    """An engine that has passed its self-test. `arena`: descriptor, stays the caller's. Raises DeviceError."""
    remembered = measurement_path(kind, device_id, settings)
    known = _read(remembered)
    try:
        engine = DeviceEngine(
            kind=kind,
            library=settings.device_library,
            device_id=device_id,
            arena_reach=settings.arena_reach,
            rtc_library=rtc_library(kind, settings.device_library),
            cache_dir=settings.cache_dir,
            arena_fd=arena,
            arena_bytes=settings.arena_bytes,
            slab_bytes=settings.slab_bytes,
            threads=settings.copy_threads,
            gather_segment_bytes=gather_segment_bytes,
            measured=known,
        )
    except (DriverAbsent, DriverError) as problem:
        raise DeviceError("driver", str(problem)) from problem
    except ValueError as refusal:
        code, _, message = str(refusal).partition(": ")
        raise DeviceError(code, message) from refusal
    problem_found = engine.self_test()
    if problem_found:
        raise DeviceError("self-test", f"{engine.backend}: {problem_found}")
    if known is None:
        _write(remembered, Measured._make(engine.measured))
    return engine


def rtc_library(kind: str, device_library: str) -> str:
    """Path of the run-time compiler that a Python package brought; "" leaves the search to the native side, which looks
    beside the driver's library first."""
    if kind != "cuda" or device_library:
        return ""
    places = (Path(folder) / name for name in NVRTC_WHEELS for folder in sys.path if folder)
    return next((str(place) for place in places if place.is_file()), "")


def measurement_path(kind: Literal["cuda", "rocm"], device_id: str, settings: Settings) -> Path:
    """Path of the kept measurement of this device with this driver."""
    library, version = probe_driver(kind, settings.device_library)[:2]
    name = f"{device_id} {version} {library}".encode()
    return Path(settings.cache_dir) / f"crossover-{hashlib.sha256(name).hexdigest()[:16]}.json"


def _read(path: Path) -> Measured | None:
    try:
        measured: Measured = msgspec.json.decode(path.read_bytes(), type=Measured)
    except (OSError, msgspec.MsgspecError):
        return None
    return measured if all(0 <= number < 1 << 64 for number in measured) else None


def _write(path: Path, measured: Measured) -> None:
    partial = path.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(msgspec.json.encode(measured))
        partial.rename(path)
