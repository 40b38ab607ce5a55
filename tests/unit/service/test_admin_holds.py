"""Operators' pins and warms: what they keep, how long and how much, and that they cost no bytes or memory."""

from kvserver.wire.admin import ClearNamespace, Held, LetGo, Pin, Unpin, Warm
from kvserver.wire.messages import KEY_BYTES, Cleared, GroupBlocks, Retrieved
from tests.rigs.admin_rig import clear_prefix, command, pinned
from tests.rigs.brain_rig import ARENA_BYTES, NAMESPACE, Client, Rig, chain, ids, is_refusal, key
from tests.rigs.disk_rig import CHUNKS, DiskRig, cold_prompt, fill
from tests.rigs.two_waiting import too_much_for_dram

SLOT_BYTES = 4096
PROMPTS_OF_RIG = ARENA_BYTES // SLOT_BYTES // CHUNKS


def stored(rig: Rig, seed: int = 1) -> tuple[Client, bytes]:
    client, keys = Client(rig).register(), chain(seed, CHUNKS)
    client.store(keys)
    return client, keys


def test_a_pinned_prefix_outlives_what_fills_the_arena_and_goes_when_its_time_is_over() -> None:
    rig = Rig()
    client, keys = stored(rig)
    held = pinned(rig, keys, ttl_ms=5_000)
    assert held == Held(1, held.hold, CHUNKS, 0, CHUNKS * SLOT_BYTES, 5_000)
    fill(client, prompts=2 * PROMPTS_OF_RIG)
    assert client.lookup(keys).chunks == CHUNKS
    rig.wait_ms(5_100)
    assert rig.service.status(rig.now_ns).holds == []
    fill(client, first=9000, prompts=2 * PROMPTS_OF_RIG)
    rig.wait_ms(rig.bounds.lease_ttl_ms)
    fill(client, first=20_000, prompts=2 * PROMPTS_OF_RIG)
    assert client.lookup(keys).chunks == 0


def test_what_was_pinned_was_asked_for_and_may_be_written_to_disk() -> None:
    rig = DiskRig(disk_second_touch=True)
    _, keys = stored(rig)
    rig.wait_ms(200)
    assert rig.written == []
    command(rig, Unpin(hold=pinned(rig, keys).hold))
    rig.wait_ms(200)
    assert rig.keys_written() == [key(keys, chunk) for chunk in range(CHUNKS)]


def test_an_unpinned_prefix_may_go_at_once() -> None:
    rig = Rig()
    client, keys = stored(rig)
    held = pinned(rig, keys)
    assert command(rig, Unpin(hold=held.hold)) == LetGo(1)
    assert is_refusal(command(rig, Unpin(hold=held.hold)), "request", "hold-unknown", str(held.hold))
    fill(client, prompts=2 * PROMPTS_OF_RIG)
    assert client.lookup(keys).chunks == 0


def test_a_pin_keeps_the_longest_part_that_is_held_or_the_prefix_of_one_key() -> None:
    rig = Rig()
    _, keys = stored(rig)
    longer = keys + chain(77, 2)
    assert pinned(rig, longer).chunks == CHUNKS
    assert pinned(rig, key(keys, 1)).chunks == 2
    refused = command(rig, Pin(namespace=NAMESPACE, keys=chain(78, 2), ttl_ms=9))
    assert is_refusal(refused, "request", "key-unknown")


def test_a_chunk_that_several_holds_keep_counts_once() -> None:
    rig = Rig()
    _, keys = stored(rig)
    first, second = pinned(rig, key(keys, 1)), pinned(rig, keys)
    assert (first.held_bytes, second.held_bytes) == (2 * SLOT_BYTES, 3 * SLOT_BYTES)
    command(rig, Unpin(hold=second.hold))
    assert rig.service.status(rig.now_ns).held_bytes == 2 * SLOT_BYTES


def test_number_and_share_of_holds_are_bounded() -> None:
    rig = Rig(holds_max=2, held_percent_max=2)
    client, keys = stored(rig)
    other = chain(5, CHUNKS)
    client.store(other)
    most = ARENA_BYTES * 2 // 100 // SLOT_BYTES
    assert CHUNKS < most < 2 * CHUNKS
    pinned(rig, keys)
    refused = command(rig, Pin(namespace=NAMESPACE, keys=other, ttl_ms=9))
    assert is_refusal(refused, "resource", "held-bytes", "2 %")
    pinned(rig, keys)
    refused = command(rig, Pin(namespace=NAMESPACE, keys=keys, ttl_ms=9))
    assert is_refusal(refused, "resource", "holds", "at most 2")
    assert len(rig.service.status(rig.now_ns).holds) == 2


def test_bad_pins_are_refused() -> None:
    rig = Rig()
    _, keys = stored(rig)
    for wrong, code in (
        (Pin(namespace=NAMESPACE, keys=keys, ttl_ms=0), "ttl"),
        (Pin(namespace=NAMESPACE, keys=keys, ttl_ms=1 << 40), "ttl"),
        (Pin(namespace=b"short", keys=keys, ttl_ms=9), "namespace"),
        (Pin(namespace=bytes(32), keys=keys, ttl_ms=9), "namespace-unknown"),
        (Pin(namespace=NAMESPACE, keys=keys[:-1], ttl_ms=9), "keys"),
        (Pin(namespace=NAMESPACE, keys=b"", ttl_ms=9), "keys"),
        (Warm(namespace=NAMESPACE, keys=bytes(KEY_BYTES)), "key-unknown"),
    ):
        assert is_refusal(command(rig, wrong), "request", code)
    assert rig.facts()["pins"] == 0


def test_a_hold_ends_with_its_namespace_and_with_its_prefix() -> None:
    rig = Rig()
    client, keys = stored(rig)
    pinned(rig, keys)
    assert clear_prefix(rig, key(keys, 1)) == Cleared(1, CHUNKS - 1)
    assert rig.facts()["pins"] == 0
    pinned(rig, key(keys, 0))
    assert command(rig, ClearNamespace(namespace=NAMESPACE)) == Cleared(1, 1)
    assert rig.facts()["pins"] == 0
    assert client.lookup(keys).chunks == 0


def test_a_pin_brings_back_from_disk_what_it_keeps() -> None:
    rig = DiskRig()
    client, keys = cold_prompt(rig)
    held = pinned(rig, keys, ttl_ms=60_000)
    assert (held.chunks, held.chunks_on_disk) == (CHUNKS, CHUNKS)
    assert len(rig.read) == CHUNKS
    fill(client, first=9000)
    assert client.lookup(keys).chunks_on_disk == 0


def test_a_warmed_prefix_is_in_dram_and_nothing_keeps_it_there() -> None:
    rig = DiskRig()
    client, keys = cold_prompt(rig)
    rig.disk_works = False
    warming = command(rig, Warm(namespace=NAMESPACE, keys=keys))
    assert warming.chunks_on_disk == CHUNKS
    (shown,) = rig.service.status(rig.now_ns).holds
    assert (shown.kind, shown.chunks_away) == ("warm", CHUNKS)
    rig.disk_works = True
    rig.finish_disk()
    assert rig.service.status(rig.now_ns).holds == []
    assert rig.facts()["pins"] == 0
    assert client.lookup(keys).chunks_on_disk == 0
    assert command(rig, Warm(namespace=NAMESPACE, keys=keys)).hold == 0


def test_a_warm_waits_for_room_and_gives_way_to_a_retrieve_that_waits_for_it_too() -> None:
    rig = DiskRig(held_percent_max=90)
    client, prompts, _ = too_much_for_dram(rig)
    assert command(rig, Warm(namespace=NAMESPACE, keys=prompts[0])).chunks_on_disk == 8
    rig.wait_ms(400)
    assert len(rig.service.status(rig.now_ns).holds) == 1
    found = client.lookup(prompts[1])
    request = client.retrieving(found.lease, GroupBlocks(0, 0, ids(*range(3 * found.chunks))))
    assert client.ask(request) is None
    rig.wait_ms(100)
    assert isinstance(rig.answers[client.peer, request.id], Retrieved)
    assert rig.service.status(rig.now_ns).holds == []


def test_a_hold_whose_chunks_cannot_be_read_ends() -> None:
    rig = DiskRig()
    client, keys = cold_prompt(rig)
    rig.fault = "checksum"
    command(rig, Warm(namespace=NAMESPACE, keys=keys))
    assert rig.service.status(rig.now_ns).holds == []
    assert client.lookup(keys).chunks == 0


def test_nothing_is_warmed_while_the_disk_is_away() -> None:
    rig = DiskRig()
    _, keys = cold_prompt(rig)
    core = rig.core
    assert core.disk is not None
    core.disk.mover = None
    assert is_refusal(command(rig, Warm(namespace=NAMESPACE, keys=keys)), "device", "disk-away")
