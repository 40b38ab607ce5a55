"""Pledges, lookups that may wait, and retrieves of what is still computed: what the client asks and what it makes of
the answers."""

from array import array
from pathlib import Path

import pytest

from kvclient import Found, PledgeResult
from kvclient.memory.blocks import cut_retrieve
from kvclient.transport.jobs import AWAITED_AHEAD_MAX, AWAITED_SPARE_S, PARTS_AHEAD_MAX
from kvserver.wire import messages as wire
from tests.rigs.client_rig import NAMESPACE, Rig, chunks, keys_of, rig, spec, turns
from tests.rigs.fake_server import WAIT_S


def awaited(at: Rig, held: int, coming: int) -> Found:
    at.fake.stored[NAMESPACE] = {keys_of(number) for number in range(1, held + 1)}
    at.fake.awaited = coming, "other"
    return at.client.lookup(NAMESPACE, keys_of(*range(1, held + coming + 1)), may_wait=True)


def test_a_lookup_that_may_wait_brings_a_lease_on_what_comes(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        found = awaited(at, 2, 3)
        assert (found.chunks, found.awaited, found.producer) == (2, 3, "other")
        assert found.lease is not None
        assert (found.lease.chunks, found.lease.awaited) == (2, 3)
        plain = at.client.lookup(NAMESPACE, keys_of(1, 2, 3, 4, 5))
        assert (plain.awaited, plain.producer) == (0, "")
        assert [type(request) for _, request in at.fake.requests[-2:]] == [wire.Await, wire.Lookup]


def test_each_awaited_chunk_is_a_request_of_its_own(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        found = awaited(at, 3, 4)
        assert found.lease is not None
        assert at.client.retrieve(at.cache, found.lease, chunks(0, 7)).result(WAIT_S).ok
        asked = [request for _, request in at.fake.requests if isinstance(request, wire.Retrieve)]
        ranges = [(part.groups[0].first_block, len(part.groups[0].block_ids) // 4) for part in asked]
        assert sorted(ranges) == [(0, 9), (9, 3), (12, 3), (15, 3), (18, 3)]
        assert [part.more for part in asked] == [True] * 4 + [False]


def test_more_awaited_chunks_are_under_way_than_parts_of_another_retrieve(tmp_path: Path) -> None:
    """A producer's store brings several chunks at once. Each would wait until the client has asked for it."""
    with rig(tmp_path) as at:
        at.fake.limits = wire.Limits(100, 1000, 60, 30_000)
        at.restart()
        found = awaited(at, 1, AWAITED_AHEAD_MAX + 3)
        assert found.lease is not None
        at.fake.hold.add(wire.Retrieve)
        future = at.client.retrieve(at.cache, found.lease, chunks(0, AWAITED_AHEAD_MAX + 4))
        ahead = [at.fake.wait_for(wire.Retrieve, number) for number in range(1, AWAITED_AHEAD_MAX + 1)]
        turns(at)
        assert at.fake.count(wire.Retrieve) == AWAITED_AHEAD_MAX > PARTS_AHEAD_MAX
        at.fake.hold.clear()
        for request in ahead:
            at.fake.answer_as_usual(request)
        assert future.result(WAIT_S).ok


@pytest.mark.parametrize(
    ("here", "wanted"), [(0, [(2, 1), (3, 3), (6, 2)]), (1, [(2, 1), (3, 3), (6, 2)]), (2, [(2, 4), (6, 2)])]
)
def test_a_retrieve_that_begins_inside_a_chunk_is_cut_at_chunks(here: int, wanted: list[tuple[int, int]]) -> None:
    blocks = [wire.GroupBlocks(0, 2, array("i", range(6)).tobytes())]
    limits = wire.Limits(100, 1000, 1, 1)
    parts = cut_retrieve(spec(0), blocks, limits, from_disk=False, chunks_here=here)
    assert [(part[0].first_block, len(part[0].block_ids) // 4) for part in parts] == wanted


def test_what_came_before_the_end_of_a_wait_is_right(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        at.fake.limits = wire.Limits(100, 1000, 12, 30_000)  # three parts of a retrieve may be under way
        at.restart()
        found = awaited(at, 2, 3)
        assert found.lease is not None
        at.fake.hold.add(wire.Retrieve)
        future = at.client.retrieve(at.cache, found.lease, chunks(0, 5))
        first, second, third = (at.fake.wait_for(wire.Retrieve, number) for number in (1, 2, 3))
        for part in (first, second):
            at.fake.answer_as_usual(part)
        fourth = at.fake.wait_for(wire.Retrieve, 4)
        for part in (fourth, third):
            at.fake.answer(part, wire.Error(part.id, "device", "not-coming", "planted"))
        result = future.result(WAIT_S)
        assert (result.ok, result.why, result.right_chunks) == (False, "not-coming", 3)
        assert at.client.connected


def test_the_server_gives_a_wait_up_before_the_caller_does(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        found = awaited(at, 1, 1)
        assert found.lease is not None
        at.client.retrieve(at.cache, found.lease, chunks(0, 2), timeout_s=30).result(WAIT_S)
        assert at.fake.wait_for(wire.Retrieve, 1).deadline_ms <= 30_000 - AWAITED_SPARE_S * 1000
        at.client.retrieve(at.cache, found.lease, chunks(0, 2), timeout_s=0.1).result(WAIT_S)
        assert at.fake.wait_for(wire.Retrieve, 3).deadline_ms == 1


def test_a_pledge_takes_the_lane_and_is_taken_back_by_its_number(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        pledge = at.client.pledge(NAMESPACE, keys_of(1, 2, 3), ttl_s=1.5)
        assert (pledge.held, pledge.chunks, pledge.incarnation, pledge.why) == (0, 3, 1, "")
        at.client.unpledge(pledge)
        asked = [
            (door, request) for door, request in at.fake.requests if isinstance(request, wire.Pledge | wire.Unpledge)
        ]
        assert [door for door, _ in asked] == ["local", "local"]
        assert (asked[0][1].keys, asked[0][1].ttl_ms, asked[1][1].pledge) == (keys_of(1, 2, 3), 1500, pledge.number)


def test_a_pledge_of_an_earlier_server_is_not_taken_back_at_the_next_one(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        pledge = at.client.pledge(NAMESPACE, keys_of(1))
        at.fake.incarnation += 1
        at.restart()
        at.client.unpledge(pledge)
        assert not [request for _, request in at.fake.requests if isinstance(request, wire.Unpledge)]


def test_a_refused_pledge_is_none_and_does_not_stop_the_client(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        at.fake.refuse[wire.Pledge] = ("resource", "pledges")
        assert at.client.pledge(NAMESPACE, keys_of(1)) == PledgeResult(0, 0, 0, why="pledges")
        assert at.client.connected
        assert at.client.pledge(NAMESPACE, b"") == PledgeResult(0, 0, 0)
        at.client.unpledge(PledgeResult(0, 0, 0))


def test_without_a_server_nothing_is_pledged(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        at.client.close()
        assert at.client.pledge(NAMESPACE, keys_of(1)).why == "closed"
