"""Engines that run on this machine, as /proc shows them, and their settings that prevent sharing GPU memory.

The engines themselves are not contacted. An engine is a process with a GPU driver's library mapped. Only processes of
this user are visible, or all for root. Their environment is the one at their start, without later changes.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

LIBRARIES = {"cuda": "libcuda.so", "rocm": "libamdhip64.so"}
ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
LEGACY = "HSA_ENABLE_IPC_MODE_LEGACY"
NAMESPACES = {"cuda": ("ipc", "pid"), "rocm": ("ipc", "pid", "net")}
"""AMD's handles are served through a socket of the network namespace, unless both sides set LEGACY."""

NO_GRAPHS = re.compile(
    r"--enforce[-_]eager(=(true|1))?$|-O=?0$|--cudagraph-capture-sizes=\[\s*\]$"
    r"|.*cudagraph_mode[\"']?\s*[:=]\s*[\"']?none\b",
    re.IGNORECASE,
)
"""Arguments of vLLM and ATOM that turn CUDA graphs off."""
SHORT = re.compile(r"--?[A-Za-z][\w.-]{0,60}(=[\w\[\]]{0,8})?")


class Peer(NamedTuple):
    pid: int
    name: str
    arguments: list[str]
    environment: dict[str, str]

    def __str__(self) -> str:
        return f"process {self.pid} ({self.name})"


def peers(kind: Literal["cuda", "rocm"], proc: Path = Path("/proc")) -> Iterator[Peer]:
    """Processes that use the vendor's driver, without the server's own."""
    for folder in proc.iterdir():
        if not folder.name.isdecimal() or int(folder.name) == os.getpid():
            continue
        try:
            if LIBRARIES[kind] not in (folder / "maps").read_text(errors="replace"):
                continue
            arguments = _strings(folder / "cmdline")
            if "kvserver.movers.mover" in arguments:
                continue
            settings = (text.partition("=") for text in _strings(folder / "environ"))
            environment = {name: value for name, equals, value in settings if equals}
            yield Peer(int(folder.name), (folder / "comm").read_text().strip(), arguments, environment)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it has ended, or is another user's


def against_sharing(kind: Literal["cuda", "rocm"], peer: Peer, proc: Path = Path("/proc")) -> list[str]:
    """The obstacles to sharing memory with this engine, each with its remedy."""
    found = [
        f"{peer} has {name}={peer.environment[name]}: its memory cannot be shared, set expandable_segments:False"
        for name in ALLOCATOR_SETTINGS
        if has_expandable_segments(peer.environment.get(name, ""))
    ]
    if kind == "rocm" and is_legacy(peer.environment) != is_legacy(os.environ):
        ours, theirs = (repr(where.get(LEGACY, "")) for where in (os.environ, peer.environment))
        found.append(f"{peer} has {LEGACY}={theirs}, this process {ours}: they must be alike")
    for name in NAMESPACES[kind]:
        if name == "net" and is_legacy(peer.environment):
            continue
        if _namespace(proc, str(peer.pid), name) not in (None, _namespace(proc, "self", name)):
            option = {"net": "network"}.get(name, name)
            found.append(f"{peer} is in another {name} namespace: start both with --{option}=host")
    return found


def slow_settings(peer: Peer) -> list[str]:
    """The settings that cost an engine more than a cache can gain, as far as its command line shows them.

    Its defaults, and what a program or a file sets, do not show there. The connectors warn about those in its log.
    """
    given = [argument for argument in peer.arguments if NO_GRAPHS.match(argument)]
    if given:
        # The argument may be a document or a whole program, with secrets in it: its name is enough.
        name = given[0] if SHORT.fullmatch(given[0]) else "cudagraph_mode none"
        return [f"{peer} runs with {name}: without CUDA graphs decoding takes several times as long"]
    return []


def has_expandable_segments(setting: str) -> bool:
    return "expandable_segments:true" in setting.lower().replace(" ", "")


def is_legacy(environment: "os._Environ[str] | dict[str, str]") -> bool:
    return environment.get(LEGACY) == "1"


def _strings(path: Path) -> list[str]:
    return [os.fsdecode(text) for text in path.read_bytes().split(b"\0") if text]


def _namespace(proc: Path, process: str, name: str) -> str | None:
    """The identity of a process's namespace; None when we may not see it."""
    try:
        return os.readlink(proc / process / "ns" / name)
    except OSError:
        return None
