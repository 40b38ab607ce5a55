"""Paths and endpoints of a server: defaults, checks, and the file systems and locks of directories."""

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from kvserver.errors import ConfigError

SOCKET_SUFFIXES = (".local", ".lock")
"""Files beside the socket: the local door, and the lock that a living server holds."""
SUN_PATH_BYTES_MAX = 107
"""sun_path of a Unix socket has 108 bytes, one of them for the final zero."""


def default_socket() -> str:
    """The default socket path for a server of this user."""
    if os.geteuid() == 0:
        return "/run/kvserver/kvserver.sock"
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    directory = f"{runtime}/kvserver" if runtime.startswith("/") else f"/tmp/kvserver-{os.geteuid()}"
    return f"{directory}/kvserver.sock"


def default_cache_dir() -> str:
    """The default directory for files that a server of this user can make again."""
    if os.geteuid() == 0:
        return "/var/cache/kvserver"
    caches = os.environ.get("XDG_CACHE_HOME", "")
    return str(Path(caches) / "kvserver" if caches.startswith("/") else Path.home() / ".cache" / "kvserver")


def check_socket(socket: str) -> None:
    """Raises ConfigError unless the path is absolute and short enough for a socket."""
    if not socket.startswith("/") or "\0" in socket or socket.endswith("/"):
        raise ConfigError("config-socket", f"socket={socket!r} must be the absolute path of a file")
    most = SUN_PATH_BYTES_MAX - max(len(suffix) for suffix in SOCKET_SUFFIXES)
    came = len(os.fsencode(socket))
    if came > most:
        raise ConfigError("config-socket", f"socket={socket!r} has {came} bytes; as a socket's path it may have {most}")


def check_directory(key: str, directory: str) -> None:
    """Raises ConfigError unless the value is empty or the absolute path of a directory other than /."""
    if directory and (not directory.startswith("/") or "\0" in directory or os.path.normpath(directory) == "/"):
        raise ConfigError("config-path", f"{key}={directory!r} must be the absolute path of a directory below /")


def check_cache_directory(directory: str) -> None:
    """Raises ConfigError if the path can never become a directory. An unwritable one costs only time."""
    try:
        is_directory = Path(directory).is_dir() or not os.path.lexists(directory)
    except OSError:
        is_directory = False
    above = next((parent for parent in Path(directory).parents if os.path.lexists(parent)), Path("/"))
    if not is_directory or not above.is_dir():
        raise ConfigError("cache-dir", f"cache_dir={directory!r}: expected a directory, or the name of one to be made")


MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")


def takes_memory(file_system: str) -> str:
    """The warning about a disk tier on a file system in memory."""
    return f"it lies on {file_system}: what is on this disk takes memory beside the arena, and is lost with the machine"


STORAGE_FILE_SYSTEMS = ("ext4", "xfs")
"""File systems that an arena may lie on: they can be mounted with DAX, and write in place what was allocated."""


def is_char_device(path: str) -> bool:
    try:
        return stat.S_ISCHR(os.stat(path).st_mode)
    except OSError:
        return False


def outside_memory(path: str) -> str:
    """The medium of an arena_path in words, if it is no memory of this machine; empty if it is, or cannot be used."""
    if is_char_device(path):
        return f"the device {path}"
    there = next((each for each in (path, *map(str, Path(path).parents)) if path and os.path.lexists(each)), "")
    with suppress(OSError), opened(there) as descriptor:
        if (kind := mount_of(descriptor).file_system) in STORAGE_FILE_SYSTEMS:
            return f"{path} on {kind}"
    return ""


class Mount(NamedTuple):
    """The mount that a directory lies on."""

    number: int
    """The kernel's id of the mount; two mounts of one file system have different ids."""
    file_system: str
    """The file system's type, as mount(8) calls it."""


def mount_of(descriptor: int) -> Mount:
    """The mount of an open directory."""
    about = Path(f"/proc/self/fdinfo/{descriptor}").read_text().split()
    number = about[about.index("mnt_id:") + 1]
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        if line.split()[0] == number:
            return Mount(int(number), line.partition(" - ")[2].split()[0])
    return Mount(int(number), "an unknown file system")


@contextmanager
def opened(directory: str) -> Iterator[int]:
    """Opens a directory and yields its descriptor. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def is_locked(descriptor: int) -> bool:
    """Whether an open directory is locked; a store locks its directory while it is open.

    Tries a shared lock, so that two processes that check at the same time do not disturb each other."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def holder_of(descriptor: int) -> str:
    """The process that has locked an open directory, as a suffix for messages; empty if unknown (other containers)."""
    status = os.fstat(descriptor)
    wanted = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    with suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            if words[1] == "FLOCK" and words[5] == wanted and int(words[4]) > 0:
                return f" (process {words[4]})"
    return ""
