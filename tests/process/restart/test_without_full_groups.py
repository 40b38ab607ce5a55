"""kill -9 of the brain where most chunks of a prompt hold nothing: models with only window layers or only states."""

import pytest

from kvclient import Blocks, Lease
from tests.process.engine import Engine, Group, Prompt, Shape, prompt
from tests.process.harness import Server, kill, until

STATES = Shape(groups=(Group(12, 11, 2, 2049, kind="state"),))
WINDOWS = Shape(groups=(Group(4, 31, 3, 517, kind="window", window_tokens=17),))


@pytest.mark.parametrize(("shape", "chunks_kept"), [(STATES, 1), (WINDOWS, 2)])
def test_the_end_of_a_prompt_is_found_by_every_later_brain(shape: Shape, chunks_kept: int) -> None:
    story = prompt(1, chunks=7)
    first_block = (story.chunks - chunks_kept) * shape.blocks_per_chunk(0)
    with Server() as server, Engine(server.path, shape) as engine:
        (whole,) = engine.ready().place(story)
        where = [Blocks(0, first_block, whole.block_ids[first_block:])]
        engine.pool.compute(story, where)
        assert engine.begin_store(story, where).result(20).chunks == story.chunks
        for _ in range(3):
            kill(server.brain_pid())
            lease = until("the prompt to be found", lambda: _lease(engine, story))
            assert lease.chunks == story.chunks
            engine.ready().pool.spoil(where)
            assert engine.begin_retrieve(lease, where).result(20).ok
            engine.pool.expect(story, where)
            assert engine.pool.wrong() == 0


def _lease(engine: Engine, story: Prompt) -> Lease | None:
    return engine.lookup(story).lease
