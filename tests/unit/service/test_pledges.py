"""Pledged chunks: an engine tells what it computes, another one awaits it, and every way in which that ends."""

import pytest

from kvserver.cli.explain import sentences
from kvserver.service.base.events import MoverGone
from kvserver.wire.admin import ClearNamespace, DrainServer
from kvserver.wire.explanation import Explanation, decode_explanations
from kvserver.wire.messages import (
    KEY_BYTES,
    Await,
    Clear,
    Explain,
    GroupBlocks,
    Pledge,
    Release,
    Retrieved,
    Store,
    Stored,
    Unregister,
)
from kvserver.wire.orders import Copy
from tests.rigs.admin_rig import command
from tests.rigs.brain_rig import FULL, NAMESPACE, STATE, WINDOW, Client, Rig, chain, ids, is_refusal, key
from tests.rigs.pledge_scene import CHUNKS, KEYS, TTL_MS, Scene


def test_a_lookup_that_may_wait_is_told_what_is_here_what_comes_and_from_whom() -> None:
    scene = Scene()
    scene.store(0, 2)
    scene.pledge()
    found = scene.await_()
    assert (found.chunks, found.awaited, found.producer) == (2, 3, "producer")
    assert found.lease


def test_a_pledge_is_on_what_nobody_holds() -> None:
    scene = Scene()
    scene.store(0, 2)
    pledged = scene.pledge()
    assert (pledged.held, pledged.chunks) == (2, 3)
    whole = scene.pledge(KEYS[: 2 * KEY_BYTES])
    assert (whole.pledge, whole.held, whole.chunks) == (0, 2, 0)


def test_each_part_of_a_retrieve_is_copied_as_soon_as_its_chunks_are_stored() -> None:
    scene = Scene()
    scene.store(0, 1)
    scene.pledge()
    found = scene.await_()
    parts = [scene.retrieve(found.lease, chunk, chunk + 1, more=chunk + 1 < CHUNKS) for chunk in range(CHUNKS)]
    assert isinstance(scene.answer(parts[0]), Retrieved), "what is here does not wait"
    for chunk in range(1, CHUNKS):
        assert [scene.answer(part) for part in parts[chunk:]] == [None] * (CHUNKS - chunk)
        scene.store(chunk, chunk + 1)
        assert isinstance(scene.answer(parts[chunk]), Retrieved)
    slots = [copy.groups[0].slots for copy in scene.rig.orders if isinstance(copy, Copy) and copy.kind == "retrieve"]
    stored = [copy.groups[0].slots for copy in scene.rig.orders if isinstance(copy, Copy) and copy.kind == "store"]
    assert slots == stored, "each part reads what was stored for it"
    scene.check_nothing_is_left()
    assert scene.pinned == 0
    assert scene.ended() == {"stored": 1}


def test_a_prompt_of_which_nothing_is_here_is_awaited_from_its_first_chunk() -> None:
    scene = Scene()
    scene.pledge()
    found = scene.await_()
    assert (found.chunks, found.awaited) == (0, CHUNKS)
    whole = scene.retrieve(found.lease, 0, CHUNKS, more=False)
    for chunk in range(CHUNKS):
        assert scene.answer(whole) is None
        scene.store(chunk, chunk + 1)
    assert isinstance(scene.answer(whole), Retrieved)
    assert scene.pinned == 0


def test_a_chunk_that_came_for_those_who_wait_is_not_evicted_for_the_next_store() -> None:
    """The arena has room for less than both prompts. Without the pin the first chunks would be the oldest."""
    scene = Scene(arena_bytes=2 * 64 << 10, pledged_percent_max=100)
    room = 0
    while scene.store(0, 1, chain(100 + room, 1)).why == "" and not scene.rig.core.counters.evictions:
        room += 1
    scene.pledge()
    found = scene.await_()
    part = scene.retrieve(found.lease, 0, CHUNKS, more=False)
    for chunk in range(CHUNKS):
        scene.store(chunk, chunk + 1)
        for other in range(2 * room):
            scene.store(0, 1, chain(1000 + other, 1))
    assert isinstance(scene.answer(part), Retrieved)


@pytest.mark.parametrize("deadline_ms", [700, 100_000])
def test_a_producer_that_stores_nothing_ends_the_wait_within_its_bound(deadline_ms: int) -> None:
    scene = Scene(pledge_patience_ms=2_000)
    scene.store(0, 2)
    scene.pledge()
    found = scene.await_()
    here, coming = scene.retrieve(found.lease, 0, 2), scene.retrieve(found.lease, 2, 5, deadline_ms=deadline_ms)
    assert isinstance(scene.answer(here), Retrieved)
    scene.rig.wait_ms(min(deadline_ms, 2_000) - 100)
    assert scene.answer(coming) is None
    scene.rig.wait_ms(200)
    assert is_refusal(scene.answer(coming), "device", "not-coming")
    late = scene.retrieve(found.lease, 2, 3)
    if deadline_ms > 2_000:
        assert is_refusal(scene.answer(late), "device", "not-coming", "2 chunks")
        assert scene.ended() == {"late": 1}
        scene.check_nothing_is_left()


def test_a_chunk_that_came_and_is_not_copied_is_waited_for_until_the_deadline_and_the_movers_grace() -> None:
    """Its mover has stopped in the middle of the copy. Only the mover's end gives the blocks back."""
    scene = Scene(mover_grace_ms=2_000)
    scene.pledge()
    part = scene.retrieve(scene.await_().lease, 0, 1, more=False, deadline_ms=1_000)
    scene.rig.wait_ms(800)
    scene.rig.movers_copy = False
    assert scene.store(0, 1) is None
    scene.rig.finish()
    (copy,) = [order for _, order in scene.rig.copies]
    assert copy.kind == "retrieve"
    scene.rig.wait_ms(2_100)
    assert scene.answer(part) is None
    assert scene.rig.kills == 0
    scene.rig.wait_ms(200)
    assert is_refusal(scene.answer(part), "device", "mover-lost")
    assert scene.rig.kills == 1
    assert scene.pinned == 0


def test_each_chunk_that_comes_is_progress_and_the_time_to_live_is_not_prolonged() -> None:
    scene = Scene(pledge_patience_ms=1_000)
    scene.pledge(ttl_ms=2_500)
    found = scene.await_()
    for chunk in range(3):
        scene.rig.wait_ms(800)
        scene.store(chunk, chunk + 1)
    assert len(scene.rig.core.pledges) == 1, "each was in time"
    last = scene.retrieve(found.lease, 3, 4)
    scene.rig.wait_ms(100)
    assert is_refusal(scene.answer(last), "device", "not-coming")
    assert scene.ended() == {"late": 1}
    assert isinstance(scene.answer(scene.retrieve(found.lease, 0, 3)), Retrieved), "what came is used"
    assert scene.pledge().chunks == CHUNKS - 3, "it was only slow, and may pledge the rest at once"


@pytest.mark.parametrize("how", ["withdrawn", "died", "not-stored", "cleared"])
def test_the_end_of_a_pledge_ends_every_wait_at_once(how: str) -> None:
    scene = Scene()
    scene.store(0, 1)
    pledge = scene.pledge().pledge
    found = scene.await_()
    waits = [scene.retrieve(found.lease, 1, 2), scene.retrieve(found.lease, 2, 5)]
    match how:
        case "withdrawn":
            scene.unpledge(pledge)
        case "died":
            scene.rig.peer_gone(scene.producer.local)
        case "not-stored":
            scene.rig.movers_copy = False
            scene.store(1, 3)
            scene.rig.finish("failed", "io", "planted")
        case "cleared":
            scene.producer.ask(Clear(scene.rig.number(), NAMESPACE))
    for wait in waits:
        assert is_refusal(scene.answer(wait), "device", "not-coming")
    assert scene.ended() == {how: 1}
    scene.check_nothing_is_left()


def test_a_store_that_finds_no_room_ends_the_await() -> None:
    """Leases keep all of the arena, so the producer's store is short."""
    scene = Scene(arena_bytes=2 * 64 << 10, pledged_percent_max=100)
    scene.pledge()
    found = scene.await_()
    wait = scene.retrieve(found.lease, 0, 1)
    number = 0
    while scene.rig.core.counters.evictions == 0 and number < 500:
        keys = chain(200 + number, 1)
        if scene.store(0, 1, keys).why:
            break
        scene.producer.lookup(keys)
        number += 1
    stored = scene.store(0, 1)
    assert isinstance(stored, Stored)
    assert stored.why == "full"
    assert is_refusal(scene.answer(wait), "device", "not-coming", "refused, was cut short or failed")
    scene.check_nothing_is_left()


def test_a_store_that_is_short_before_its_pledged_chunks_ends_the_await() -> None:
    """The chunk before is gone, so the store does not come to what was pledged."""
    scene = Scene()
    scene.store(0, 2)
    scene.pledge()
    found = scene.await_()
    wait = scene.retrieve(found.lease, 2, 3)
    client = scene.producer
    head = scene.rig.number(), client.cache, 5, 1, 10_000, 1, chain(7, 1)
    blocks = GroupBlocks(0, 3, ids(*range(12)))
    stored = client.ask(Store(*head, KEYS[KEY_BYTES:], [blocks]))
    assert stored.why == "parent-absent"
    assert is_refusal(scene.answer(wait), "device", "not-coming")


def test_a_pledge_whose_client_gave_its_store_up_is_over() -> None:
    scene = Scene()
    scene.pledge()
    found = scene.await_()
    wait = scene.retrieve(found.lease, 0, 2)
    scene.rig.movers_copy = False
    scene.store(0, 1)
    scene.rig.finish("abandoned")
    assert is_refusal(scene.answer(wait), "device", "not-coming")
    assert scene.ended() == {"not-stored": 1}


@pytest.mark.parametrize("how", ["jobs", "blocks", "parent"])
def test_a_store_that_is_refused_as_a_whole_ends_the_await(how: str) -> None:
    scene = Scene(jobs_max=1)
    scene.pledge()
    wait = scene.retrieve(scene.await_().lease, 0, 2)
    keys, head = KEYS[: 2 * KEY_BYTES], (scene.rig.number(), scene.producer.cache, 5, 1, 10_000)
    match how:
        case "jobs":
            scene.rig.movers_copy = False
            scene.store(0, 1, chain(60, 1))
            refused = scene.store(0, 2)
        case "blocks":
            refused = scene.producer.ask(Store(*head, 0, b"", keys, [GroupBlocks(0, 1, ids(*range(6)))]))
        case _:
            refused = scene.producer.ask(Store(*head, 1, b"", keys, [GroupBlocks(0, 3, ids(*range(6)))]))
    code = {"jobs": "jobs", "blocks": "block-range", "parent": "parent"}[how]
    assert refused.code == code
    assert is_refusal(scene.answer(wait), "device", "not-coming")
    assert scene.ended() == {"not-stored": 1}


def test_a_refused_store_of_another_engine_ends_nothing() -> None:
    scene = Scene()
    third = Client(scene.rig, engine="third", epoch=13).register()
    scene.pledge()
    for cache in (third.cache, scene.producer.cache, 4097):
        blocks = [GroupBlocks(0, 1, ids(*range(3)))]
        refused = third.ask(Store(scene.rig.number(), cache, 5, 1, 10_000, 0, b"", KEYS, blocks))
        assert refused.family == "request"
    assert scene.ended() == {}


def test_a_scheduler_that_dies_ends_its_pledges_though_its_workers_live_on() -> None:
    scene = Scene()
    scheduler = Client(scene.rig, engine="producer", epoch=11, rank=-1)
    scene.pledge(by=scheduler)
    wait = scene.retrieve(scene.await_().lease, 0, 2)
    scene.rig.peer_gone(scheduler.local)
    assert is_refusal(scene.answer(wait), "device", "not-coming", "has ended")
    assert scene.ended() == {"died": 1}


def test_a_cache_that_is_unregistered_ends_what_its_engine_has_pledged() -> None:
    scene = Scene()
    scene.pledge()
    wait = scene.retrieve(scene.await_().lease, 0, 2)
    scene.producer.ask(Unregister(scene.rig.number(), scene.producer.cache))
    assert is_refusal(scene.answer(wait), "device", "not-coming", "let its cache go")
    assert scene.ended() == {"died": 1}
    assert scene.pledge().chunks == 0
    scene.check_nothing_is_left()


def test_a_cache_that_is_unregistered_ends_no_pledge_while_its_engine_has_the_shard_in_another() -> None:
    scene = Scene()
    spare = Client(scene.rig, engine="producer", epoch=11).register()
    scene.pledge()
    scene.producer.ask(Unregister(scene.rig.number(), scene.producer.cache))
    assert scene.ended() == {}
    spare.ask(Unregister(scene.rig.number(), spare.cache))
    assert scene.ended() == {"died": 1}


def test_the_end_of_the_producers_mover_ends_its_pledges_though_nothing_is_stored_then() -> None:
    scene = Scene()
    scene.store(0, 1)
    scene.pledge()
    scene.await_()
    scene.rig.handle(MoverGone(scene.rig.core.caches[scene.producer.cache].mover.number, "signal 9"))
    assert scene.ended() == {"died": 1}
    scene.check_nothing_is_left()


def test_a_store_that_ends_with_its_mover_is_no_broken_word() -> None:
    scene = Scene()
    scene.store(0, 1)
    scene.pledge()
    wait = scene.retrieve(scene.await_().lease, 0, 3)
    scene.rig.movers_copy = False
    assert scene.store(1, 3) is None
    scene.rig.handle(MoverGone(scene.rig.core.caches[scene.producer.cache].mover.number, "signal 9"))
    assert scene.ended() == {"died": 1}
    assert is_refusal(scene.answer(wait), "device", "mover-lost")
    scene.producer.register()
    again = scene.pledge()
    assert (again.held, again.chunks) == (1, CHUNKS - 1)


def test_a_cache_that_its_mover_still_maps_keeps_no_pledge_once_it_is_unregistered() -> None:
    scene = Scene()
    spare = Client(scene.rig, engine="producer", epoch=11).register()
    scene.pledge()
    wait = scene.retrieve(scene.await_().lease, 0, 2)
    scene.rig.movers_copy = False
    assert scene.store(0, 1, chain(9, 1)) is None, "the mover copies, and unmaps nothing meanwhile"
    scene.producer.ask(Unregister(scene.rig.number(), scene.producer.cache))
    assert scene.answer(wait) is None
    spare.ask(Unregister(scene.rig.number(), spare.cache))
    assert is_refusal(scene.answer(wait), "device", "not-coming", "let its cache go")
    assert scene.pledge().chunks == 0, "nothing is stored from a cache that is to go"
    assert scene.ended() == {"died": 1}


def test_a_lease_on_a_prompt_that_has_not_begun_to_come_ends_with_its_namespace() -> None:
    rig = Rig()
    producer = Client(rig, engine="producer", epoch=11).register()
    looker = Client(rig, engine="other", epoch=12)
    assert producer.ask(Pledge(rig.number(), NAMESPACE, KEYS, TTL_MS)).chunks == CHUNKS
    assert looker.ask(Await(rig.number(), NAMESPACE, KEYS, 1)).awaited == CHUNKS
    producer.ask(Unregister(rig.number(), producer.cache))
    assert not rig.core.leases
    assert rig.core.chunks.pins == 0


def test_a_cache_that_is_unregistered_ends_no_pledge_of_another_namespace() -> None:
    scene = Scene()
    elsewhere = Client(scene.rig, engine="producer", epoch=11).register(namespace=bytes(32))
    scene.pledge()
    elsewhere.ask(Unregister(scene.rig.number(), elsewhere.cache))
    assert scene.ended() == {}


def test_a_clear_ends_no_pledge_of_another_namespace() -> None:
    scene = Scene()
    elsewhere = Client(scene.rig, engine="producer", epoch=11).register(namespace=bytes(32))
    scene.pledge()
    elsewhere.ask(Clear(scene.rig.number(), bytes(32)))
    assert scene.ended() == {}


def test_a_clear_during_a_store_is_no_broken_word() -> None:
    scene = Scene()
    scene.pledge()
    wait = scene.retrieve(scene.await_().lease, 0, 1)
    scene.rig.movers_copy = False
    scene.store(0, 2)
    scene.other.ask(Clear(scene.rig.number(), NAMESPACE))
    assert scene.ended() == {"cleared": 1}
    assert is_refusal(scene.answer(wait), "device", "not-coming", "it was cleared")
    assert scene.pledge().chunks == CHUNKS


def test_one_engine_pledges_a_chunk_and_the_others_are_told_that_nothing_is_theirs() -> None:
    scene = Scene()
    assert scene.pledge().chunks == CHUNKS
    second = scene.pledge(by=scene.other)
    assert (second.pledge, second.held, second.chunks) == (0, 0, 0)
    longer = scene.pledge(KEYS + chain(2, 2), by=scene.other)
    assert longer.chunks == 0, "nothing is pledged behind what somebody else has pledged"
    branch = KEYS[: 2 * KEY_BYTES] + chain(3, 2)
    assert scene.pledge(branch, by=scene.other).chunks == 0
    assert scene.pledge(chain(4, 3), by=scene.other).chunks == 3


def test_nobody_awaits_itself() -> None:
    scene = Scene()
    twin = Client(scene.rig, engine="producer", epoch=11, rank=-1)
    scene.pledge()
    for who in (scene.producer, twin):
        found = scene.await_(by=who)
        assert (found.chunks, found.awaited, found.lease, found.producer) == (0, 0, 0, "")


def test_a_lookup_that_does_not_wait_is_answered_as_ever() -> None:
    scene = Scene()
    scene.store(0, 2)
    scene.pledge()
    found = scene.other.lookup(KEYS)
    assert found.chunks == 2
    refused = scene.retrieve(found.lease, 0, 3)
    assert is_refusal(scene.answer(refused), "request", "beyond-lease", "the lease is on 2 chunks")


def test_only_keys_of_the_pledged_chain_are_awaited() -> None:
    scene = Scene()
    scene.pledge()
    other = KEYS[: 3 * KEY_BYTES] + chain(5, 4)
    assert scene.await_(other).awaited == 3
    torn = chain(6, 1) + KEYS[KEY_BYTES:]
    assert scene.await_(torn).awaited == 0, "the chunk before is another one"


def test_keys_that_leave_out_the_next_pledged_chunk_are_not_awaited() -> None:
    scene = Scene()
    scene.store(0, 1)
    scene.pledge()
    skipped = scene.await_(KEYS[:KEY_BYTES] + key(KEYS, 2))
    assert (skipped.chunks, skipped.awaited, skipped.producer) == (1, 0, "")
    scene.store(1, 4)
    assert isinstance(scene.answer(scene.retrieve(skipped.lease, 0, 1)), Retrieved)
    command(scene.rig, ClearNamespace(NAMESPACE, key(KEYS, 1)))
    assert scene.other.lookup(KEYS).chunks == 1
    assert scene.pinned == len(scene.rig.core.leases), "each lease pins one chunk"


def test_a_chunk_that_comes_behind_another_than_the_pledge_says_is_not_its_next_one() -> None:
    scene = Scene()
    scene.pledge(KEYS[:KEY_BYTES] + key(KEYS, 2))
    scene.store(0, 2)
    assert scene.ended() == {}
    scene.store(2, 3)
    assert scene.ended() == {"not-stored": 1}


def test_a_later_pledged_chunk_that_comes_in_place_of_the_next_one_ends_the_pledge() -> None:
    scene = Scene()
    scene.pledge()
    wait = scene.retrieve(scene.await_().lease, 0, 1)
    scene.store(0, 1, key(KEYS, 2))
    assert is_refusal(scene.answer(wait), "device", "not-coming")
    assert scene.ended() == {"not-stored": 1}
    scene.check_nothing_is_left()


@pytest.mark.parametrize("same", range(8))
def test_a_prompt_is_awaited_up_to_where_it_becomes_another_one(same: int) -> None:
    pledged = chain(40, 7)
    scene = Scene()
    scene.pledge(pledged)
    found = scene.await_(pledged[: same * KEY_BYTES] + chain(41, 9))
    assert (found.awaited, found.producer) == ((same, "producer") if same else (0, ""))


def test_fewer_chunks_than_wanted_bring_no_lease() -> None:
    scene = Scene()
    scene.store(0, 1)
    scene.pledge()
    assert scene.await_(wanted_min=CHUNKS).lease
    assert not scene.await_(KEYS[: 3 * KEY_BYTES], wanted_min=4).lease
    assert scene.await_(KEYS[: 3 * KEY_BYTES], wanted_min=4).awaited == 0


def test_a_released_lease_pins_nothing_that_comes_later() -> None:
    scene = Scene()
    scene.pledge()
    found = scene.await_()
    scene.store(0, 2)
    assert scene.pinned == 1
    scene.other.ask(Release(scene.rig.number(), found.lease))
    assert scene.pinned == 0
    scene.store(2, 5)
    assert scene.pinned == 0


@pytest.mark.parametrize("more", [True, False])
def test_a_lease_that_is_given_back_ends_its_waiting_retrieves(more: bool) -> None:
    """Also when it ended with the last of them. Those of another lease go on."""
    scene = Scene()
    scene.pledge()
    lease, other = scene.await_().lease, scene.await_().lease
    first, last = scene.retrieve(lease, 0, 2), scene.retrieve(lease, 2, 3, more=more)
    goes_on = scene.retrieve(other, 0, 1)
    scene.producer.ask(Release(scene.rig.number(), other + 1000))
    scene.other.ask(Release(scene.rig.number(), lease))
    for ended in first, last:
        assert is_refusal(scene.answer(ended), "device", "not-coming", "given back")
    assert scene.answer(goes_on) is None
    scene.store(0, 1)
    assert isinstance(scene.answer(goes_on), Retrieved)


def test_an_engine_gives_back_no_lease_of_another_one_that_is_over() -> None:
    scene = Scene()
    scene.pledge()
    lease = scene.await_().lease
    wait = scene.retrieve(lease, 0, 1, more=False)
    scene.producer.ask(Release(scene.rig.number(), lease))
    assert scene.answer(wait) is None


def test_a_retrieve_outlives_its_lease_and_is_fed_to_its_end() -> None:
    scene = Scene(lease_ttl_ms=500, lease_extended_ms=300)
    scene.pledge()
    found = scene.await_()
    wait = scene.retrieve(found.lease, 0, 4)
    scene.store(0, 2)
    scene.rig.wait_ms(1_000)
    assert not scene.rig.core.leases
    scene.store(2, 4)
    assert isinstance(scene.answer(wait), Retrieved)
    assert scene.pinned == 0


def test_an_engine_that_leaves_while_it_waits_leaves_nothing() -> None:
    scene = Scene()
    scene.pledge()
    found = scene.await_()
    scene.retrieve(found.lease, 0, 4)
    scene.store(0, 2)
    scene.rig.peer_gone(scene.other.local)
    assert scene.pinned == 0
    assert not scene.rig.core.jobs
    scene.store(2, 5)
    scene.check_nothing_is_left()


def test_a_cache_that_is_unregistered_takes_its_waiting_retrieves_along() -> None:
    scene = Scene()
    scene.pledge()
    found = scene.await_()
    wait = scene.retrieve(found.lease, 0, 4)
    scene.other.ask(Unregister(scene.rig.number(), scene.other.cache))
    assert is_refusal(scene.answer(wait), "device", "abandoned")
    scene.store(0, 5)
    scene.check_nothing_is_left()


def test_what_another_engine_stores_of_a_pledge_is_progress_as_well() -> None:
    scene = Scene()
    third = Client(scene.rig, engine="third", epoch=13).register()
    scene.pledge()
    found = scene.await_()
    wait = scene.retrieve(found.lease, 0, CHUNKS)
    scene.store(0, 3, by=third)
    scene.store(3, 5)
    assert isinstance(scene.answer(wait), Retrieved)
    assert scene.ended() == {"stored": 1}


@pytest.mark.parametrize(("ttl_ms", "lives_ms"), [(-5, 1), (0, 1), (700, 700), (10**15, 2_000)])
def test_a_pledge_lives_no_longer_than_it_asked_for_nor_than_the_server_lets_it(ttl_ms: int, lives_ms: int) -> None:
    scene = Scene(pledge_ttl_ms=2_000)
    scene.pledge(ttl_ms=ttl_ms)
    scene.rig.wait_ms(lives_ms - 1)
    assert scene.ended() == {}
    scene.rig.wait_ms(1)
    assert scene.ended() == {"late": 1}


@pytest.mark.parametrize("keys", [b"", bytes(31), bytes(33), bytes(32 * 4097)])
def test_keys_of_a_pledge_are_whole_and_not_too_many(keys: bytes) -> None:
    scene = Scene()
    assert is_refusal(scene.producer.ask(Pledge(scene.rig.number(), NAMESPACE, keys, TTL_MS)), "request", "keys")
    wrong = scene.producer.ask(Pledge(scene.rig.number(), NAMESPACE[:-1], KEYS, TTL_MS))
    assert is_refusal(wrong, "request", "namespace", "31 bytes")


def test_keys_that_come_twice_are_pledged_once() -> None:
    scene = Scene()
    assert scene.pledge(KEYS + KEYS[:KEY_BYTES] + chain(8, 2)).chunks == CHUNKS
    assert scene.pledge(chain(9, 1) * 3).chunks == 1


def test_a_pledge_of_keys_that_are_no_chain_brings_no_bytes_of_others() -> None:
    """The second key comes at another depth, under another parent."""
    scene = Scene()
    torn = chain(51, 1) + key(chain(50, 3), 2)
    assert scene.pledge(torn).chunks == 2
    found = scene.await_(torn)
    wait = scene.retrieve(found.lease, 0, 2)
    scene.store(0, 3, chain(50, 3), by=scene.other)
    assert scene.store(0, 2, torn).why == "parent-absent"
    assert is_refusal(scene.answer(wait), "device", "not-coming")
    assert scene.await_(torn).chunks == 1


@pytest.mark.parametrize("state", ["held", "waiting"])
def test_a_chunk_that_is_elsewhere_is_not_pledged(state: str) -> None:
    """No store makes it servable behind the chunks of this prompt."""
    scene = Scene()
    elsewhere = chain(50, 3)
    if state == "held":
        scene.store(0, 3, elsewhere)
    else:
        scene.rig.movers_copy = False
        scene.store(0, 3, elsewhere)
    for place in range(3):
        torn = chain(51, 2) + key(elsewhere, place) + chain(52, 1)
        pledged = scene.pledge(torn)
        assert pledged.chunks == 2
        scene.unpledge(pledged.pledge)
    assert scene.pledge(key(elsewhere, 1) + chain(53, 1)).chunks == 0


def test_chunks_that_another_engine_is_storing_are_pledged() -> None:
    scene = Scene()
    scene.rig.movers_copy = False
    scene.store(0, 2, by=scene.other)
    assert scene.pledge().chunks == CHUNKS


def test_a_chunk_that_was_cleared_from_elsewhere_is_pledged() -> None:
    scene = Scene(forget_chunks=1)
    elsewhere = chain(50, 9)
    scene.store(0, 9, elsewhere)
    command(scene.rig, ClearNamespace(NAMESPACE, key(elsewhere, 1)))
    assert scene.pledge(chain(51, 2) + key(elsewhere, 7)).chunks == 3


def test_a_pledge_belongs_to_its_session() -> None:
    scene = Scene()
    pledge = scene.pledge().pledge
    scene.unpledge(pledge, by=scene.other)
    assert len(scene.rig.core.pledges) == 1
    scene.unpledge(pledge)
    scene.unpledge(pledge)
    assert scene.ended() == {"withdrawn": 1}


def test_nothing_is_pledged_where_chunks_of_a_prompt_depend_on_its_end() -> None:
    rig = Rig()
    client = Client(rig).register([FULL, WINDOW, STATE], namespace=bytes(range(32)))
    pledged = client.ask(Pledge(rig.number(), bytes(range(32)), KEYS, TTL_MS))
    assert (pledged.pledge, pledged.chunks) == (0, 0)


def test_an_engine_pledges_only_where_it_has_a_cache() -> None:
    scene = Scene()
    stranger = Client(scene.rig, engine="stranger", epoch=14)
    assert scene.pledge(by=stranger).chunks == 0
    unknown = scene.producer.ask(Pledge(scene.rig.number(), bytes(32), KEYS, TTL_MS))
    assert (unknown.pledge, unknown.held, unknown.chunks) == (0, 0, 0)


def test_a_server_that_is_drained_takes_no_pledge_and_ends_those_that_cannot_be_kept() -> None:
    scene = Scene()
    scene.pledge()
    found = scene.await_()
    wait = scene.retrieve(found.lease, 0, 1)
    command(scene.rig, DrainServer())
    assert scene.answer(wait) is None
    assert is_refusal(scene.store(0, 1), "resource", "draining")
    assert is_refusal(scene.answer(wait), "device", "not-coming")
    refused = scene.producer.ask(Pledge(scene.rig.number(), NAMESPACE, chain(9, 1), TTL_MS))
    assert is_refusal(refused, "resource", "draining")


def test_a_pledge_that_ended_gives_its_keys_to_whoever_comes_next() -> None:
    scene = Scene()
    scene.unpledge(scene.pledge().pledge)
    assert scene.pledge(by=scene.other).chunks == CHUNKS
    found = scene.await_(by=scene.producer)
    assert (found.awaited, found.producer) == (CHUNKS, "other")


def test_what_lies_behind_a_cleared_prefix_is_not_awaited_any_more() -> None:
    scene = Scene()
    scene.store(0, 2)
    scene.pledge()
    found = scene.await_()
    wait = scene.retrieve(found.lease, 2, 3)
    command(scene.rig, ClearNamespace(NAMESPACE, key(KEYS, 0)))
    assert is_refusal(scene.answer(wait), "device", "cleared")
    stored = scene.store(2, 3)
    assert stored.why == "parent-absent"
    scene.check_nothing_is_left()
    assert scene.pinned == 0


def test_explain_says_who_computes_a_chunk_and_for_how_long_others_wait() -> None:
    scene = Scene(pledge_patience_ms=4_000)
    scene.store(0, 1)
    assert explained(scene).producer == ""
    scene.pledge(ttl_ms=60_000)
    scene.rig.wait_ms(1_500)
    found = explained(scene)
    assert (found.chunks, found.producer, found.producer_s) == (1, "producer", 2.5)
    assert sentences(found)[-1] == "  engine producer computes it now, and others wait for it for another 2.5 s"
    assert scene.rig.service.status(scene.rig.now_ns).pledges == 1


def explained(scene: Scene) -> Explanation:
    reply = scene.other.ask(Explain(scene.rig.number(), NAMESPACE, KEYS))
    (found,) = decode_explanations(reply.document)
    return found
