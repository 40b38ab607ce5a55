"""The arena and its ledger as files on a memory file system, so that they outlive the server without systemd.

Rule 1: both files of a pair have the same random id in their names. A ledger describes only its own arena, so a file
without its counterpart is not used.
Rule 2: the ledger is made last and removed first, and gets its size when it is complete. Whenever a server dies, it
leaves no ledger without its arena.
Rule 3: a server locks the directories with descriptors that no child has: they are free as soon as it is dead. It locks
the files with the descriptors that its children inherit: they are free when nobody can write to them any more, since a
mapping keeps a lock as a descriptor does.
Rule 4: all pages of the ledger are allocated at the start. The brain writes to it, which would be a SIGBUS on a full
file system. The arena grows slab by slab, by calls that can fail.
"""

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

from kvserver.config.config import PAGE_BYTES, Config
from kvserver.config.paths import STORAGE_FILE_SYSTEMS, holder_of, mount_of
from kvserver.errors import ConfigError
from kvserver.private_files import directory_problem, file_problem

ARENA, LEDGER = "kvserver-arena", "kvserver-ledger"
"""Names of the arena and the ledger with every keeper. The files here have an id as suffix."""
FILE_SYSTEMS = ("tmpfs", "hugetlbfs", *STORAGE_FILE_SYSTEMS)
"""Those that an arena may lie on; mapped_arena.py has the arena that lies on storage."""


@dataclass(frozen=True, slots=True)
class Directory:
    """A directory that this server has locked while `descriptor` is open."""

    path: str
    descriptor: int
    kind: str
    """Type of its file system."""

    def named(self, what: str) -> list[str]:
        """Names of the files of one kind, with any id."""
        return sorted(name for name in os.listdir(self.descriptor) if name.startswith(f"{what}."))

    def open(self, name: str, more: int = 0) -> int:
        return os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | more, 0o600, dir_fd=self.descriptor)

    def remove(self, what: str) -> None:
        for name in self.named(what):
            os.unlink(name, dir_fd=self.descriptor)


class ArenaFiles:
    """The keeper of arena and ledger on a memory file system. Directories are locked from construction to close()."""

    takes_memory = True

    def __init__(self, config: Config) -> None:
        """Claims the directories. Raises ConfigError if one cannot be used, or if a running server uses it."""
        self._id = os.urandom(8).hex()
        self._files: list[int] = []
        arena = claim(config.arena_path)
        self._directories = {ARENA: arena, LEDGER: arena}
        try:
            if config.ledger_path and os.path.realpath(config.ledger_path) != os.path.realpath(config.arena_path):
                self._directories[LEDGER] = claim(config.ledger_path)
            _check_pages(config, arena, self._directories[LEDGER])
        except ConfigError:
            self.close()
            raise

    def close(self) -> None:
        """Unlocks the directories for another server. The files stay."""
        for descriptor in {directory.descriptor for directory in self._directories.values()}:
            os.close(descriptor)

    def take(self) -> dict[str, int]:
        """Opens the existing files: name -> descriptor, the ledger first. The caller owns the descriptors.

        Raises ConfigError for a file that is not ours alone."""
        names = {what: self._directories[what].named(what) for what in (LEDGER, ARENA)}
        kept = {what: self._open(what, named[0]) for what, named in names.items() if named}
        self._files = list(kept.values())
        self._ids = {what: [name.removeprefix(what) for name in named] for what, named in names.items()}
        return kept

    def undead(self) -> str:
        """Why a process may still write to the files: it holds their locks. Empty: no process can."""
        try:
            for descriptor in self._files:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return "processes of an earlier start have not ended, and may still write to it"
        return ""

    def doubt(self) -> str:
        if self._ids[ARENA] == self._ids[LEDGER] and len(self._ids[ARENA]) == 1:
            return ""
        shown = ", ".join(f"{what}{number}" for what, ids in self._ids.items() for number in ids)
        return f"there is {shown}; expected one arena and its own ledger"

    def forget(self, what: str) -> bool:
        """Removes the files of one kind, with any id. Their memory is free when no process has them open."""
        self._directories[what].remove(what)
        return True

    def create(self, what: str, size: int) -> int:
        """A new file of `size` bytes, locked; the caller's descriptor. Raises OSError."""
        descriptor = self._directories[what].open(f"{what}.{self._id}", os.O_CREAT | os.O_EXCL)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if what == LEDGER:
                os.posix_fallocate(descriptor, 0, size)
            else:
                os.ftruncate(descriptor, size)
        except OSError:
            os.close(descriptor)
            self.forget(what)
            raise
        return descriptor

    def keep(self, _what: str, _descriptor: int) -> bool:
        """Always True: a file is kept without further action."""
        return True

    def check_room(self, missing: dict[str, int]) -> None:
        """Raises ConfigError if a file system lacks room. missing: bytes still to be allocated, by name."""
        needed: dict[int, int] = {}
        for what, directory in self._directories.items():
            place = os.fstat(directory.descriptor).st_dev
            needed[place] = needed.get(place, 0) + missing[what]
        for directory in self._directories.values():
            space, wanted = os.fstatvfs(directory.descriptor), needed[os.fstat(directory.descriptor).st_dev]
            free = space.f_bavail * space.f_frsize
            if space.f_blocks and free < wanted:  # 0 blocks: the file system has no size limit
                parts = ", ".join(f"{what} {count}" for what, count in missing.items())
                raise ConfigError(
                    "arena-memory",
                    f"the {directory.kind} at {directory.path} has {free} bytes free, {wanted} more are needed "
                    f"({parts}); give it a larger size=, or make arena_bytes or chunks_max smaller",
                )

    def _open(self, what: str, name: str) -> int:
        path = f"{self._directories[what].path}/{name}"
        try:
            descriptor = self._directories[what].open(name)
        except OSError as problem:
            raise ConfigError("arena-path", f"{path}: {problem.strerror}") from problem
        if wrong := file_problem(path, os.fstat(descriptor)):
            os.close(descriptor)
            raise ConfigError("arena-path", wrong)
        return descriptor


# ---------------------------------------------------------------- directories


def claim(path: str) -> Directory:
    """Makes the directory if it is missing, checks it and locks it. Raises ConfigError."""
    try:
        Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileExistsError as problem:
        raise ConfigError("arena-path", f"{path}: is no directory, and no device DAX") from problem
    except OSError as problem:
        raise ConfigError("arena-path", f"{path}: {problem.strerror}") from problem
    try:
        directory = Directory(path, descriptor, mount_of(descriptor).file_system)
        _check(directory)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        whose = holder_of(descriptor)
        os.close(descriptor)
        raise ConfigError("arena-in-use", f"{path} belongs to another server that lives{whose}") from None
    except ConfigError:
        os.close(descriptor)
        raise
    return directory


def _check(directory: Directory) -> None:
    if directory.kind not in FILE_SYSTEMS:
        expected = f"expected one of {', '.join(FILE_SYSTEMS)}"
        raise ConfigError("arena-path", f"{directory.path} is on {directory.kind}; {expected}")
    if problem := directory_problem(directory.path, os.fstat(directory.descriptor)):
        raise ConfigError("arena-path", problem)


def _check_pages(config: Config, arena: Directory, ledger: Directory) -> None:
    """Raises ConfigError if a page size differs from the configuration: the file system decides it, not the server."""
    page_bytes = os.fstatvfs(arena.descriptor).f_bsize
    if page_bytes != (config.huge_page_bytes or PAGE_BYTES):
        raise ConfigError(
            "arena-path",
            f"{arena.path} is on {arena.kind} with pages of {page_bytes} bytes; expected "
            f"{config.huge_page_bytes or PAGE_BYTES} (huge_page_bytes={config.huge_page_bytes})",
        )
    if ledger.kind != "tmpfs":
        raise ConfigError(
            "arena-path",
            f"{ledger.path} is on {ledger.kind}, where a ledger has no holes; expected a ledger_path on tmpfs",
        )
