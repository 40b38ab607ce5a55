"""Read counts of a device's chunks by namespace, kept beside its store and shown by `kvserver disk inspect`.

The mover counts. It writes one small file every ten seconds in which something was read, since a single count is not
worth a write. A mover that is killed, as all are when the server stops, loses the counts since the last write. The file
is not made durable either: after a power cut it may be an older one. If it cannot be read, counting starts again.
"""

import time
import zlib
from pathlib import Path
from typing import Self

import msgspec

from kvserver.private_files import write_whole

FILE = "kvserver.hits"
FORMAT = 1
SAVE_AFTER_S = 10.0
NAMESPACES_MAX = 1024
"""Above this, the least recently read namespace is dropped."""
FILE_BYTES_MAX = 1 << 20


class Hits(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The counts of one namespace."""

    chunks: int
    """Number of times that a chunk was read whole."""
    last_s: int
    """Time of the last read, in seconds since 1970."""


class HitsFile(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    format: int
    since_s: int
    hits: dict[bytes, Hits]
    crc32: int
    """Checksum of the fields before it."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(HitsFile).decode


class HitCounts:
    """The read counts of one device."""

    def __init__(self, directory: str, since_s: int, by_namespace: dict[bytes, Hits]) -> None:
        self.since_s = since_s
        """Start of counting, in seconds since 1970."""
        self.by_namespace = by_namespace
        self.kept = False
        """The counts were read from the file, or written to it."""
        self._path = Path(directory) / FILE
        self._changed = False
        self._saved_s = time.monotonic()

    @classmethod
    def begin(cls, directory: str) -> Self:
        """New counts for a new store. A file beside it belongs to an older store, and will be replaced."""
        counts = cls(directory, int(time.time()), {})
        counts._changed = True
        return counts

    @classmethod
    def load(cls, directory: str) -> Self:
        """The counts in the file; new ones if there is none, or none that can be read."""
        try:
            with (Path(directory) / FILE).open("rb") as file:
                kept = _decode(file.read(FILE_BYTES_MAX))
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return cls.begin(directory)
        if kept.format != FORMAT or kept.crc32 != _crc(kept.since_s, kept.hits):
            return cls.begin(directory)
        counts = cls(directory, kept.since_s, kept.hits)
        counts.kept = True
        return counts

    def add(self, namespace: bytes) -> None:
        """Counts one chunk of the namespace that was read."""
        before = self.by_namespace.get(namespace)
        if before is None and len(self.by_namespace) == NAMESPACES_MAX:
            del self.by_namespace[min(self.by_namespace, key=lambda name: self.by_namespace[name].last_s)]
        self.by_namespace[namespace] = Hits(1 if before is None else before.chunks + 1, int(time.time()))
        self._changed = True

    def save_when_due(self) -> float | None:
        """Writes the counts if the last write is SAVE_AFTER_S ago. Whole or not at all. Raises OSError.

        Returns the seconds until the write is due; None while nothing is new."""
        if not self._changed:
            return None
        left_s = self._saved_s + SAVE_AFTER_S - time.monotonic()
        if left_s > 0:
            return left_s
        self.save()
        return None

    def save(self) -> None:
        """Writes the counts now. Raises OSError."""
        crc32 = _crc(self.since_s, self.by_namespace)
        content = _encode(HitsFile(FORMAT, self.since_s, self.by_namespace, crc32))
        write_whole(self._path, content, durable=False)
        self.kept = True
        self._changed = False
        self._saved_s = time.monotonic()


def erase(directory: str) -> None:
    """Removes the files of the counts. Raises OSError."""
    for name in (FILE, f"{FILE}.new"):
        (Path(directory) / name).unlink(missing_ok=True)


def _crc(since_s: int, hits: dict[bytes, Hits]) -> int:
    return zlib.crc32(_encode([FORMAT, since_s, hits]))
