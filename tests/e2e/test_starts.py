"""Engine and server start in any order.

An unusable server is logged and ignored. An engine that restarts with other settings finds only chunks that fit
them.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvserver.wire import messages as wire
from tests.e2e.checks import assert_same, prompt, settled, whole_chunks
from tests.e2e.engine import Engine
from tests.process.checked import CheckedServer
from tests.process.harness import Server, until
from tests.rigs.fake_server import FakeServer

pytestmark = pytest.mark.long

LENGTH = 600


@pytest.fixture
def unstarted() -> Iterator[Server]:
    server = CheckedServer(arena_bytes=4 << 20, slab_bytes=2 << 20)
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
    """Cached tokens of the prompt after the engine has forgotten it; computed chunks are stored meanwhile."""
    engine.evict()
    answer = engine.generate([prompt(1, LENGTH)], tokens=1)[0]
    until("the server to be at rest", lambda: settled(server))
    return answer.cached_tokens


def refusals(engine: Engine) -> int:
    """Number of refusals in the log. A step makes the worker check."""
    engine.generate([prompt(2, 40)], tokens=1)
    return engine.log().count("no cache rank=0 prompt-size")


def test_a_server_of_another_protocol_is_said_so_once_and_done_without(tmp_path: Path, models: Path) -> None:
    with FakeServer(tmp_path / "s") as other:
        other.refuse[wire.Hello] = ("request", "protocol")
        with Engine(models / "llama", other.path, block_size=32) as engine:
            wanted = engine.generate([prompt(1, LENGTH)])[0]
            other.wait_for(wire.Hello, other.count(wire.Hello) + 3)
            engine.evict()
            assert_same(engine.generate([prompt(1, LENGTH)])[0], wanted)
            assert engine.log().count("no cache rank=0 protocol") == 1


def test_chunks_that_are_no_whole_blocks_stop_the_engine_at_its_start(server: Server, models: Path) -> None:
    chunks: dict[str, object] = {"chunk_tokens": 48}
    with (
        pytest.raises(AssertionError, match="chunk_tokens=48 must be a multiple of 32"),
        Engine(models / "llama", server.path, connector=chunks, block_size=32),
    ):
        pass


def test_an_engine_that_comes_back_finds_nothing_with_another_type_and_all_with_another_length(
    server: Server, models: Path
) -> None:
    with Engine(models / "llama", server.path, block_size=32) as first:
        wanted = first.generate([prompt(1, LENGTH)])[0]
        until("the stores to end", lambda: stored(server))
    with Engine(models / "llama", server.path, block_size=32, dtype="bfloat16") as other:
        computed = other.generate([prompt(1, LENGTH)])[0]
        assert computed.cached_tokens == 0
        until("the stores to end", lambda: settled(server))
        other.evict()
        assert_same(other.generate([prompt(1, LENGTH)])[0], computed)
    with Engine(models / "llama", server.path, block_size=32, max_model_len=1024) as shorter:
        found = shorter.generate([prompt(1, LENGTH)])[0]
        assert found.cached_tokens == whole_chunks(LENGTH)
        assert_same(found, wanted)


def stored(server: Server) -> bool:
    return settled(server) and server.status().chunks == whole_chunks(LENGTH) // 256
