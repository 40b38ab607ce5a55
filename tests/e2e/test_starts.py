"""Engine and server start in any order, and a server that is of no use is said so and done without."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.checks import assert_same, prompt, settled, whole_chunks
from tests.e2e.engine import Engine
from tests.process.harness import Server, until

pytestmark = pytest.mark.long

LENGTH = 600


@pytest.fixture
def unstarted() -> Iterator[Server]:
    server = Server(arena_bytes=4 << 20, slab_bytes=2 << 20)
    server.path.parent.mkdir(mode=0o700)
    try:
        yield server
    finally:
        server.close()


def test_the_engine_is_first_then_a_server_that_is_too_small_then_a_good_one(unstarted: Server, models: Path) -> None:
    server = unstarted
    with Engine(models / "llama", server.path, block_size=32) as engine:
        wanted = engine.generate([prompt(1, LENGTH)])[0]
        server.start()
        until("the refusal", lambda: refusals(engine))
        engine.evict()
        assert_same(engine.generate([prompt(1, LENGTH)])[0], wanted)
        assert refusals(engine) == 1
        server.kill()
        server.settings |= {"arena_bytes": 64 << 20, "slab_bytes": 16 << 20}
        server.start()
        until("the prompt to be stored and found", lambda: cached_tokens(engine, server) == whole_chunks(LENGTH))
        engine.evict()
        assert_same(engine.generate([prompt(1, LENGTH)])[0], wanted)


def cached_tokens(engine: Engine, server: Server) -> int:
    """Of the prompt, when the engine has forgotten it; what is computed is stored meanwhile."""
    engine.evict()
    answer = engine.generate([prompt(1, LENGTH)], tokens=1)[0]
    until("the server to be at rest", lambda: settled(server))
    return answer.cached_tokens


def refusals(engine: Engine) -> int:
    """A step makes the worker look."""
    engine.generate([prompt(2, 40)], tokens=1)
    return engine.log().count("no cache rank=0 prompt-size")
