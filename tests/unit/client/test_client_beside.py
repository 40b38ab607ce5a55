"""Jobs of several caches of the same blocks, each with another shard of every chunk."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec.structs import replace as changed

from kvclient import Blocks, Cache, RequestError, RetrieveResult, StoreResult
from kvserver._native import DONE, FAILED
from kvserver.wire import messages as wire
from tests.rigs.client_rig import BLOCK_BYTES, BLOCKS_PER_CHUNK, Rig, chunks, keys_of, rig, spec, turns
from tests.rigs.fake_server import WAIT_S


@contextmanager
def shards(tmp_path: Path, *, others: int = 1) -> Iterator[tuple[Rig, list[Cache]]]:
    with rig(tmp_path) as at:
        caches = [at.client.register_cache(spec(at.pool, f"kv.{number}")) for number in range(1, 1 + others)]
        assert all(cache.wait_registered(WAIT_S) for cache in caches)
        yield at, caches


def numbers_of(at: Rig, caches: list[Cache]) -> list[int]:
    registrations = [cache.registration for cache in (at.cache, *caches)]
    return [registration.number for registration in registrations if registration is not None]


def fail(at: Rig, request: wire.Retrieve, code: str) -> None:
    at.fake.set_word(request, FAILED)
    at.fake.answer(request, wire.Error(request.id, "device", code, "as the test wants it"))


def test_a_store_is_of_every_shard_and_counts_what_all_hold(tmp_path: Path) -> None:
    with shards(tmp_path, others=2) as (at, beside):
        at.fake.hold.add(wire.Store)
        future = at.client.store(at.cache, 0, b"", keys_of(1, 2, 3), chunks(0, 3), beside=beside)
        asked = [at.fake.wait_for(wire.Store, number) for number in (1, 2, 3)]
        assert [request.cache for request in asked] == numbers_of(at, beside)
        assert len({request.word for request in asked}) == 3
        assert len({(request.keys, request.groups[0].block_ids) for request in asked}) == 1
        for request, held, why in zip(asked, (3, 1, 2), ("", "full", "busy"), strict=True):
            assert not future.done()
            at.fake.set_word(request, DONE)
            at.fake.answer(request, wire.Stored(request.id, held, held, 7, why))
        assert future.result(WAIT_S) == StoreResult(1, 3, 21, "full")


def test_the_last_shard_of_the_last_part_ends_the_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvclient.memory.blocks.STREAMED_BYTES", 1)
    with shards(tmp_path) as (at, beside):
        at.fake.chunks_on_disk = 1
        future = at.client.retrieve(at.cache, at.lease(3), chunks(0, 3), beside=beside)
        assert future.result(WAIT_S) == RetrieveResult(True, 2 * 3 * BLOCKS_PER_CHUNK * BLOCK_BYTES, "")
        asked = [at.fake.wait_for(wire.Retrieve, number) for number in range(1, 7)]
        assert [request.cache for request in asked] == numbers_of(at, beside) * 3
        assert [request.groups[0].first_block // BLOCKS_PER_CHUNK for request in asked] == [0, 0, 1, 1, 2, 2]
        assert [request.more for request in asked] == [*[True] * 5, False]


def test_a_retrieve_ends_when_no_shard_is_being_written(tmp_path: Path) -> None:
    with shards(tmp_path) as (at, beside):
        at.fake.hold.add(wire.Retrieve)
        future = at.client.retrieve(at.cache, at.lease(2), chunks(0, 2), beside=beside)
        first, second = (at.fake.wait_for(wire.Retrieve, number) for number in (1, 2))
        fail(at, first, "disk-io")
        turns(at)
        assert not future.done(), "a mover may still write the blocks of the second shard"
        at.fake.answer_as_usual(second)
        assert future.result(WAIT_S) == RetrieveResult(False, 2 * BLOCKS_PER_CHUNK * BLOCK_BYTES, "disk-io")


@pytest.mark.parametrize("wrong_from", [(2, 1), (1, 2)])
def test_blocks_are_right_up_to_the_first_chunk_that_is_wrong_in_any_shard(
    tmp_path: Path, wrong_from: tuple[int, int]
) -> None:
    with shards(tmp_path) as (at, beside):
        at.fake.hold.add(wire.Retrieve)
        future = at.client.retrieve(at.cache, at.lease(3), chunks(0, 3), beside=beside)
        asked = [at.fake.wait_for(wire.Retrieve, number) for number in (1, 2)]
        for request, first in zip(asked, wrong_from, strict=True):
            at.fake.set_word(request, FAILED)
            at.fake.answer(request, wire.Retrieved(request.id, 0, first))
        assert future.result(WAIT_S) == RetrieveResult(False, 0, "digest", 1)


def test_nothing_is_right_where_one_shard_is_wrong_and_another_has_failed(tmp_path: Path) -> None:
    with shards(tmp_path) as (at, beside):
        at.fake.hold.add(wire.Retrieve)
        future = at.client.retrieve(at.cache, at.lease(3), chunks(0, 3), beside=beside)
        first, second = (at.fake.wait_for(wire.Retrieve, number) for number in (1, 2))
        at.fake.set_word(first, FAILED)
        at.fake.answer(first, wire.Retrieved(first.id, 0, 2))
        fail(at, second, "disk-io")
        assert future.result(WAIT_S) == RetrieveResult(False, 0, "disk-io", 0)


def test_a_shard_that_is_the_callers_mistake_is_an_exception_when_no_other_is_being_written(tmp_path: Path) -> None:
    with shards(tmp_path) as (at, beside):
        at.fake.hold.add(wire.Retrieve)
        future = at.client.retrieve(at.cache, at.lease(2), chunks(0, 2), beside=beside)
        first, second = (at.fake.wait_for(wire.Retrieve, number) for number in (1, 2))
        at.fake.answer(first, wire.Error(first.id, "request", "block-range", "as the test wants it"))
        turns(at)
        assert not future.done()
        at.fake.answer_as_usual(second)
        with pytest.raises(RequestError, match="block-range"):
            future.result(WAIT_S)


def test_a_job_takes_a_slot_for_every_shard_and_gives_all_back(tmp_path: Path) -> None:
    """So that no rank has more jobs in flight than the server allows it."""
    with shards(tmp_path, others=2) as (at, beside):
        at.fake.limits = wire.Limits(100, 1000, 8, 30_000)  # six slots
        at.restart()
        assert all(cache.wait_registered(WAIT_S) for cache in beside)
        for _ in range(2):
            at.fake.hold.add(wire.Store)
            begun = at.fake.count(wire.Store)
            futures = [
                at.client.store(at.cache, 0, b"", keys_of(number), chunks(0, 1), beside=beside) for number in (1, 2)
            ]
            refused = at.client.store(at.cache, 0, b"", keys_of(3), chunks(0, 1))
            assert refused.result(WAIT_S) == StoreResult(0, 0, 0, "busy")
            asked = [at.fake.wait_for(wire.Store, begun + number) for number in range(1, 7)]
            at.fake.hold.clear()
            for request in asked:
                at.fake.answer_as_usual(request)
            assert [future.result(WAIT_S).chunks for future in futures] == [1, 1]


def test_a_job_needs_every_shard_to_be_registered(tmp_path: Path) -> None:
    with shards(tmp_path) as (at, (other,)):
        other.settle(None)
        stored = at.client.store(at.cache, 0, b"", keys_of(1), chunks(0, 1), beside=[other])
        assert stored.result(WAIT_S) == StoreResult(0, 0, 0, "not-registered")
        assert at.fake.count(wire.Store) == 0


def test_caches_beside_each_other_must_be_of_the_same_blocks(tmp_path: Path) -> None:
    with shards(tmp_path) as (at, (other,)):
        fewer = replace(other.spec, name="fewer", groups=[changed(other.spec.groups[0], blocks=7)])
        smaller = at.client.register_cache(fewer)
        for wrong in ([at.cache], [other, other], [smaller]):
            with pytest.raises(RequestError, match="must differ from each other and have the same groups of blocks"):
                at.client.store(at.cache, 0, b"", keys_of(1), [Blocks(0, 0, range(3))], beside=wrong)
