"""Checks of the disk tier's directories, used before a server starts and by `kvserver doctor`."""

import os
import shlex
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from kvserver.config.config import Config
from kvserver.config.paths import MEMORY_FILE_SYSTEMS, holder_of, is_locked, mount_of, opened, takes_memory
from kvserver.errors import ConfigError
from kvserver.movers import disk_retire
from kvserver.private_files import OTHERS_READ, OTHERS_WRITE, directory_problem, file_problem
from kvserver.units import show_bytes

NOTES_BYTES = 8 << 20
"""Room for the notes of a new device, beside disk_bytes: at most 2,000 notes of about one block each."""


class Problem(NamedTuple):
    code: str
    message: str


@dataclass(slots=True)
class FileSystem:
    """A file system with devices, and its room for them."""

    free_bytes: int
    held_bytes: int = 0
    """Bytes that the devices' stores take already."""
    notes_bytes: int = 0
    """Bytes for the notes of devices that will be made."""
    directories: list[str] = field(default_factory=list)


def refuse(config: Config) -> None:
    """Raises ConfigError for the first directory that cannot be used."""
    for problem in problems(config):
        raise ConfigError(problem.code, f"{problem.message} (disk_paths={config.disk_paths!r})")


def make_missing(config: Config) -> Iterator[tuple[str, str]]:
    """Makes the missing directories, after problems() found nothing wrong with them. Raises ConfigError.

    Yields each path that it made, and the type of its file system."""
    for directory in config.disk_directories:
        try:
            os.mkdir(directory, 0o700)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError("disk-path", f"{directory} cannot be made: {error.strerror}") from error
        with opened(directory) as descriptor:
            yield directory, mount_of(descriptor).file_system


def warnings(config: Config) -> Iterator[tuple[str, str]]:
    """Directories, existing or missing, that lie in memory, each with a warning.

    They are allowed, for trials on a machine without a spare disk, and for tests where /tmp is memory."""
    for directory in config.disk_directories:
        there = directory if os.path.lexists(directory) else os.path.dirname(directory)
        with suppress(OSError), opened(there) as descriptor:
            file_system = mount_of(descriptor).file_system
            if file_system in MEMORY_FILE_SYSTEMS:
                yield directory, takes_memory(file_system)


def problems(config: Config) -> Iterator[Problem]:
    """The problems of the directories; none if a device can be opened or made in each of them."""
    file_systems: dict[int, FileSystem] = {}
    names: dict[tuple[int, int, str], str] = {}
    for directory in config.disk_directories:
        missing = "" if os.path.lexists(directory) else os.path.basename(directory)
        there = os.path.dirname(directory) if missing else directory
        try:
            problem = _unmakable(there, directory) if missing else _unusable(directory)
            if problem is not None:
                yield problem
                continue
            place = os.stat(there)
            other = names.setdefault((place.st_dev, place.st_ino, missing), directory)
            if other != directory:
                yield Problem("disk-path", f"{directory} and {other} are one directory")
            elif not disk_retire.is_drained(directory):  # nothing will be made where a device was drained
                _add(file_systems, place.st_dev, directory, os.statvfs(there))
        except OSError as error:
            yield Problem("disk-path", f"{directory}: {error.strerror}")
    for file_system in file_systems.values():
        yield from _too_small(file_system, config.disk_bytes, config.disk_store_bytes)


def _unusable(directory: str) -> Problem | None:
    if not stat.S_ISDIR(os.stat(directory).st_mode):
        return Problem("disk-path", f"{directory} is no directory")
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        return Problem("disk-path", f"{directory} cannot be written to: mounted read-only, or no permission")
    if foreign := _foreign(directory):
        return Problem("disk-owner", foreign)
    with opened(directory) as descriptor:
        if is_locked(descriptor):
            holder = holder_of(descriptor)
            return Problem("disk-locked", f"{directory} belongs to another server that lives{holder}")
    return None


def _foreign(directory: str) -> str:
    """Why the directory, or one of our files in it, is not ours alone; empty if they are. As strict as arena_path."""
    if problem := directory_problem(directory, os.stat(directory)):
        return problem
    notes = os.path.join(directory, disk_retire.NOTES)
    if os.path.lexists(notes):
        found = os.lstat(notes)
        if stat.S_ISLNK(found.st_mode):
            return f"{notes} is a link; move it away"
        if problem := directory_problem(notes, found):
            return problem
    for names, forbidden in ((disk_retire.SECRET_FILES, OTHERS_READ), (disk_retire.OPEN_FILES, OTHERS_WRITE)):
        for path in (os.path.join(directory, name) for name in names):
            if os.path.lexists(path) and (problem := file_problem(path, os.lstat(path), forbidden=forbidden)):
                return problem
    return ""


# ---------------------------------------------------------------- what is missing


def _unmakable(parent: str, directory: str) -> Problem | None:
    """Why the server does not make a missing directory; None if it will.

    Below a missing mount, a new directory would lie on the system's disk, and the tier would fill that. So the server
    makes directories only right below a mount point; anywhere else the operator has to."""
    if not _is_mount_point(parent):
        return Problem(
            "disk-path",
            f"{directory} is missing, and is made only right below a mount point other than /: mount its disk, or make "
            f"it by {_command(directory)}",
        )
    if not os.access(parent, os.W_OK | os.X_OK):
        return Problem(
            "disk-path",
            f"{directory} is missing, and {parent} cannot be written to (mounted read-only, or no permission): make it "
            f"by {_command(directory)}",
        )
    return None


def _is_mount_point(directory: str) -> bool:
    """Whether something is mounted at a directory, also a bind mount. False for / itself, which has no parent."""
    try:
        with opened(directory) as descriptor, opened(f"{directory}/..") as above:
            return mount_of(descriptor).number != mount_of(above).number
    except (FileNotFoundError, NotADirectoryError):
        return False


def _command(directory: str) -> str:
    """The command that makes a directory for the server's user."""
    return f"`install -d -m 700 -o {os.geteuid()} {shlex.quote(directory)}`"


# ---------------------------------------------------------------- space


def _add(file_systems: dict[int, FileSystem], number: int, directory: str, space: os.statvfs_result) -> None:
    file_system = file_systems.setdefault(number, FileSystem(space.f_bavail * space.f_frsize))
    held_bytes = sum(_held_bytes(os.path.join(directory, name)) for name in disk_retire.STORE_FILES)
    file_system.held_bytes += held_bytes
    file_system.notes_bytes += 0 if held_bytes else NOTES_BYTES
    file_system.directories.append(directory)


def _too_small(file_system: FileSystem, disk_bytes: int, store_bytes: int) -> Iterator[Problem]:
    """The problem of a file system without room for its stores.

    store_bytes: the part of disk_bytes that a store takes, so that an existing store fits on a full file system."""
    directories = file_system.directories
    needed_bytes = len(directories) * store_bytes + file_system.notes_bytes
    if needed_bytes <= file_system.free_bytes + file_system.held_bytes:
        return
    where, count = (directories[0], "") if len(directories) == 1 else (
        f"the file system of {', '.join(directories)}", f"{len(directories)} x "
    )  # fmt: skip
    yield Problem(
        "disk-space",
        f"{where} has {file_system.free_bytes:,} bytes free and {file_system.held_bytes:,} in stores; "
        f"{count}disk_bytes={show_bytes(disk_bytes)} do not fit{_beside(file_system)}",
    )


def _beside(file_system: FileSystem) -> str:
    return f" with {show_bytes(file_system.notes_bytes)} for notes beside" if file_system.notes_bytes else ""


def _held_bytes(path: str) -> int:
    """Bytes that a store's file takes; if it is missing, those of an unfinished one, which the store will reuse."""
    for name in (path, path + disk_retire.UNFINISHED):
        if os.path.exists(name):
            return os.stat(name).st_blocks * 512
    return 0
