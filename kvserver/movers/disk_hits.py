"""How often chunks were read from a device, by namespace: counted by its mover, kept beside its store, and shown by
`kvserver disk inspect`.

A count is worth no write of its own: one small file is written every ten seconds in which something was read. A mover
that is killed, as all are when the server stops, takes along what it read since. Nor is the file made durable: after a
power cut it may be an older one. One that cannot be read back is left out, and counting begins anew.
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
"""Of more, those that were not read for longest are left out."""
FILE_BYTES_MAX = 1 << 20


class Hits(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Of one namespace."""

    chunks: int
    """Read whole, each time that one was."""
    last_s: int
    """When, in seconds since 1970."""


class HitsFile(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    format: int
    since_s: int
    hits: dict[bytes, Hits]
    crc32: int
    """Of what is before it."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(HitsFile).decode


class HitCounts:
    """Of one device."""

    def __init__(self, directory: str, since_s: int, by_namespace: dict[bytes, Hits]) -> None:
        self.since_s = since_s
        """When the first was counted, at the earliest; seconds since 1970."""
        self.by_namespace = by_namespace
        self.kept = False
        """They are as in the file, or were; otherwise there is none, or none that can be read."""
        self._path = Path(directory) / FILE
        self._changed = False
        self._saved_s = time.monotonic()

    @classmethod
    def begin(cls, directory: str) -> Self:
        """Of a store that was made just now: what is kept beside it is another one's, and will be replaced."""
        counts = cls(directory, int(time.time()), {})
        counts._changed = True
        return counts

    @classmethod
    def load(cls, directory: str) -> Self:
        """As they were kept; from now on where nothing was, or nothing that can be read."""
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
        """A chunk of it was read."""
        before = self.by_namespace.get(namespace)
        if before is None and len(self.by_namespace) == NAMESPACES_MAX:
            del self.by_namespace[min(self.by_namespace, key=lambda name: self.by_namespace[name].last_s)]
        self.by_namespace[namespace] = Hits(1 if before is None else before.chunks + 1, int(time.time()))
        self._changed = True

    def save_when_due(self) -> float | None:
        """Writes them, whole or not at all, when that was not done lately. Returns after how many seconds it is to be
        done; None while nothing is new. Raises OSError."""
        if not self._changed:
            return None
        left_s = self._saved_s + SAVE_AFTER_S - time.monotonic()
        if left_s > 0:
            return left_s
        self.save()
        return None

    def save(self) -> None:
        """Raises OSError."""
        crc32 = _crc(self.since_s, self.by_namespace)
        content = _encode(HitsFile(FORMAT, self.since_s, self.by_namespace, crc32))
        write_whole(self._path, content, durable=False)
        self.kept = True
        self._changed = False
        self._saved_s = time.monotonic()


def erase(directory: str) -> None:
    """Raises OSError."""
    for name in (FILE, f"{FILE}.new"):
        (Path(directory) / name).unlink(missing_ok=True)


def _crc(since_s: int, hits: dict[bytes, Hits]) -> int:
    return zlib.crc32(_encode([FORMAT, since_s, hits]))
