"""Which chunks a server writes to a remote store, in which order, and again after a failure."""

import pytest

from kvserver.remote.chunk_value import SHARDS_MAX, decode
from kvserver.service.base.events import Tick
from kvserver.wire.messages import GROUPS_MAX, KEY_BYTES, GroupBlocks, GroupSpec, RegionRun
from kvserver.wire.orders import PutRemote, ReadRemoteNote, RemoteEnded, RemoteNoteRead
from tests.rigs.brain_rig import CHUNK_TOKENS, Client, chain, ids, key
from tests.rigs.remote_rig import EPOCH, RemoteRig

CHUNKS = 5
KEYS = chain(1, CHUNKS)


def ordered(rig: RemoteRig) -> list[PutRemote]:
    """The writes that are ordered now. They stay in the list of orders."""
    before = len(rig.asked(PutRemote))
    rig.handle(Tick())
    return rig.asked(PutRemote)[before:]


def places(orders: list[PutRemote]) -> list[int]:
    """The place of each chunk in the prompt."""
    keys = [key(KEYS, place) for place in range(CHUNKS)]
    return [keys.index(decode(order.head).key) for order in orders]


def end(rig: RemoteRig, orders: list[PutRemote], **faults: str) -> None:
    """Ends the writes in turn; faults: of chunk_0, chunk_1, …"""
    for place, order in zip(places(orders), orders, strict=True):
        rig.report(rig.mover, RemoteEnded(order.job, faults.get(f"chunk_{place}", ""), 1))


@pytest.mark.parametrize(
    ("write", "after_store", "after_use"), [("through", CHUNKS, 0), ("reuse", 0, CHUNKS), ("never", 0, 0)]
)
def test_chunks_are_written_once_when_the_policy_says_so_and_parents_first(
    write: str, after_store: int, after_use: int
) -> None:
    rig = RemoteRig(write=write)
    rig.client.store(KEYS)
    first = ordered(rig)
    assert places(first) == list(range(after_store))
    end(rig, first)
    rig.client.lookup(KEYS)
    second = ordered(rig)
    assert places(second) == list(range(after_use))
    assert {decode(order.head).epoch for order in first + second} <= {EPOCH}
    end(rig, second)
    rig.client.lookup(KEYS)
    assert ordered(rig) == []


@pytest.mark.parametrize("failed", [0, 2, 4])
def test_a_chunk_that_could_not_be_written_is_written_with_its_next_use_and_what_the_store_has_is_not(
    failed: int,
) -> None:
    """Those below it were written before its failure was known."""
    rig = RemoteRig(write="through")
    rig.client.store(KEYS)
    end(rig, ordered(rig), **{f"chunk_{failed}": "left-alone"})
    assert ordered(rig) == [], "not before it is used"
    rig.client.lookup(KEYS)
    again = ordered(rig)
    assert places(again) == [failed]
    end(rig, again)
    rig.client.lookup(KEYS)
    assert ordered(rig) == []


def test_a_prompt_that_branches_is_offered_again_as_far_as_it_is_used() -> None:
    rig = RemoteRig(write="through")
    rig.client.store(KEYS)
    end(rig, ordered(rig), chunk_1="remote-slow", chunk_2="remote-slow", chunk_3="remote-slow")
    rig.client.lookup(KEYS[: 3 * KEY_BYTES])
    assert places(ordered(rig)) == [1, 2]


@pytest.mark.parametrize(("groups", "ranks"), [(6, 41), (13, 19), (GROUPS_MAX, 16)])
def test_a_chunk_with_more_shards_than_a_head_has_room_for_stays_here(groups: int, ranks: int) -> None:
    rig = RemoteRig(write="through")
    client, namespace, keys = Client(rig), bytes(range(32)), chain(2, 1)
    caches = []
    for rank in range(ranks):
        run = RegionRun(0, 0, 1, 0, 16, 16)
        specs = [GroupSpec(CHUNK_TOKENS, 2, "full", 0, ranks, rank, 1, 0, [run])] * groups
        caches.append(client.register(specs, name=f"rank {rank}", namespace=namespace).cache)
    rig.handle(Tick())
    note = rig.asked(ReadRemoteNote)[-1]
    rig.report(rig.mover, RemoteNoteRead(note.job, "", "here", EPOCH, b""))
    for cache in caches:
        client.cache = cache
        client.ask(client.storing(keys, *(GroupBlocks(group, 0, ids(0)) for group in range(groups))))
    assert client.lookup(keys, namespace).chunks == 1
    assert len(ordered(rig)) == (1 if groups * ranks <= SHARDS_MAX else 0)
