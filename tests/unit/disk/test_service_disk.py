"""The brain's decisions about the disk tier: which reads it makes for whom, and the cost of a fault."""

import pytest

from kvserver.index.space import READY
from kvserver.service.base.events import ArenaGrew, MoverGone
from kvserver.service.disk import writes
from kvserver.service.holdings.disk_chunks import DiskChunks
from kvserver.service.state.core import Core
from kvserver.service.state.disk_tier import DiskTier
from kvserver.wire.messages import (
    KEY_BYTES,
    Error,
    GroupBlocks,
    GroupSpec,
    RegionRun,
    Retrieved,
)
from kvserver.wire.orders import Copy, ItemFault, Moved
from tests.rigs.brain_rig import FULL, NAMESPACE, SLAB_BYTES, STATE, Client, chain, ids, is_refusal, key
from tests.rigs.disk_rig import (
    CHUNKS,
    PROMPTS_OF_ARENA,
    DiskRig,
    cold_prompt,
    fill,
    restart,
    sums_of,
)
from tests.rigs.two_waiting import WIDE, too_much_for_dram


def whole(client: Client, lease: int) -> object:
    return client.ask(client.retrieving(lease, GroupBlocks(0, 0, ids(*range(3 * CHUNKS)))))


def test_chunks_that_left_dram_are_found_on_disk_and_read_once_for_all_who_wait() -> None:
    rig = DiskRig()
    client, keys = cold_prompt(rig)
    found = client.lookup(keys)
    assert (found.chunks, found.chunks_on_disk) == (CHUNKS, CHUNKS)
    assert [records[0].key for records in rig.read] == [key(keys, chunk) for chunk in range(CHUNKS)]
    assert isinstance(whole(client, found.lease), Retrieved)
    assert client.lookup(keys).chunks_on_disk == 0
    assert len(rig.read) == CHUNKS


def test_a_retrieve_waits_for_the_last_of_its_chunks() -> None:
    rig = DiskRig()
    client, keys = cold_prompt(rig)
    rig.disk_works = False
    found = client.lookup(keys)
    copies = sum(isinstance(order, Copy) for order in rig.orders)
    request = client.retrieving(found.lease, GroupBlocks(0, 0, ids(*range(3 * CHUNKS))))
    assert client.ask(request) is None
    assert sum(isinstance(order, Copy) for order in rig.orders) == copies
    rig.finish_disk()
    assert isinstance(rig.answers[client.peer, request.id], Retrieved)


def test_a_part_of_a_retrieve_waits_for_its_own_chunks_only() -> None:
    rig = DiskRig(disk_jobs_max=1)
    client, keys = cold_prompt(rig)
    rig.disk_works = False
    found = client.lookup(keys)
    parts = [
        client.retrieving(found.lease, GroupBlocks(0, 3 * chunk, ids(0, 1, 2)), more=chunk + 1 < CHUNKS)
        for chunk in range(CHUNKS)
    ]
    assert [client.ask(part) for part in parts] == [None] * CHUNKS
    for chunk in range(CHUNKS):
        assert rig.read[-1][0].key == key(keys, chunk)
        assert (client.peer, parts[chunk].id) not in rig.answers
        rig.finish_disk()
        assert isinstance(rig.answers[client.peer, parts[chunk].id], Retrieved)


def test_the_reads_of_a_lease_keep_their_turn_when_its_last_retrieve_comes() -> None:
    """The retrieve ends the lease for which the reads were queued; lookups made since then do not overtake them."""
    rig = DiskRig(disk_jobs_max=1)
    client, keys = cold_prompt(rig)
    others = chain(1000, CHUNKS)
    rig.disk_works = False
    found, later = client.lookup(keys), client.lookup(others)
    assert (found.chunks_on_disk, later.chunks_on_disk) == (CHUNKS, CHUNKS)
    client.ask(client.retrieving(found.lease, GroupBlocks(0, 0, ids(*range(3 * CHUNKS)))))
    for _ in range(2 * CHUNKS):
        rig.finish_disk()
    asked_for = keys + others
    assert [records[0].key for records in rig.read] == [key(asked_for, chunk) for chunk in range(2 * CHUNKS)]


def test_a_retrieve_of_what_is_in_dram_already_does_not_wait_for_the_rest() -> None:
    rig = DiskRig()
    client, keys = cold_prompt(rig)
    head = client.lookup(keys[:KEY_BYTES])
    assert head.chunks_on_disk == 1
    rig.disk_works = False
    found = client.lookup(keys)
    assert found.chunks_on_disk == CHUNKS - 1
    reply = client.ask(client.retrieving(found.lease, GroupBlocks(0, 0, ids(0, 1, 2))))
    assert isinstance(reply, Retrieved)


def test_a_chunk_on_disk_stays_there_when_dram_has_no_room_for_what_a_store_adds_to_it() -> None:
    rig = DiskRig()
    hybrid, other = Client(rig).register([FULL, STATE], namespace=bytes(32)), Client(rig).register()
    keys = chain(1, 1)
    blocks, state = GroupBlocks(0, 0, ids(0, 1, 2)), GroupBlocks(1, 0, ids(3))
    hybrid.ask(hybrid.storing(keys, blocks))
    fill(other)
    node = rig.core.chunks.spaces[bytes(32)].nodes[keys]
    assert (node.in_dram, node.on_disk) == (0, 1)
    rig.movers_copy = False
    for seed in range(PROMPTS_OF_ARENA + 1):  # under way, so they keep all slots
        other.ask(other.storing(chain(seed, CHUNKS), GroupBlocks(0, 0, ids(*range(3 * CHUNKS)))))
    assert hybrid.ask(hybrid.storing(keys, blocks, state)).why == "full"
    assert (node.state, node.on_disk) == (READY, 1)


def test_a_chunk_that_cannot_be_read_is_a_miss_with_all_behind_it() -> None:
    rig = DiskRig()
    client, keys = cold_prompt(rig)
    rig.disk_works = False
    found = client.lookup(keys)
    request = client.retrieving(found.lease, GroupBlocks(0, 0, ids(*range(3 * CHUNKS))))
    client.ask(request)
    rig.disk_works, rig.fault = True, "checksum"
    rig.finish_disk()
    assert is_refusal(rig.answers[client.peer, request.id], "device", "disk-io")
    assert client.lookup(keys).chunks == 0
    rig.fault = None
    client.store(keys)
    assert client.lookup(keys).chunks == CHUNKS


def test_a_held_retrieve_ends_at_its_deadline() -> None:
    rig = DiskRig(disk_job_ms=60_000)
    client, keys = cold_prompt(rig)
    rig.disk_works = False
    found = client.lookup(keys)
    request = client.retrieving(found.lease, GroupBlocks(0, 0, ids(*range(3 * CHUNKS))))
    client.ask(request)
    rig.wait_ms(request.deadline_ms + 50)
    assert is_refusal(rig.answers[client.peer, request.id], "device", "disk-late")


@pytest.mark.parametrize("busy", [False, True])
def test_two_retrieves_that_wait_for_each_others_slots_are_served_one_after_the_other(busy: bool) -> None:
    """busy: something else is being copied all the time."""
    rig = DiskRig()
    client, prompts, heads = too_much_for_dram(rig)
    found = [client.lookup(keys) for keys in prompts]
    assert [(each.chunks, each.chunks_on_disk) for each in found] == [(35, 8), (37, 4)]
    rig.movers_copy = not busy
    assert (client.ask(client.retrieving(heads[0].lease, GroupBlocks(0, 0, ids(0, 1)))) is None) == busy
    client.release(heads[1])
    asked = [client.retrieving(each.lease, GroupBlocks(0, 0, ids(*range(3 * each.chunks)))) for each in found]
    assert [client.ask(request) for request in asked] == [None, None]
    for _ in range(9):
        rig.wait_ms(50)
        rig.finish()
    assert all(isinstance(rig.answers[client.peer, request.id], Retrieved) for request in asked)
    assert (rig.service.status(rig.now_ns).leases, rig.service.status(rig.now_ns).pins) == (0, 0)


def test_all_parts_of_two_retrieves_that_wait_for_each_others_slots_are_served() -> None:
    rig = DiskRig()
    client, prompts, heads = too_much_for_dram(rig)
    first, last = (client.lookup(keys) for keys in prompts)
    for head in heads:
        client.release(head)
    late = [client.retrieving(first.lease, GroupBlocks(0, 3 * at, ids(*range(6))), more=True) for at in (31, 33)]
    parts = [client.retrieving(last.lease, GroupBlocks(0, 3 * at, ids(*range(6))), more=True) for at in (33, 35)]
    assert [client.ask(request) for request in (parts[0], *late, parts[1])] == [None] * 4
    rig.wait_ms(500)
    assert all(isinstance(rig.answers[client.peer, part.id], Retrieved) for part in (*parts, *late))


def test_a_retrieve_that_lacks_slots_gets_those_of_leases_that_nobody_uses_yet() -> None:
    """What these leases keep is read again when their own retrieve comes."""
    rig = DiskRig()
    client, prompts, heads = too_much_for_dram(rig)
    request = client.retrieving(client.lookup(prompts[0]).lease, GroupBlocks(0, 0, ids(*range(3 * 35))))
    assert client.ask(request) is None
    rig.wait_ms(50)
    assert (client.peer, request.id) not in rig.answers, "ending copies may give slots back first"
    rig.wait_ms(150)
    assert isinstance(rig.answers[client.peer, request.id], Retrieved)
    later = client.retrieving(heads[1].lease, GroupBlocks(0, 0, ids(*range(3 * 33))))
    client.ask(later)
    rig.wait_ms(300)
    assert isinstance(rig.answers[client.peer, later.id], Retrieved)


def test_reads_of_a_retrieve_that_lacks_slots_go_before_those_of_leases_that_nobody_uses_yet() -> None:
    rig = DiskRig()
    client, prompts, _ = too_much_for_dram(rig)
    others = [chain(1000 + number, CHUNKS) for number in range(9)]
    assert all(client.lookup(keys).chunks_on_disk == CHUNKS for keys in others)
    found = client.lookup(prompts[0])
    before = len(rig.read)
    request = client.retrieving(found.lease, GroupBlocks(0, 0, ids(*range(3 * found.chunks))))
    assert client.ask(request) is None
    rig.wait_ms(500)
    assert isinstance(rig.answers[client.peer, request.id], Retrieved)
    assert [records[0].key for records in rig.read[before:]][:8] == [key(prompts[0], at) for at in range(27, 35)]


def test_a_lease_ends_when_a_part_that_left_dram_for_others_cannot_be_read_again() -> None:
    rig = DiskRig()
    client, keys = Client(rig).register([FULL, STATE]), chain(1, 1)
    client.ask(client.storing(keys, GroupBlocks(0, 0, ids(0, 1, 2)), GroupBlocks(1, 0, ids(3))))
    kept = client.lookup(keys)
    space = rig.core.chunks.spaces[NAMESPACE]
    rig.core.chunks.room.send_away(space, space.nodes[keys])
    rig.disk_works = False
    assert client.lookup(keys).chunks_on_disk == 1
    ((mover, order),) = rig.moving
    rig.moving.clear()
    rig.report(mover, Moved(order.job, [ItemFault(1, "checksum")], 1, sums_of(order)))
    request = client.retrieving(kept.lease, GroupBlocks(0, 0, ids(0, 1, 2)), GroupBlocks(1, 0, ids(3)))
    assert is_refusal(client.ask(request), "request", "lease-unknown")


def test_what_leases_keep_and_no_disk_has_is_written_before_it_leaves_dram() -> None:
    rig = DiskRig(disk_write_through=False)
    client = Client(rig).register((WIDE,), buffer_bytes=40_000)
    client.store(cold := chain(1, 8))
    fill(client)
    assert client.lookup(cold).chunks_on_disk == 8
    rig.wait_ms(40_000)  # that lease is over
    fill(client, first=3000)
    kept = [chain(seed, 30) for seed in (5000, 5001)]
    leases = []
    for keys in kept:
        client.store(keys)
        leases.append(client.lookup(keys).lease)
    before = set(rig.keys_written())
    request = client.retrieving(client.lookup(cold).lease, GroupBlocks(0, 0, ids(*range(3 * 8))))
    assert client.ask(request) is None
    rig.wait_ms(500)
    assert isinstance(rig.answers[client.peer, request.id], Retrieved)
    assert {key(keys, chunk) for keys in kept for chunk in range(30)} & (set(rig.keys_written()) - before)
    for lease in leases:
        rig.wait_ms(500)
        assert isinstance(client.ask(client.retrieving(lease, GroupBlocks(0, 0, ids(*range(3))))), Retrieved | None)


def test_a_retrieve_gives_way_when_no_chunk_may_leave_dram_and_no_disk_takes_one() -> None:
    rig = DiskRig()
    client = Client(rig).register((WIDE,), buffer_bytes=40_000)
    prompts = [chain(1, 8), chain(2, 8)]
    for keys in prompts:
        client.store(keys)
    fill(client)
    assert rig.core.disk is not None
    rig.core.disk.devices[0].set_problem("8 reads or writes in a row failed")
    kept = []
    for seed in (5000, 5001):
        client.store(chain(seed, 30))
        kept.append(client.lookup(chain(seed, 30)))
    found = [client.lookup(keys) for keys in prompts]
    assert [each.chunks_on_disk for each in found] == [8, 8]
    asked = [client.retrieving(each.lease, GroupBlocks(0, 0, ids(*range(3 * 8)))) for each in found]
    assert [client.ask(request) for request in asked] == [None, None]
    rig.wait_ms(900)
    assert not any((client.peer, request.id) in rig.answers for request in asked)
    rig.wait_ms(200)
    assert is_refusal(rig.answers[client.peer, asked[1].id], "device", "disk-room")
    client.release(kept[0])
    rig.wait_ms(100)
    assert isinstance(rig.answers[client.peer, asked[0].id], Retrieved)


def test_no_retrieve_gives_way_while_the_arena_grows() -> None:
    rig = DiskRig(arena_bytes=5 * SLAB_BYTES)
    client, prompts = Client(rig).register((WIDE,), buffer_bytes=40_000), [chain(1, 35), chain(2, 37)]
    for keys in prompts:
        client.store(keys)
    restart(rig)
    rig.handle(ArenaGrew(4, ""))
    client = Client(rig).register((WIDE,), buffer_bytes=40_000)
    head = client.lookup(prompts[1][: 33 * KEY_BYTES])
    found = [client.lookup(keys) for keys in prompts]
    client.release(head)
    asked = [client.retrieving(each.lease, GroupBlocks(0, 0, ids(*range(3 * each.chunks)))) for each in found]
    assert [client.ask(request) for request in asked] == [None, None]
    rig.wait_ms(500)
    assert not any((client.peer, request.id) in rig.answers for request in asked)
    rig.handle(ArenaGrew(5, ""))
    rig.wait_ms(100)
    assert all(isinstance(rig.answers[client.peer, request.id], Retrieved) for request in asked)


def test_a_disk_mover_that_hangs_is_killed_and_lookups_answer_what_dram_has() -> None:
    rig = DiskRig(disk_job_ms=1_000, disk_restart_ms=5_000, disk_jobs_max=1)
    client, keys = cold_prompt(rig)
    rig.disk_works = False
    found = client.lookup(keys)
    assert found.chunks == CHUNKS
    request = client.retrieving(found.lease, GroupBlocks(0, 2, ids(*range(2, 3 * CHUNKS))))
    client.ask(request)
    rig.wait_ms(1_100)
    assert rig.kills == 1
    assert is_refusal(rig.answers[client.peer, request.id], "device", "disk-lost")
    assert client.lookup(keys).chunks == 0
    rig.moving.clear()
    rig.disk_works = True
    rig.wait_ms(5_100)
    assert client.lookup(keys).chunks == CHUNKS


def test_a_disk_mover_that_answers_no_note_is_killed_though_nothing_is_read_or_written() -> None:
    rig = DiskRig(disk_job_ms=1_000, disk_restart_ms=500)
    rig.disk_works = rig.notes_answered = False
    client = Client(rig).register()
    client.store(chain(1, CHUNKS))
    rig.disk_works = True
    rig.finish_disk()
    rig.wait_ms(900)
    assert rig.kills == 0
    rig.wait_ms(300)
    assert rig.kills == 1
    rig.notes_answered = True
    rig.wait_ms(5_000)
    assert rig.kills == 1


def test_when_the_disk_mover_dies_who_waits_for_its_turn_is_told_as_well() -> None:
    rig = DiskRig(disk_jobs_max=1)
    client, first = cold_prompt(rig)
    second = chain(1000, CHUNKS)
    rig.disk_works = False
    assert client.lookup(first).chunks == CHUNKS  # its first chunk is under way
    waiting = client.retrieving(client.lookup(second).lease, GroupBlocks(0, 0, ids(*range(3 * CHUNKS))))
    assert client.ask(waiting) is None
    ((mover, _),) = rig.moving
    rig.moving.clear()
    rig.handle(MoverGone(mover, "signal 9"))
    assert is_refusal(rig.answers[client.peer, waiting.id], "device", "disk-lost")


def test_the_daily_budget_holds_and_says_so() -> None:
    rig = DiskRig(disk_daily_write_bytes=24 * 7 * 4096)
    client, _ = cold_prompt(rig)
    assert len(rig.written) == 7
    assert rig.service.counters.disk_refused["budget"] > 0
    rig.now_ns += 3600 * 1_000_000_000
    rig.wait_ms(200)
    fill(client, first=3000, prompts=1)
    assert 7 < len(rig.written) <= 14


def test_a_chunk_that_the_daily_budget_never_allows_at_once_does_not_hold_up_others() -> None:
    """It is the coldest, so it would be tried before them for ever."""
    segment_bytes = 17 * 4096
    sizes = {"disk_segment_bytes": segment_bytes, "disk_device_bytes": 9 * segment_bytes}
    rig = DiskRig(disk_daily_write_bytes=24 * 7 * 4096, **sizes)
    page_bytes = 8 * 4096 // 3
    group = GroupSpec(2, 3, "full", 0, 1, 0, 1, 0, [RegionRun(0, 0, 1, 0, page_bytes, page_bytes)])
    large = Client(rig, engine="large").register((group,), namespace=b"L" * 32, buffer_bytes=3 * page_bytes)
    large.ask(large.storing(chain(1, 1), GroupBlocks(0, 0, ids(0, 1, 2))))
    rig.wait_ms(1_000)
    small = Client(rig).register()
    small.store(chain(2, CHUNKS))
    rig.wait_ms(1_000)
    assert rig.keys_written() == [key(chain(2, CHUNKS), chunk) for chunk in range(CHUNKS)]


def test_second_touch_writes_only_what_was_asked_for_again() -> None:
    rig = DiskRig(disk_second_touch=True, disk_write_through=False, disk_clean_percent=50)
    client = Client(rig).register()
    asked, other = chain(1, CHUNKS), chain(2, CHUNKS)
    client.store(asked)
    client.store(other)
    client.release(client.lookup(asked))
    fill(client)
    assert set(rig.keys_written()) == {key(asked, chunk) for chunk in range(CHUNKS)}
    assert client.lookup(other).chunks == 0
    assert rig.service.counters.disk_refused["second-touch"] > 0


def test_leaves_that_are_refused_do_not_hold_up_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number may become due at once: here while the disk mover was away."""
    rig = DiskRig(disk_second_touch=True, disk_restart_ms=5_000)
    client = Client(rig).register()
    (mover,) = (mover.mover for mover in rig.service.status(rig.now_ns).movers if mover.device == "disk")
    rig.handle(MoverGone(mover, "signal 9"))
    looks: list[int] = []
    coldest_dirty, choose = DiskChunks.coldest_dirty, writes.choose

    def counted(chunks: DiskChunks) -> object:
        looks[-1] += 1
        return coldest_dirty(chunks)

    def one_event(core: Core, tier: DiskTier, now_ns: int) -> None:
        looks.append(0)
        choose(core, tier, now_ns)

    monkeypatch.setattr(DiskChunks, "coldest_dirty", counted)
    monkeypatch.setattr(writes, "choose", one_event)
    monkeypatch.setattr(writes, "REFUSALS_A_LOOK", 3)
    fill(client, prompts=11)
    assert looks == []
    rig.wait_ms(6_000)
    assert max(looks) == 3
    assert sum(looks) > 11
    assert rig.written == []


def test_keys_are_remembered_only_where_second_touch_asks_for_them() -> None:
    for second_touch in (False, True):
        rig = DiskRig(disk_second_touch=second_touch)
        client, keys = Client(rig).register(), chain(1, CHUNKS)
        client.store(keys)
        client.release(client.lookup(keys))
        assert (rig.service.status(rig.now_ns).keys_touched > 0) == second_touch


def test_a_prefix_that_would_come_too_slowly_is_not_offered() -> None:
    rig = DiskRig(recompute_tokens_per_s=1_000_000_000)
    client, keys = cold_prompt(rig)
    assert rig.core.disk is not None
    for device in rig.core.disk.devices:
        device.placement.reads.began(rig.now_ns - 1_000_000_000)
        device.placement.reads.ended(2 << 20, rig.now_ns)
    assert client.lookup(keys).chunks == 0
    assert rig.service.counters.lookup_ends["declined"] == 1
    assert rig.read == []


def test_a_disk_that_nobody_has_measured_is_read() -> None:
    rig = DiskRig(recompute_tokens_per_s=1_000_000_000)
    client, keys = cold_prompt(rig)
    assert client.lookup(keys).chunks > 0


def test_a_device_smaller_than_dram_is_not_written_in_circles() -> None:
    rig = DiskRig(disk_device_bytes=4 * 20 << 10)
    client = Client(rig).register()
    fill(client, prompts=30)
    rig.wait_ms(4_000)
    before = len(rig.written)
    rig.wait_ms(4_000)
    assert len(rig.written) == before


def test_a_retrieve_while_the_disk_is_away_is_refused_and_keeps_its_lease() -> None:
    rig = DiskRig(disk_job_ms=1_000, disk_restart_ms=60_000)
    client, keys = cold_prompt(rig)
    head = client.lookup(keys[:KEY_BYTES])
    rig.disk_works = False
    assert isinstance(whole(client, head.lease), Error)
    assert isinstance(client.ask(client.retrieving(head.lease, GroupBlocks(0, 0, ids(0, 1)))), Retrieved)
