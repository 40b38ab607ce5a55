"""The brain's tables after very many requests: their size follows the held chunks, not the number of past requests."""

import random
from collections import Counter, deque
from dataclasses import fields
from typing import Any

import msgspec

from kvserver.service.service import Service
from kvserver.service.state.bounds import Bounds
from kvserver.wire.messages import Found, GroupBlocks
from tests.rigs.brain_rig import Client, Rig, chain, ids

CHUNKS = 2
ROUNDS = 5000
TTL_MS = 1000
"""Lifetime of everything that ends by itself."""
SLACK = ROUNDS // 20
"""Eviction may leave chunks in trees of another shape; a table that grows per request would grow by ROUNDS."""


def entries(service: Service) -> Counter[str]:
    """Number of entries in all tables that the service can reach, by the attribute that leads to them."""
    found: Counter[str] = Counter()
    seen: set[int] = set()
    ahead: list[tuple[str, Any]] = [("", service)]
    while ahead:
        name, thing = ahead.pop()
        if id(thing) in seen or isinstance(thing, msgspec.Struct):
            continue
        seen.add(id(thing))
        if isinstance(thing, dict):
            found[name] += len(thing)
            ahead += [(name, part) for pair in thing.items() for part in pair]
        elif isinstance(thing, list | tuple | set | frozenset | deque):
            found[name] += len(thing)
            ahead += [(name, part) for part in thing]
        elif type(thing).__module__.startswith("kvserver."):
            owner = type(thing).__name__
            slots = [slot for kind in type(thing).__mro__ for slot in getattr(kind, "__slots__", ())]
            names = [*getattr(thing, "__dict__", ()), *slots]
            ahead += [(f"{owner}.{part}", getattr(thing, part)) for part in names if hasattr(thing, part)]
    return found


class Traffic:
    """A client that stays, others that come and go, and every kind of request."""

    def __init__(self) -> None:
        self.rig = Rig(**{field.name: TTL_MS for field in fields(Bounds) if field.name.endswith("_ms")})
        self.rig.service.check = lambda: None  # type: ignore[method-assign]  # a check now and then is enough
        self.client = Client(self.rig).register()
        self.random = random.Random(3)
        self.stories = 0
        self.seen: Counter[str] = Counter()

    def run(self, rounds: int) -> None:
        """Ends with a full arena, when every lease, job and reservation is over."""
        for number in range(rounds):
            self.store(self.random.choice(("done", "done", "done", "failed", "abandoned", "invalid")))
            self.look()
            if number % 10 == 0:
                self.visit()
            if number % 50 == 0:
                self.rig.wait_ms(100)
                Service.check(self.rig.service)
        self.store("done")
        self.rig.wait_ms(3 * TTL_MS)

    def store(self, status: str) -> None:
        """Stores a prompt of CHUNKS chunks by a job that ends with that status."""
        self.stories += 1
        self.rig.movers_copy = False
        request = self.client.storing(chain(self.stories, CHUNKS), GroupBlocks(0, 0, ids(*range(3 * CHUNKS))))
        self.client.ask(request)
        self.rig.finish(status, "some-code", "some text")
        self.rig.movers_copy = True
        self.seen[f"stored {status}"] += 1

    def look(self) -> None:
        """Looks up a prompt and uses, misuses, releases or forgets its lease."""
        found = self.client.lookup(chain(self.random.randint(max(1, self.stories - 40), self.stories + 1), CHUNKS))
        fate = self.random.choice(("use", "misuse", "release", "forget"))
        if not found.chunks:
            fate = "miss"
        elif fate == "use":
            self.client.ask(self.client.retrieving(found.lease, GroupBlocks(0, 0, ids(6, 7, 8))))
        elif fate == "misuse":
            self.client.ask(self.client.retrieving(found.lease + 1, GroupBlocks(0, 0, ids(-1))))
        elif fate == "release":
            self.client.release(found)
        self.seen[fate] += 1

    def visit(self) -> None:
        """Lets an engine register, store, look up and vanish with its lease and an offered descriptor."""
        visitor = Client(self.rig, engine=f"visitor {self.rig.number()}", epoch=self.rig.number()).register()
        self.stories += 1
        visitor.store(chain(self.stories, CHUNKS))
        assert isinstance(visitor.lookup(chain(self.stories, CHUNKS)), Found)
        visitor.offer()
        self.rig.peer_gone(visitor.local)


def test_tables_hold_what_is_held_and_nothing_of_what_is_over() -> None:
    traffic = Traffic()
    traffic.run(ROUNDS // 4)
    facts, before = traffic.rig.facts(), entries(traffic.rig.service)
    assert before["Space.nodes"] == facts["chunks"] > 50
    traffic.run(ROUNDS)
    assert traffic.rig.facts() == facts
    grown = {name: count - before[name] for name, count in entries(traffic.rig.service).items()}
    assert {name: more for name, more in grown.items() if more > SLACK} == {}
    assert sum(grown.values()) < 2 * SLACK
    for what in ("use", "misuse", "release", "forget", "miss", "stored done", "stored failed", "stored abandoned"):
        assert traffic.seen[what] > 20, traffic.seen


def test_nothing_is_left_when_everybody_has_gone() -> None:
    traffic = Traffic()
    for _ in range(2):
        traffic.run(40)
        left = entries(traffic.rig.service)
    traffic.rig.peer_gone(traffic.client.local)
    traffic.rig.wait_ms(3 * TTL_MS)
    facts = traffic.rig.facts()
    held = ("sessions", "caches", "leases", "pins", "stores", "retrieves", "descriptors")
    assert {name: facts[name] for name in held} == dict.fromkeys(held, 0)
    gone = {name for name, count in entries(traffic.rig.service).items() if count == 0 and left[name]}
    tables = {"Sessions._rows", "Sessions.by_token", "Sessions.by_peer", "Sessions.engines", "Caches._rows"}
    assert tables <= gone
