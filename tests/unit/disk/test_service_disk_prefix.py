"""The part of a prefix on disk that enters DRAM when some chunk of it cannot be read."""

import pytest

from kvserver.service.base.events import MoverGone
from kvserver.wire.messages import KEY_BYTES, Await, GroupBlocks, Pledge, Retrieved, Store
from kvserver.wire.orders import Copy, ItemFault, Moved
from tests.rigs.brain_rig import FULL, NAMESPACE, STATE, Client, chain, ids, is_refusal, key
from tests.rigs.disk_rig import CHUNKS, EXTENT_BYTES, PROMPTS_OF_ARENA, DiskRig, cold_prompt, fill, sums_of


@pytest.mark.parametrize("last_first", [False, True], ids=["first read first", "last read first"])
@pytest.mark.parametrize("middle", range(CHUNKS))
def test_only_chunks_before_an_unreadable_one_enter_dram(middle: int, last_first: bool) -> None:
    """Chunks read after the unreadable one are useless, and take no room."""
    rig = DiskRig()
    client, keys = cold_prompt(rig)
    rig.disk_works = False
    found = client.lookup(keys)
    used_bytes = rig.service.status(rig.now_ns).arena.used_bytes
    request = client.retrieving(found.lease, GroupBlocks(0, 0, ids(*range(3 * CHUNKS))))
    assert client.ask(request) is None
    assert [records[0].key for records in rig.read] == [key(keys, chunk) for chunk in range(CHUNKS)]
    if last_first:
        rig.moving.reverse()
    rig.finish_disk(unreadable=key(keys, middle))
    assert is_refusal(rig.answers[client.peer, request.id], "device", "disk-io")
    again = client.lookup(keys)
    assert (again.chunks, again.chunks_on_disk) == (middle, 0)
    status = rig.service.status(rig.now_ns)
    assert status.arena.used_bytes == used_bytes - (CHUNKS - middle) * EXTENT_BYTES
    assert status.counters["disk_lost"] == 1
    if middle:
        head = client.retrieving(again.lease, GroupBlocks(0, 0, ids(*range(3 * middle))))
        assert isinstance(client.ask(head), Retrieved)


def test_a_state_that_cannot_be_read_ends_only_what_needs_a_state_there() -> None:
    """A longer prefix needs only the parts of that chunk that were read well; the chunk stays servable for it."""
    rig = DiskRig()
    client = Client(rig, engine="hybrid").register((FULL, STATE), namespace=bytes(32))
    keys = chain(1, 2)
    client.ask(client.storing(keys, GroupBlocks(0, 0, ids(*range(6))), GroupBlocks(1, 0, ids(0, 1))))
    fill(Client(rig).register())
    rig.disk_works = False
    short, long = (client.lookup(keys[: count * KEY_BYTES], namespace=bytes(32)) for count in (1, 2))
    assert (short.chunks_on_disk, long.chunks_on_disk) == (1, 2)
    of_short = client.retrieving(short.lease, GroupBlocks(0, 0, ids(0, 1, 2)), GroupBlocks(1, 0, ids(0)))
    of_long = client.retrieving(long.lease, GroupBlocks(0, 0, ids(*range(6))), GroupBlocks(1, 1, ids(1)))
    assert client.ask(of_short) is client.ask(of_long) is None
    mover, head = rig.moving.pop(0)
    assert [record.group for record in rig.read[0]] == [0, 1]
    rig.report(mover, Moved(head.job, [ItemFault(1, "checksum")], 1, sums_of(head)))
    assert is_refusal(rig.answers[client.peer, of_short.id], "device", "disk-io")
    rig.finish_disk()
    assert isinstance(rig.answers[client.peer, of_long.id], Retrieved)
    assert client.lookup(keys[:KEY_BYTES], namespace=bytes(32)).chunks == 0
    assert client.lookup(keys, namespace=bytes(32)).chunks == 2


@pytest.mark.parametrize("unreadable", range(1, CHUNKS))
def test_what_is_copied_above_a_chunk_that_is_cut_off_keeps_its_slots(unreadable: int) -> None:
    """The lease had one pin below the cut, and a part of its retrieve is under way above."""
    rig = DiskRig(disk_jobs_max=1)
    client, keys = cold_prompt(rig)
    rig.movers_copy = rig.disk_works = False
    found = client.lookup(keys)
    for chunk in range(CHUNKS):
        client.ask(client.retrieving(found.lease, GroupBlocks(0, 3 * chunk, ids(0, 1, 2)), more=chunk + 1 < CHUNKS))
        rig.finish_disk(unreadable=key(keys, unreadable))
    assert len(rig.copies) == unreadable
    copied = slots_of(rig.copies)
    rig.disk_works = True
    first = len(rig.copies)
    for seed in range(2000, 2000 + PROMPTS_OF_ARENA):
        client.ask(client.storing(chain(seed, CHUNKS), GroupBlocks(0, 0, ids(*range(3 * CHUNKS)))))
    stored = slots_of(rig.copies[first:])
    assert stored
    assert stored.isdisjoint(copied)
    rig.finish()
    status = rig.service.status(rig.now_ns)
    assert (status.pins, client.lookup(keys).chunks) == (0, unreadable)


def slots_of(copies: list[tuple[int, Copy]]) -> set[int]:
    return {slot for _, copy in copies for group in copy.groups for slot in memoryview(group.slots).cast("q")}


def test_a_retrieve_that_awaited_its_last_chunk_waits_on_for_those_that_are_on_disk() -> None:
    rig = DiskRig()
    producer = Client(rig, engine="producer", epoch=11).register()
    client, keys = cold_prompt(rig)
    whole = keys + chain(9, 1)
    rig.disk_works = False
    assert producer.ask(Pledge(rig.number(), NAMESPACE, whole, 60_000)).chunks == 1
    found = client.ask(Await(rig.number(), NAMESPACE, whole, 1))
    assert (found.chunks, found.chunks_on_disk, found.awaited) == (CHUNKS, CHUNKS, 1)
    request = client.retrieving(found.lease, GroupBlocks(0, 0, ids(*range(3 * CHUNKS), 0, 1, 2)))
    assert client.ask(request) is None
    blocks = [GroupBlocks(0, 3 * CHUNKS, ids(0, 1, 2))]
    producer.ask(Store(rig.number(), producer.cache, 5, 1, 10_000, CHUNKS, key(keys, CHUNKS - 1), whole[-32:], blocks))
    assert (client.peer, request.id) not in rig.answers
    rig.disk_works = True
    rig.finish_disk()
    rig.wait_ms(50)
    assert isinstance(rig.answers[client.peer, request.id], Retrieved)
    assert rig.core.chunks.pins == 0


def test_nothing_is_awaited_behind_chunks_that_cannot_be_read_now() -> None:
    """A wait there would be for another chunk than the next one of the pledge, and would end it for all."""
    rig = DiskRig()
    producer = Client(rig, engine="producer", epoch=11).register()
    client, keys = cold_prompt(rig)
    whole = keys + chain(9, 1)
    assert producer.ask(Pledge(rig.number(), NAMESPACE, whole, 60_000)).chunks == 1
    (mover,) = (mover.mover for mover in rig.service.status(rig.now_ns).movers if mover.device == "disk")
    rig.handle(MoverGone(mover, "signal 9"))
    found = client.ask(Await(rig.number(), NAMESPACE, whole, 1))
    assert (found.chunks, found.awaited, found.producer, found.lease) == (0, 0, "", 0)
