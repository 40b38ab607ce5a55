"""The life number that all processes of an ATOM engine share, found through a common ancestor process.

ATOM gives its scheduler and workers nothing that identifies one start of an engine. But a worker's parent is its
EngineCore, which is the scheduler's process. With pipeline stages there is one EngineCore per stage, and one process is
the parent of them all.
"""

import hashlib
import os
import socket
from pathlib import Path

SCHEDULER, WORKER = 0, 1
"""Generations between a process and its EngineCore."""


def life_of(generations: int, *, name: str) -> int:
    """56-bit number of the ancestor, unique among all processes this machine has ever had: from pid, start time and
    boot."""
    pid = ancestor(generations)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    said = f"{name} {socket.gethostname()} {boot} {pid} {_stat(pid)[19]}"
    return int.from_bytes(hashlib.sha256(said.encode()).digest()[:7], "little")


def ancestor(generations: int) -> int:
    """Process id of the ancestor `generations` up. 0 is this process itself."""
    pid = os.getpid()
    for _ in range(generations):
        pid = int(_stat(pid)[1])
    return pid


def _stat(pid: int) -> list[str]:
    """Fields of /proc/<pid>/stat from the state on: [1] is the parent, [19] the start time."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
