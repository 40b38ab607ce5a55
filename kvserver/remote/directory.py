"""A directory that several machines mount: one file for a chunk, published whole or not at all.

A file is written under another name and then linked to its own, which only one of two writers can do. It never changes
afterwards: a reader that has opened it reads one write of it, also while another machine removes or replaces it.

A call on a file system that hangs cannot be ended from inside. Deadlines are looked at between two calls.
"""

import errno
import os
import stat
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate, islice
from pathlib import Path
from typing import Never

from kvserver.remote.chunk_value import (
    FORMAT,
    HEAD_BYTES_MAX,
    ChunkName,
    Head,
    NamespaceName,
    WrongValue,
    decode_of,
    digest_from_text,
    encode,
    epoch_from_text,
    head_bytes,
    text_of,
)
from kvserver.remote.directory_log import AnnouncementFiles
from kvserver.remote.store import Announced, Cursor, Facts, Gone, Listed, Problem, Sources, StoreError

UNFINISHED = f"kv{FORMAT}.unfinished"
"""Folder of files that are being written. A file there is old when its writer must be gone."""
UNFINISHED_S_MAX = 3600
NOTE = "note"
ANNOUNCED = "announced"
"""Folder of a namespace's announcements."""
LOGS_MAX = 256
"""Namespaces whose file of announcements is gone on with. Another one begins a new file."""
NOTE_BYTES_MAX = 1 << 16
USE_TOLD_EVERY_S = 3600
"""A file's time is set to that of its last use, give or take so much: each time costs a file system a write."""
IOV_MAX = 1024
LISTED_AT_A_TIME = 1000
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""Answers of file systems without hard links."""
CODES: dict[int, Problem] = {
    errno.ENOSPC: "remote-full",
    errno.EDQUOT: "remote-full",
    errno.EFBIG: "remote-full",
    errno.EACCES: "remote-denied",
    errno.EPERM: "remote-denied",
    errno.EROFS: "remote-denied",
    errno.ETIMEDOUT: "remote-slow",
    errno.ELOOP: "remote-refused",
    errno.ENOTDIR: "remote-refused",
    errno.EISDIR: "remote-refused",
}
"""errno -> what it means for a store; anything else is "remote-down"."""


class DirectoryStore:
    """A Store in a directory (kvserver/remote/store.py)."""

    def __init__(self, root: str, *, probe_s: float = 0.3, bulk_s: float = 10.0, only_looks: bool = False) -> None:
        """root: must exist; whoever may write to it is trusted. Raises StoreError.

        only_looks: nothing is made or removed there now, so that a read-only mount will do."""
        self._root = Path(root)
        self._node = root
        self._probe_s = probe_s
        self._bulk_s = bulk_s
        self._announcements: OrderedDict[NamespaceName, AnnouncementFiles] = OrderedDict()
        with self._as_store_errors():
            if not self._root.is_dir():
                raise FileNotFoundError(errno.ENOENT, "no such directory; is the file system mounted?")
            self._unfinished = self._root / UNFINISHED
            if not only_looks:
                self._unfinished.mkdir(exist_ok=True)
                self._sweep()

    def facts(self) -> Facts:
        with self._as_store_errors():
            room = os.statvfs(self._root)
        free = 100 * room.f_bavail // max(1, room.f_blocks)
        return Facts(
            "directory",
            f"{free} % free",
            evicts=False,
            warnings=("nothing removes old chunks by itself: `kvserver remote sweep --older-than` does",),
        )

    def node_of(self, name: ChunkName) -> str:
        return self._node

    def nodes(self) -> frozenset[str]:
        return frozenset({self._node})

    def heads(self, names: Sequence[ChunkName], shards: int) -> list[Head | StoreError | WrongValue | None]:
        due_s = time.monotonic() + self._probe_s
        found = [self._head(name, head_bytes(shards), due_s, counts=True) for name in names]
        if None in found and (away := self._away()):
            return [away if head is None else head for head in found]
        return found

    def read(self, name: ChunkName, head: Head, targets: Sequence[memoryview | None]) -> None:
        due_s = time.monotonic() + self._bulk_s
        with self._as_store_errors():
            try:
                with self._opened(self._path(name)) as descriptor:
                    self._read(descriptor, head, targets, due_s)
            except FileNotFoundError as missing:
                raise Gone("remote-gone", "is not there any more") from missing
            except WrongValue as foreign:
                raise Gone("remote-gone", foreign.message) from foreign

    def _read(self, descriptor: int, head: Head, targets: Sequence[memoryview | None], due_s: float) -> None:
        expected = encode(head)
        if os.pread(descriptor, len(expected), 0) != expected:
            raise Gone("remote-gone", "another write of it is there")
        starts = accumulate((shard.payload_bytes for shard in head.shards), initial=len(expected))
        for target, start in zip(targets, starts, strict=False):
            if target is not None:
                self._read_whole(descriptor, target, start, due_s)

    def write(self, name: ChunkName, head: Head, sources: Sources) -> bool:
        path = self._path(name)
        with self._as_store_errors():
            if path.exists():
                return False
            with self._unfinished_file(f"{text_of(name.key)}.{head.write:016x}", [encode(head), *sources]) as written:
                return self._publish(written, path)

    def touch(self, name: ChunkName, head: Head) -> None:
        with self._as_store_errors(), suppress(FileNotFoundError):
            os.utime(self._path(name), follow_symlinks=False)

    def drop(self, name: ChunkName, head: Head | None) -> None:
        with self._as_store_errors():
            self._path(name).unlink(missing_ok=True)

    def drop_listed(self, of: NamespaceName, values: Sequence[Listed]) -> None:
        for value in values:
            self.drop(ChunkName(of, value.epoch, value.key, value.ranks), None)

    def notes(self, names: Sequence[NamespaceName]) -> list[bytes | None]:
        with self._as_store_errors():
            found = [self._note(name) for name in names]
        if None in found and (away := self._away()):
            raise away
        return found

    def make_note(self, name: NamespaceName, note: bytes) -> bool:
        with self._as_store_errors(), self._unfinished_file(_note_draft(name), [note]) as written:
            return self._publish(written, self._note_path(name))

    def replace_note(self, name: NamespaceName, note: bytes) -> None:
        with self._as_store_errors(), self._unfinished_file(_note_draft(name), [note]) as written:
            path = self._note_path(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            written.rename(path)

    def announce(self, of: NamespaceName, epoch: int, batch: bytes) -> None:
        with self._as_store_errors():
            self._announcements_of(of).append(epoch, batch)

    def announced(self, of: NamespaceName, epoch: int, after: Cursor | None) -> Announced:
        with self._as_store_errors():
            found = self._announcements_of(of).read(epoch, after)
        if not found.batch and (away := self._away()):
            raise away
        return found

    def drop_announced(self, of: NamespaceName, epoch: int) -> None:
        with self._as_store_errors():
            self._announcements_of(of).drop(epoch)

    def look(self, name: ChunkName) -> Head | None:
        found = self._head(name, HEAD_BYTES_MAX, time.monotonic() + self._probe_s, counts=False)
        if found is None and (away := self._away()):
            raise away
        if isinstance(found, StoreError | WrongValue):
            raise found
        return found

    def namespaces(self, tenant: str) -> Iterator[list[NamespaceName]]:
        if away := self._away():
            raise away
        for entries in self._entries(self._root / f"kv{FORMAT}" / tenant):
            digests = [digest_from_text(entry.name) for entry in entries]
            names = [NamespaceName(tenant, digest) for digest in digests if digest is not None]
            with self._as_store_errors():
                noted = [name for name in names if self._note_path(name).exists()]
            yield noted

    def values(self, of: NamespaceName) -> Iterator[list[Listed]]:
        if away := self._away():
            raise away
        for epochs in self._entries(self._root.joinpath(*of.pieces())):
            for folder in epochs:
                if (epoch := epoch_from_text(folder.name)) is not None:
                    yield from self._of_epoch(epoch, folder.path)

    def close(self) -> None:
        pass

    # ---------------------------------------------------------------- files

    def _away(self) -> StoreError | None:
        """An empty mount point has nothing, and knows nothing: it answers no question."""
        if self._unfinished.is_dir():
            return None
        return StoreError("remote-down", f"{UNFINISHED} is not there; is the file system mounted?", node=self._node)

    def _entries(self, folder: str | Path) -> Iterator[list[os.DirEntry[str]]]:
        """A folder's entries, some of them at a time; nothing if it is not there any more, or is no folder."""
        with self._as_store_errors(), suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
            while some := list(islice(entries, LISTED_AT_A_TIME)):
                yield some

    def _of_epoch(self, epoch: int, path: str) -> Iterator[list[Listed]]:
        for folders in self._entries(path):
            for folder in folders:
                for files in self._entries(folder.path):
                    yield [one for file in files for one in self._listed(epoch, file)]

    def _listed(self, epoch: int, file: os.DirEntry[str]) -> Iterator[Listed]:
        text, _, ranks = file.name.partition(".")
        key = digest_from_text(text)
        with self._as_store_errors(), suppress(FileNotFoundError):
            if key is not None and file.is_file(follow_symlinks=False):
                found = file.stat(follow_symlinks=False)
                yield Listed(epoch, key, ranks, "", found.st_size, found.st_mtime)

    def _path(self, name: ChunkName) -> Path:
        key = text_of(name.key)
        file = f"{key}.{name.ranks}" if name.ranks else key
        return self._root.joinpath(*name.of.pieces(), f"{name.epoch:016x}", key[:2], file)

    def _announcements_of(self, of: NamespaceName) -> AnnouncementFiles:
        if of not in self._announcements:
            if len(self._announcements) >= LOGS_MAX:
                self._announcements.popitem(last=False)
            self._announcements[of] = AnnouncementFiles(self._root.joinpath(*of.pieces(), ANNOUNCED))
        self._announcements.move_to_end(of)
        return self._announcements[of]

    def _note_path(self, name: NamespaceName) -> Path:
        return self._root.joinpath(*name.pieces(), NOTE)

    def _head(
        self, name: ChunkName, most_bytes: int, due_s: float, *, counts: bool
    ) -> Head | StoreError | WrongValue | None:
        """counts: as use, which a file's time tells."""
        if time.monotonic() > due_s:
            return StoreError("remote-slow", f"the heads took longer than {self._probe_s} s")
        try:
            with self._as_store_errors(), self._opened(self._path(name)) as descriptor:
                head = decode_of(name, os.pread(descriptor, most_bytes, 0))
                whole_bytes = len(encode(head)) + head.payload_bytes
                state = os.fstat(descriptor)
                if state.st_size != whole_bytes:
                    raise WrongValue("short", f"has {state.st_size} bytes; expected {whole_bytes}")
                if counts and time.time() - state.st_mtime > USE_TOLD_EVERY_S:
                    with suppress(OSError):  # a mount for reading
                        os.utime(descriptor)
                return head
        except StoreError as problem:
            return None if isinstance(problem.__cause__, FileNotFoundError) else problem
        except WrongValue as problem:
            return problem

    @contextmanager
    def _opened(self, path: Path) -> Iterator[int]:
        # A pipe or a device under our name must not keep us waiting.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise WrongValue("foreign", "is no plain file")
            yield descriptor
        finally:
            os.close(descriptor)

    def _read_whole(self, descriptor: int, target: memoryview, offset: int, due_s: float) -> None:
        done = 0
        while done < len(target):
            if time.monotonic() > due_s:
                raise StoreError("remote-slow", f"a read took longer than {self._bulk_s} s")
            count = os.preadv(descriptor, [target[done:]], offset + done)
            if count == 0:
                raise Gone("remote-gone", "is shorter than its head says")
            done += count

    @contextmanager
    def _unfinished_file(self, name: str, pieces: Sequence[bytes | memoryview]) -> Iterator[Path]:
        """A file with that content under a name that nobody reads; gone afterwards."""
        path = self._unfinished / f"{name}.{os.getpid()}.{time.monotonic_ns()}"
        due_s = time.monotonic() + self._bulk_s
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(path, flags, 0o660)
            try:
                self._write_whole(descriptor, [memoryview(piece) for piece in pieces], due_s)
            finally:
                os.close(descriptor)
            yield path
        finally:
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def _write_whole(self, descriptor: int, pieces: list[memoryview], due_s: float) -> None:
        while pieces:
            if time.monotonic() > due_s:
                raise StoreError("remote-slow", f"a write took longer than {self._bulk_s} s")
            count = os.writev(descriptor, pieces[:IOV_MAX])
            while pieces and count >= len(pieces[0]):
                count -= len(pieces.pop(0))
            if count:
                pieces[0] = pieces[0][count:]

    def _publish(self, written: Path, path: Path) -> bool:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(written, path, follow_symlinks=False)
        except FileExistsError:
            # NFS may carry a call out twice, and tell the second result.
            return os.path.samefile(written, path)
        except OSError as problem:
            if problem.errno not in NO_LINKS:
                raise
            # The last of two writers wins then. Both wrote the whole file, so no reader sees a mixture.
            written.rename(path)
        return True

    def _note(self, name: NamespaceName) -> bytes | None:
        try:
            with self._opened(self._note_path(name)) as descriptor:
                return os.pread(descriptor, NOTE_BYTES_MAX, 0)
        except FileNotFoundError:
            return None
        except WrongValue:
            return b""  # a damaged note

    def _sweep(self) -> None:
        """Removes what dead writers left. Its age is told by the file system's clock: machines' clocks differ."""
        with self._unfinished_file("clock", [b""]) as clock:
            now_s = clock.stat().st_mtime
            for entry in os.scandir(self._unfinished):
                with suppress(OSError):
                    if now_s - entry.stat(follow_symlinks=False).st_mtime > UNFINISHED_S_MAX:
                        os.unlink(entry.path)

    @contextmanager
    def _as_store_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as problem:
            self._raise(problem)

    def _raise(self, problem: OSError) -> Never:
        code = CODES.get(problem.errno or 0, "remote-down")
        raise StoreError(code, problem.strerror or str(problem), node=self._node) from problem


def _note_draft(name: NamespaceName) -> str:
    return f"{NOTE}.{text_of(name.namespace)}"
