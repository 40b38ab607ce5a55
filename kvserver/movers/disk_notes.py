"""Notes beside a device's store: for each namespace its document, and the generation up to which its records are void.

Each note is one small file. A new version is written to a second file, made durable, and renamed over the old one. A
damaged file is left alone and counted: without its note a namespace is not recovered, which costs only hits.

A full file system has no room for a second file, and a Clear must hold there too. Then an existing note is overwritten
in place, by one write that is no shorter than the old content: a kill leaves the old or the new note.

Notes are removed at some time, as they would accumulate otherwise. Before that, one note under FORGOTTEN records a
generation: records up to it are void in every namespace without a note. So a Clear also holds for a device that was
away and comes back with a note that the others have removed.

A note that no device could write is kept aside, in a directory on another disk that is read like one more device. So a
Clear holds even if all devices were read-only or failing, and work again at the next start.
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
NOTE_BYTES_MAX = 1 << 17
"""A longer file is damaged. Documents have half of it at most (tiers/records.py), and a report has to have room."""
ASIDE_MAX = 4096
"""Notes that are kept aside at most. Above that save_aside() fails."""
TRIAL_BYTES = 1 << 18
"""Size of the trial file, as large as some 100 ordinary notes."""


class NoteFile(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    format: int
    namespace: bytes
    document: bytes
    void: int
    crc32: int
    """Checksum of the fields before it."""


class Known(NamedTuple):
    """The content of a note."""

    document: bytes
    void: int


FORMAT = 1
FORGOTTEN = sha256(b"kvserver forgotten notes").digest()
"""Name of the note about removed notes, in place of a namespace. Up to its `void`, records are void in every namespace
without a note on the same device."""
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(NoteFile).decode


def load(directory: str) -> tuple[dict[bytes, Known], int]:
    """Namespace -> note of a device, and the number of damaged files. Raises OSError."""
    folder = Path(directory) / FOLDER
    notes: dict[bytes, Known] = {}
    damaged = 0
    if not folder.is_dir():
        return notes, damaged
    for path in sorted(folder.glob("*.note")):
        note = _read(path)
        if note is None or path.stem != note.namespace.hex():
            damaged += 1
        else:
            notes[note.namespace] = Known(note.document, note.void)
    return notes, damaged


def save(directory: str, namespace: bytes, document: bytes, void: int) -> None:
    """Saves a note durably. An empty document keeps the existing one, and `void` never decreases. Raises OSError."""
    folder = Path(directory) / FOLDER
    if not folder.exists():
        folder.mkdir(mode=0o700)
        make_durable(directory)
    path = folder / f"{namespace.hex()}.note"
    known = _read(path)
    if known is not None:
        document, void = document or known.document, max(void, known.void)
        if (document, void) == (known.document, known.void):
            _fsync(path)  # its writer may have died before it was durable
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
    """Overwrites a file durably and in place, which needs no free blocks. Raises OSError."""
    with path.open("r+b", buffering=0) as file:
        if file.write(content) < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(file.fileno())


def forget(directory: str, namespaces: Iterable[bytes], void: int) -> None:
    """Removes these notes, after noting under FORGOTTEN that their records up to `void` are void. Raises OSError."""
    save(directory, FORGOTTEN, b"", void)
    for namespace in namespaces:
        (Path(directory) / FOLDER / f"{namespace.hex()}.note").unlink(missing_ok=True)


def together(devices: Sequence[Mapping[bytes, Known]]) -> dict[bytes, Known]:
    """The combined notes of devices that are used together: for each namespace the last document, the highest void."""
    nothing = Known(b"", 0)
    known: dict[bytes, Known] = {}
    for namespace in set[bytes]().union(*devices):
        said = [device.get(namespace, nothing).document for device in devices]
        voids = [device.get(namespace, device.get(FORGOTTEN, nothing)).void for device in devices]
        known[namespace] = Known(next(filter(None, reversed(said)), b""), max(voids))
    return known


def complete(directory: str, known: Mapping[bytes, Known]) -> None:
    """Saves the combined notes on one device. Raises OSError.

    FORGOTTEN is saved last, because it makes namespaces void that this device has no note of yet."""
    mine, _ = load(directory)
    for namespace in sorted(known, key=lambda namespace: namespace == FORGOTTEN):
        if mine.get(namespace) != known[namespace]:
            save(directory, namespace, *known[namespace])


def try_to_write(directory: str) -> None:
    """Writes and removes a trial file. Raises OSError if there is no room for a few notes."""
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
    """Rewrites one existing note, unchanged. Raises OSError if even that fails: then other notes may be missing."""
    for path in sorted((Path(directory) / FOLDER).glob("*.note"))[:1]:
        _overwrite(path, path.read_bytes())


def aside_of(cache_directory: str, directories: Sequence[str]) -> str:
    """The directory for notes that none of these devices could write."""
    devices = sha256("\0".join(sorted(directories)).encode()).hexdigest()
    return os.path.join(cache_directory, f"notes-{devices[:16]}")


def load_aside(directory: str) -> dict[bytes, Known]:
    """The notes kept aside; none if other users could have written them. Raises OSError."""
    folder = Path(directory) / FOLDER
    if not folder.is_dir() or any(directory_problem(str(at), at.lstat()) for at in (Path(directory), folder)):
        return {}
    return load(directory)[0]


def save_aside(directory: str, namespace: bytes, document: bytes, void: int) -> None:
    """Saves a note durably in a directory aside. Raises OSError, also above ASIDE_MAX notes."""
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
    """Makes a directory's list of files durable. Raises OSError."""
    _fsync(directory)


def _fsync(path: str | Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: Path) -> NoteFile | None:
    """The note in a file; None if it is damaged or no file. Raises OSError."""
    if not path.is_file():
        return None  # opening a pipe would wait for ever
    with path.open("rb") as file:
        content = file.read(NOTE_BYTES_MAX)
    try:
        note: NoteFile = _decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    sound = note.format == FORMAT and note.crc32 == _crc(note.namespace, note.document, note.void)
    return note if sound else None


def _content(namespace: bytes, document: bytes, void: int) -> bytes:
    """An encoded NoteFile whose length depends only on its document: numbers have their longest encoding."""
    before = b"".join((b"\x95", *map(_encode, (FORMAT, namespace, document))))
    return before + struct.pack(">BQBI", 0xCF, void, 0xCE, _crc(namespace, document, void))


def _crc(namespace: bytes, document: bytes, void: int) -> int:
    return zlib.crc32(_encode([FORMAT, namespace, document, void]))
