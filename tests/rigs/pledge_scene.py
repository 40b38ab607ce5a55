"""An engine that computes prompts, and another one that would rather have them."""

from typing import Any

from kvserver.wire.messages import (
    KEY_BYTES,
    Await,
    Awaited,
    GroupBlocks,
    Pledge,
    Pledged,
    Retrieve,
    Store,
    Unpledge,
)
from tests.rigs.brain_rig import NAMESPACE, Client, Rig, chain, ids, key

CHUNKS = 5
KEYS = chain(1, CHUNKS)
TTL_MS = 60_000


class Scene:
    """An engine that computes prompts, and another one that would rather have them."""

    def __init__(self, *, rig: Rig | None = None, **bounds: Any) -> None:
        self.rig = rig or Rig(**bounds)
        self.producer = Client(self.rig, engine="producer", epoch=11).register()
        self.other = Client(self.rig, engine="other", epoch=12).register()

    def pledge(self, keys: bytes = KEYS, *, by: Client | None = None, ttl_ms: int = TTL_MS) -> Pledged:
        reply = (by or self.producer).ask(Pledge(self.rig.number(), NAMESPACE, keys, ttl_ms))
        assert isinstance(reply, Pledged), reply
        return reply

    def unpledge(self, pledge: int, *, by: Client | None = None) -> None:
        (by or self.producer).ask(Unpledge(self.rig.number(), pledge))

    def await_(self, keys: bytes = KEYS, *, by: Client | None = None, wanted_min: int = 1) -> Awaited:
        reply = (by or self.other).ask(Await(self.rig.number(), NAMESPACE, keys, wanted_min))
        assert isinstance(reply, Awaited), reply
        return reply

    def store(self, first: int, end: int, keys: bytes = KEYS, *, by: Client | None = None) -> Any:
        """Stores chunks [first, end) of a prompt. Returns the reply, or None while the mover copies."""
        client = by or self.producer
        parent = key(keys, first - 1) if first else b""
        blocks = GroupBlocks(0, 3 * first, ids(*range(3 * (end - first))))
        head = self.rig.number(), client.cache, 5, 1, 10_000, first, parent
        return client.ask(Store(*head, keys[first * KEY_BYTES : end * KEY_BYTES], [blocks]))

    def retrieve(self, lease: int, first: int, end: int, *, more: bool = True, deadline_ms: int = 10_000) -> int:
        """Asks for chunks [first, end). Returns the request's number, by which its answer is found."""
        number = self.rig.number()
        blocks = GroupBlocks(0, 3 * first, ids(*range(3 * (end - first))))
        self.other.ask(Retrieve(number, self.other.cache, lease, 6, 1, deadline_ms, [blocks], more))
        return number

    def answer(self, number: int) -> Any:
        return self.rig.answers.get((self.other.peer, number))

    @property
    def pinned(self) -> int:
        return self.rig.core.chunks.pins

    def ended(self) -> dict[str, int]:
        """How pledges have ended."""
        return {how: count for how, count in self.rig.core.counters.pledges_ended.items() if count}

    def check_nothing_is_left(self) -> None:
        assert not self.rig.core.pledges
        assert not self.rig.core.pledges.by_key
        assert not self.rig.core.pledges.taken
        assert not self.rig.core.jobs
