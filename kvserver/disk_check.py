"""Whether the directories of the disk tier can be used: asked before a server starts, and by `kvserver doctor`."""

import fcntl
import os
import stat
from typing import NamedTuple

from kvserver.config import Config, show_bytes
from kvserver.errors import ConfigError

STORE_FILE = "kvserver.store"
"""The one file in a directory that is ours (kvserver._native.DiskStore.FILE)."""


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
        path = os.path.join(directory, STORE_FILE)
        held = os.stat(path).st_blocks * 512 if os.path.exists(path) else 0
        if _is_locked(directory):
            return Problem("disk-locked", f"{directory} belongs to another server that lives")
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
