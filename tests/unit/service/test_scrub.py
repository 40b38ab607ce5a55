"""Chunks in DRAM are read at a bounded rate, round after round. One that changed leaves every tier at once."""

from typing import Any

import pytest

from kvserver.service.base.effects import Log
from kvserver.service.base.events import MoverGone
from kvserver.tiers.records import SCRUB_ITEM, names_hash
from kvserver.wire.messages import KEY_BYTES, Clear, GroupBlocks
from kvserver.wire.orders import Cancel, Demote, Done, Order, Promote, Scrub, Scrubbed
from tests.rigs.admin_rig import clear_prefix
from tests.rigs.brain_rig import FULL, NAMESPACE, SLAB_BYTES, STATE, WINDOW, Client, Rig, chain, ids, key
from tests.rigs.disk_rig import CHUNKS, DISK, DiskRig, fill

PAYLOAD_BYTES = 3 * 2 * 129
"""A chunk of the rig's cache: three blocks in two regions."""
RATE, FAST = 20 * PAYLOAD_BYTES, 5_000 * PAYLOAD_BYTES


class ScrubRig(DiskRig):
    """The scrubber answers at once, or waits for finish_scrub()."""

    def __init__(self, **bounds: Any) -> None:
        self.scrubber_works = True
        self._scrubs = False
        self.reading: list[tuple[int, Scrub]] = []
        self.items: list[tuple[int, int, bytes]] = []
        """(slot, bytes, names) of everything that was ordered to be read."""
        self.changed: set[bytes] = set()
        """Names of the shards that changed."""
        super().__init__(**{"scrub_bytes_per_s": RATE, **bounds})

    def finish_scrub(self) -> None:
        reading, self.reading = self.reading, []
        for mover, order in reading:
            items = list(SCRUB_ITEM.iter_unpack(order.items))
            wrong = [index for index, (_, _, names) in enumerate(items) if names in self.changed]
            self.report(mover, Scrubbed(order.job, tuple(wrong), sum(size for _, size, _ in items)))

    def _obey(self, mover: int, order: Order) -> None:
        if not isinstance(order, Scrub):
            super()._obey(mover, order)
            return
        self.reading.append((mover, order))
        self.items += SCRUB_ITEM.iter_unpack(order.items)
        if not self._scrubs:
            self._scrubs = True  # a loop, no recursion
            while self.scrubber_works and self.reading:
                self.finish_scrub()
            self._scrubs = False

    def errors(self) -> list[dict[str, object]]:
        return [dict(it.fields) for it in self.effects if isinstance(it, Log) and it.event == "digest mismatch"]


def dram_only(**bounds: Any) -> ScrubRig:
    return ScrubRig(disk_devices=0, **bounds)


def name(keys: bytes, chunk: int, group: int = 0) -> bytes:
    return names_hash(NAMESPACE, group, 0, [key(keys, chunk)])


def names(keys: bytes) -> set[bytes]:
    return {name(keys, chunk) for chunk in range(len(keys) // KEY_BYTES)}


def under_way(rig: ScrubRig, keys: bytes) -> Client:
    """Stores a prompt and has one scrub of it begin."""
    rig.scrubber_works = False
    client = Client(rig).register()
    client.store(keys)
    rig.wait_ms(100)
    assert len(rig.reading) == 1
    return client


def used_bytes(rig: Rig) -> int:
    return rig.service.status(rig.now_ns).arena.used_bytes


# ---------------------------------------------------------------- the walk


def test_it_is_off_by_default() -> None:
    rig = ScrubRig(scrub_bytes_per_s=0)
    Client(rig).register().store(chain(1, CHUNKS))
    rig.wait_ms(2_000)
    assert not rig.items
    assert all(order.asked for order in rig.orders if isinstance(order, Promote))
    assert not {mode for _, _, mode in rig.core.counters.digest_mismatches} & {"scrub"}


def test_it_goes_round_all_chunks_and_round_again() -> None:
    rig = dram_only()
    client, prompts = Client(rig).register(), [chain(seed, CHUNKS) for seed in range(4)]
    for keys in prompts:
        client.store(keys)
    rig.wait_ms(3_000)
    seen = [names for _, _, names in rig.items]
    every = set().union(*map(names, prompts))
    assert len(every) == 12
    assert set(seen[:12]) == set(seen[12:24]) == every
    assert {size for _, size, _ in rig.items} == {PAYLOAD_BYTES}
    assert rig.core.counters.scrubbed_bytes == {"dram": PAYLOAD_BYTES * len(seen), "disk": 0}
    round_s = rig.service.status(rig.now_ns).scrub_round_s["dram"]
    assert 12 / 20 - 0.2 <= round_s <= 12 / 20 + 0.2


def test_every_group_of_a_chunk_is_read_under_its_own_name() -> None:
    rig = dram_only()
    client, keys = Client(rig).register((FULL, WINDOW, STATE)), chain(1, 2)
    blocks = GroupBlocks(0, 0, ids(*range(6))), GroupBlocks(1, 0, ids(*range(4))), GroupBlocks(2, 0, ids(0, 1))
    client.ask(client.storing(keys, *blocks))
    rig.wait_ms(2_000)
    assert {names for _, _, names in rig.items} == {name(keys, chunk, group) for chunk in (0, 1) for group in (0, 1, 2)}


def test_the_rate_is_kept_by_the_clock() -> None:
    rig = dram_only(scrub_bytes_per_s=100 * PAYLOAD_BYTES)
    client = Client(rig).register()
    for seed in range(20):
        client.store(chain(seed, CHUNKS))
    rig.items.clear()
    for _ in range(10):
        before = len(rig.items)
        rig.wait_ms(1_000)
        assert 90 <= len(rig.items) - before <= 100 + 10 + 1, "a burst of 100 ms, and one order"
    assert 950 <= len(rig.items) <= 1_011


def test_one_order_is_under_way_at_a_time_and_it_is_small() -> None:
    rig = dram_only(scrub_bytes_per_s=FAST)
    rig.scrubber_works = False
    client = Client(rig).register()
    fill(client, prompts=40)
    rig.wait_ms(2_000)
    ((_, order),) = rig.reading
    assert len(order.items) // SCRUB_ITEM.size * PAYLOAD_BYTES <= rig.bounds.arena_bytes // 64 + PAYLOAD_BYTES
    assert rig.core.chunks.pins == len(order.items) // SCRUB_ITEM.size


def test_one_event_looks_at_a_bounded_number_of_places() -> None:
    rig = dram_only(arena_bytes=4096 * SLAB_BYTES, scrub_bytes_per_s=FAST)
    client = Client(rig).register()
    client.store(chain(1, 2))
    walk = rig.core.scrub.dram
    assert len(list(walk.places([rig.core.chunks.pool], rig.now_ns))) == 1024
    rig.wait_ms(2_000)
    assert names(chain(1, 2)) == {names for _, _, names in rig.items}


def test_the_walk_goes_on_while_chunks_come_and_go() -> None:
    """Chunks that stay are met in every round, whatever is evicted and stored meanwhile."""
    rig = dram_only(arena_bytes=DISK["arena_bytes"])
    client, kept = Client(rig).register(), chain(1, CHUNKS)
    client.store(kept)
    for step in range(60):
        fill(client, first=5_000 + 3 * step, prompts=3)
        rig.now_ns += 1_000_000
        client.release(client.lookup(kept))
        rig.wait_ms(200)
    assert rig.core.counters.evictions > 100
    seen = [names for _, _, names in rig.items]
    for chunk in range(CHUNKS):
        assert seen.count(name(kept, chunk)) >= 2
    assert len(set(seen)) > 60


def test_without_a_mover_nothing_is_read() -> None:
    rig = dram_only()
    client = Client(rig).register()
    client.store(chain(1, CHUNKS))
    (mover,) = rig.core.movers.values()
    rig.handle(MoverGone(mover.number, "signal 9"))
    rig.items.clear()
    rig.wait_ms(2_000)
    assert not rig.items
    Client(rig, engine="other").register()
    rig.wait_ms(500)
    assert rig.items


def test_without_digests_dram_is_not_read_and_disks_are() -> None:
    rig = ScrubRig(verifies=False)
    Client(rig).register().store(chain(1, CHUNKS))
    rig.wait_ms(2_000)
    assert not rig.items
    assert rig.core.counters.scrubbed_bytes["disk"] > 0


# ---------------------------------------------------------------- what changed


def test_a_chunk_that_changed_leaves_every_tier_and_what_comes_before_it_stays() -> None:
    rig = ScrubRig()
    client, keys = Client(rig).register(), chain(2, CHUNKS)
    client.store(keys)
    assert rig.service.status(rig.now_ns).chunks_on_disk == CHUNKS
    rig.changed = {name(keys, 1)}
    rig.wait_ms(1_000)
    now = rig.service.status(rig.now_ns)
    assert (now.chunks, now.chunks_on_disk, now.pins) == (1, 1, 0)
    assert client.lookup(keys).chunks == 1
    (line,) = rig.errors()
    assert line["key"] == key(keys, 1).hex()
    assert (line["tier"], line["device"], line["mode"], line["group"]) == ("dram", "host", "scrub", 0)
    assert rig.core.counters.digest_mismatches["dram", "host", "scrub"] == 1


def test_all_that_changed_is_counted_and_some_of_it_told() -> None:
    rig = dram_only(arena_bytes=1 << 20, scrub_bytes_per_s=FAST)
    rig.scrubber_works = False
    client, prompts = Client(rig).register(), [chain(seed, CHUNKS) for seed in range(20)]
    for keys in prompts:
        client.store(keys)
    rig.changed = set().union(*map(names, prompts))
    rig.wait_ms(100)
    ((_, order),) = rig.reading
    rig.finish_scrub()
    count = len(order.items) // SCRUB_ITEM.size
    assert count > 8
    assert rig.core.counters.digest_mismatches["dram", "host", "scrub"] == count
    assert len(rig.errors()) == 8
    found = {names for _, _, names in SCRUB_ITEM.iter_unpack(order.items)}
    held = {name(keys, chunk) for keys in prompts for chunk in range(client.lookup(keys).chunks)}
    assert held
    assert not held & found, "all of it leaves, whatever prompt it is of"


def test_leases_on_what_changed_end() -> None:
    rig = dram_only()
    client, keys = Client(rig).register(), chain(3, CHUNKS)
    client.store(keys)
    lease = client.lookup(keys).lease
    rig.changed = {name(keys, 2)}
    rig.wait_ms(1_000)
    reply = client.ask(client.retrieving(lease, GroupBlocks(0, 0, ids(*range(9)))))
    assert (reply.family, reply.code) == ("request", "lease-unknown")
    assert client.lookup(keys).chunks == 2


def test_counts_begin_at_zero_where_it_is_on() -> None:
    rig = ScrubRig()
    Client(rig).register()
    counted = rig.core.counters.digest_mismatches
    assert counted["dram", "host", "scrub"] == counted["disk", "0", "scrub"] == 0


# ---------------------------------------------------------------- under way


def test_what_is_read_is_not_evicted() -> None:
    rig = dram_only(arena_bytes=DISK["arena_bytes"])
    keys = chain(4, 1)
    client = under_way(rig, keys)
    fill(client, prompts=60)
    found = client.lookup(keys)
    assert found.chunks == 1
    client.release(found)
    rig.scrubber_works = True
    rig.finish_scrub()
    fill(client, first=3_000, prompts=60)
    assert client.lookup(keys).chunks == 0, "and it goes afterwards"


def test_a_namespace_is_cleared_meanwhile() -> None:
    rig = dram_only()
    keys = chain(5, 2)
    client = under_way(rig, keys)
    client.ask(Clear(rig.number(), NAMESPACE))
    rig.wait_ms(100)
    assert used_bytes(rig) == 2 * 4096, "its slots are still read"
    client.store(keys)
    rig.changed = names(keys)
    rig.finish_scrub()
    assert client.lookup(keys).chunks == 2, "the new ones are others"
    assert used_bytes(rig) == 2 * 4096


def test_it_is_cut_off_meanwhile() -> None:
    """A retrieve finds the chunk wrong that the scrub is reading."""
    rig = dram_only()
    keys = chain(6, 2)
    client = under_way(rig, keys)
    rig.movers_copy = False
    lease = client.lookup(keys).lease
    assert client.ask(client.retrieving(lease, GroupBlocks(0, 0, ids(*range(6))))) is None
    ((mover, copy),) = rig.copies
    rig.copies.clear()
    rig.report(mover, Done(copy.job, "failed", 0, 1, "digest", "", copy.mode, wrong=(0,)))
    assert client.lookup(keys).chunks == 0
    assert used_bytes(rig) == 2 * 4096, "its slots are still read"
    rig.changed = names(keys)
    rig.finish_scrub()
    assert used_bytes(rig) == 0
    assert rig.core.chunks.pins == 0


def test_the_mover_dies_meanwhile() -> None:
    rig = dram_only()
    keys = chain(7, 2)
    client = under_way(rig, keys)
    ((mover, order),) = rig.reading
    rig.handle(MoverGone(mover, "signal 9"))
    assert rig.core.scrub.job is None
    assert rig.core.chunks.pins == 0
    rig.report(mover, Scrubbed(order.job, (0,), 0))
    rig.reading.clear()
    rig.items.clear()
    rig.scrubber_works = True
    client = Client(rig, engine="other").register()
    rig.wait_ms(1_000)
    assert {names for _, _, names in rig.items} == names(keys)
    assert client.lookup(keys).chunks == 2


def test_a_mover_that_does_not_end_it_is_killed() -> None:
    rig = dram_only(job_ttl_ms=1_000)
    under_way(rig, chain(8, 2))
    rig.wait_ms(800)
    assert rig.kills == 0
    rig.wait_ms(400)
    assert rig.kills == 1
    assert rig.core.scrub.job is None
    assert not [order for order in rig.orders if isinstance(order, Cancel)]


def test_a_report_of_another_job_or_mover_says_nothing() -> None:
    rig = ScrubRig()
    keys = chain(9, 1)
    client = under_way(rig, keys)
    ((mover, order),) = rig.reading
    (other,) = rig.core.movers.keys() - {mover}
    rig.report(mover, Scrubbed(order.job + 1, (0,), 0))
    rig.report(other, Scrubbed(order.job, (0,), 0))
    assert rig.core.scrub.job is not None
    assert client.lookup(keys).chunks == 1
    assert not rig.errors()


def test_a_chunk_is_written_to_disk_while_it_is_read() -> None:
    rig = ScrubRig(disk_write_through=False)
    rig.scrubber_works = False
    client, keys = Client(rig).register(), chain(10, CHUNKS)
    client.store(keys)
    rig.wait_ms(100)
    assert rig.reading
    fill(client)
    assert any(isinstance(order, Demote) for order in rig.orders)
    rig.changed = {name(keys, chunk) for chunk in range(CHUNKS)}
    rig.finish_scrub()
    assert client.lookup(keys).chunks == 0


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_it_does_not_count_as_use(policy: str) -> None:
    rig = dram_only(arena_bytes=DISK["arena_bytes"], eviction_policy=policy, scrub_bytes_per_s=FAST)
    client = Client(rig).register()
    first, second = chain(11, 1), chain(12, 1)
    for keys in (first, second):
        rig.now_ns += 1_000_000
        client.store(keys)
    rig.wait_ms(500)
    assert {names for _, _, names in rig.items} == names(first) | names(second)
    seed = 100
    while client.lookup(first).chunks and not rig.core.counters.evictions:
        client.store(chain(seed, 1))
        seed += 1
    assert rig.core.counters.evictions == 1


def test_what_was_cut_off_is_not_read_while_it_is_forgotten() -> None:
    rig = dram_only(forget_chunks=1)
    client, keys = Client(rig).register(), chain(1, 9)
    client.store(keys)
    clear_prefix(rig, key(keys, 0))
    rig.items.clear()
    rig.wait_ms(2_000)
    assert rig.items == []
