"""A brain with a remote store whose mover is the test."""

from typing import TypeVar

from kvserver.config.remotes import parse
from kvserver.remote.chunk_value import Head, Shard, encode
from kvserver.service.base.events import Tick
from kvserver.tiers.records import NO_PARENT
from kvserver.wire.messages import KEY_BYTES
from kvserver.wire.orders import ProbeRemote, ReadRemoteNote, RemoteNoteRead, RemoteProbed
from tests.rigs.brain_rig import NAMESPACE, Client, Rig, key

EPOCH = 77
"""The epoch in the namespace's note."""
T = TypeVar("T")


class RemoteRig(Rig):
    """A brain with an engine, whose remote store answers when the test says so."""

    def __init__(self, *, kv_events: bool = False, **options: object) -> None:
        given = "&".join(f"{name}={value}" for name, value in {"tokens_min": 0, **options}.items())
        super().__init__(remotes=parse(f"fleet=file:///mnt/kv?{given}"), kv_events=kv_events)
        self.client = Client(self).register()
        self.meet_mover()
        (note,) = self.asked(ReadRemoteNote)
        self.report(self.mover, RemoteNoteRead(note.job, "", "here", EPOCH, b""))

    def meet_mover(self) -> None:
        """The brain starts the mover of the store, and asks it for the namespace's note."""
        self.handle(Tick())
        assert self.core.remotes[0].mover is not None
        self.mover = self.core.remotes[0].mover.number
        self.handle(Tick())

    def asked(self, kind: type[T]) -> list[T]:
        """All orders of a kind."""
        return [order for order in self.orders if isinstance(order, kind)]

    def has(self, keys: bytes, *chunks: int) -> None:
        """The store answers the last probe: it has these chunks of a prompt."""
        probe = self.asked(ProbeRemote)[-1]
        part = self.core.chunks.spaces[NAMESPACE].parts[0]
        asked = [probe.keys[at : at + KEY_BYTES] for at in range(0, len(probe.keys), KEY_BYTES)]
        heads = {}
        for chunk in chunks:
            parent = key(keys, chunk - 1) if chunk else NO_PARENT
            shards = (Shard(0, 0, part.payload_bytes, 5),)
            heads[key(keys, chunk)] = encode(Head(NAMESPACE, key(keys, chunk), parent, EPOCH, 3, 0, shards))
        self.report(self.mover, RemoteProbed(probe.job, [heads.get(one, b"") for one in asked], [], 1))
