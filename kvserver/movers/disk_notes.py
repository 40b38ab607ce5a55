"""Notes beside a device's store: for each namespace its document, and the generation up to which its records are void.

One small file each, written whole beside its old self, made durable, and renamed over it. A file that cannot be read
back is left alone and told: without its note a namespace is not recovered, which costs hits and nothing else.

A full file system has no room for a file beside the old one, and a Clear must hold there too. So a note that exists is
then overwritten in place, by one write that is no shorter than what was there: a kill leaves the old or the new note.

Notes are forgotten, or there would be more of them for ever. Whoever forgets one notes first up to where: of namespaces
without a note beside it everything up to there is void. So a Clear stays one also for a device that was away and comes
back with a note which the others have forgotten.

What no device could note is kept aside, in a directory on another disk, which is read like one more device. So a Clear
stays one where all devices were read-only, or failed, and the server starts again when they are well.
"""

import errno
import os
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvserver.private_files import create, directory_problem, write_whole

FOLDER = "kvserver.notes"
NOTE_BYTES_MAX = 1 << 20
ASIDE_MAX = 4096
"""Notes that are kept aside. Whoever clears more while no device takes a note is told so, as ever."""
TRIAL_BYTES = 1 << 18
"""Of an ordinary note some 100."""


class NoteFile(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    format: int
    namespace: bytes
    document: bytes
    void: int
    crc32: int
    """Of what is before it."""


class Known(NamedTuple):
    """What a note says."""

    document: bytes
    void: int


FORMAT = 1
FORGOTTEN = sha256(b"kvserver forgotten notes").digest()
"""In place of a namespace, in a note: up to its `void` the records are void of namespaces that the device has no note
of."""
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(NoteFile).decode


def load(directory: str) -> tuple[dict[bytes, Known], int]:
    """What a device knows, by namespace, and how many files there are no notes. Raises OSError."""
    folder = Path(directory) / FOLDER
    notes: dict[bytes, Known] = {}
    damaged = 0
    if not folder.is_dir():
        return notes, damaged
    for path in sorted(folder.glob("*.note")):
        with path.open("rb") as file:
            content = file.read(NOTE_BYTES_MAX)
        note = _read(content)
        if note is None or path.stem != note.namespace.hex():
            damaged += 1
        else:
            notes[note.namespace] = Known(note.document, note.void)
    return notes, damaged


def save(directory: str, namespace: bytes, document: bytes, void: int) -> None:
    """Durable when it returns. An empty document keeps the one that is there. Raises OSError."""
    folder = Path(directory) / FOLDER
    if not folder.exists():
        folder.mkdir(mode=0o700)
        make_durable(directory)
    path = folder / f"{namespace.hex()}.note"
    known = _read(path.read_bytes()) if path.exists() else None
    if known is not None:
        document, void = document or known.document, max(void, known.void)
        if (document, void) == (known.document, known.void):
            _fsync(path)  # whoever wrote it may not have come so far
            make_durable(folder)
            return
    try:
        write_whole(path, _content(namespace, document, void), durable=True)
        make_durable(folder)
    except OSError:
        with suppress(OSError):
            path.with_name(f"{path.name}.new").unlink()
        if known is None:
            raise
        _overwrite(path, _content(namespace, known.document, void))
        if document != known.document:
            raise


def _overwrite(path: Path, content: bytes) -> None:
    """Needs no room on the file system: the block is there. Durable when it returns. Raises OSError."""
    with path.open("r+b", buffering=0) as file:
        if file.write(content) < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(file.fileno())


def forget(directory: str, namespaces: Iterable[bytes], void: int) -> None:
    """Removes these notes; up to `void` there are no records of theirs any more, anywhere. Raises OSError."""
    save(directory, FORGOTTEN, b"", void)
    for namespace in namespaces:
        (Path(directory) / FOLDER / f"{namespace.hex()}.note").unlink(missing_ok=True)


def together(devices: Sequence[Mapping[bytes, Known]]) -> dict[bytes, Known]:
    """What devices know that are used together, each of them by namespace: the last document, and the latest void."""
    nothing = Known(b"", 0)
    known: dict[bytes, Known] = {}
    for namespace in set[bytes]().union(*devices):
        said = [device.get(namespace, nothing).document for device in devices]
        voids = [device.get(namespace, device.get(FORGOTTEN, nothing)).void for device in devices]
        known[namespace] = Known(next(filter(None, reversed(said)), b""), max(voids))
    return known


def complete(directory: str, known: Mapping[bytes, Known]) -> None:
    """Notes what devices know together. What was forgotten comes last: until then, what this one has no note of is not
    void. Raises OSError."""
    mine, _ = load(directory)
    for namespace in sorted(known, key=lambda namespace: namespace == FORGOTTEN):
        if mine.get(namespace) != known[namespace]:
            save(directory, namespace, *known[namespace])


def try_to_write(directory: str) -> None:
    """Raises OSError where not even a few notes have room."""
    folder = Path(directory) / FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    trial = folder / "trial.new"
    trial.unlink(missing_ok=True)
    try:
        with create(trial) as file:
            file.write(bytes(TRIAL_BYTES))
            file.flush()
            os.fsync(file.fileno())
    finally:
        trial.unlink(missing_ok=True)


def try_to_overwrite(directory: str) -> None:
    """Writes a note as it is, where there is one. Raises OSError where not even that is taken: then other notes that
    should be there may be missing."""
    for path in sorted((Path(directory) / FOLDER).glob("*.note"))[:1]:
        _overwrite(path, path.read_bytes())


def aside_of(cache_directory: str, directories: Sequence[str]) -> str:
    """Where the notes are kept that none of these devices could write."""
    devices = sha256("\0".join(sorted(directories)).encode()).hexdigest()
    return os.path.join(cache_directory, f"notes-{devices[:16]}")


def load_aside(directory: str) -> dict[bytes, Known]:
    """What is kept aside; nothing where others could have written it. Raises OSError."""
    folder = Path(directory) / FOLDER
    if not folder.is_dir() or any(directory_problem(str(at), at.lstat()) for at in (Path(directory), folder)):
        return {}
    return load(directory)[0]


def save_aside(directory: str, namespace: bytes, document: bytes, void: int) -> None:
    """Durable when it returns. Raises OSError."""
    path = Path(directory)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if problem := directory_problem(directory, path.lstat()):
        raise PermissionError(errno.EPERM, problem)
    make_durable(path.parent)
    if len(load(directory)[0]) >= ASIDE_MAX:
        raise OSError(errno.EDQUOT, f"{ASIDE_MAX} notes are kept there already")
    save(directory, namespace, document, void)


def erase(directory: str) -> None:
    """Removes all notes of a device, and nothing else. Raises OSError."""
    folder = Path(directory) / FOLDER
    if folder.is_dir():
        for path in [*folder.glob("*.note"), *folder.glob("*.new")]:
            path.unlink()
        if not any(folder.iterdir()):
            folder.rmdir()


def make_durable(directory: str | Path) -> None:
    """Which files are in it. Raises OSError."""
    _fsync(directory)


def _fsync(path: str | Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(content: bytes) -> NoteFile | None:
    try:
        note: NoteFile = _decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    sound = note.format == FORMAT and note.crc32 == _crc(note.namespace, note.document, note.void)
    return note if sound else None


def _content(namespace: bytes, document: bytes, void: int) -> bytes:
    """A NoteFile whose length depends on its document alone: numbers are as long as they can be."""
    before = b"".join((b"\x95", *map(_encode, (FORMAT, namespace, document))))
    return before + struct.pack(">BQBI", 0xCF, void, 0xCE, _crc(namespace, document, void))


def _crc(namespace: bytes, document: bytes, void: int) -> int:
    return zlib.crc32(_encode([FORMAT, namespace, document, void]))
