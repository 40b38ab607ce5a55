"""Which chunks a server writes to a remote store, in which order, and again after a failure."""

import pytest

from kvserver.remote.chunk_value import SHARDS_MAX, decode
from kvserver.service.base.events import Tick
from kvserver.service.remote import writes
from kvserver.wire.messages import GROUPS_MAX, KEY_BYTES, GroupBlocks, GroupSpec, RegionRun
from kvserver.wire.orders import PutRemote, ReadRemoteNote, RemoteEnded, RemoteNoteRead
from tests.rigs.brain_rig import BLOCKS, CHUNK_TOKENS, Client, chain, ids, key
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


class Unreadable:
    """An engine with a namespace whose note the store does not let this server read, beside the rig's own engine."""

    def __init__(self, rig: RemoteRig) -> None:
        self._rig, self.namespace = rig, bytes(range(32))
        run = RegionRun(0, 0, 1, 0, 16, 16)
        self.client = Client(rig).register(
            [GroupSpec(2, BLOCKS, "full", 0, 1, 0, 1, 0, [run])], namespace=self.namespace
        )
        rig.wait_ms(1_100)
        self.answer()

    def answer(self) -> None:
        """The store answers all reads of notes."""
        jobs = self._rig.core.remotes[0].jobs
        for order in [order for order in self._rig.asked(ReadRemoteNote) if order.job in jobs]:
            fault, state = ("remote-denied", "absent") if order.namespace == self.namespace else ("", "here")
            self._rig.report(self._rig.mover, RemoteNoteRead(order.job, fault, state, EPOCH, b""))


def test_a_namespace_whose_note_cannot_be_read_keeps_no_other_one_from_being_written() -> None:
    rig = RemoteRig(write="through")
    denied = Unreadable(rig)
    for seed in range(30, 50):
        denied.client.store(chain(seed, 3))
    assert ordered(rig) == []
    rig.client.store(KEYS)
    assert sorted(places(ordered(rig))) == list(range(CHUNKS))


def test_a_namespace_whose_note_cannot_be_read_does_not_fill_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writes, "QUEUE_MAX", CHUNKS + 1)
    rig = RemoteRig(write="through")
    denied = Unreadable(rig)
    for seed in range(30, 50):
        denied.client.store(chain(seed, 3))
        rig.handle(Tick())
    rig.client.store(KEYS)
    assert sorted(places(ordered(rig))) == list(range(CHUNKS))


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
