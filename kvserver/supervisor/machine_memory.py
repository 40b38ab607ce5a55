"""The memory available for an arena: what the machine has, and what our control groups allow.

A limit may be set on our own control group or on any above it, so all of them are read, in both versions of control
groups. Inside a container our group's path may be the host's and not exist there; then only the existing groups count.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

RESERVE_BYTES = 256 << 20
"""Memory that must stay free beside the arena for the processes themselves."""
UNLIMITED_BYTES = 1 << 60
"""Control groups of version 1 show a number above this when they have no limit."""


class Memory(NamedTuple):
    total_bytes: int
    available_bytes: int
    """Memory that can be taken now: the minimum of what the machine and each control group have left."""
    limit_bytes: int | None
    """The smallest limit of our control groups; None without a limit."""

    def fits(self, arena_bytes: int) -> bool:
        """Whether an arena fits into the memory that is available now."""
        return arena_bytes + RESERVE_BYTES <= self.available_bytes

    def can_ever_fit(self, arena_bytes: int) -> bool:
        return arena_bytes + RESERVE_BYTES <= min(self.total_bytes, self.limit_bytes or self.total_bytes)


def read_memory(root: Path = Path("/")) -> Memory:
    """The machine's memory now. root: the directory with /proc and /sys."""
    machine = dict(_numbers(root / "proc/meminfo"))
    total, available = machine["MemTotal:"] * 1024, machine["MemAvailable:"] * 1024
    groups = list(_limited_groups(root))
    return Memory(
        total_bytes=total,
        available_bytes=min([available, *(max(0, limit - used) for limit, used in groups)]),
        limit_bytes=min((limit for limit, _ in groups), default=None),
    )


def _limited_groups(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, used bytes that cannot be reclaimed at once) of our control group and of those above it."""
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            mounted, limit_name, used_name, cache_name = "", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            mounted, limit_name, used_name = "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache_name = "total_inactive_file"
        else:
            continue
        top = root / "sys/fs/cgroup" / mounted
        own = top / path.lstrip("/")
        for group in (own, *(parent for parent in own.parents if parent.is_relative_to(top))):
            if not (group / limit_name).exists():
                continue
            text = (group / limit_name).read_text().strip()
            if text.isdecimal() and int(text) < UNLIMITED_BYTES:
                used = int((group / used_name).read_text())
                yield int(text), used - dict(_numbers(group / "memory.stat")).get(cache_name, 0)


def _numbers(path: Path) -> Iterator[tuple[str, int]]:
    """The first two words of each line of files like /proc/meminfo, as name and number."""
    for line in path.read_text().splitlines():
        words = line.split()
        if len(words) > 1 and words[1].isdecimal():
            yield words[0], int(words[1])
