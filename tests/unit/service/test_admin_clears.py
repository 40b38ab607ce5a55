"""Clearing a prefix, and new weights: no cleared chunk is served again, also with jobs under way or after a restart."""

import pytest

from kvserver.service.operators.clear_prefix import PREFIXES_MAX
from kvserver.tiers.prefix_notes import ClearedPrefix
from kvserver.wire.admin import ClearNamespace, NewWeights
from kvserver.wire.messages import Cleared, Error, GroupBlocks, Retrieved, Stored
from kvserver.wire.orders import Copy
from tests.rigs.admin_rig import clear_prefix, command
from tests.rigs.brain_rig import NAMESPACE, SLAB_BYTES, STATE, Client, Rig, chain, ids, is_refusal, key
from tests.rigs.disk_rig import CHUNKS, DiskRig, fill, restart

BLOCKS = GroupBlocks(0, 0, ids(*range(3 * CHUNKS)))


def forked(client: Client) -> tuple[bytes, bytes]:
    """Stores two prompts that share their first chunk."""
    one = chain(1, CHUNKS)
    other = key(one, 0) + chain(2, CHUNKS - 1)
    client.store(one)
    client.store(other)
    return one, other


def test_what_continues_the_cleared_chunk_goes_and_nothing_else() -> None:
    rig = Rig()
    client = Client(rig).register()
    one, other = forked(client)
    assert clear_prefix(rig, key(one, 1)) == Cleared(1, CHUNKS - 1)
    assert client.lookup(one).chunks == 1
    assert client.lookup(other).chunks == CHUNKS
    assert clear_prefix(rig, key(one, 1)) == Cleared(1, 0)
    assert clear_prefix(rig, key(one, 0)) == Cleared(1, CHUNKS)
    assert rig.facts()["used_bytes"] == 0


def test_a_retrieve_under_way_ends_and_its_chunks_are_found_no_more() -> None:
    rig = Rig()
    client, keys = Client(rig).register(), chain(1, CHUNKS)
    client.store(keys)
    found = client.lookup(keys)
    rig.movers_copy = False
    request = client.retrieving(found.lease, BLOCKS)
    assert client.ask(request) is None
    assert clear_prefix(rig, key(keys, 0)) == Cleared(1, CHUNKS)
    assert client.lookup(keys).chunks == 0
    assert rig.facts()["used_bytes"] > 0, "the copy still reads there"
    rig.finish()
    assert isinstance(rig.answers[client.peer, request.id], Retrieved)
    assert rig.facts()["used_bytes"] == 0
    assert rig.facts()["pins"] == 0


@pytest.mark.parametrize("cuts", [(2,), (2, 1), (1, 2), (2, 1, 0)])
def test_what_is_read_keeps_its_slots_however_often_its_prefix_is_cut(cuts: tuple[int, ...]) -> None:
    rig = Rig(arena_bytes=SLAB_BYTES)
    client, keys = Client(rig).register(), chain(1, CHUNKS)
    client.store(keys)
    found = client.lookup(keys)
    rig.movers_copy = False
    client.ask(client.retrieving(found.lease, BLOCKS))
    read = slots_of(rig.copies)
    for at in cuts:
        clear_prefix(rig, key(keys, at))
    for seed in range(2, 10):
        client.ask(client.storing(chain(seed, CHUNKS), BLOCKS))
    stored = slots_of(rig.copies[1:])
    assert stored
    assert stored.isdisjoint(read)
    rig.finish()
    assert rig.facts()["pins"] == 0
    assert client.lookup(keys).chunks in (0, min(cuts)), "what is above may have made room since"


def slots_of(copies: list[tuple[int, Copy]]) -> set[int]:
    return {slot for _, copy in copies for group in copy.groups for slot in memoryview(group.slots).cast("q")}


def test_a_store_under_way_below_the_cleared_chunk_is_not_kept() -> None:
    rig = Rig()
    client, keys = Client(rig).register(), chain(1, CHUNKS)
    rig.movers_copy = False
    request = client.storing(keys, BLOCKS)
    client.ask(request)
    clear_prefix(rig, key(keys, 1))
    rig.finish()
    stored = rig.answers[client.peer, request.id]
    assert isinstance(stored, Stored)
    assert (stored.chunks, stored.why) == (1, "discarded")
    assert client.lookup(keys).chunks == 1


def test_a_cleared_prefix_is_not_found_on_disk_after_a_restart() -> None:
    rig = DiskRig()
    client, keys = Client(rig).register(), chain(1, CHUNKS)
    client.store(keys)
    assert clear_prefix(rig, key(keys, 1)) == Cleared(1, CHUNKS - 1)
    assert len(rig.devices) == CHUNKS, "their records lie there until something needs the place"
    restart(rig)
    assert Client(rig).lookup(keys).chunks == 1


def test_what_was_stored_again_is_found_after_a_restart_and_not_what_hung_on_the_old_one() -> None:
    rig = DiskRig()
    client, keys = Client(rig).register(), chain(1, CHUNKS)
    client.store(keys)
    clear_prefix(rig, key(keys, 0))
    again = GroupBlocks(0, 0, ids(0, 1, 2))
    assert client.ask(client.storing(key(keys, 0), again)).chunks == 1
    restart(rig)
    assert Client(rig).lookup(keys).chunks == 1


def test_old_records_of_chunks_that_had_left_are_void_too() -> None:
    rig = DiskRig(disk_device_bytes=2 * DiskRig().bounds.disk_segment_bytes)
    client, keys = Client(rig).register(), chain(1, CHUNKS)
    client.store(keys)
    there = dict(rig.devices)
    tier = rig.core.disk
    assert tier is not None
    while tier.chunks.drop_any(tenant=0):
        pass
    fill(client, prompts=60)
    rig.devices = there
    clear_prefix(rig, key(keys, 0))
    restart(rig)
    assert Client(rig).lookup(keys).chunks == 0


def test_a_prefix_clear_is_answered_when_the_devices_have_noted_it() -> None:
    rig = DiskRig()
    client, keys = Client(rig).register(), chain(1, CHUNKS)
    client.store(keys)
    rig.notes_answered = False
    assert clear_prefix(rig, key(keys, 0)) is None
    rig.answer_notes()
    assert Cleared(1, CHUNKS) in rig.answers.values()


def test_a_prefix_clear_that_no_device_can_note_says_so() -> None:
    rig = DiskRig()
    client, keys = Client(rig).register(), chain(1, CHUNKS)
    client.store(keys)
    rig.notes_kept = False
    assert is_refusal(clear_prefix(rig, key(keys, 0)), "device", "disk-clear")
    assert client.lookup(keys).chunks == 0


def test_notes_of_prefixes_are_bounded() -> None:
    rig = DiskRig()
    client, keys = Client(rig).register(), chain(1, CHUNKS)
    client.store(keys)
    tier = rig.core.disk
    assert tier is not None
    for number in range(PREFIXES_MAX):
        tier.notes.clear_prefix(number.to_bytes(32, "big"), ClearedPrefix(bytes(32), number.to_bytes(32, "big")))
    assert is_refusal(clear_prefix(rig, key(keys, 0)), "resource", "clears", "clear their namespaces")
    assert client.lookup(keys).chunks == CHUNKS


def test_bad_clears_are_refused() -> None:
    rig = Rig()
    client, keys = Client(rig).register(), chain(1, CHUNKS)
    client.store(keys)
    assert is_refusal(command(rig, ClearNamespace(namespace=b"short")), "request", "namespace")
    assert is_refusal(command(rig, ClearNamespace(namespace=NAMESPACE, key=b"short")), "request", "key")
    assert client.lookup(keys).chunks == CHUNKS


def test_new_weights_forget_all_and_close_the_namespace_to_stores_for_a_while() -> None:
    rig = Rig()
    client, keys = Client(rig).register(), chain(1, CHUNKS)
    client.store(keys)
    assert command(rig, NewWeights(namespace=NAMESPACE, quiet_ms=3_000)) == Cleared(1, CHUNKS)
    late = client.ask(client.storing(keys, BLOCKS))
    assert is_refusal(late, "resource", "new-weights", "3000 ms")
    assert client.lookup(keys).chunks == 0
    command(rig, NewWeights(namespace=NAMESPACE, quiet_ms=1))
    rig.wait_ms(2_000)
    assert isinstance(client.ask(client.storing(keys, BLOCKS)), Error), "a second update does not open it sooner"
    rig.wait_ms(1_000)
    client.store(keys)
    assert client.lookup(keys).chunks == CHUNKS
    assert is_refusal(command(rig, NewWeights(namespace=NAMESPACE, quiet_ms=-1)), "request", "quiet")


def test_marks_of_a_cleared_prefix_are_withdrawn_while_something_is_still_read() -> None:
    rig = Rig()
    client, keys = Client(rig).register((STATE,)), chain(1, CHUNKS)
    client.ask(client.storing(keys, GroupBlocks(0, CHUNKS - 1, ids(0))))
    marks = rig.core.chunks.marks
    assert len(marks.places) == CHUNKS - 1
    found = client.lookup(keys)
    rig.movers_copy = False
    client.ask(client.retrieving(found.lease, GroupBlocks(0, CHUNKS - 1, ids(1))))
    assert clear_prefix(rig, key(keys, 1)) == Cleared(1, CHUNKS - 1)
    assert [node.key for node in marks.places] == [key(keys, 0)]
    rig.finish()
    assert rig.facts()["pins"] == 0
