"""A remote store without bytes, and what its movers would tell: one for all machines of a sizing.

Every call takes no time and succeeds. A store with a size drops what was used longest ago, as a Valkey with
`allkeys-lru` does; reading a head counts as a use there, too.
"""

from collections import OrderedDict
from typing import NamedTuple

from kvserver.remote.chunk_value import decode
from kvserver.tiers.records import NO_SUM
from kvserver.wire.messages import KEY_BYTES
from kvserver.wire.orders import (
    FetchRemote,
    ProbeRemote,
    PutRemote,
    ReadRemoteNote,
    RemoteEnded,
    RemoteNoteRead,
    RemoteNoteWritten,
    RemoteProbed,
    WriteRemoteNote,
)

RemoteOrder = ProbeRemote | FetchRemote | PutRemote | ReadRemoteNote | WriteRemoteNote
SLOT_BYTES = 8
"""Bytes of an offset in FetchRemote.slots."""


class Value(NamedTuple):
    head: bytes
    bytes: int


class SharedStore:
    def __init__(self, bytes_max: int) -> None:
        """bytes_max: bytes of payloads; 0: no end."""
        self.evictions = 0
        self._bytes_max = bytes_max
        self._bytes = 0
        self._values: OrderedDict[bytes, Value] = OrderedDict()
        """Key -> chunk, the one used longest ago first. A sizing has one namespace, which nobody clears."""
        self._epoch: int | None = None

    def answer(self, order: RemoteOrder) -> RemoteProbed | RemoteEnded | RemoteNoteRead | RemoteNoteWritten:
        match order:
            case ProbeRemote(job):
                return RemoteProbed(job, self._heads(order.keys), [], 0)
            case FetchRemote(job):
                if decode(order.head).key not in self._values:
                    return RemoteEnded(job, "gone", 0)
                sums = NO_SUM.to_bytes(8, "little") * (len(order.slots) // SLOT_BYTES)
                return RemoteEnded(job, "", 0, sums)
            case PutRemote(job):
                return RemoteEnded(job, "" if self._put(order.head) else "existed", 0)
            case ReadRemoteNote(job):
                return RemoteNoteRead(job, "", "absent" if self._epoch is None else "here", self._epoch or 0, b"")
            case WriteRemoteNote(job):
                is_first = self._epoch is None or order.replaces
                self._epoch = order.epoch if is_first else self._epoch
                return RemoteNoteWritten(job, "", is_first)

    def _heads(self, keys: bytes) -> list[bytes]:
        heads = []
        for at in range(0, len(keys), KEY_BYTES):
            value = self._values.get(keys[at : at + KEY_BYTES])
            if value is not None:
                self._values.move_to_end(keys[at : at + KEY_BYTES])
            heads.append(value.head if value is not None else b"")
        return heads

    def _put(self, head: bytes) -> bool:
        """Whether the chunk was not there."""
        told = decode(head)
        if told.key in self._values:
            return False
        self._values[told.key] = Value(head, told.payload_bytes)
        self._bytes += told.payload_bytes
        while self._bytes_max and self._bytes > self._bytes_max:
            _, oldest = self._values.popitem(last=False)
            self._bytes -= oldest.bytes
            self.evictions += 1
        return True
