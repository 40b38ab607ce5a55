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
    AnnounceRemote,
    FetchRemote,
    ListenRemote,
    ProbeRemote,
    PutRemote,
    ReadRemoteNote,
    RemoteEnded,
    RemoteHeard,
    RemoteNoteRead,
    RemoteNoteWritten,
    RemoteProbed,
    WriteRemoteNote,
)

RemoteOrder = ProbeRemote | FetchRemote | PutRemote | ReadRemoteNote | WriteRemoteNote | AnnounceRemote | ListenRemote
RemoteAnswer = RemoteProbed | RemoteEnded | RemoteNoteRead | RemoteNoteWritten | RemoteHeard
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
        self.announced = bytearray()
        """Marks that machines have told."""

    def answer(self, order: RemoteOrder) -> RemoteAnswer:
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
            case AnnounceRemote(job):
                self.announced += order.marks
                return RemoteEnded(job, "", 0)
            case ListenRemote():
                raise AssertionError("a mover answers it")
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


class StoreMover:
    """One machine's mover, which knows how far its server has read the announcements."""

    def __init__(self, store: SharedStore) -> None:
        self._store = store
        self._heard = 0

    def answer(self, order: RemoteOrder) -> RemoteAnswer:
        if not isinstance(order, ListenRemote):
            return self._store.answer(order)
        marks = bytes(self._store.announced[self._heard :])
        self._heard += len(marks)
        return RemoteHeard(order.job, "", marks, is_all=True)
