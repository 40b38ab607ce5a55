"""The main path through real processes: stored bytes come back exactly, and only where they should."""

import os
import random

import pytest

from kvclient import Blocks, RequestError
from tests.process.engine import SMALL, Engine, Group, Shape, prompt
from tests.process.harness import OBSERVER_SESSIONS, Server, maps, until
from tests.process.worker import Worker


def test_what_one_engine_stored_another_retrieves(server: Server) -> None:
    story = prompt(1, chunks=5)
    with Engine(server.path, name="one") as one, Engine(server.path, name="two") as two:
        assert one.ready().retrieve(story) == 0
        stored = one.store(story)
        assert (stored.chunks, stored.chunks_written, stored.why) == (5, 5, "")
        assert one.retrieve(story) == 5
        assert two.ready().retrieve(story) == 5
        again = two.store(story)
        assert (again.chunks, again.chunks_written, again.why) == (5, 0, "")


def test_a_prompt_with_a_known_beginning_is_found_as_far_as_it_is_known(server: Server) -> None:
    whole = prompt(2, chunks=7)
    with Engine(server.path) as engine:
        engine.ready().store(whole.head(4))
        assert engine.retrieve(whole) == 4
        where = engine.place(whole, first_chunk=4)
        engine.pool.compute(whole, where)
        assert engine.begin_store(whole, where, first_chunk=4).result(20).chunks == 3
        assert engine.retrieve(whole) == 7


def test_every_range_of_blocks_may_be_retrieved_and_nothing_else_is_written(server: Server) -> None:
    story = prompt(4, chunks=3)
    with Engine(server.path) as engine:
        engine.ready().store(story)
        blocks = 9
        for first in range(blocks):
            for last in range(first + 1, blocks + 1):
                found = engine.lookup(story)
                assert found.lease is not None
                (everywhere,) = engine.place(story)
                where = [Blocks(0, first, everywhere.block_ids[first:last])]
                engine.pool.spoil([everywhere])
                assert engine.begin_retrieve(found.lease, where).result(20).ok
                engine.pool.expect(story, where)
                assert engine.pool.wrong() == 0, (first, last)


def test_ranks_of_a_tensor_parallel_engine_share_one_lookup(server: Server) -> None:
    story = prompt(5, chunks=4)
    shapes = [Shape(groups=(Group(4, 23, 3, 517, shards=2, shard=rank),)) for rank in range(2)]
    with (
        Engine(server.path, shapes[0], name="tp", epoch=7, ranks=2, rank=0) as first,
        Engine(server.path, shapes[1], name="tp", epoch=7, ranks=2, rank=1) as second,
    ):
        first.ready(), second.ready()
        assert first.store(story).chunks == 4
        assert first.lookup(story).chunks == 0, "a chunk with a shard missing must not be visible"
        assert second.store(story).chunks == 4
        found = second.lookup(story)
        assert found.lease is not None
        assert found.chunks == 4
        for rank in (first, second):
            where = rank.place(story)
            rank.pool.spoil(where)
            assert rank.begin_retrieve(found.lease, where).result(20).ok
            rank.pool.expect(story, where)
            assert rank.pool.wrong() == 0
        until("the lease to be used up", lambda: server.status().leases == 0)


def test_a_replicated_group_is_stored_once_by_taking_turns(server: Server) -> None:
    story = prompt(6, chunks=5)
    shapes = [Shape(groups=(Group(3, 29, 2, 1153, writers=2, writer=rank),)) for rank in range(2)]
    with (
        Engine(server.path, shapes[0], name="mla", epoch=7, ranks=2, rank=0) as first,
        Engine(server.path, shapes[1], name="mla", epoch=7, ranks=2, rank=1) as second,
    ):
        first.ready(), second.ready()
        assert first.store(story).chunks_written == 3
        assert first.lookup(story).chunks == 1
        assert second.store(story).chunks_written == 2
        found = first.lookup(story)
        assert found.lease is not None
        assert found.chunks == 5
        for rank in (first, second):
            where = rank.place(story)
            rank.pool.spoil(where)
            assert rank.begin_retrieve(found.lease, where).result(20).ok
            rank.pool.expect(story, where)
            assert rank.pool.wrong() == 0
    assert server.status().arena.used_bytes == 5 * shapes[0].slot_bytes()


def test_window_and_state_groups_are_served_where_their_last_chunks_are_held(server: Server) -> None:
    shape = Shape(
        groups=(
            Group(4, 31, 3, 517),
            Group(6, 17, 2, 259, kind="window", window_tokens=17),
            Group(12, 9, 1, 2049, kind="state"),
        )
    )
    story = prompt(7, chunks=6)
    with Engine(server.path, shape) as engine:
        engine.ready()
        full, window, state = engine.place(story)
        # The engine still has the window blocks of chunks 2 and 3, and the states after chunks 1 and 3.
        kept = [full, Blocks(1, 4, window.block_ids[4:8]), Blocks(2, 3, state.block_ids[3:4])]
        engine.pool.compute(story, kept)
        stored = engine.begin_store(story, kept).result(20)
        assert (stored.chunks, stored.why) == (6, "")
        found = engine.lookup(story)
        assert found.chunks == 4, "the boundary behind chunk 3 is the longest with its window and its state"
        assert found.lease is not None
        # The 17 tokens before token 48 begin at token 31: block 5 of the window group.
        wanted = [
            Blocks(0, 0, full.block_ids[:12]),
            Blocks(1, 5, window.block_ids[5:8]),
            Blocks(2, 3, state.block_ids[3:4]),
        ]
        for index, group in enumerate(shape.groups):
            engine.pool.spoil([Blocks(index, 0, list(range(group.blocks)))])
        assert engine.begin_retrieve(found.lease, wanted).result(20).ok
        engine.pool.expect(story, wanted)
        assert engine.pool.wrong() == 0


def test_unregister_lets_the_memory_go_and_the_name_may_be_used_again(server: Server) -> None:
    story = prompt(10, chunks=2)
    with Engine(server.path) as engine:
        engine.ready().store(story)
        mover = server.mover_pid()
        assert maps(mover, engine.pool.name)
        assert engine.cache is not None
        assert engine.client.unregister(engine.cache).result(20)
        assert not maps(mover, engine.pool.name)
        assert not maps(server.brain_pid(), engine.pool.name)
        with pytest.raises(RequestError, match="not registered"):
            engine.begin_store(story, engine.place(story))
        engine.cache = None
        assert engine.ready().retrieve(story) == 2


def test_a_closed_client_leaves_nothing_but_its_chunks(server: Server) -> None:
    story = prompt(11, chunks=3)
    with Engine(server.path) as engine:
        engine.ready().store(story)
        assert engine.lookup(story).lease is not None
    until("the session to end", lambda: server.status().sessions == OBSERVER_SESSIONS)
    until("the cache to be unmapped", lambda: server.status().caches == 0)
    status = server.status()
    assert (status.leases, status.pins, status.chunks) == (0, 0, 3)
    assert status.arena.used_bytes == 3 * SMALL.slot_bytes()


@pytest.mark.parametrize("hash_seeds", [("1", "2"), ("2", "random")])
def test_the_same_prompt_hits_from_processes_with_any_hash_seed(server: Server, hash_seeds: tuple[str, str]) -> None:
    with (
        Worker(server.path, environment={"PYTHONHASHSEED": hash_seeds[0]}) as one,
        Worker(server.path, environment={"PYTHONHASHSEED": hash_seeds[1]}) as two,
    ):
        one.call("ready"), two.call("ready")
        if hash_seeds[1] != "random":
            assert one.call("hash_of_text") != two.call("hash_of_text"), "the seeds do not reach the workers"
        assert one.call("store", 12, 4)["chunks"] == 4
        assert two.call("retrieve", 12, 4) == 4


def test_a_client_follows_its_server_through_a_restart(server: Server) -> None:
    story = prompt(13, chunks=3)
    with Engine(server.path) as engine:
        engine.ready().store(story)
        assert server.stop() == 0
        until("the client to notice", lambda: not engine.client.connected)
        found = engine.lookup(story)
        assert (found.chunks, found.lease) == (0, None)
        assert found.why
        assert engine.begin_store(story, engine.place(story)).result(20).chunks == 0
        server.start()
        engine.ready()
        assert engine.retrieve(story) == 0
        assert engine.store(story).chunks == 3
        assert engine.retrieve(story) == 3


def test_many_prompts_at_once_stay_apart(server: Server) -> None:
    stories = [prompt(100 + seed, chunks=1 + seed % 4) for seed in range(23)]
    with Engine(server.path, name="one") as one, Engine(server.path, name="two") as two:
        one.ready(), two.ready()
        order = random.Random(os.getpid())
        for story in order.sample(stories, len(stories)):
            order.choice((one, two)).store(story)
        for story in order.sample(stories, len(stories)):
            assert order.choice((one, two)).retrieve(story) == story.chunks
