"""Announcements in a directory that several machines mount: files of marks, each written by one server alone.

A server appends to its own file and reads all of them: two machines cannot safely append to one file of a network file
system. Errors leave as OSError.
"""

import errno
import os
import secrets
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from kvserver.remote.announcement import MARK_BYTES
from kvserver.remote.store import Announced, Cursor

FILE_BYTES_MAX = 1 << 20
"""A server begins another file then."""
FILES_MAX = 64
"""Files of an epoch; whoever begins another removes those that were not written to for longest."""
OTHER_EPOCH_S_MAX = 86_400
"""Files of another epoch are removed when they were not written to for so long."""
READ_BYTES_MAX = 1 << 20
READ_S_MAX = 1.0
"""Afterwards the rest is left for the next time, if something was read."""
UNREADABLE = (errno.ENOENT, errno.ELOOP, errno.EACCES, errno.ESTALE)
"""Answers for a file that is gone, or that this server cannot read: the others are read."""


class AnnouncementFiles:
    """The announcements of one namespace. Calls may come from one thread at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer = secrets.token_hex(8)
        self._begun = 0
        """Files that this server has begun."""
        self._mine: tuple[int, Path, int] | None = None
        """The epoch that was appended to last, the file that this server appends to, and its bytes."""

    def append(self, epoch: int, batch: bytes) -> None:
        mine, self._mine = self._mine, None
        if mine is not None and mine[0] == epoch and mine[2] < FILE_BYTES_MAX:
            _, path, size = mine
        else:
            self._begun += 1
            path, size = self._folder / f"{epoch:016x}.{self._writer}.{self._begun:08x}", 0
            self._folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o660)
        written = 0
        try:
            written = os.write(descriptor, batch)
        finally:
            os.close(descriptor)
            if not size and not written:
                path.unlink(missing_ok=True)  # a full disk gets no file for each batch
            elif written % MARK_BYTES == 0:
                # Nobody could read on after a part of a mark: then the next batch begins another file.
                self._mine = epoch, path, size + written
        if not size:
            self._sweep(path)

    def read(self, epoch: int, after: Cursor | None) -> Announced:
        offsets = dict(after) if isinstance(after, Mapping) else {}
        pieces: list[bytes] = []
        left = READ_BYTES_MAX
        due_s = time.monotonic() + READ_S_MAX
        names = [name for name, _ in self._files(epoch)]
        for name in names:
            piece = self._behind(name, offsets.get(name, 0), left)
            if piece is None:
                offsets.pop(name, None)  # it has begun anew, or is gone: what it has now is read next time
                continue
            offsets[name] = offsets.get(name, 0) + len(piece)
            pieces.append(piece)
            left -= len(piece)
            # Without anything new it goes on, or files far down the list would never be reached on a slow file system.
            if left <= 0 or (left < READ_BYTES_MAX and time.monotonic() > due_s):
                left = 0
                break
        kept = {name: offset for name, offset in offsets.items() if name in names}
        return Announced(b"".join(pieces), kept, left > 0)

    def drop(self, epoch: int) -> None:
        for name, _ in self._files(epoch):
            (self._folder / name).unlink(missing_ok=True)

    def _behind(self, name: str, offset: int, most_bytes: int) -> bytes | None:
        """Whole marks of a file behind an offset; None if it is shorter than that, not there, or no plain file."""
        # It is opened each time: a size that a network file system remembers may be old.
        try:
            descriptor = os.open(self._folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as problem:
            if problem.errno in UNREADABLE:
                return None
            raise
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_size < offset:
                return None
            piece = os.pread(descriptor, most_bytes, offset)
        finally:
            os.close(descriptor)
        return piece[: len(piece) // MARK_BYTES * MARK_BYTES]

    def _files(self, epoch: int | None = None) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """Files of an epoch, or of all, in the order of their names: those of a server as it has begun them."""
        beginning = "" if epoch is None else f"{epoch:016x}."
        with suppress(FileNotFoundError), os.scandir(self._folder) as entries:
            found = {entry.name: entry for entry in entries if entry.name.startswith(beginning)}
            yield from sorted(found.items())

    def _sweep(self, newest: Path) -> None:
        """Removes old files. Their age is told by the file system's clock: machines' clocks differ."""
        now_s = newest.stat().st_mtime
        epoch = newest.name.partition(".")[0]
        same: list[tuple[float, str]] = []
        for name, entry in self._files():
            with suppress(OSError):
                age_s = now_s - entry.stat(follow_symlinks=False).st_mtime
                if name.startswith(f"{epoch}."):
                    same.append((age_s, name))
                elif age_s > OTHER_EPOCH_S_MAX:
                    (self._folder / name).unlink()
        for _, name in sorted(same)[FILES_MAX:]:
            with suppress(OSError):
                (self._folder / name).unlink()
