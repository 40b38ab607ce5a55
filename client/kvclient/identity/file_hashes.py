"""BLAKE3 hashes of whole files, computed once per machine and kept.

A model's weights are many gigabytes, and several ranks of several engines need the same hashes. A file is recognized by
device, inode, size and times, which change when it is written or replaced. Hashes are kept in a folder that the user
owns, and one process at a time computes one. Without such a folder each process hashes for itself. A kept file that is
damaged or belongs to another user is ignored.
"""

import fcntl
import hashlib
import json
import os
import stat as stats
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from blake3 import blake3

KEPT, LOCK = "weights.json", "weights.lock"
KEPT_FILES_MAX = 4096
KEPT_BYTES_MAX = 4 << 20
PIECE_BYTES = 8 << 20
THREADS_MAX = 8
SETTLED_S = 2.0
"""Age below which a file's hash is not kept. Such a file may change again without a new time, because file systems have
coarse clocks, the coarsest with steps of 2 s."""
PATIENCE_BYTES_PER_S = 20e6
"""Least speed expected of another process that hashes a file. A slower one is not waited for."""


class FileId(NamedTuple):
    device: int
    inode: int
    bytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, stat: os.stat_result) -> "FileId":
        return cls(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


class Seen(NamedTuple):
    """A file and its stat values when it was seen."""

    path: Path
    id: FileId

    @classmethod
    def at(cls, path: Path) -> "Seen":
        return cls(path, FileId.of(path.stat()))


class Hashed(NamedTuple):
    blake3: str
    sha256: str = ""
    """Empty unless somebody has asked for it."""


class Changed(Exception):
    """A file has changed since it was seen."""


class Hashes:
    """The hashes of files on this machine. Calls may take minutes."""

    def __init__(self, folder: Path | None = None, *, settled_s: float = SETTLED_S) -> None:
        """folder: where hashes are kept, by default own_folder()."""
        self._folder = folder if folder is not None else own_folder()
        self._settled_ns = int(settled_s * 1e9)
        self._known: dict[FileId, Hashed] = {}
        """Hashes known in this process."""

    def kept(self, seen: Seen, *, wants_sha256: bool = False) -> Hashed | None:
        found = self._known.get(seen.id)
        if found is None and self._folder is not None:
            found = _read(self._folder / KEPT).get(_key(seen.id))
        if found is not None:
            self._known[seen.id] = found
        return None if found is None or (wants_sha256 and not found.sha256) else found

    def of(self, seen: Seen, *, wants_sha256: bool = False) -> Hashed:
        """Hash the file, or wait for another process that does. OSError if it cannot be read, Changed if it has
        changed."""
        found = self.kept(seen, wants_sha256=wants_sha256)
        if found is None:
            with _locked(self._folder, 10 + seen.id.bytes / PATIENCE_BYTES_PER_S):
                found = self.kept(seen, wants_sha256=wants_sha256)
                if found is None:
                    found = self._known[seen.id] = _hash(seen, wants_sha256=wants_sha256)
                    self._keep(seen, found)
        if FileId.of(seen.path.stat()) != seen.id:
            raise Changed(str(seen.path))
        return found

    # ---------------------------------------------------------------- the kept file

    def _keep(self, seen: Seen, found: Hashed) -> None:
        """Replace the kept file as a whole, so that readers see the old or the new one. A failure only costs another
        hash."""
        if self._folder is None or time.time_ns() - max(seen.id.ctime_ns, seen.id.mtime_ns) < self._settled_ns:
            return
        entries = _read(self._folder / KEPT)
        entries.pop(_key(seen.id), None)
        entries[_key(seen.id)] = found
        newest = dict(list(entries.items())[-KEPT_FILES_MAX:])
        text = json.dumps({"version": 1, "files": {key: list(entry) for key, entry in newest.items()}})
        draft = self._folder / f"{KEPT}.{os.getpid()}"
        try:
            with suppress(FileNotFoundError):
                draft.unlink()
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
                file.write(text)
            draft.replace(self._folder / KEPT)
        except OSError:
            with suppress(OSError):
                draft.unlink()


def own_folder() -> Path | None:
    """The user's cache folder, or else a user's folder in the temporary directory."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    with suppress(RuntimeError):  # the user has no home
        if (folder := _made(cache.expanduser() / "kvserver")) is not None:
            return folder
    return _made(Path(tempfile.gettempdir()) / f"kvserver-{os.geteuid()}")


def _made(folder: Path) -> Path | None:
    """Create the folder. None if it does not belong to the user alone, or is not writable."""
    if not folder.is_absolute():
        return None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        stat = folder.lstat()
        is_own = stats.S_ISDIR(stat.st_mode) and stat.st_uid == os.geteuid() and not stat.st_mode & 0o077
        return folder if is_own and os.access(folder, os.W_OK | os.X_OK) else None
    except OSError:
        return None


def _key(id_: FileId) -> str:
    return "-".join(map(str, id_))


def _read(path: Path) -> dict[str, Hashed]:
    """The kept hashes, oldest first. Empty if the file is damaged or belongs to another user."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            stat = os.fstat(descriptor)
            is_own = stat.st_uid == os.geteuid() and not stat.st_mode & 0o022
            if not stats.S_ISREG(stat.st_mode) or not is_own or stat.st_size > KEPT_BYTES_MAX:
                return {}
            files = json.loads(file.read())["files"]
            return {key: Hashed(*entry) for key, entry in files.items() if _is_whole(entry)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def _is_whole(entry: Any) -> bool:
    if not isinstance(entry, list) or len(entry) != 2 or not all(isinstance(text, str) for text in entry):
        return False
    return (
        all(set(text) <= set("0123456789abcdef") for text in entry) and len(entry[0]) == 64 and len(entry[1]) in (0, 64)
    )


@contextmanager
def _locked(folder: Path | None, patience_s: float) -> Iterator[None]:
    """Lock the folder for one process. After `patience_s` this process goes on too, because the holder may be
    stopped."""
    try:
        if folder is None:
            raise OSError("no folder")
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        yield
        return
    try:
        due_s = time.monotonic() + patience_s
        while time.monotonic() < due_s:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.02)
            except OSError:  # a file system without locks
                break
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # for all copies of the descriptor, also a forked child's
        os.close(descriptor)


# ---------------------------------------------------------------- one file


def threads() -> int:
    """Half of the CPUs that this process may use, because a starting engine needs some too."""
    return max(1, min(THREADS_MAX, len(os.sched_getaffinity(0)) // 2))


def _hash(seen: Seen, *, wants_sha256: bool) -> Hashed:
    """Hash with read(), not mmap: a file that is truncated meanwhile is then an error, and does not kill the
    process."""
    content = blake3(max_threads=threads())
    sha256 = hashlib.sha256() if wants_sha256 else None
    piece = memoryview(bytearray(min(PIECE_BYTES, max(1, seen.id.bytes))))
    with open(seen.path, "rb", buffering=0) as file:
        _check(file.fileno(), seen)
        place = 0
        while count := file.readinto(piece):
            place += count
            os.posix_fadvise(file.fileno(), place, PIECE_BYTES, os.POSIX_FADV_WILLNEED)
            content.update(piece[:count])
            if sha256 is not None:
                sha256.update(piece[:count])
        _check(file.fileno(), seen)
        if place != seen.id.bytes:
            raise Changed(str(seen.path))
    return Hashed(content.hexdigest(), sha256.hexdigest() if sha256 is not None else "")


def _check(descriptor: int, seen: Seen) -> None:
    if FileId.of(os.fstat(descriptor)) != seen.id:
        raise Changed(str(seen.path))
