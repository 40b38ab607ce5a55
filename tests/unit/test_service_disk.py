"""The disk tier as the brain decides it: what is written when, what is read for whom, and what a fault costs."""

from dataclasses import replace

import pytest
from brain_rig import Client, chain, ids, is_refusal, key
from disk_rig import SEGMENT_BYTES, DiskRig

from kvserver.service.events import MoverGone
from kvserver.wire.messages import (
    KEY_BYTES,
    Clear,
    Cleared,
    Error,
    GroupBlocks,
    Retrieved,
    Unregister,
    Unregistered,
)
from kvserver.wire.orders import Copy

CHUNKS = 3
"""Of a prompt: what the rig's cache has blocks for."""
PROMPTS_OF_ARENA = 21


def fill(client: Client, first: int = 1000, prompts: int = PROMPTS_OF_ARENA + 3) -> None:
    """Stores so much else that what was there before leaves DRAM."""
    for seed in range(first, first + prompts):
        client.rig.now_ns += 1_000_000
        client.store(chain(seed, CHUNKS))


def cold_prompt(rig: DiskRig) -> tuple[Client, bytes]:
    """A prompt that is on disk alone."""
    client, keys = Client(rig).register(), chain(1, CHUNKS)
    client.store(keys)
    fill(client)
    return client, keys


def whole(client: Client, lease: int) -> object:
    return client.ask(client.retrieving(lease, GroupBlocks(0, 0, ids(*range(3 * CHUNKS)))))


def test_a_chain_is_written_head_first() -> None:
    rig = DiskRig()
    client, keys = Client(rig).register(), chain(1, CHUNKS)
    client.store(keys)
    assert rig.keys_written() == [key(keys, chunk) for chunk in range(CHUNKS)]


def test_a_child_is_not_written_when_its_parent_could_not_be() -> None:
    rig = DiskRig(disk_jobs_max=1)
    rig.disk_works, rig.fault = False, "io"
    client, keys = Client(rig).register(), chain(1, CHUNKS)
    client.store(keys)
    rig.disk_works = True
    rig.finish_disk()
    assert set(rig.keys_written()) == {key(keys, 0)}


def test_nothing_is_written_while_enough_of_dram_is_free() -> None:
    rig = DiskRig(disk_write_through=False, disk_clean_percent=25)
    client = Client(rig).register()
    fill(client, prompts=12)
    assert rig.written == []
    fill(client, first=2000, prompts=10)
    assert rig.written != []


def test_clean_chunks_that_are_warm_do_not_stand_for_those_that_go_next() -> None:
    rig = DiskRig(disk_write_through=False, disk_clean_percent=50)
    client = Client(rig).register()
    fill(client)
    prompts = {seed: chain(seed, CHUNKS) for seed in range(1000, 1000 + PROMPTS_OF_ARENA + 3)}
    clean = {seed for seed, keys in prompts.items() if keys[-KEY_BYTES:] in rig.keys_written()}
    dirty = prompts.keys() - clean
    assert min(len(clean), len(dirty)) > 6
    for seed in sorted(clean):  # from now on the clean ones are the warmest of DRAM
        rig.now_ns += 1_000_000
        client.release(client.lookup(prompts[seed]))
    fill(client, first=2000, prompts=6)
    assert [seed for seed in sorted(dirty) if client.lookup(prompts[seed]).chunks < CHUNKS] == []


def test_two_chains_do_not_push_each_other_off_a_device_that_is_too_small_for_both() -> None:
    """Their heads are older than their tails, which were asked for since."""
    rig = DiskRig(disk_device_bytes=SEGMENT_BYTES)
    client, prompts = Client(rig).register(), [chain(seed, CHUNKS) for seed in (1, 2)]
    for keys in prompts:
        client.store(keys)
        rig.now_ns += 1_000_000
    for prompt, chunks in ((1, 1), (0, 3), (1, 3), (0, 3), (1, 2)):
        rig.now_ns += 1_000_000
        client.release(client.lookup(prompts[prompt][: chunks * KEY_BYTES]))
    rig.wait_ms(2_000)
    settled = len(rig.written)
    rig.wait_ms(2_000)
    assert len(rig.written) == settled


def test_what_leaves_dram_is_found_on_disk_and_read_once_for_all() -> None:
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


def test_a_prefix_that_would_come_too_slowly_is_not_offered() -> None:
    rig = DiskRig(recompute_tokens_per_s=1_000_000_000)
    client, keys = cold_prompt(rig)
    assert client.lookup(keys).chunks == 0
    assert rig.service.counters.lookup_ends["declined"] == 1
    assert rig.read == []


def test_a_device_smaller_than_dram_is_not_written_in_circles() -> None:
    rig = DiskRig(disk_device_bytes=4 * 20 << 10)
    client = Client(rig).register()
    fill(client, prompts=30)
    rig.wait_ms(4_000)
    before = len(rig.written)
    rig.wait_ms(4_000)
    assert len(rig.written) == before


def test_another_brain_finds_what_is_on_disk() -> None:
    rig = DiskRig()
    client, keys = cold_prompt(rig)
    rig.service = rig.new_service()
    rig.copies.clear()
    rig.wait_ms(100)
    client = Client(rig).register()
    found = client.lookup(keys)
    assert (found.chunks, found.chunks_on_disk) == (CHUNKS, CHUNKS)
    assert rig.service.counters.disk_recovered > CHUNKS


def test_what_was_cleared_does_not_come_back() -> None:
    rig = DiskRig()
    client, keys = cold_prompt(rig)
    assert isinstance(client.ask(Clear(rig.number(), rig.notes[0].namespace)), Cleared)
    rig.service = rig.new_service()
    rig.wait_ms(100)
    assert Client(rig).register().lookup(keys).chunks == 0


def test_a_namespace_that_was_cleared_does_not_take_the_place_of_one_with_chunks() -> None:
    rig = DiskRig(namespaces_max=1)
    old = Client(rig).register(namespace=b"o" * 32)
    old.store(chain(7, CHUNKS))
    assert isinstance(old.ask(Unregister(rig.number(), old.cache)), Unregistered)
    _, keys = cold_prompt(rig)
    assert rig.notes[0].namespace == b"o" * 32
    rig.service = rig.new_service()
    rig.copies.clear()
    rig.wait_ms(100)
    assert Client(rig).register().lookup(keys).chunks == CHUNKS


@pytest.mark.parametrize(("name", "newcomer", "chunks"), [("x", "", 3), ("z", "", 3), ("y", "", 0), ("x", "n", 3)])
def test_of_the_namespaces_on_disk_those_written_last_get_the_places(name: str, newcomer: str, chunks: int) -> None:
    rig, keys = DiskRig(namespaces_max=3), chain(1, CHUNKS)
    for which in "yzx":
        Client(rig).register(namespace=which.encode() * 32).store(keys)
    rig.bounds = replace(rig.bounds, namespaces_max=2)
    rig.service = rig.new_service()
    rig.copies.clear()
    rig.wait_ms(100)
    if newcomer:
        Client(rig).register(namespace=newcomer.encode() * 32)
    namespace = name.encode() * 32
    assert Client(rig).register(namespace=namespace).lookup(keys, namespace).chunks == chunks


def test_a_clear_before_everything_is_known_counts_for_what_is_found_later() -> None:
    rig = DiskRig()
    _, keys = cold_prompt(rig)
    namespace = rig.notes[0].namespace
    rig.service = rig.new_service()
    client = Client(rig)
    request = Clear(rig.number(), namespace)
    assert client.ask(request) is None
    rig.wait_ms(100)
    assert isinstance(rig.answers[client.peer, request.id], Cleared)
    assert client.register().lookup(keys).chunks == 0


def test_a_retrieve_while_the_disk_is_away_is_refused_and_keeps_its_lease() -> None:
    rig = DiskRig(disk_job_ms=1_000, disk_restart_ms=60_000)
    client, keys = cold_prompt(rig)
    head = client.lookup(keys[:KEY_BYTES])
    rig.disk_works = False
    assert isinstance(whole(client, head.lease), Error)
    assert isinstance(client.ask(client.retrieving(head.lease, GroupBlocks(0, 0, ids(0, 1)))), Retrieved)
