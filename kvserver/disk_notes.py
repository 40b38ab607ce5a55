"""Notes beside a device's store: for each namespace its document, and the generation up to which its records are void.

One small file each, written whole beside its old self, made durable, and renamed over it. A file that cannot be read
back is left alone and told: without its note a namespace is not recovered, which costs hits and nothing else.
"""

import os
import zlib
from pathlib import Path

import msgspec

FOLDER = "kvserver.notes"
NOTE_BYTES_MAX = 1 << 20


class NoteFile(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    format: int
    namespace: bytes
    document: bytes
    void: int
    crc32: int
    """Of what is before it."""


FORMAT = 1
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(NoteFile).decode


def load(directory: str) -> tuple[list[NoteFile], int]:
    """All notes of a device, and how many files there are no notes. Raises OSError."""
    folder = Path(directory) / FOLDER
    notes: list[NoteFile] = []
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
            notes.append(note)
    return notes, damaged


def save(directory: str, namespace: bytes, document: bytes, void: int) -> None:
    """Durable when it returns. An empty document keeps the one that is there. Raises OSError."""
    folder = Path(directory) / FOLDER
    if not folder.exists():
        folder.mkdir(mode=0o700)
        make_durable(directory)
    path = folder / f"{namespace.hex()}.note"
    if path.exists():
        known = _read(path.read_bytes())
        if known is not None:
            document, void = document or known.document, max(void, known.void)
    fresh = path.with_suffix(".new")
    crc32 = _crc(namespace, document, void)
    with fresh.open("wb") as file:
        file.write(_encode(NoteFile(FORMAT, namespace, document, void, crc32)))
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    make_durable(folder)


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
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
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


def _crc(namespace: bytes, document: bytes, void: int) -> int:
    return zlib.crc32(_encode([FORMAT, namespace, document, void]))
