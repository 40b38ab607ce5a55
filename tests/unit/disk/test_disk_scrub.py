"""Records are read and compared before anybody asks for them: into free slots, and never before somebody's read."""

from typing import Any

import pytest

from kvserver.service.base.effects import Log
from kvserver.service.base.events import ArenaGrew
from kvserver.service.holdings.accounts import Quota
from kvserver.service.holdings.place_owners import DiskJob
from kvserver.wire.messages import Clear, Drain, GroupBlocks, Retrieved
from kvserver.wire.orders import ItemFault, Moved, Promote
from tests.rigs.brain_rig import FULL, NAMESPACE, SLAB_BYTES, STATE, Client, chain, ids, is_refusal, key
from tests.rigs.disk_rig import CHUNKS, EXTENT_BYTES, DiskRig, cold_prompt, fill, restart

RATE = 20 * EXTENT_BYTES


class ScrubRig(DiskRig):
    """A rig whose disks alone are scrubbed."""

    def __init__(self, **bounds: Any) -> None:
        super().__init__(**{"scrub_bytes_per_s": RATE, "verifies": False, **bounds})

    def scrubs(self) -> list[Promote]:
        return [order for order in self.orders if isinstance(order, Promote) and not order.asked]

    def compared(self) -> list[bytes]:
        """Keys of the chunks that were compared."""
        return [records[0].key for records in self.read]

    def errors(self) -> list[dict[str, object]]:
        return [dict(it.fields) for it in self.effects if isinstance(it, Log) and it.event == "digest mismatch"]

    def used_bytes(self) -> int:
        return self.service.status(self.now_ns).arena.used_bytes

    def on_disk(self) -> int:
        return self.service.status(self.now_ns).chunks_on_disk


def stored(rig: ScrubRig, prompts: int) -> tuple[Client, list[bytes]]:
    """A few prompts in DRAM and on disk."""
    client, keys = Client(rig).register(), [chain(seed, CHUNKS) for seed in range(prompts)]
    for each in keys:
        client.store(each)
    assert rig.on_disk() == CHUNKS * prompts
    return client, keys


def on_disk_alone(rig: ScrubRig, prompts: int) -> tuple[Client, list[bytes]]:
    """A few prompts on disk, and all of DRAM free."""
    _, keys = stored(rig, prompts)
    restart(rig)
    rig.handle(ArenaGrew(rig.bounds.arena_bytes // SLAB_BYTES, ""))
    client = Client(rig, engine="later").register()
    rig.read.clear()
    rig.orders.clear()
    return client, keys


def under_way(rig: ScrubRig, prompts: int = 1) -> tuple[Client, list[bytes]]:
    """A few prompts on disk alone, and a scrub of one chunk that has begun."""
    client, keys = on_disk_alone(rig, prompts)
    rig.disk_works = False
    rig.wait_ms(1_000)
    assert len(rig.moving) == 1
    return client, keys


# ---------------------------------------------------------------- the walk


def test_it_goes_round_all_records_and_round_again() -> None:
    rig = ScrubRig()
    _, keys = on_disk_alone(rig, 4)
    rig.wait_ms(2_000)
    seen, every = rig.compared(), {key(each, chunk) for each in keys for chunk in range(CHUNKS)}
    assert set(seen[-12:]) == set(seen[-24:-12]) == every
    assert rig.used_bytes() == 0, "nothing enters DRAM for it"
    assert rig.core.counters.evictions == rig.core.counters.disk_reads == 0
    assert rig.core.counters.scrubbed_bytes["disk"] >= EXTENT_BYTES * 24
    assert rig.service.status(rig.now_ns).scrub_round_s["disk"] > 0


def test_what_is_in_dram_as_well_is_compared_and_stays_there() -> None:
    rig = ScrubRig()
    client, (keys,) = stored(rig, 1)
    used = rig.used_bytes()
    rig.wait_ms(1_000)
    assert set(rig.compared()) == {key(keys, chunk) for chunk in range(CHUNKS)}
    assert rig.used_bytes() == used
    assert client.lookup(keys).chunks_on_disk == 0


def test_the_rate_is_kept_by_the_clock() -> None:
    rig = ScrubRig()
    stored(rig, 8)
    for _ in range(5):
        before = len(rig.scrubs())
        rig.wait_ms(1_000)
        assert 18 <= len(rig.scrubs()) - before <= 20 + 2 + 1, "a burst of 100 ms, and one chunk"


def test_it_is_off_by_default() -> None:
    rig = ScrubRig(scrub_bytes_per_s=0)
    stored(rig, 2)
    rig.wait_ms(2_000)
    assert not rig.read


def test_all_devices_have_their_turn() -> None:
    rig = ScrubRig(disk_devices=2, disk_run_tokens=1)
    stored(rig, 6)
    rig.wait_ms(2_000)
    assert {records[0].device for records in rig.read} == {0, 1}
    assert len(set(rig.compared())) == 6 * CHUNKS


# ---------------------------------------------------------------- what changed


def test_a_record_that_changed_goes_and_so_does_what_needs_it() -> None:
    rig = ScrubRig()
    client, (keys,) = under_way(rig)
    ((_, order),) = rig.moving
    first = rig.read[-1][0].key
    rig.finish_disk(unreadable=first)
    left = [key(keys, chunk) for chunk in range(CHUNKS)].index(first)
    assert client.lookup(keys).chunks == rig.on_disk() == left
    (line,) = rig.errors()
    assert (line["key"], line["tier"], line["device"], line["mode"]) == (first.hex(), "disk", "0", "scrub")
    assert rig.core.counters.digest_mismatches["disk", "0", "scrub"] == 1
    assert rig.core.counters.disk_lost == rig.core.counters.disk_faults["checksum"] == 1
    assert isinstance(order, Promote)


@pytest.mark.parametrize("fault", ["io", "stale", "short"])
def test_a_record_that_cannot_be_read_goes_as_in_any_read(fault: Any) -> None:
    rig = ScrubRig()
    under_way(rig)
    rig.fault = fault
    rig.finish_disk()
    assert rig.core.counters.disk_lost == 1
    assert not rig.errors()


def test_what_dram_keeps_servable_stays_and_so_do_its_leases() -> None:
    rig = ScrubRig()
    client, (keys,) = stored(rig, 1)
    lease = client.lookup(keys).lease
    rig.disk_works = False
    rig.wait_ms(500)
    rig.finish_disk(unreadable=rig.read[-1][0].key)
    assert rig.on_disk() == CHUNKS - 1
    reply = client.ask(client.retrieving(lease, GroupBlocks(0, 0, ids(*range(9)))))
    assert isinstance(reply, Retrieved)
    assert client.lookup(keys).chunks == CHUNKS


# ---------------------------------------------------------------- others go first


def test_somebodys_read_goes_first() -> None:
    rig = ScrubRig(disk_jobs_max=1)
    client, keys = on_disk_alone(rig, 6)
    rig.disk_works = False
    for each in keys:
        client.lookup(each)
    while rig.core.disk and rig.core.disk.waits.reads:
        rig.wait_ms(200)
        assert not rig.scrubs()
        rig.finish_disk()
    rig.wait_ms(200)
    assert len(rig.scrubs()) == 1


def test_a_read_begins_beside_it() -> None:
    rig = ScrubRig(disk_jobs_max=1)
    client, (one, other) = under_way(rig, 2)
    scrubbed = rig.read[-1][0].key
    keys = other if scrubbed in {key(one, chunk) for chunk in range(CHUNKS)} else one
    client.lookup(keys)
    assert [order.asked for _, order in rig.moving if isinstance(order, Promote)] == [False, True]


@pytest.mark.parametrize("is_right", [True, False])
def test_a_retrieve_wants_the_chunk_that_is_compared(is_right: bool) -> None:
    rig = ScrubRig()
    client, (keys,) = under_way(rig)
    compared = rig.read[-1][0].key
    request = client.retrieving(client.lookup(keys).lease, GroupBlocks(0, 0, ids(*range(9))))
    assert client.ask(request) is None
    rig.disk_works = is_right
    rig.finish_disk(unreadable=b"" if is_right else compared)
    if is_right:
        assert isinstance(rig.answers[client.peer, request.id], Retrieved)
        assert rig.core.counters.disk_reads == CHUNKS
    else:
        assert is_refusal(rig.answers[client.peer, request.id], "device", "disk-io")


def test_a_retrieve_wants_what_turns_out_to_be_wrong_of_a_chunk_that_stays() -> None:
    rig = ScrubRig()
    client, keys = Client(rig).register((FULL, STATE)), chain(3, 1)
    blocks = GroupBlocks(0, 0, ids(0, 1, 2)), GroupBlocks(1, 0, ids(0))
    client.ask(client.storing(keys, *blocks))
    restart(rig)
    rig.handle(ArenaGrew(rig.bounds.arena_bytes // SLAB_BYTES, ""))
    client = Client(rig, engine="later").register((FULL, STATE))
    rig.disk_works = False
    rig.wait_ms(500)
    ((mover, scrub),) = rig.moving
    rig.moving.clear()
    request = client.retrieving(client.lookup(keys).lease, *blocks)
    assert client.ask(request) is None
    rig.report(mover, Moved(scrub.job, [ItemFault(1, "checksum")], 1, bytes(16)))
    assert is_refusal(rig.answers[client.peer, request.id], "device", "disk-io")
    assert rig.on_disk() == 1, "its other group is servable"


def test_without_a_free_slot_it_waits_and_nothing_is_evicted() -> None:
    rig = ScrubRig(scrub_bytes_per_s=0)
    client, keys = cold_prompt(rig)
    rig.service._core.reload(ScrubRig().bounds)
    evictions, before = rig.core.counters.evictions, len(rig.read)
    assert not rig.core.chunks.pool.has_room(EXTENT_BYTES)
    rig.wait_ms(10_000)
    assert len(rig.read) == before
    assert rig.core.counters.evictions == evictions
    assert rig.service.status(rig.now_ns).scrub_round_s["disk"] == 0, "nothing was stepped over"
    client.ask(Clear(rig.number(), NAMESPACE))
    client.store(keys)
    rig.wait_ms(1_000)
    assert len(rig.read) > before, "it goes on when there is room"


def test_a_chunk_of_several_slots_takes_all_of_them_or_none() -> None:
    rig = ScrubRig(scrub_bytes_per_s=0)
    client, keys = Client(rig).register((FULL, STATE)), chain(1, 1)
    client.ask(client.storing(keys, GroupBlocks(0, 0, ids(0, 1, 2)), GroupBlocks(1, 0, ids(0))))
    tier, pool = rig.core.disk, rig.core.chunks.pool
    assert tier is not None
    (space,) = rig.core.chunks.spaces.values()
    (node,) = space.nodes.values()
    job = DiskJob(number=99, kind="scrub", space=space, node=node, device=0, groups=3, generation=1, began_ns=0)
    assert len(job.parts) == 2
    while (last := pool.allocate(EXTENT_BYTES, node)) is not None:
        spare = last
    pool.free(spare)
    used = pool.bytes_used
    assert not tier.chunks.begin_scrub(job)
    assert (pool.bytes_used, node.pins) == (used, 0)
    pool.free(spare - EXTENT_BYTES)
    assert tier.chunks.begin_scrub(job)
    assert (pool.bytes_used, node.pins) == (used + EXTENT_BYTES, 1)
    tier.chunks.end_scrub(job)
    assert (pool.bytes_used, node.pins) == (used - EXTENT_BYTES, 0)


def test_a_device_with_a_problem_is_left_alone() -> None:
    rig = ScrubRig()
    stored(rig, 2)
    rig.problem = "it fails"
    rig.tell_devices()
    before = len(rig.read)
    rig.wait_ms(1_000)
    assert len(rig.read) == before
    rig.problem = ""
    rig.tell_devices()
    rig.wait_ms(1_000)
    assert len(rig.read) > before


def test_no_tenant_is_charged_for_it() -> None:
    most = CHUNKS * EXTENT_BYTES
    rig = ScrubRig(tenants=(Quota("", 0, most),))
    client, (keys,) = stored(rig, 1)
    rig.disk_works = False
    rig.wait_ms(500)
    assert len(rig.moving) == 1
    assert rig.core.chunks.accounts is not None
    assert all(account.taken_bytes <= most for account in rig.core.chunks.accounts.all())
    rig.finish_disk()
    assert client.lookup(keys).chunks == CHUNKS


# ---------------------------------------------------------------- under way


def test_a_namespace_is_cleared_meanwhile() -> None:
    rig = ScrubRig()
    client, (keys,) = under_way(rig)
    compared = rig.read[-1][0].key
    client.ask(Clear(rig.number(), NAMESPACE))
    rig.finish_disk(unreadable=compared)
    rig.wait_ms(100)
    assert rig.used_bytes() == rig.on_disk() == 0
    assert rig.core.chunks.pins == 0
    assert client.lookup(keys).chunks == 0


def test_the_chunk_above_is_lost_meanwhile() -> None:
    rig = ScrubRig()
    client, (keys,) = on_disk_alone(rig, 1)
    rig.disk_works = False
    for _ in range(CHUNKS):
        rig.wait_ms(200)
        if rig.read[-1][0].key == key(keys, CHUNKS - 1):
            break
        rig.finish_disk()
    assert rig.read[-1][0].key == key(keys, CHUNKS - 1)
    scrub, rig.moving = rig.moving, []
    client.lookup(keys[: len(keys) // CHUNKS])
    rig.finish_disk(unreadable=key(keys, 0))
    assert rig.on_disk() == 2, "the one that is compared keeps its extent, and so does the one above"
    rig.moving = scrub
    rig.finish_disk()
    assert rig.on_disk() == rig.used_bytes() == 0
    assert rig.core.chunks.pins == 0


def test_the_mover_dies_meanwhile() -> None:
    rig = ScrubRig()
    client, (keys,) = under_way(rig)
    rig.moving.clear()
    rig.disk_works = True
    rig.another_mover()
    assert rig.core.counters.disk_lost == 0
    rig.wait_ms(1_000)
    assert set(rig.compared()) == {key(keys, chunk) for chunk in range(CHUNKS)}
    assert rig.core.counters.scrubbed_bytes["disk"] == EXTENT_BYTES * (len(rig.compared()) - 1), "one was lost"
    assert client.lookup(keys).chunks == CHUNKS


def test_a_mover_that_does_not_end_it_is_killed() -> None:
    rig = ScrubRig(disk_job_ms=500)
    under_way(rig)
    rig.moving.clear()
    rig.wait_ms(600)
    assert rig.kills == 1


def test_a_drained_device_is_emptied_beside_it() -> None:
    rig = ScrubRig(disk_devices=2, disk_run_tokens=1)
    client, _ = stored(rig, 6)
    rig.disk_works = False
    rig.wait_ms(500)
    client.ask(Drain(rig.number(), 0))
    rig.disk_works = True
    rig.finish_disk()
    rig.wait_ms(2_000)
    assert rig.drains[0] == "drained"
    assert rig.on_disk() == 6 * CHUNKS


def test_writes_and_evictions_go_on_beside_it() -> None:
    rig = ScrubRig(scrub_bytes_per_s=50 * RATE)
    client = Client(rig).register()
    for step in range(30):
        fill(client, first=5_000 + 5 * step, prompts=5)
        rig.wait_ms(100)
    assert rig.core.counters.evictions > 100
    assert rig.core.counters.disk_lost == 0
