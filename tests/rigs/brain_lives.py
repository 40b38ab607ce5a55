"""Brains that follow each other over one ledger."""

import os
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from kvserver.service.base.effects import DropNamespace, Effect, Publish, PutNamespace, Withdraw
from kvserver.service.service import Service
from kvserver.tiers.records import NO_GROUP, Record, unpack_all
from kvserver.tiers.slots import SLOT_ALIGN
from kvserver.transfer.native import Ledger, create_memfd
from kvserver.wire.messages import GroupSpec
from tests.rigs.brain_rig import ARENA_BYTES, Client, Rig

CHUNKS_MAX = 23
SPAN_BYTES = ARENA_BYTES + CHUNKS_MAX * SLOT_ALIGN


class KeepingService(Service):
    """A service that carries out its effects on the ledger as soon as they are decided."""

    ledger: Ledger

    def effects(self) -> list[Effect]:
        effects = super().effects()
        for effect in effects:
            match effect:
                case Publish(records):
                    self.ledger.seal(records)
                case Withdraw(offsets):
                    self.ledger.clear(offsets)
                case PutNamespace(number, document):
                    self.ledger.put_namespace(number, document)
                case DropNamespace(number):
                    self.ledger.drop_namespace(number)
        return effects


class Life(Rig):
    """One life of a brain over a ledger that outlives it."""

    def __init__(self, descriptor: int, **bounds: Any) -> None:
        self.ledger = Ledger(descriptor, SPAN_BYTES)
        super().__init__(**{"chunks_max": CHUNKS_MAX, **bounds})

    def new_service(self) -> Service:
        held = {"documents": self.ledger.namespaces(), "records": self.ledger.scan()}
        service = KeepingService(self.bounds, random.Random(9).randbytes, **held)
        service.ledger = self.ledger
        service.effects()
        service.check()
        return service

    def kinds(self) -> Counter[str]:
        """Records in the ledger, by kind."""
        return Counter("mark" if record.group == NO_GROUP else "slot" for record in self.records())

    def records(self) -> list[Record]:
        return list(unpack_all(self.ledger.scan()))


@pytest.fixture
def descriptor() -> Iterator[int]:
    made = create_memfd("ledger", Ledger.file_bytes(SPAN_BYTES))
    yield made
    os.close(made)


def engine(life: Rig, *groups: GroupSpec) -> Client:
    return Client(life).register(groups)
