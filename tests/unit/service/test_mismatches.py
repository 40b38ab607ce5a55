"""Sums go from a store to the ledger, and a chunk with other bytes than were stored leaves every tier."""

import hashlib
import struct
from array import array
from typing import Any

import pytest

from kvserver.service.base.effects import Log, Publish
from kvserver.tiers.records import NO_SUM, unpack_all
from kvserver.wire.messages import ALL_RIGHT, KEY_BYTES, Clear, Explain, Explained, GroupBlocks, Retrieved
from kvserver.wire.orders import Copy, Demote, Done, ItemFault, Moved
from tests.rigs.brain_rig import FULL, NAMESPACE, STATE, Client, Rig, chain, ids, is_refusal, key
from tests.rigs.disk_rig import CHUNKS, DiskRig, cold_prompt


def end(rig: Rig, status: str = "done", code: str = "", *, moved: int = 7, **said: Any) -> Copy:
    """Ends the only job that is under way. moved: bytes."""
    ((mover, order),) = rig.copies
    rig.copies.clear()
    rig.report(mover, Done(order.job, status, moved, 11, code, "", order.mode, **said))  # type: ignore[arg-type]
    return order


def records(rig: Rig) -> dict[tuple[bytes, int], int]:
    """(key, group) -> sum of each record that was published."""
    published = [effect.records for effect in rig.effects if isinstance(effect, Publish)]
    return {(record.key, record.group): record.sum for packed in published for record in unpack_all(packed)}


def errors(rig: Rig) -> list[dict[str, object]]:
    return [dict(it.fields) for it in rig.effects if isinstance(it, Log) and it.event == "digest mismatch"]


def stored(rig: Rig, keys: bytes) -> Client:
    client = Client(rig).register()
    client.store(keys)
    rig.movers_copy = False
    return client


def retrieve(client: Client, keys: bytes, chunks: int) -> Any:
    """Begins a retrieve of all blocks of these chunks."""
    lease = client.lookup(keys).lease
    request = client.retrieving(lease, GroupBlocks(0, 0, ids(*range(3 * chunks))))
    assert client.ask(request) is None
    return request


def test_the_sums_of_a_store_are_recorded_with_their_chunks_and_groups() -> None:
    rig = Rig()
    client, keys = Client(rig).register((FULL, STATE)), chain(1, 3)
    rig.movers_copy = False
    client.ask(client.storing(keys, GroupBlocks(0, 0, ids(*range(9))), GroupBlocks(1, 2, ids(4))))
    end(rig, sums=array("Q", [50, 51, 52, 90]).tobytes())
    wanted = {(key(keys, chunk), 0): 50 + chunk for chunk in range(3)} | {(key(keys, 2), 1): 90}
    assert records(rig) == wanted


def test_a_store_without_sums_is_recorded_as_such() -> None:
    rig = Rig()
    keys = chain(2, 2)
    stored(rig, keys)
    assert set(records(rig).values()) == {NO_SUM}


def test_a_retrieve_names_to_its_mover_what_the_slots_must_hold() -> None:
    rig = Rig()
    keys = chain(3, 3)
    client = stored(rig, keys)
    lease = client.lookup(keys).lease
    client.ask(client.retrieving(lease, GroupBlocks(0, 4, ids(0, 1, 2, 3))))  # chunks 1 and 2, in part
    (group,) = end(rig).groups
    named = NAMESPACE + struct.pack("<HH", 0, 0) + keys[KEY_BYTES : 3 * KEY_BYTES]
    assert group.names == hashlib.sha256(named).digest()[:8]


def test_what_comes_before_a_wrong_chunk_is_used_and_the_rest_is_not_held_any_more() -> None:
    rig = Rig()
    keys = chain(4, 3)
    client = stored(rig, keys)
    request = retrieve(client, keys, 3)
    end(rig, "failed", "digest", wrong=(1,))
    assert rig.answers[client.peer, request.id] == Retrieved(request.id, 0, 1)
    assert client.lookup(keys).chunks == 1
    (line,) = errors(rig)
    assert (line["key"], line["tier"], line["device"], line["group"]) == (key(keys, 1).hex(), "dram", "host", 0)
    assert rig.core.counters.digest_mismatches == {("dram", "host", "direct"): 1}
    told = client.ask(Explain(rig.number(), NAMESPACE, keys))
    assert isinstance(told, Explained)
    assert b'"digest"' in told.document


def test_no_chunk_is_said_to_be_right_when_nothing_was_copied() -> None:
    """The slots of one group hold other chunks than the order names. So the mover has copied none of any group."""
    rig = Rig()
    client, keys = Client(rig).register((FULL, STATE)), chain(9, 3)
    client.ask(client.storing(keys, GroupBlocks(0, 0, ids(*range(9))), GroupBlocks(1, 2, ids(4))))
    rig.movers_copy = False
    request = client.retrieving(
        client.lookup(keys).lease, GroupBlocks(1, 2, ids(4)), GroupBlocks(0, 4, ids(*range(5)))
    )  # the state of chunk 2, and chunks 1 and 2
    assert client.ask(request) is None
    end(rig, "failed", "digest", moved=0, wrong=(0,))
    assert rig.answers[client.peer, request.id] == Retrieved(request.id, 0, 1)
    assert [line["key"] for line in errors(rig)] == [key(keys, 2).hex()], "the others are right where they are"


def test_all_wrong_chunks_are_counted_and_some_told() -> None:
    rig = Rig(arena_bytes=64 << 16)
    client, keys = Client(rig).register(), chain(5, 3)
    client.store(keys)
    rig.movers_copy = False
    request = retrieve(client, keys, 3)
    end(rig, "failed", "digest", wrong=(0, 1, 2))
    assert rig.answers[client.peer, request.id].wrong_from == 0
    assert sum(rig.core.counters.digest_mismatches.values()) == len(errors(rig)) == 3
    assert client.lookup(keys).chunks == 0


def test_a_retrieve_that_reads_the_same_chunks_ends_before_their_slots_are_used_again() -> None:
    rig = Rig()
    keys = chain(6, 2)
    client, other = stored(rig, keys), Client(rig, engine="other").register()
    first = retrieve(client, keys, 2)
    used = rig.service.status(rig.now_ns).arena.used_bytes
    second = retrieve(other, keys, 2)
    (mover, order), still = rig.copies
    rig.report(mover, Done(order.job, "failed", 7, 11, "digest", "", order.mode, wrong=(0,)))
    assert rig.answers[client.peer, first.id] == Retrieved(first.id, 0, 0)
    assert rig.service.status(rig.now_ns).arena.used_bytes == used, "the other retrieve still reads them"
    rig.copies = [still]
    end(rig, unverified=2)
    assert rig.answers[other.peer, second.id] == Retrieved(second.id, 7, ALL_RIGHT)
    assert rig.core.counters.shards_unverified == 2
    assert rig.service.status(rig.now_ns).arena.used_bytes == 0


def test_a_mismatch_of_a_cleared_namespace_changes_nothing_of_the_new_one() -> None:
    rig = Rig()
    keys = chain(7, 2)
    client = stored(rig, keys)
    request = retrieve(client, keys, 2)
    rig.movers_copy = True
    held, rig.copies = rig.copies, []
    client.ask(Clear(rig.number(), NAMESPACE))
    client.store(keys)
    rig.copies = held
    end(rig, "failed", "digest", wrong=(0,))
    assert rig.answers[client.peer, request.id].wrong_from == 0
    assert client.lookup(keys).chunks == 2


def test_a_chunk_whose_bytes_changed_in_dram_is_not_written_to_disk_and_goes() -> None:
    rig = DiskRig()
    rig.disk_works = False
    client, keys = Client(rig).register(), chain(8, CHUNKS)
    client.store(keys)
    mover, order = next((mover, order) for mover, order in rig.moving if isinstance(order, Demote))
    rig.moving = [entry for entry in rig.moving if entry[1] is not order]
    rig.report(mover, Moved(order.job, [ItemFault(0, "checksum")], 1))
    assert client.lookup(keys).chunks == 0
    assert rig.core.counters.digest_mismatches["dram", "disk", "demote"] == 1
    assert errors(rig)[0]["tier"] == "dram"


def test_what_is_read_from_disk_is_recorded_with_the_sum_that_was_read() -> None:
    rig = DiskRig()
    client, keys = cold_prompt(rig)
    rig.effects.clear()
    rig.disk_works = False
    client.lookup(keys)
    expected = {key(keys, chunk): int.from_bytes(key(keys, chunk)[:7], "little") for chunk in range(CHUNKS)}
    rig.finish_disk()
    assert {name: of for (name, _), of in records(rig).items()} == expected


def test_a_chunk_whose_bytes_changed_on_disk_is_counted_for_its_device() -> None:
    rig = DiskRig()
    client, keys = cold_prompt(rig)
    rig.disk_works = False
    lease = client.lookup(keys).lease
    request = client.retrieving(lease, GroupBlocks(0, 0, ids(*range(9))))
    assert client.ask(request) is None
    rig.finish_disk(unreadable=key(keys, 1))
    assert is_refusal(rig.answers[client.peer, request.id], "device", "disk-io")
    assert client.lookup(keys).chunks == 1
    assert rig.core.counters.digest_mismatches["disk", "0", "promote"] == 1
    assert errors(rig)[0]["key"] == key(keys, 1).hex()


@pytest.mark.parametrize(("tier", "modes"), [("dram", {"direct", "demote"}), ("disk", {"promote"})])
def test_counts_of_mismatches_begin_at_zero(tier: str, modes: set[str]) -> None:
    rig = DiskRig()
    Client(rig).register()
    counted = rig.core.counters.digest_mismatches
    assert set(counted.values()) == {0}
    assert {mode for of, _, mode in counted if of == tier} == modes
