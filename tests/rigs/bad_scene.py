"""Two engines for tests of wrong requests: one with stored chunks, and one that makes mistakes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvserver.wire.messages import (
    GroupBlocks,
    Request,
    Retrieved,
)
from tests.rigs.brain_rig import Client, Rig, chain, ids, is_refusal

change = msgspec.structs.replace
HUGE = (1 << 64) - 1


@dataclass
class Scene:
    """An engine with three stored chunks, and another engine that sends wrong requests."""

    rig: Rig = field(default_factory=Rig)
    keys: bytes = chain(1, 3)

    def __post_init__(self) -> None:
        self.keeper = Client(self.rig, engine="keeper").register()
        self.keeper.store(self.keys)
        self.culprit = Client(self.rig, engine="culprit")

    def refused(self, reply: Callable[[], Any], family: str, code: str, *says: str) -> None:
        """Checks that the reply is this refusal, nothing has changed and the stored chunks are still there."""
        before = self.rig.facts()
        is_refusal(reply(), family, code, *says)
        assert self.rig.facts() == before
        self.still_serves()

    def still_serves(self) -> None:
        found = self.keeper.lookup(self.keys)
        assert found.chunks == 3
        reply = self.keeper.ask(self.keeper.retrieving(found.lease, GroupBlocks(0, 0, ids(*range(9)))))
        assert isinstance(reply, Retrieved), reply

    def refuses(self, request: Request, family: str, code: str, *says: str) -> None:
        self.refused(lambda: self.culprit.ask(request), family, code, *says)
