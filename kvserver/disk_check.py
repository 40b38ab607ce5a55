"""Whether the directories of the disk tier can be used: asked before a server starts, and by `kvserver doctor`."""

import fcntl
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from kvserver import disk_leave
from kvserver.config import Config
from kvserver.errors import ConfigError
from kvserver.sizes import show_bytes


class Problem(NamedTuple):
    code: str
    message: str


@dataclass(slots=True)
class FileSystem:
    """One that holds devices: what it has for them."""

    free_bytes: int
    held_bytes: int = 0
    """Taken by their stores already."""
    directories: list[str] = field(default_factory=list)


def refuse(config: Config) -> None:
    """Raises ConfigError for the first directory that cannot be used."""
    for problem in problems(config):
        raise ConfigError(problem.code, f"{problem.message} (disk_paths={config.disk_paths!r})")


def problems(config: Config) -> Iterator[Problem]:
    """What is wrong with the directories; nothing when a device can be opened or made in each of them."""
    file_systems: dict[int, FileSystem] = {}
    names: dict[tuple[int, int], str] = {}
    for directory in config.disk_directories:
        try:
            problem = _unusable(directory)
            if problem is not None:
                yield problem
                continue
            place = os.stat(directory)
            other = names.setdefault((place.st_dev, place.st_ino), directory)
            if other != directory:
                yield Problem("disk-path", f"{directory} and {other} are one directory")
            elif not disk_leave.is_drained(directory):  # nothing will be made where a device was drained
                _add(file_systems, place.st_dev, directory)
        except OSError as error:
            yield Problem("disk-path", f"{directory}: {error.strerror}")
    for file_system in file_systems.values():
        yield from _too_small(file_system, config.disk_bytes)


def _unusable(directory: str) -> Problem | None:
    if not stat.S_ISDIR(os.stat(directory).st_mode):
        return Problem("disk-path", f"{directory} is no directory")
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        return Problem("disk-path", f"{directory} cannot be written to: mounted read-only, or no permission")
    if _is_locked(directory):
        return Problem("disk-locked", f"{directory} belongs to another server that lives{_holder(directory)}")
    return None


# ---------------------------------------------------------------- space


def _add(file_systems: dict[int, FileSystem], number: int, directory: str) -> None:
    space = os.statvfs(directory)
    file_system = file_systems.setdefault(number, FileSystem(space.f_bavail * space.f_frsize))
    file_system.held_bytes += sum(_held_bytes(os.path.join(directory, name)) for name in disk_leave.STORE_FILES)
    file_system.directories.append(directory)


def _too_small(file_system: FileSystem, disk_bytes: int) -> Iterator[Problem]:
    directories = file_system.directories
    if len(directories) * disk_bytes <= file_system.free_bytes + file_system.held_bytes:
        return
    where, count = (directories[0], "") if len(directories) == 1 else (
        f"the file system of {', '.join(directories)}", f"{len(directories)} x "
    )  # fmt: skip
    yield Problem(
        "disk-space",
        f"{where} has {file_system.free_bytes:,} bytes free and {file_system.held_bytes:,} in stores; "
        f"{count}disk_bytes={show_bytes(disk_bytes)} do not fit",
    )


def _held_bytes(path: str) -> int:
    """Of a file of a store; when there is none, of what a server left that died while it made one, which is used up."""
    for name in (path, path + disk_leave.UNFINISHED):
        if os.path.exists(name):
            return os.stat(name).st_blocks * 512
    return 0


# ---------------------------------------------------------------- the lock


def _is_locked(directory: str) -> bool:
    """The store locks its directory for as long as it is open. A shared lock, so that two who ask do not meet."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
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
