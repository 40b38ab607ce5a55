"""The arena and its ledger as files on a file system of memory: they outlive the server where no systemd keeps them.

Rule 1: both files of a pair bear one id, drawn when they were made. An arena and the ledger of another one would be a
lie, so what has no counterpart is not used.
Rule 2: the ledger is made last and removed first, and has its size when it is whole. Wherever a server dies, no ledger
lies there that an arena does not match.
Rule 3: a server locks the directories by descriptors that no child has: they are free as soon as it is dead. It locks
the files by the descriptors that its children inherit: they are free when nobody can write to them any more, since a
mapping holds on to a lock as a descriptor does.
Rule 4: the ledger is made real as a whole. The brain writes to it, and where the file system is full that would be a
SIGBUS. The arena grows slab by slab, by calls that can be refused.
"""

import fcntl
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from kvserver.config.config import PAGE_BYTES, Config
from kvserver.config.paths import holder_of, mount_of
from kvserver.errors import ConfigError
from kvserver.private_files import directory_problem, file_problem

ARENA, LEDGER = "kvserver-arena", "kvserver-ledger"
"""What the two are called, wherever they are; here an id follows."""


@dataclass(frozen=True, slots=True)
class _Directory:
    """One that is this server's alone while `descriptor` is open."""

    path: str
    descriptor: int
    kind: str
    """Of its file system."""

    def named(self, what: str) -> list[str]:
        """Files that are called so, whatever their id."""
        return sorted(name for name in os.listdir(self.descriptor) if name.startswith(f"{what}."))

    def open(self, name: str, more: int = 0) -> int:
        return os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | more, 0o600, dir_fd=self.descriptor)

    def remove(self, what: str) -> None:
        for name in self.named(what):
            os.unlink(name, dir_fd=self.descriptor)


class ArenaFiles:
    """What arena_path keeps: one server's, from its construction to close()."""

    def __init__(self, config: Config) -> None:
        """Raises ConfigError when a directory cannot be used, or another server that lives uses it."""
        self._id = secrets.token_hex(8)
        self._files: list[int] = []
        arena = _claim(config.arena_path)
        self._directories = {ARENA: arena, LEDGER: arena}
        try:
            if config.ledger_path and os.path.realpath(config.ledger_path) != os.path.realpath(config.arena_path):
                self._directories[LEDGER] = _claim(config.ledger_path)
            _check_pages(config, arena, self._directories[LEDGER])
        except ConfigError:
            self.close()
            raise

    def close(self) -> None:
        """The directories are free for another server; the files stay."""
        for descriptor in {directory.descriptor for directory in self._directories.values()}:
            os.close(descriptor)

    def take(self) -> dict[str, int]:
        """What lies there, by name, the ledger first; the caller's from now on. Raises ConfigError for what is none of
        ours."""
        names = {what: self._directories[what].named(what) for what in (LEDGER, ARENA)}
        kept = {what: self._open(what, named[0]) for what, named in names.items() if named}
        self._files = list(kept.values())
        self._ids = {what: [name.removeprefix(what) for name in named] for what, named in names.items()}
        return kept

    def undead(self) -> str:
        """Why somebody may still write to what was taken: processes hold on to its locks. Empty: nobody can."""
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
        """Removes it, whatever its id; its memory is free when nobody has it open."""
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
        """It is kept by lying there."""
        return True

    lasts = True

    def check_room(self, missing: dict[str, int]) -> None:
        """Raises ConfigError when a file system has no room for what is still to be taken of it. missing: bytes."""
        needed: dict[int, int] = {}
        for what, directory in self._directories.items():
            place = os.fstat(directory.descriptor).st_dev
            needed[place] = needed.get(place, 0) + missing[what]
        for directory in self._directories.values():
            space, wanted = os.fstatvfs(directory.descriptor), needed[os.fstat(directory.descriptor).st_dev]
            free = space.f_bavail * space.f_frsize
            if space.f_blocks and free < wanted:  # 0 blocks: it has no size of its own
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


def _claim(path: str) -> _Directory:
    """Makes the directory if it is missing, checks and locks it."""
    try:
        Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as problem:
        raise ConfigError("arena-path", f"{path}: {problem.strerror}") from problem
    try:
        directory = _Directory(path, descriptor, mount_of(descriptor).file_system)
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


def _check(directory: _Directory) -> None:
    if directory.kind not in ("tmpfs", "hugetlbfs"):
        raise ConfigError("arena-path", f"{directory.path} is on {directory.kind}; expected tmpfs or hugetlbfs")
    if problem := directory_problem(directory.path, os.fstat(directory.descriptor)):
        raise ConfigError("arena-path", problem)


def _check_pages(config: Config, arena: _Directory, ledger: _Directory) -> None:
    """The file system, not the server, decides what pages the arena is on."""
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
