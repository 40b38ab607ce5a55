"""The part of `kvserver doctor` that is about GPUs: drivers, devices, kernels, copies, and what breaks sharing.

A machine without any GPU library is in order: it serves the host device. A GPU that is there and cannot be used as the
movers would use it is a failure, so that nobody finds out later that a slower way was taken. Drivers are begun in this
process, and each device copies some MiB through its self-test; nothing else is touched.
"""

import importlib
import os
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Literal, NamedTuple

from kvserver.config import MIB, Config, show_bytes
from kvserver.errors import DeviceError

Answer = tuple[Literal["ok", "warn", "fail"], str]
"""As in doctor.py."""

Kind = Literal["cuda", "rocm"]
KINDS: tuple[Kind, ...] = ("cuda", "rocm")
TRIAL_ARENA_BYTES = 64 * MIB
INITIAL_NAMESPACES = {"ipc": 0xEFFFFFFF, "pid": 0xEFFFFFFC}
"""Inode numbers that Linux gives to the first namespace of a kind: another number means a container of its own."""
ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


class Settings(NamedTuple):
    """A mover's settings for a trial: a small arena, and no measurement of earlier times."""

    device_library: str
    arena_path_gpu: Literal["auto", "register", "bounce"]
    copy_threads: int
    cache_dir: str
    arena_bytes: int = TRIAL_ARENA_BYTES
    slab_bytes: int = TRIAL_ARENA_BYTES


class Probed(NamedTuple):
    kind: Kind
    library: str
    version: int
    devices: int
    missing: list[str]
    problem: str


def driver(config: Config) -> Answer:
    """Which vendor's library is there, and whether it has what we call."""
    try:
        found = _probe(config)
    except ImportError as error:
        return "fail", f"cannot be looked for: {error}"
    usable = [probed for probed in found if not probed.problem]
    broken = [
        f"{probed.kind}, {probed.library}: {probed.problem}" for probed in found if probed.library and probed.problem
    ]
    if usable:
        said = [
            f"{probed.kind} {probed.version}, {probed.library}, {probed.devices} devices"
            + (f", without {', '.join(probed.missing)}" if probed.missing else "")
            for probed in usable
        ]
        return ("warn" if broken else "ok"), "; ".join([*said, *broken])
    problems = "; ".join(f"{probed.kind}: {probed.problem}" for probed in found)
    if broken or config.device_library:
        return "fail", problems
    return "ok", f"none, the host device only ({problems})"


def kernels(config: Config) -> Answer:
    """Where each device gets its kernels from: compiled for it, or built in."""
    said, verdict = [], "ok"
    for probed, ordinal in _devices(config):
        native = _native()
        facts = native.device_facts(probed.kind, config.device_library, ordinal)
        name = f"{probed.kind} {ordinal} {facts[1]} {facts[2] or 'of unknown architecture'}"
        try:
            rtc_library = _transfer().rtc_library(probed.kind, config.device_library)
            provider, _, note = native.kernel_report(probed.kind, config.device_library, ordinal, rtc_library)
        except (native.DriverError, ValueError) as error:
            return "fail", f"{name}: {error}"
        if note:
            verdict = "warn"
        said.append(f"{name}: {provider}" + (f" because {_line(note)}" if note else ""))
    return ("warn" if verdict == "warn" else "ok"), "; ".join(said) or "no device"


def copies(config: Config) -> Answer:
    """Opens each device as its mover does: bytes are compared, and the link is measured."""
    said = []
    for probed, ordinal in _devices(config):
        device_id = _native().device_facts(probed.kind, config.device_library, ordinal)[0]
        try:
            facts = _try(probed.kind, device_id, config)
        except (DeviceError, _native().DriverError) as error:
            return "fail", f"{probed.kind} {ordinal}: {error}"
        said.append(
            f"{probed.kind} {ordinal}: arena by {facts['arena-path']}, link {facts['link-store-gbps']} GB/s out, "
            f"{facts['link-retrieve-gbps']} GB/s in, batches {facts['batch']}, "
            f"direct from {facts['direct-from-store']} out, {facts['direct-from-retrieve']} in"
        )
    return "ok", "; ".join(said) or "no device"


def sharing(config: Config) -> Answer:
    """What in this environment keeps engines and server from sharing GPU memory. Both sides must be looked at."""
    kinds = {probed.kind for probed, _ in _devices(config)}
    if not kinds:
        return "ok", "no device"
    against = [
        f"{name} has expandable_segments:True, whose memory no engine can share"
        for name in ALLOCATOR_SETTINGS
        if "expandable_segments:true" in os.environ.get(name, "").lower()
    ]
    for name, inode in INITIAL_NAMESPACES.items():
        if os.stat(f"/proc/self/ns/{name}").st_ino != inode:
            against.append(f"this is a container with its own {name} namespace: engines must be in the same (--{name})")
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != resource.RLIM_INFINITY and soft < config.arena_bytes:
        against.append(f"memlock limit {show_bytes(soft)} is below the arena's size, which some drivers count")
    modes = ", ".join(f"{kind} ipc mode {_native().ipc_mode(kind)}" for kind in sorted(kinds) if kind == "rocm")
    if modes:
        modes += ": engines need the same HSA_ENABLE_IPC_MODE_LEGACY"
    return ("warn" if against else "ok"), "; ".join([*against, *([modes] if modes else [])]) or "nothing is against it"


CHECKS = (
    ("gpu driver", driver),
    ("gpu kernels", kernels),
    ("gpu copies", copies),
    ("gpu sharing", sharing),
)


def _native() -> ModuleType:
    """Imported only now: where it cannot be loaded, doctor's own check says so."""
    return importlib.import_module("kvserver._native")


def _transfer() -> ModuleType:
    return importlib.import_module("kvserver.transfer.device")


def _probe(config: Config) -> list[Probed]:
    found = []
    for kind in KINDS:
        library, version, devices, _, missing, problem = _native().probe_driver(kind, config.device_library)
        found.append(Probed(kind, library, version, devices, missing, _line(problem)))
    usable = [probed for probed in found if not probed.problem]
    # An explicit library is one vendor's: the other's verdict about it is of no interest.
    return usable if config.device_library and usable else found


def _devices(config: Config) -> Iterator[tuple[Probed, int]]:
    try:
        found = _probe(config)
    except ImportError:
        return
    for probed in found:
        if not probed.problem:
            yield from ((probed, ordinal) for ordinal in range(probed.devices))


def _try(kind: Kind, device_id: str, config: Config) -> dict[str, str]:
    """Facts of an engine that has passed its self-test."""
    arena = os.memfd_create("kvserver-doctor", os.MFD_CLOEXEC)
    try:
        os.ftruncate(arena, TRIAL_ARENA_BYTES)
        with tempfile.TemporaryDirectory(prefix="kvserver-doctor-") as directory:
            settings = Settings(config.device_library, config.arena_path_gpu, config.copy_threads, str(Path(directory)))
            engine = _transfer().open_device(kind, device_id, arena, settings)
            try:
                return dict(engine.facts)
            finally:
                engine.close()
    finally:
        os.close(arena)


def _line(text: str) -> str:
    """One line of a finding; a compiler's log has many."""
    return " ".join(text.split())
