"""Pledges of an engine with several ranks, each of which stores some of every chunk, or some of the chunks."""

from typing import Any

import msgspec
import pytest

from kvserver.wire.messages import KEY_BYTES, Await, GroupBlocks, Pledge, Retrieved, Store, Unregister
from tests.rigs.brain_rig import FULL, NAMESPACE, Client, Rig, chain, ids, is_refusal, key

CHUNKS = 5
KEYS = chain(1, CHUNKS)
TTL_MS = 60_000


def two_ranks(**bounds: Any) -> tuple[Rig, list[Client], Client]:
    """An engine of two ranks, each with a shard of every chunk, and a rank of another one."""
    rig = Rig(**bounds)
    shards = [msgspec.structs.replace(FULL, shards=2, shard=rank) for rank in range(2)]
    ranks = [Client(rig, engine="producer", epoch=11, ranks=2, rank=rank).register([shards[rank]]) for rank in range(2)]
    other = Client(rig, engine="other", epoch=12, ranks=2, rank=0).register([shards[0]])
    return rig, ranks, other


def piece_of(client: Client, first: int, end: int) -> Store:
    parent = key(KEYS, first - 1) if first else b""
    blocks = GroupBlocks(0, 3 * first, ids(*range(3 * (end - first))))
    head = client.rig.number(), client.cache, 5, 1, 10_000, first, parent
    return Store(*head, KEYS[first * KEY_BYTES : end * KEY_BYTES], [blocks])


def test_a_chunk_comes_when_the_last_rank_has_stored_its_shard() -> None:
    rig, ranks, other = two_ranks()
    ranks[0].ask(Pledge(rig.number(), NAMESPACE, KEYS, TTL_MS))
    found = other.ask(Await(rig.number(), NAMESPACE, KEYS, 1))
    wait = other.retrieving(found.lease, GroupBlocks(0, 0, ids(0, 1, 2)), more=True)
    other.ask(wait)
    ranks[0].ask(piece_of(ranks[0], 0, 2))
    assert (other.peer, wait.id) not in rig.answers
    ranks[1].ask(piece_of(ranks[1], 0, 1))
    assert isinstance(rig.answers[other.peer, wait.id], Retrieved)


def test_a_rank_whose_cache_goes_ends_what_its_engine_has_pledged() -> None:
    rig, ranks, other = two_ranks()
    ranks[0].ask(Pledge(rig.number(), NAMESPACE, KEYS, TTL_MS))
    found = other.ask(Await(rig.number(), NAMESPACE, KEYS, 1))
    wait = other.retrieving(found.lease, GroupBlocks(0, 0, ids(0, 1, 2)), more=True)
    other.ask(wait)
    ranks[1].ask(Unregister(rig.number(), ranks[1].cache))
    assert is_refusal(rig.answers[other.peer, wait.id], "device", "not-coming", "let its cache go")


def test_a_rank_that_writes_every_other_chunk_ends_the_await_when_its_cache_goes() -> None:
    rig = Rig()
    halves = [msgspec.structs.replace(FULL, writers=2, writer=rank) for rank in range(2)]
    ranks = [Client(rig, engine="producer", epoch=11, ranks=2, rank=rank).register([halves[rank]]) for rank in range(2)]
    other = Client(rig, engine="other", epoch=12, ranks=2, rank=0).register([halves[0]])
    ranks[0].ask(Pledge(rig.number(), NAMESPACE, KEYS, TTL_MS))
    found = other.ask(Await(rig.number(), NAMESPACE, KEYS, 1))
    wait = other.retrieving(found.lease, GroupBlocks(0, 0, ids(*range(6))), more=True)
    assert other.ask(wait) is None
    ranks[1].ask(Unregister(rig.number(), ranks[1].cache))
    assert is_refusal(rig.answers[other.peer, wait.id], "device", "not-coming", "let its cache go")


def test_nothing_is_pledged_before_all_ranks_have_registered() -> None:
    rig = Rig()
    shards = [msgspec.structs.replace(FULL, shards=2, shard=rank) for rank in range(2)]
    first, second = (Client(rig, engine="producer", epoch=11, ranks=2, rank=rank) for rank in range(2))
    first.register([shards[0]])
    assert first.ask(Pledge(rig.number(), NAMESPACE, KEYS, TTL_MS)).chunks == 0
    second.register([shards[1]])
    assert first.ask(Pledge(rig.number(), NAMESPACE, KEYS, TTL_MS)).chunks == CHUNKS


@pytest.mark.parametrize("how", ["fails", "never stores"])
def test_a_rank_that_does_not_store_its_shard_ends_the_await(how: str) -> None:
    rig, ranks, other = two_ranks(reserve_ttl_ms=1_000)
    ranks[0].ask(Pledge(rig.number(), NAMESPACE, KEYS, TTL_MS))
    found = other.ask(Await(rig.number(), NAMESPACE, KEYS, 1))
    wait = other.retrieving(found.lease, GroupBlocks(0, 0, ids(0, 1, 2)), more=True)
    other.ask(wait)
    ranks[0].ask(piece_of(ranks[0], 0, 1))
    if how == "fails":
        rig.movers_copy = False
        ranks[1].ask(piece_of(ranks[1], 0, 1))
        rig.finish("failed", "io", "planted")
    else:
        rig.wait_ms(1_100)
    assert is_refusal(rig.answers[other.peer, wait.id], "device", "not-coming")
    assert rig.core.counters.pledges_ended["not-stored"] == 1


def test_a_pledge_whose_time_ends_together_with_that_of_its_chunk_ends_once() -> None:
    rig, ranks, _ = two_ranks(reserve_ttl_ms=1_000, pledge_patience_ms=1_000)
    ranks[0].ask(Pledge(rig.number(), NAMESPACE, KEYS, TTL_MS))
    ranks[0].ask(piece_of(ranks[0], 0, 1))
    rig.wait_ms(1_500, step_ms=1_500)
    assert sum(rig.core.counters.pledges_ended.values()) == 1
