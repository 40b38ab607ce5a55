"""Processes as /proc shows them: when one began, and which engine it belongs to."""

import hashlib
import os
import socket
import time
from pathlib import Path

STAT_PARENT, STAT_BEGAN = 1, 19
"""Fields of /proc/<pid>/stat after the name. The second is the start time, in ticks since the boot."""


def began_ns(pid: int) -> int:
    """Start of a process by the wall clock. 0 if the system does not say, so that everything counts as younger."""
    try:
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(_stat(pid)[STAT_BEGAN]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0
    return time.time_ns() - int(age_s * 1e9)


def ancestor(generations: int) -> int:
    """Process id of the ancestor `generations` up. 0 is this process itself."""
    pid = os.getpid()
    for _ in range(generations):
        pid = int(_stat(pid)[STAT_PARENT])
    return pid


def life_of(generations: int, *, name: str) -> int:
    """The life number of an engine whose processes have this ancestor in common.

    56 bits from pid, start time and boot, so unique among all processes that this machine has ever had.
    """
    pid = ancestor(generations)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    said = f"{name} {socket.gethostname()} {boot} {pid} {_stat(pid)[STAT_BEGAN]}"
    return int.from_bytes(hashlib.sha256(said.encode()).digest()[:7], "little")


def _stat(pid: int) -> list[str]:
    """Fields of /proc/<pid>/stat from the state on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
