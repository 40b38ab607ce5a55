"""The index comes back from a real ledger: after a brain's death no sealed chunk is lost."""

from array import array

import msgspec

from kvserver.tiers.records import NO_GROUP, NO_PARENT, NO_SUM, Record, pack
from kvserver.tiers.slots import SLOT_ALIGN
from kvserver.wire.messages import KEY_BYTES, Clear, GroupBlocks, GroupSpec, RegionRun, Stored
from tests.rigs.brain_lives import CHUNKS_MAX, SPAN_BYTES, Life, engine
from tests.rigs.brain_rig import FULL, NAMESPACE, STATE, Client, chain, ids, key

WIDE = GroupSpec(6, 2, "full", 0, 1, 0, 1, 0, [RegionRun(0, 5001, 1, 0, SLOT_ALIGN + 1, SLOT_ALIGN + 1)])
"""Two units per slot."""


def store_state(client: Client, keys: bytes, *chunks: int) -> None:
    """Stores the keys of a prompt, and the state after each of these chunks."""
    for chunk in chunks:
        reply = client.ask(client.storing(keys[: (chunk + 1) * KEY_BYTES], GroupBlocks(0, chunk, ids(chunk % 5))))
        assert reply == Stored(reply.id, chunk + 1, 1, 7, "")


def test_a_state_far_into_a_prompt_is_found_by_the_next_brain(descriptor: int) -> None:
    life, keys = Life(descriptor), chain(1, 9)
    store_state(engine(life, STATE), keys, 8, 3)
    assert life.kinds() == {"slot": 2, "mark": 8}
    again = Life(descriptor)
    client = engine(again, STATE)
    assert client.lookup(keys).chunks == 9
    assert client.lookup(keys[: 8 * KEY_BYTES]).chunks == 4
    assert client.lookup(keys[: 3 * KEY_BYTES]).chunks == 0
    assert again.kinds() == {"slot": 2, "mark": 8}


def test_life_after_life_goes_on_where_it_was(descriptor: int) -> None:
    """Branches grow from chunks that hold nothing, and marks of several lives never take each other's place."""
    stem, tails = chain(1, 4), {seed: chain(seed, 3) for seed in range(2, 6)}
    for seed, tail in tails.items():
        client = engine(Life(descriptor), STATE)
        store_state(client, stem + tail, 6)
        for known in range(2, seed + 1):
            assert client.lookup(stem + tails[known]).chunks == 7
    assert Life(descriptor).kinds() == {"slot": 4, "mark": 4 + 4 * 2}


def test_a_chunk_that_holds_half_of_a_group_hides_nothing_behind_it(descriptor: int) -> None:
    """Two ranks have a half each; one of them stores more."""
    halves = [msgspec.structs.replace(STATE, shards=2, shard=shard) for shard in (0, 1)]
    life, keys = Life(descriptor), chain(1, 5)
    ranks = [Client(life, ranks=2, rank=rank).register([halves[rank]]) for rank in (0, 1)]
    store_state(ranks[0], keys, 1)
    for rank in ranks:
        store_state(rank, keys, 4)
    assert life.kinds() == {"slot": 3, "mark": 4}
    again = Life(descriptor)
    assert again.kinds() == {"slot": 2, "mark": 4}
    assert Client(again).lookup(keys).chunks == 5


def test_what_was_evicted_leaves_no_mark(descriptor: int) -> None:
    life = Life(descriptor)
    client = engine(life, STATE)
    for seed in range(2 * CHUNKS_MAX):
        store_state(client, chain(seed, 7), 6)
    assert life.facts()["chunks"] <= CHUNKS_MAX
    assert life.kinds()["slot"] <= CHUNKS_MAX // 7 + 1
    assert life.kinds()["mark"] <= CHUNKS_MAX
    assert Life(descriptor).facts()["chunks"] <= CHUNKS_MAX
    assert client.lookup(chain(2 * CHUNKS_MAX - 1, 7)).chunks == 7


def test_what_was_cleared_leaves_no_mark_even_under_a_retrieve(descriptor: int) -> None:
    life, keys = Life(descriptor), chain(1, 6)
    client = engine(life, STATE)
    store_state(client, keys, 5)
    life.movers_copy = False
    assert client.ask(client.retrieving(client.lookup(keys).lease, GroupBlocks(0, 5, ids(2)))) is None
    client.ask(Clear(life.number(), NAMESPACE))
    assert life.kinds() == {}
    assert Life(descriptor).facts()["chunks"] == 0
    life.finish()
    assert life.facts()["chunks"] == 0


def test_nothing_is_marked_where_a_full_group_is_needed(descriptor: int) -> None:
    life, keys = Life(descriptor), chain(1, 2)
    client = engine(life, FULL, STATE)
    reply = client.ask(client.storing(keys, GroupBlocks(0, 0, ids(*range(6))), GroupBlocks(1, 1, ids(3))))
    assert reply.chunks == 2
    assert life.kinds() == {"slot": 3}
    assert Client(Life(descriptor)).lookup(keys).chunks == 2


def test_a_chain_with_a_hole_in_it_is_given_up_whole(descriptor: int) -> None:
    life, keys = Life(descriptor), chain(1, 5)
    store_state(engine(life, STATE), keys, 4)
    hole = next(record for record in life.records() if record.key == key(keys, 2))
    life.ledger.clear(array("q", [hole.offset]).tobytes())
    again = Life(descriptor)
    assert {record.key for record in again.records()} == {key(keys, 0), key(keys, 1)}
    assert again.facts()["used_bytes"] == 0


def test_what_is_stored_next_is_newer_than_all_that_was_restored(descriptor: int) -> None:
    """The newest record need not lie last."""
    life, first, second = Life(descriptor), chain(1, 3), chain(2, 2)
    engine(life, FULL).store(first)
    newest = min(life.records(), key=lambda record: record.offset)._replace(generation=1000)
    life.ledger.clear(array("q", [newest.offset]).tobytes())
    life.ledger.seal(pack(newest))
    again = Life(descriptor)
    engine(again, FULL).store(second)
    stored = [record.generation for record in again.records() if record.key in (key(second, 0), key(second, 1))]
    assert len(stored) == 2
    assert min(stored) > newest.generation


def test_a_chunk_whose_slots_clash_with_others_takes_none(descriptor: int) -> None:
    """The ledger says that one of the two lies in a slab whose slots have another size."""
    life, keys = Life(descriptor), chain(1, 2)
    client = Client(life).register((FULL, WIDE), buffer_bytes=14_000)
    reply = client.ask(client.storing(keys, GroupBlocks(0, 0, ids(*range(6))), GroupBlocks(1, 0, ids(0, 1))))
    assert reply.chunks == 2
    (wide,) = (record for record in life.records() if (record.key, record.group) == (key(keys, 1), 1))
    life.ledger.clear(array("q", [wide.offset]).tobytes())
    life.ledger.seal(pack(wide._replace(offset=6 * SLOT_ALIGN)))
    again = Life(descriptor)
    assert Client(again).lookup(keys).chunks == 1
    assert again.facts()["used_bytes"] == 3 * SLOT_ALIGN
    assert {record.key for record in again.records()} == {key(keys, 0)}


def test_one_of_two_marks_of_a_chunk_stays(descriptor: int) -> None:
    life, keys = Life(descriptor), chain(1, 3)
    store_state(engine(life, STATE), keys, 2)
    first = next(record for record in life.records() if record.key == key(keys, 0))
    life.ledger.seal(pack(first._replace(offset=SPAN_BYTES - SLOT_ALIGN, generation=0)))
    again = Life(descriptor)
    assert sorted(again.records()) == sorted(life.records())
    assert again.kinds() == {"slot": 1, "mark": 2}
    assert Client(again).lookup(keys).chunks == 3


def test_a_mark_among_the_slots_is_not_believed(descriptor: int) -> None:
    life, keys = Life(descriptor), chain(1, 2)
    life.ledger.seal(
        pack(Record(5 * SLOT_ALIGN, NAMESPACE, key(keys, 0), NO_PARENT, NO_GROUP, 0, 0, 0, SLOT_ALIGN, 3, NO_SUM))
    )
    client = engine(life, STATE)
    assert Life(descriptor).facts()["chunks"] == 0
    assert life.kinds() == {}
    store_state(client, keys, 1)
