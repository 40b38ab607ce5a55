"""How the processes of one ATOM engine find the name that they share: by the process that they descend from.

ATOM hands nothing to its scheduler and its workers that tells one start of an engine from the next. But a worker's
parent is its EngineCore, which is the process of the scheduler; with pipeline stages, which have an EngineCore each,
the parents of these are one process.
"""

import hashlib
import os
import socket
from pathlib import Path

SCHEDULER, WORKER = 0, 1
"""Generations between a process and its EngineCore."""


def life_of(generations: int, *, name: str) -> int:
    """Names the ancestor, `generations` up, among all processes that this machine has ever had: by its id, the moment
    when it started, and the boot. 56 bits."""
    pid = ancestor(generations)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    said = f"{name} {socket.gethostname()} {boot} {pid} {_stat(pid)[19]}"
    return int.from_bytes(hashlib.sha256(said.encode()).digest()[:7], "little")


def ancestor(generations: int) -> int:
    """Of this process: its id. 0 generations up is this process itself."""
    pid = os.getpid()
    for _ in range(generations):
        pid = int(_stat(pid)[1])
    return pid


def _stat(pid: int) -> list[str]:
    """From the state on: [1] is the parent, [19] the moment of the start."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
