"""Pins under random traffic: never fewer than promised, none left over, and every pinned chunk stays."""

import random
from collections.abc import Callable

import msgspec
import pytest

from kvserver.service.base import effects
from kvserver.service.base.events import GoOn
from kvserver.service.holdings.eviction import VAIN_PRICE_MAX
from kvserver.tiers.slots import SLOT_ALIGN
from kvserver.wire.messages import KEY_BYTES, Clear, Found, GroupBlocks, RegionRun
from tests.rigs.brain_rig import ARENA_BYTES, FULL, NAMESPACE, SLAB_BYTES, STATE, Client, Rig, chain, ids

LARGE_STATE = msgspec.structs.replace(STATE, regions=[RegionRun(0, 3600, 1, 0, 4200, 4200)], blocks=1)
"""A state group whose slots are two units; those of FULL are one."""
SLOTS_A_SLAB = SLAB_BYTES // SLOT_ALIGN
PROMPTS, CHUNKS = 60, 7
STEPS = 160


class Traffic:
    """One engine that stores, looks up, retrieves and releases at random, with copies that end late, or fail."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.rig = Rig()
        self.client = Client(self.rig).register([FULL, LARGE_STATE], buffer_bytes=9000)
        self.prompts = [chain(1000 * seed + number, CHUNKS) for number in range(PROMPTS)]
        self.leases: dict[int, bytes] = {}
        """Lease -> the keys that it promises."""

    def step(self) -> None:
        acts: list[Callable[[], None]] = [self.store] * 6 + [self.look_up] * 4 + [self.release] * 2
        acts += [self.retrieve, self.retrieve, self.finish, self.finish, self.toggle, self.release_again, self.wait]
        self.random.choice(acts)()

    def store(self) -> None:
        keys = self.random.choice(self.prompts)
        chunks = self.random.randint(1, CHUNKS)
        groups = [GroupBlocks(0, 0, ids(*range(3)) * chunks)]
        if self.random.random() < 0.3:
            groups.append(GroupBlocks(1, chunks - 1, ids(0)))
        before = self.rig.service.counters.evictions
        self.client.ask(self.client.storing(keys[: chunks * KEY_BYTES], *groups))
        slots = chunks + len(groups) - 1
        assert self.rig.service.counters.evictions - before <= slots + (1 + 2 * VAIN_PRICE_MAX) * SLOTS_A_SLAB

    def look_up(self) -> None:
        keys = self.random.choice(self.prompts)
        found = self.client.lookup(keys)
        if found.lease:
            self.leases[found.lease] = keys[: found.chunks * KEY_BYTES]

    def release(self) -> None:
        if self.leases:
            lease = self.random.choice(list(self.leases))
            del self.leases[lease]
            self.client.release(Found(0, 0, lease, 0, 0, ""))

    def release_again(self) -> None:
        """Releases a lease that is over or was never granted."""
        pins = self.rig.facts()["pins"]
        self.client.release(Found(0, 0, self.random.randint(1, 1 << 40), 0, 0, ""))
        assert self.rig.facts()["pins"] == pins

    def retrieve(self) -> None:
        if self.leases:
            lease = self.random.choice(list(self.leases))
            del self.leases[lease]
            self.client.ask(self.client.retrieving(lease, GroupBlocks(0, 0, ids(0, 1, 2))))

    def finish(self) -> None:
        self.rig.finish(self.random.choice(["done", "done", "done", "failed"]))

    def toggle(self) -> None:
        self.rig.movers_copy = not self.rig.movers_copy

    def wait(self) -> None:
        self.rig.wait_ms(300)

    def check(self) -> None:
        facts = self.rig.facts()
        assert facts["leases"] == len(self.leases)
        assert facts["pins"] >= facts["leases"] + facts["retrieves"]
        assert facts["pins"] <= facts["leases"] + facts["retrieves"] + facts["stores"] * CHUNKS


@pytest.mark.parametrize("seed", range(5))
def test_pins_are_those_of_what_is_promised_and_nothing_pinned_goes(seed: int) -> None:
    traffic = Traffic(seed)
    for _ in range(STEPS):
        traffic.step()
        traffic.check()
    assert traffic.rig.facts()["used_bytes"] > ARENA_BYTES / 2
    for lease, keys in traffic.leases.items():
        found = traffic.client.lookup(keys)
        assert found.chunks * KEY_BYTES == len(keys)
        traffic.client.release(found)
        traffic.client.release(Found(0, 0, lease, 0, 0, ""))
    traffic.finish()
    traffic.rig.wait_ms(11_000)
    facts = traffic.rig.facts()
    assert (facts["leases"], facts["retrieves"], facts["stores"], facts["pins"]) == (0, 0, 0, 0)
    traffic.client.ask(Clear(traffic.rig.number(), NAMESPACE))
    while effects.GoOn() in traffic.rig.effects:
        traffic.rig.effects.clear()
        traffic.rig.handle(GoOn())
    assert traffic.rig.facts()["used_bytes"] == 0
