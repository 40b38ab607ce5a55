"""The arena on a medium that is no memory of this machine: a directory on ext4 or xfs, or a device DAX.

Rule 1: nothing that lies there is believed. Such a medium keeps its bytes when the machine ends, without those that
were still in the processors' caches. So the ledger is a memfd, and each start begins with an empty arena.
Rule 2: nobody's data are written over. In a directory the arena is a file without a name, which is gone with the last
process that maps it. A device has no names: whoever names it gives away all that lies on it.
Rule 3: every byte is the arena's before the first is used. A hole in a file would be a SIGBUS on a full file system.
Rule 4: children inherit the descriptor with the lock of a device. So it is free when nobody can write to it any more.
"""

import fcntl
import logging
import os
from pathlib import Path

import msgspec

from kvserver import logs
from kvserver.config.config import Config
from kvserver.config.paths import holder_of, is_char_device, outside_memory
from kvserver.errors import ConfigError
from kvserver.private_files import owner_problem
from kvserver.supervisor.arena_files import ARENA, ArenaFiles, claim
from kvserver.transfer.native import create_memfd, is_dax

SYS = Path("/sys")
ALIGN_BYTES = 2 << 20
"""Alignment of a device that does not say it."""


class MappedArena:
    """A keeper that keeps nothing. Its directory or device is locked from construction to close()."""

    takes_memory = False

    def __init__(self, config: Config, where: str, lock: int) -> None:
        self._where = where
        self._lock = lock
        for key, memory in (("huge_page_bytes", 0), ("numa_node", -1), ("ledger_path", "")):
            if (value := getattr(config, key)) != memory:
                expected = f"{key}={memory!r}, since arena_path={config.arena_path!r} is {where}"
                raise ConfigError("arena-path", f"{key}={value!r} is for an arena in memory; expected {expected}")

    def close(self) -> None:
        os.close(self._lock)

    def take(self) -> dict[str, int]:
        return {}

    def undead(self) -> str:
        return ""

    def doubt(self) -> str:
        return ""

    def forget(self, _what: str) -> bool:
        return True

    def keep(self, _what: str, _descriptor: int) -> bool:
        """Always True: it is no trouble that nothing is kept."""
        return True

    def create(self, what: str, size: int) -> int:
        """The arena, or a memfd for the ledger; the caller's descriptor. Raises OSError."""
        return self._arena(size) if what == ARENA else int(create_memfd(what, size))

    def check_room(self, missing: dict[str, int]) -> None:
        """Raises ConfigError if there is no room for the arena. missing: bytes still to be allocated, by name."""
        if (room := self._room_bytes()) < missing[ARENA]:
            said = f"{self._where} has {room} bytes; expected {missing[ARENA]} for arena_bytes"
            raise ConfigError("arena-memory", said)

    def _arena(self, size: int) -> int:
        raise NotImplementedError

    def _room_bytes(self) -> int:
        raise NotImplementedError


class ArenaOnStorage(MappedArena):
    """An arena in a file without a name, in a directory on ext4 or xfs."""

    def __init__(self, config: Config) -> None:
        """Claims the directory. Raises ConfigError if it cannot be used, or if a running server uses it."""
        directory = claim(config.arena_path)
        try:
            super().__init__(config, f"{directory.path} on {directory.kind}", directory.descriptor)
            if config.arena_reach == "register":
                said = f"arena_reach=register pins the arena, and Linux pins no file on {directory.kind} for long"
                raise ConfigError("arena-path", f"{said}; expected auto or bounce")
        except ConfigError:
            os.close(directory.descriptor)
            raise

    def _arena(self, size: int) -> int:
        descriptor = os.open(".", os.O_TMPFILE | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=self._lock)
        try:
            os.posix_fallocate(descriptor, 0, size)
            if not is_dax(descriptor):
                why = "it is not mounted with DAX: the arena lies in the page cache, and is written to the storage"
                logs.event(logging.WARNING, "arena on storage", ("where", self._where), ("why", why))
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def _room_bytes(self) -> int:
        space = os.fstatvfs(self._lock)
        return space.f_bavail * space.f_frsize


class ArenaOnDevice(MappedArena):
    """An arena that is the beginning of a device DAX, such as CXL memory that is no memory of the kernel."""

    def __init__(self, config: Config) -> None:
        """Claims the device. Raises ConfigError if it cannot be used, or if a process of a server still has it."""
        path = config.arena_path
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as problem:
            raise ConfigError("arena-path", f"{path}: {problem.strerror}") from problem
        try:
            super().__init__(config, f"the device {path}", descriptor)
            self._check(config, os.fstat(descriptor))
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            whose = holder_of(descriptor)
            os.close(descriptor)
            said = f"{path} is used by another server, or by a process of an earlier one{whose}"
            raise ConfigError("arena-in-use", said) from None
        except ConfigError:
            os.close(descriptor)
            raise

    def _check(self, config: Config, found: os.stat_result) -> None:
        about = SYS / f"dev/char/{os.major(found.st_rdev)}:{os.minor(found.st_rdev)}"
        if (kind := (about / "subsystem").resolve().name) != "dax":
            raise ConfigError("arena-path", f"{config.arena_path} is a device of {kind}; expected a device DAX")
        if problem := owner_problem(config.arena_path, found):
            raise ConfigError("arena-path", problem)
        self._bytes = _number(about / "size", 0)
        align = _number(about / "align", ALIGN_BYTES)
        if config.arena_bytes % align:
            said = (
                f"arena_bytes={config.arena_bytes} must be a multiple of {align}, the alignment of {config.arena_path}"
            )
            raise ConfigError("arena-path", f"{said}; with such a slab_bytes it is one")
        if config.scrub_bytes_per_s and config.digests == "on":
            said = f"scrub_bytes_per_s={config.scrub_bytes_per_s} reads the arena as a file, which a device is not"
            raise ConfigError("arena-path", f"{said}; expected 0")

    def _arena(self, _size: int) -> int:
        return os.dup(self._lock)

    def _room_bytes(self) -> int:
        return self._bytes


def settled(config: Config, keeper: ArenaFiles | MappedArena | None) -> Config:
    """The configuration for movers: GPUs reach a file on storage by pinned memory of the mover's own."""
    if not isinstance(keeper, ArenaOnStorage):
        return config
    return msgspec.structs.replace(config, arena_reach="bounce")


def keeper_at(config: Config) -> ArenaFiles | MappedArena | None:
    """The keeper of the arena at arena_path; None without one. Raises ConfigError."""
    if not config.arena_path:
        return None
    if is_char_device(config.arena_path):
        return ArenaOnDevice(config)
    return ArenaOnStorage(config) if outside_memory(config.arena_path) else ArenaFiles(config)


def _number(path: Path, otherwise: int) -> int:
    """The number in a file of the kernel; `otherwise` where there is none."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return otherwise
