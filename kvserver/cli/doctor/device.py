"""The checks of `kvserver doctor` for GPUs: drivers, devices, kernels, copies, and obstacles to sharing.

A machine without a GPU passes: it serves the host device. A GPU that exists but cannot be used as the movers would use
it fails, so that nobody finds out later that a slower way was taken. Drivers are loaded in this process. Each device
copies some MiB in its self-test, and is tried with memory of a second process (trial.py), which takes 200 MiB for a
second. Running engines are only looked at.
"""

import importlib
import os
import resource
from collections.abc import Iterator
from types import ModuleType
from typing import Literal, NamedTuple

from kvserver.cli.doctor import peers
from kvserver.config.config import Config
from kvserver.errors import DeviceError
from kvserver.units import show_bytes

Answer = tuple[Literal["ok", "warn", "fail"], str]
"""Verdict and text, as in doctor.py."""

Kind = Literal["cuda", "rocm"]
KINDS: tuple[Kind, ...] = ("cuda", "rocm")
DEVICE_FILES = {"cuda": "/dev/nvidiactl", "rocm": "/dev/kfd"}
"""Files made by the vendor's kernel module: a GPU exists, even if its library is missing."""
INITIAL_NAMESPACES = {"ipc": 0xEFFFFFFF, "pid": 0xEFFFFFFC}
"""Inode numbers of Linux's initial namespaces. Another number means that this is a container with its own."""


class Probed(NamedTuple):
    kind: Kind
    library: str
    version: int
    devices: int
    missing: list[str]
    problem: str


def driver(config: Config) -> Answer:
    """Checks which vendors' libraries exist, and whether they have the functions that we call."""
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
    present = [path for path in DEVICE_FILES.values() if os.path.exists(path)]
    if broken or config.device_library or present:
        unused = [f"{path} is there; device_library names its driver's library, if it is elsewhere" for path in present]
        return "fail", "; ".join([*unused, problems])
    return "ok", f"none, the host device only ({problems})"


def kernels(config: Config) -> Answer:
    """Reports the origin of each device's kernels: compiled for it, or built in."""
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
    """Opens each device like its mover, compares bytes, and copies memory of another process.

    Reports the rates beside that of one long copy between the device and pinned memory."""
    said = []
    for probed, ordinal in _devices(config):
        device_id = _native().device_facts(probed.kind, config.device_library, ordinal)[0]
        try:
            facts, mode, store_gbps, retrieve_gbps = _trial().attempt(probed.kind, ordinal, device_id, config)
        except (DeviceError, _native().DriverError) as error:
            return "fail", f"{probed.kind} {ordinal}: {_line(str(error))}"
        said.append(
            f"{probed.kind} {ordinal}: arena by {facts['arena-reach']}; another process's memory in pages of 32KiB by "
            f"{mode} {store_gbps:.1f} GB/s out, {retrieve_gbps:.1f} in; one long copy {facts['link-store-gbps']} GB/s "
            f"out, {facts['link-retrieve-gbps']} in; batches {facts['batch']}; direct from "
            f"{facts['direct-from-store']} out, {facts['direct-from-retrieve']} in, without staging from "
            f"{facts['bare-direct-from-store']} out, {facts['bare-direct-from-retrieve']} in; a flipped bit was noticed"
        )
    return "ok", "; ".join(said) or "no device"


def sharing(config: Config) -> Answer:
    """Checks for obstacles to sharing GPU memory, around this process and in running engines."""
    kinds = sorted({probed.kind for probed, _ in _devices(config)})
    if not kinds:
        return "ok", "no device"
    against = [
        f"{name} has expandable_segments:True here, whose memory no engine can share"
        for name in peers.ALLOCATOR_SETTINGS
        if peers.has_expandable_segments(os.environ.get(name, ""))
    ]
    for name, inode in INITIAL_NAMESPACES.items():
        if os.stat(f"/proc/self/ns/{name}").st_ino != inode:
            against.append(f"this is a container with its own {name} namespace: engines must be in the same (--{name})")
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != resource.RLIM_INFINITY and soft < config.arena_bytes:
        against.append(f"memlock limit {show_bytes(soft)} is below the arena's size, which some drivers count")
    seen = [(kind, peer) for kind in kinds for peer in peers.peers(kind)]
    for kind, peer in seen:
        against += peers.against_sharing(kind, peer)
    said = [f"{len(seen)} engines seen"]
    if "rocm" in kinds:
        said.append(f"rocm ipc mode {_native().ipc_mode('rocm')}: engines need the same {peers.LEGACY}")
    return ("warn" if against else "ok"), "; ".join([*against, *said])


def engines(config: Config) -> Answer:
    """Checks running engines for settings that cost more than a cache can gain."""
    kinds = sorted({probed.kind for probed, _ in _devices(config)})
    slow = [said for kind in kinds for peer in peers.peers(kind) for said in peers.slow_settings(peer)]
    return ("warn" if slow else "ok"), "; ".join(slow) or "nothing to say about their settings"


CHECKS = (
    ("gpu driver", driver),
    ("gpu kernels", kernels),
    ("gpu copies", copies),
    ("gpu sharing", sharing),
    ("engines", engines),
)


def _native() -> ModuleType:
    """The native module, imported late: if it cannot be loaded, doctor's own check reports that."""
    return importlib.import_module("kvserver._native")


def _transfer() -> ModuleType:
    return importlib.import_module("kvserver.transfer.device")


def _trial() -> ModuleType:
    return importlib.import_module("kvserver.cli.doctor.trial")


def _probe(config: Config) -> list[Probed]:
    found = []
    for kind in KINDS:
        library, version, devices, _, missing, problem = _native().probe_driver(kind, config.device_library)
        found.append(Probed(kind, library, version, devices, missing, _line(problem)))
    usable = [probed for probed in found if not probed.problem]
    # An explicit library belongs to one vendor, so the other vendor's finding about it is left out.
    return usable if config.device_library and usable else found


def _devices(config: Config) -> Iterator[tuple[Probed, int]]:
    try:
        found = _probe(config)
    except ImportError:
        return
    for probed in found:
        if not probed.problem:
            yield from ((probed, ordinal) for ordinal in range(probed.devices))


def _line(text: str) -> str:
    """The text on one line; a compiler's log has many."""
    return " ".join(text.split())
