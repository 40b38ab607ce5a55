"""A prompt that one engine computes and another one awaits, through real processes: byte for byte, chunk by chunk."""

import time

import pytest

from kvclient import RequestError
from tests.process.engine import SMALL, Engine, Waiting, prompt
from tests.process.harness import Server, kill, resume, stop, until
from tests.process.worker import Worker

CHUNKS = 7
PER_CHUNK = SMALL.blocks_per_chunk(0)


def test_each_chunk_is_there_before_the_next_one_is_computed(server: Server) -> None:
    story = prompt(11, CHUNKS)
    with Engine(server.path, name="one").ready() as one, Engine(server.path, name="two").ready() as two:
        one.store_piece(story.head(2), 0)
        pledged = one.client.pledge(one.namespace, story.keys)
        assert (pledged.held, pledged.chunks) == (2, CHUNKS - 2)
        waiting = Waiting(two, story)
        assert (waiting.found.chunks, waiting.found.awaited, waiting.found.producer) == (2, CHUNKS - 2, "one")
        for chunks in range(2, CHUNKS):
            until(f"{chunks} chunks", lambda chunks=chunks: waiting.has(chunks))  # type: ignore[misc]
            assert not waiting.future.done()
            assert one.store_piece(story.head(chunks + 1), chunks) == 1
        assert waiting.future.result(20).ok
        assert waiting.has(CHUNKS)
        until("the pledge to be over", lambda: not server.status().pins)


def test_sixteen_that_ask_for_one_prompt_at_once_compute_it_once(server: Server) -> None:
    """Two engines, eight requests each. The first one computes; those of its own engine would share its blocks."""
    story = prompt(12, CHUNKS)
    with Engine(server.path, name="one").ready() as one, Engine(server.path, name="two").ready() as two:
        assert one.client.pledge(one.namespace, story.keys).chunks == CHUNKS
        assert [two.client.pledge(two.namespace, story.keys).chunks for _ in range(8)] == [0] * 8
        leases = []
        for _ in range(8):
            found = two.client.lookup(two.namespace, story.keys, may_wait=True)
            assert (found.chunks, found.awaited) == (0, CHUNKS)
            assert found.lease is not None
            leases.append(found.lease)
        where = two.place(story)
        first = two.begin_retrieve(leases[0], where)
        stored_before = server.status().counters["bytes_stored"]
        for chunk in range(CHUNKS):
            one.store_piece(story.head(chunk + 1), chunk)
        assert first.result(20).ok
        two.pool.expect(story, where)
        assert two.pool.wrong() == 0
        for lease in leases[1:]:
            again = two.place(story)
            two.pool.spoil(again)
            assert two.begin_retrieve(lease, again).result(20).ok
            two.pool.expect(story, again)
            assert two.pool.wrong() == 0
        assert two.store(story).chunks_written == 0
        now = server.status().counters["bytes_stored"]
        assert isinstance(now, int)
        assert isinstance(stored_before, int)
        assert now - stored_before == CHUNKS * PER_CHUNK * 3 * 517, "each chunk was stored once"


def test_a_producer_that_is_killed_ends_the_wait_and_what_came_is_right(server: Server) -> None:
    story = prompt(13, CHUNKS)
    with Worker(server.path, name="one") as worker, Engine(server.path, name="two").ready() as two:
        worker.call("ready")
        assert worker.call("pledge", 13, CHUNKS) == CHUNKS
        waiting = Waiting(two, story)
        for chunk in range(3):
            assert worker.call("store_piece", 13, chunk, chunk + 1) == 1
        worker.kill()
        result = waiting.future.result(20)
        assert (result.ok, result.why, result.right_chunks) == (False, "not-coming", 3)
        assert waiting.has(3)
        until("nothing to be pinned", lambda: two.client.release(waiting.lease) or not server.status().pins)


def test_a_producer_that_is_stopped_is_waited_for_no_longer_than_its_patience() -> None:
    story = prompt(14, CHUNKS)
    with (
        Server(pledge_patience_ms=700) as server,
        Worker(server.path, name="one") as worker,
        Engine(server.path, name="two").ready() as two,
    ):
        worker.call("ready")
        worker.call("pledge", 14, CHUNKS)
        waiting = Waiting(two, story)
        worker.call("store_piece", 14, 0, 2)
        stop(worker.pid)
        result = waiting.future.result(20)
        assert (result.ok, result.why, result.right_chunks) == (False, "not-coming", 2)
        assert waiting.has(2)
        resume(worker.pid)
        assert worker.call("store_piece", 14, 2, CHUNKS) == CHUNKS - 2
        assert two.retrieve(story) == CHUNKS, "what comes late is there for the next one"


def test_a_pledge_that_is_taken_back_ends_the_wait_at_once(server: Server) -> None:
    story = prompt(15, CHUNKS)
    with Engine(server.path, name="one").ready() as one, Engine(server.path, name="two").ready() as two:
        pledged = one.client.pledge(one.namespace, story.keys)
        waiting = Waiting(two, story)
        one.client.unpledge(pledged)
        result = waiting.future.result(20)
        assert (result.ok, result.why, result.right_chunks) == (False, "not-coming", 0)
        assert waiting.has(0)
        assert not two.client.lookup(two.namespace, story.keys, may_wait=True).awaited


def test_a_lease_that_is_given_back_ends_its_retrieve_before_all_has_come(server: Server) -> None:
    """As an engine does for a request that was aborted: the blocks are free at once."""
    story = prompt(21, CHUNKS)
    with Engine(server.path, name="one").ready() as one, Engine(server.path, name="two").ready() as two:
        one.client.pledge(one.namespace, story.keys)
        waiting = Waiting(two, story)
        one.store_piece(story.head(2), 0)
        until("two chunks to be there", lambda: waiting.has(2))
        until("all others to wait", lambda: server.status().retrieves == CHUNKS - 2)
        two.client.release(waiting.lease)
        result = waiting.future.result(20)
        assert (result.ok, result.why, result.right_chunks) == (False, "not-coming", 2)
        one.store_piece(story, 2)
        until("nothing to be pinned", lambda: not server.status().pins)
        assert waiting.has(2), "nobody writes the blocks any more"


def test_a_wait_outlives_neither_its_deadline_nor_the_brain(server: Server) -> None:
    story = prompt(16, CHUNKS)
    with Engine(server.path, name="one").ready() as one, Engine(server.path, name="two").ready() as two:
        one.client.pledge(one.namespace, story.keys)
        found = two.client.lookup(two.namespace, story.keys, may_wait=True)
        assert found.lease is not None
        where = two.place(story)
        began_s = time.monotonic()
        late = two.begin_retrieve(found.lease, where, timeout_s=1.5).result(20)
        assert (late.ok, late.why, late.right_chunks) == (False, "not-coming", 0)
        assert time.monotonic() - began_s < 15
        assert two.client.connected, "a slow producer is no silent server"
        waiting = Waiting(two, story)
        brain = server.brain_pid()
        kill(brain)
        assert not waiting.future.result(20).ok
        assert waiting.has(0)
        until("another brain", lambda: server.brain_pid() != brain)


@pytest.mark.parametrize("ttl_s", [0, -1.0, 90_000])
def test_a_time_that_no_pledge_can_have_is_refused(server: Server, ttl_s: float) -> None:
    with Engine(server.path).ready() as engine, pytest.raises(RequestError, match="ttl_s"):
        engine.client.pledge(engine.namespace, prompt(17, 1).keys, ttl_s=ttl_s)
