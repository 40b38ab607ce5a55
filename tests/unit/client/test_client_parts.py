"""Jobs in parts: long stores, and retrieves of chunks that still come from disk."""

from concurrent.futures import Future
from pathlib import Path

import pytest

from kvclient import Blocks, Cache, RequestError, RetrieveResult, StoreResult
from kvclient.memory.blocks import PART_CHUNKS_MAX
from kvclient.transport.jobs import PARTS_AHEAD_MAX
from kvserver._native import DONE, FAILED, SUBMITTED
from kvserver.wire import messages as wire
from tests.rigs.client_rig import BLOCK_BYTES, BLOCKS_PER_CHUNK, Rig, chunks, keys_of, rig, turns
from tests.rigs.fake_server import WAIT_S, until


def test_parts_of_a_large_store_run_side_by_side(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        part_chunks = at.fake.limits.chunks_max
        assert part_chunks < PART_CHUNKS_MAX
        many = part_chunks * 2 + 5
        at.fake.hold.add(wire.Store)
        future = at.client.store(at.cache, 0, b"", keys_of(*range(1, many + 1)), chunks(0, many))
        first, second = at.fake.wait_for(wire.Store, 1), at.fake.wait_for(wire.Store, 2)
        assert (second.first_chunk, second.parent) == (part_chunks, first.keys[-32:])
        assert not future.done()
        at.fake.hold.clear()
        at.fake.answer_as_usual(second)
        at.fake.answer_as_usual(first)
        assert future.result(WAIT_S).chunks == many


def test_a_store_claims_what_leads_and_not_what_follows_a_short_part(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        at.fake.limits = wire.Limits(2, 100, 20, 1000)
        at.restart()
        at.fake.hold.add(wire.Store)
        future = at.client.store(at.cache, 0, b"", keys_of(1, 2, 3, 4, 5), chunks(0, 5))
        first, second, third = (at.fake.wait_for(wire.Store, number) for number in (1, 2, 3))
        for part, reply in (
            (third, wire.Stored(third.id, 1, 1, 7, "")),
            (second, wire.Stored(second.id, 1, 1, 7, "full")),
            (first, wire.Stored(first.id, 2, 0, 0, "")),
        ):
            assert not future.done()
            at.fake.set_word(part, DONE)
            at.fake.answer(part, reply)
        assert future.result(WAIT_S) == StoreResult(3, 2, 14, "full")


def test_a_retrieve_beyond_the_servers_limit_is_cut(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        most = at.fake.limits.blocks_max // BLOCKS_PER_CHUNK
        future = at.client.retrieve(at.cache, at.lease(), [Blocks(0, 0, range(BLOCKS_PER_CHUNK * (most + 1)))])
        assert future.result(WAIT_S).ok
        first, second = at.fake.wait_for(wire.Retrieve, 1), at.fake.wait_for(wire.Retrieve, 2)
        assert (first.groups[0].first_block, second.groups[0].first_block) == (0, most * BLOCKS_PER_CHUNK)
        assert (first.more, second.more) == (True, False)
        assert first.lease == second.lease


def from_disk(
    at: Rig, monkeypatch: pytest.MonkeyPatch, count: int, timeout_s: float = WAIT_S
) -> "Future[RetrieveResult]":
    """A retrieve that is cut into as many parts as it has chunks."""
    monkeypatch.setattr("kvclient.memory.blocks.STREAMED_BYTES", 1)
    at.fake.chunks_on_disk = 1
    return at.client.retrieve(at.cache, at.lease(count), chunks(0, count), timeout_s=timeout_s)


def test_parts_of_a_retrieve_from_disk_are_under_way_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with rig(tmp_path) as at:
        at.fake.hold.add(wire.Retrieve)
        future = from_disk(at, monkeypatch, 5)
        first, second = (at.fake.wait_for(wire.Retrieve, number) for number in (1, 2))
        assert [request.groups[0].first_block for request in (first, second)] == [0, BLOCKS_PER_CHUNK]
        assert first.word != second.word
        turns(at)
        assert at.fake.count(wire.Retrieve) == 2, "no more than the server's limit leaves room for"
        at.fake.hold.clear()
        for request in (first, second):
            assert not future.done()
            at.fake.answer_as_usual(request)
        assert future.result(WAIT_S) == RetrieveResult(True, 5 * BLOCKS_PER_CHUNK * BLOCK_BYTES, "")
        assert [at.fake.wait_for(wire.Retrieve, number).more for number in range(1, 6)] == [*[True] * 4, False]


def test_a_retrieve_ends_with_its_first_part_that_fails_when_no_other_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rig(tmp_path) as at:
        at.fake.hold.add(wire.Retrieve)
        future = from_disk(at, monkeypatch, 5)
        first, second = (at.fake.wait_for(wire.Retrieve, number) for number in (1, 2))
        at.fake.set_word(first, FAILED)
        at.fake.answer(first, wire.Error(first.id, "device", "disk-io", "unreadable"))
        turns(at)
        assert not future.done(), "a mover may still write the blocks of the second part"
        at.fake.answer_as_usual(second)
        assert future.result(WAIT_S) == RetrieveResult(False, BLOCKS_PER_CHUNK * BLOCK_BYTES, "disk-io")
        assert at.fake.count(wire.Retrieve) == 2


def test_no_part_begins_after_the_deadline_though_those_before_ended_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rig(tmp_path) as at:
        at.fake.hold.add(wire.Retrieve)
        future = from_disk(at, monkeypatch, 5, timeout_s=0.3)
        begun = [at.fake.wait_for(wire.Retrieve, number) for number in (1, 2)]
        for request in begun:
            at.fake.set_word(request, SUBMITTED)
        until("both deadlines", lambda: at.client.counters.retrieves_overdue == 2)
        at.fake.hold.clear()
        for request in begun:  # the mover was slow
            at.fake.set_word(request, DONE)
        assert future.result(WAIT_S) == RetrieveResult(False, 2 * BLOCKS_PER_CHUNK * BLOCK_BYTES, "timeout")
        turns(at)
        assert at.fake.count(wire.Retrieve) == 2


def test_a_few_parts_are_ahead_however_many_jobs_the_server_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test repeats it: parts sent ahead are given back with their job."""
    with rig(tmp_path) as at:
        at.fake.limits = wire.Limits(100, 1000, 24, 30_000)
        at.restart()
        for begun in (0, 9, 18):
            at.fake.hold.add(wire.Retrieve)
            future = from_disk(at, monkeypatch, 9)
            ahead = [at.fake.wait_for(wire.Retrieve, begun + number) for number in range(1, PARTS_AHEAD_MAX + 1)]
            turns(at)
            assert at.fake.count(wire.Retrieve) == begun + PARTS_AHEAD_MAX
            at.fake.hold.clear()
            for request in ahead:
                at.fake.answer_as_usual(request)
            assert future.result(WAIT_S).ok


def test_a_part_that_is_the_callers_mistake_is_an_exception_when_no_other_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rig(tmp_path) as at:
        at.fake.hold.add(wire.Retrieve)
        future = from_disk(at, monkeypatch, 5)
        first, second = (at.fake.wait_for(wire.Retrieve, number) for number in (1, 2))
        at.fake.answer(first, wire.Error(first.id, "request", "block-range", "as the test wants it"))
        turns(at)
        assert not future.done()
        at.fake.answer_as_usual(second)
        with pytest.raises(RequestError, match="block-range"):
            future.result(WAIT_S)
        assert at.fake.count(wire.Retrieve) == 2


def test_an_unexpected_error_in_a_part_is_the_jobs_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of_others(cache: Cache, groups: list[wire.GroupBlocks]) -> int:
        return 1 // groups[0].first_block  # the first part begins at 0

    with rig(tmp_path, bugs=1) as at:
        at.fake.hold.add(wire.Retrieve)
        future = from_disk(at, monkeypatch, 5)
        first, second = (at.fake.wait_for(wire.Retrieve, number) for number in (1, 2))
        at.fake.answer_as_usual(second)
        with monkeypatch.context() as patch:
            patch.setattr("kvclient.transport.jobs._bytes_of", of_others)
            at.fake.answer_as_usual(first)
            result = future.result(WAIT_S)
        assert (result.ok, result.why) == (False, "client-bug")
        at.fake.hold.clear()
        at.connected_again(2)
        assert from_disk(at, monkeypatch, 2).result(WAIT_S).ok
