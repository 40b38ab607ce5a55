"""A brain with two remote stores, near and far, whose movers are the test."""

from typing import TypeVar

from kvserver.config.remotes import parse
from kvserver.remote.announcement import Kind, mark_of, pack
from kvserver.remote.chunk_value import Head, Shard, decode, encode
from kvserver.service.base.effects import Instruct
from kvserver.service.base.events import Tick
from kvserver.service.state.remote_tier import RemoteTier
from kvserver.tiers.records import NO_PARENT
from kvserver.wire.messages import KEY_BYTES
from kvserver.wire.orders import (
    FetchRemote,
    ListenRemote,
    Order,
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
from tests.rigs.brain_rig import NAMESPACE, Client, Rig, key

MEASURED_BYTES = 7 << 20
SUM = (9).to_bytes(8, "little")
T = TypeVar("T")


class SeveralRig(Rig):
    """A brain with an engine. Notes are answered by themselves, all other orders when the test says so."""

    def __init__(self, near: str = "", far: str = "", *, tokens_min: int = 0) -> None:
        """near, far: options of the stores. tokens_min: of the store near."""
        self.epochs = {"near": 77, "far": 78}
        """In the notes of the namespace."""
        self.silent: set[str] = set()
        """Stores that do not answer when their note is read or written."""
        self.told: dict[str, list[int]] = {}
        """Store -> marks that it tells when its announcements are read. Others do not answer."""
        stores = {"near": [f"tokens_min={tokens_min}", *near.split()], "far": ["tokens_min=0", *far.split()]}
        texts = (f"{name}=file:///{name}?{'&'.join(given)}" for name, given in stores.items())
        super().__init__(remotes=parse(" ".join(texts)))
        self.client = Client(self).register()
        self.pass_ticks()

    def pass_ticks(self) -> None:
        """Movers start, and notes are read."""
        for _ in range(3):
            self.handle(Tick())

    def store(self, name: str) -> RemoteTier:
        return next(tier for tier in self.core.remotes if tier.name == name)

    def mover(self, name: str) -> int:
        mover = self.store(name).mover
        assert mover is not None
        return mover.number

    def asked(self, name: str, kind: type[T]) -> list[T]:
        """All orders of a kind for a store."""
        sent = (effect for effect in self.effects if isinstance(effect, Instruct))
        return [one.order for one in sent if isinstance(one.order, kind) and one.mover == self.mover(name)]

    def _obey(self, mover: int, order: Order) -> None:
        super()._obey(mover, order)
        name = next((tier.name for tier in self.core.remotes if tier.mover and tier.mover.number == mover), "")
        match order:
            case ReadRemoteNote(job) if name not in self.silent:
                self.report(mover, RemoteNoteRead(job, "", "here", self.epochs[name], b""))
            case WriteRemoteNote(job, _, epoch) if name not in self.silent:
                self.epochs[name] = epoch
                self.report(mover, RemoteNoteWritten(job, "", True))
            case ListenRemote(job) if name in self.told:
                marks, self.told[name] = self.told[name], []
                self.report(mover, RemoteHeard(job, "", pack(marks), True))

    def tells(self, name: str, keys: bytes, *told: tuple[int, Kind]) -> None:
        """The announcements of a store are read, and tell this of chunks of a prompt."""
        marks = [mark_of(NAMESPACE, self.epochs[name], key(keys, chunk)) | kind for chunk, kind in told]
        self.told[name] = [*self.told.get(name, []), *marks]
        for order in self.asked(name, ListenRemote):
            if order.job in self.store(name).jobs:
                self._obey(self.mover(name), order)
        self.wait_ms(self.bounds.remote_listen_ms)

    def measured(self, **bytes_per_s: int) -> None:
        """Stores were read at these rates before."""
        for name, rate in bytes_per_s.items():
            store = self.store(name)
            store.reads.began(self.now_ns - MEASURED_BYTES * 10**9 // rate)
            store.reads.ended(MEASURED_BYTES, self.now_ns)
            store.tried_ns = self.now_ns

    def probes(self, name: str) -> list[bytes]:
        """The keys that a store was asked for, probe by probe."""
        return [probe.keys for probe in self.asked(name, ProbeRemote)]

    def has(self, name: str, keys: bytes, *chunks: int) -> None:
        """A store answers its last probe: it has these chunks of a prompt."""
        probe = self.asked(name, ProbeRemote)[-1]
        part = self.core.chunks.spaces[NAMESPACE].parts[0]
        asked = [probe.keys[at : at + KEY_BYTES] for at in range(0, len(probe.keys), KEY_BYTES)]
        heads = {}
        for chunk in chunks:
            parent = key(keys, chunk - 1) if chunk else NO_PARENT
            shards = (Shard(0, 0, part.payload_bytes, 5),)
            head = Head(NAMESPACE, key(keys, chunk), parent, self.epochs[name], 3, 0, shards)
            heads[key(keys, chunk)] = encode(head)
        self.report(self.mover(name), RemoteProbed(probe.job, [heads.get(one, b"") for one in asked], [], 1))

    def fetches(self, name: str) -> list[FetchRemote]:
        """Reads that have not ended."""
        return [order for order in self.asked(name, FetchRemote) if order.job in self.store(name).jobs]

    def brings(self, name: str, keys: bytes, *chunks: int) -> None:
        """A store has these chunks, and they arrive."""
        self.has(name, keys, *chunks)
        for order in self.fetches(name):
            self.report(self.mover(name), RemoteEnded(order.job, "", 1, SUM))

    def writes(self, name: str, keys: bytes) -> list[int]:
        """Places in a prompt of the chunks whose write is ordered now. All writes go well."""
        self.handle(Tick())
        places = []
        for order in self.asked(name, PutRemote):
            if order.job in self.store(name).jobs:
                places.append(keys.index(decode(order.head).key) // KEY_BYTES)
                self.report(self.mover(name), RemoteEnded(order.job, "", 1))
        return places
