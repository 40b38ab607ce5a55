"""Engines that hold the same shard on one, two or four ranks, in one namespace: each divides the writing among its own.

A chunk is copied once, whoever stores it. A rank copies no chunk that another rank of its engine is to write.
"""

from array import array

import msgspec
import pytest

from kvserver.index.space import ABSENT
from kvserver.service.holdings.namespace_documents import document_of, space_from
from kvserver.wire.messages import (
    KEY_BYTES,
    Await,
    GroupBlocks,
    GroupSpec,
    Pledge,
    Retrieved,
    Store,
    Stored,
    Unregister,
)
from kvserver.wire.orders import Copy
from tests.rigs.brain_rig import FULL, NAMESPACE, Client, Rig, chain, ids, is_refusal

CHUNKS = 6
KEYS = chain(1, CHUNKS)
SIZES = (1, 2, 4)
TTL_MS = 60_000


def of(writers: int, writer: int) -> GroupSpec:
    return msgspec.structs.replace(FULL, writers=writers, writer=writer)


def engine(rig: Rig, size: int, name: str = "") -> list[Client]:
    name = name or f"engine of {size}"
    clients = [Client(rig, engine=name, epoch=size, ranks=size, rank=rank) for rank in range(size)]
    return [client.register([of(size, client.rank)]) for client in clients]


def store_of(client: Client, chunks: int = CHUNKS) -> Store:
    return client.storing(KEYS[: chunks * KEY_BYTES], GroupBlocks(0, 0, ids(*(n % 11 for n in range(3 * chunks)))))


def copied(rig: Rig, since: int) -> list[int]:
    """Chunks that movers were told to copy into the arena since then."""
    stores = [order for order in rig.orders[since:] if isinstance(order, Copy) and order.kind == "store"]
    return sorted(
        chunk
        for order in stores
        for group in order.groups
        for chunk, slot in enumerate(array("q", group.slots))
        if slot != ABSENT
    )


@pytest.mark.parametrize("first", SIZES)
def test_each_engine_divides_the_chunks_among_its_own_ranks_and_none_is_copied_twice(first: int) -> None:
    rig = Rig()
    engines = {size: engine(rig, size) for size in SIZES}
    for rank, client in enumerate(engines[first]):
        since = len(rig.orders)
        reply = client.ask(store_of(client))
        assert (reply.chunks, reply.why) == (CHUNKS, "")
        assert copied(rig, since) == list(range(rank, CHUNKS, first))
    since = len(rig.orders)
    for client in (client for clients in engines.values() for client in clients):
        assert client.lookup(KEYS).chunks == CHUNKS
        reply = client.ask(store_of(client))
        assert (reply.chunks, reply.chunks_written, reply.why) == (CHUNKS, 0, "")
    assert copied(rig, since) == []


def test_a_chunk_is_found_when_the_rank_has_stored_it_whose_turn_it_is() -> None:
    rig = Rig()
    four, one = engine(rig, 4), engine(rig, 1)[0]
    for rank, found in ((0, 1), (2, 1), (1, 3), (3, CHUNKS)):
        assert isinstance(four[rank].ask(store_of(four[rank])), Stored)
        assert one.lookup(KEYS).chunks == found


def test_two_engines_that_store_at_once_fill_what_the_other_has_not_begun() -> None:
    rig = Rig()
    two, one = engine(rig, 2), engine(rig, 1)[0]
    rig.movers_copy = False
    begun = store_of(two[1])
    assert two[1].ask(begun) is None
    rest = store_of(one)
    assert one.ask(rest) is None
    late = two[0].ask(store_of(two[0]))
    assert (late.chunks, late.why) == (0, "busy")
    assert copied(rig, 0) == list(range(CHUNKS))
    rig.finish()
    assert (rig.answers[two[1].peer, begun.id].chunks, rig.answers[one.peer, rest.id].chunks) == (CHUNKS, CHUNKS)
    assert one.lookup(KEYS).chunks == CHUNKS


def test_what_a_dead_engine_left_half_is_stored_by_one_of_another_size() -> None:
    rig = Rig()
    two, one = engine(rig, 2), engine(rig, 1)[0]
    two[0].ask(store_of(two[0]))
    assert one.lookup(KEYS).chunks == 1
    rig.peer_gone(two[0].local), rig.peer_gone(two[1].local)
    since = len(rig.orders)
    assert one.ask(store_of(one)).chunks == CHUNKS
    assert copied(rig, since) == [1, 3, 5]
    assert one.lookup(KEYS).chunks == CHUNKS


def test_a_lease_of_one_size_is_used_up_by_as_many_ranks() -> None:
    rig = Rig()
    four, one = engine(rig, 4), engine(rig, 1)[0]
    one.store(KEYS[: 3 * KEY_BYTES])
    found = four[3].lookup(KEYS)
    for rank in four:
        assert rig.facts()["leases"] == 1
        assert isinstance(rank.ask(rank.retrieving(found.lease, GroupBlocks(0, 0, ids(*range(9))))), Retrieved)
    assert rig.facts()["leases"] == 0


@pytest.mark.parametrize(("other", "goes"), [((1, 0), (2, 0)), ((2, 0), (1, 0))])
def test_a_pledge_ends_with_the_cache_that_writes_its_chunks_if_another_one_of_the_engine_writes_others(
    other: tuple[int, int], goes: tuple[int, int]
) -> None:
    """Both are the first of their writers, and these are not the same chunks."""
    rig = Rig()
    producer = Client(rig, engine="producer", epoch=11).register([of(*goes)])
    stays = Client(rig, engine="producer", epoch=11).register([of(*other)])
    asks = engine(rig, 1, "asks")[0]
    assert stays.ask(Pledge(rig.number(), NAMESPACE, KEYS, TTL_MS)).chunks == CHUNKS
    found = asks.ask(Await(rig.number(), NAMESPACE, KEYS, 1))
    wait = asks.retrieving(found.lease, GroupBlocks(0, 0, ids(0, 1, 2)), more=True)
    assert asks.ask(wait) is None
    producer.ask(Unregister(rig.number(), producer.cache))
    assert is_refusal(rig.answers[asks.peer, wait.id], "device", "not-coming", "let its cache go")


def test_a_document_of_before_says_a_number_of_ranks_that_nobody_holds_against_them() -> None:
    rig = Rig()
    engine(rig, 4)
    space = rig.core.chunks.spaces[NAMESPACE]
    document = document_of(space)
    groups = [msgspec.structs.replace(group, writers=4) for group in document.groups]
    assert space_from(0, msgspec.structs.replace(document, groups=groups)).geometry == space.geometry
