"""Whether the directories of the disk tier can be used: asked before a server starts, and by `kvserver doctor`."""

import fcntl
import os
import stat
from typing import NamedTuple

from kvserver import disk_leave
from kvserver.config import Config, show_bytes
from kvserver.errors import ConfigError


class Problem(NamedTuple):
    code: str
    message: str


def refuse(config: Config) -> None:
    """Raises ConfigError for the first directory that cannot be used."""
    for directory in config.disk_directories:
        problem = examine(directory, config.disk_bytes)
        if problem is not None:
            raise ConfigError(problem.code, f"{problem.message} (disk_paths={config.disk_paths!r})")


def examine(directory: str, disk_bytes: int) -> Problem | None:
    """What is wrong with a directory; None when a device can be opened or made there."""
    try:
        if not stat.S_ISDIR(os.stat(directory).st_mode):
            return Problem("disk-path", f"{directory} is no directory")
        if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
            return Problem("disk-path", f"{directory} cannot be written to: mounted read-only, or no permission")
        space = os.statvfs(directory)
        if disk_leave.is_marked(directory) and disk_leave.is_empty(directory):
            return None  # nothing will be made there
        held = sum(_physical_bytes(os.path.join(directory, name)) for name in disk_leave.STORE_FILES)
        if _is_locked(directory):
            return Problem("disk-locked", f"{directory} belongs to another server that lives{_holder(directory)}")
    except OSError as problem:
        return Problem("disk-path", f"{directory}: {problem.strerror}")
    free_bytes = space.f_bavail * space.f_frsize
    if disk_bytes > free_bytes + held:
        return Problem(
            "disk-space",
            f"{directory} has {show_bytes(free_bytes)} bytes free and {held} in its store; disk_bytes="
            f"{show_bytes(disk_bytes)} do not fit",
        )
    return None


def _physical_bytes(path: str) -> int:
    return os.stat(path).st_blocks * 512 if os.path.exists(path) else 0


def _is_locked(directory: str) -> bool:
    """The store locks its directory for as long as it is open."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _holder(directory: str) -> str:
    """Which process has locked the directory, as far as the kernel tells (it does not across containers)."""
    inode = os.stat(directory).st_ino
    with open("/proc/locks") as locks:
        for line in locks:
            _, kind, _, _, pid, place, *_ = line.split()
            if kind == "FLOCK" and place.endswith(f":{inode}") and int(pid) > 0:
                return f" (process {pid})"
    return ""
