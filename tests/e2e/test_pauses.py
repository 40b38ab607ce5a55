"""An engine that is paused, put to sleep or reset while requests load and store.

It waits for work in flight, or refuses, and then continues with the same tokens. A stopped mover simulates a slow
one: work in flight stays so until the mover is resumed.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.checks import assert_same, prompt, settled, whole_chunks
from tests.e2e.engine import Answer, Engine
from tests.process.harness import Server, resume, stop, until

pytestmark = pytest.mark.long

LENGTH = 900
TOKENS = 8


@pytest.fixture(scope="module")
def engine(models: Path, server: Server) -> Iterator[Engine]:
    with Engine(models / "llama", server.path, block_size=32) as running:
        yield running


@pytest.fixture(scope="module")
def wanted(engine: Engine) -> Answer:
    answer = engine.generate([prompt(1, LENGTH)], tokens=TOKENS)[0]
    assert answer.cached_tokens == 0
    return answer


@pytest.fixture
def stored(engine: Engine, wanted: Answer, server: Server) -> Answer:
    """The server holds the prompt, the engine does not."""
    until("the prompt to be stored", lambda: server.status().chunks >= LENGTH // 256 and settled(server))
    engine.evict()
    return wanted


def begin_load(engine: Engine, name: str, server: Server) -> int:
    """Begins a request that waits for its load. Returns the pid of the mover, which is stopped."""
    mover = server.mover_pid()
    stop(mover)
    engine.call("add", name, prompt(1, LENGTH), TOKENS)
    until("the load to be under way", lambda: server.status().retrieves == 1)
    return mover


def answer_of(engine: Engine, name: str) -> tuple[int, ...]:
    answers: dict[str, tuple[int, ...]] = {}
    until("the request to finish", lambda: answers.update(engine.call("drain")) or name in answers)
    return answers[name]


def tokens_brought(engine: Engine) -> float:
    return float(engine.call("metrics")["vllm:kvserver_tokens_retrieved"])


def assert_finds(engine: Engine, server: Server, wanted: Answer) -> None:
    until("the server to be at rest", lambda: settled(server))
    engine.evict()  # fails while any block is held
    found = engine.generate([prompt(1, LENGTH)], tokens=TOKENS)[0]
    assert found.cached_tokens == whole_chunks(LENGTH)
    assert_same(found, wanted)


def test_a_pause_waits_for_a_load_and_its_request_goes_on_behind(
    engine: Engine, stored: Answer, server: Server
) -> None:
    brought = tokens_brought(engine)
    mover = begin_load(engine, "kept", server)
    engine.send("sleep", 0, "keep")
    resume(mover)
    engine.receive()
    until("the server to be at rest", lambda: settled(server))
    assert engine.call("wake")
    assert answer_of(engine, "kept") == stored.tokens
    assert tokens_brought(engine) == brought + whole_chunks(LENGTH)
    assert_finds(engine, server, stored)


def test_a_pause_that_aborts_gives_the_blocks_of_a_load_back(engine: Engine, stored: Answer, server: Server) -> None:
    mover = begin_load(engine, "aborted", server)
    engine.send("sleep", 0, "abort")
    resume(mover)
    engine.receive()
    until("the server to be at rest", lambda: settled(server))
    assert engine.call("wake")
    answer_of(engine, "aborted")
    assert_finds(engine, server, stored)


def test_requests_that_are_made_to_begin_anew_say_the_same(engine: Engine, stored: Answer, server: Server) -> None:
    """A reset does not wait: it is refused while blocks are being stored, and the engine goes on."""
    alone = engine.generate([prompt(2, LENGTH)], tokens=400, cache_salt="alone")[0]
    until("the stores to end", lambda: settled(server))
    mover = server.mover_pid()
    stop(mover)
    engine.call("add", "anew", prompt(2, LENGTH), 400)
    until("the store to be under way", lambda: server.status().stores >= 1)
    with pytest.raises(AssertionError, match="Failed to reset KV cache"):
        engine.call("reset", False, True)
    resume(mover)
    until("the stores so far to end", lambda: settled(server))
    assert answer_of(engine, "anew") == alone.tokens
    assert_finds(engine, server, stored)


def test_sleep_waits_for_stores_and_nothing_of_before_is_found_behind_it(
    engine: Engine, stored: Answer, server: Server
) -> None:
    """The last test: from now on this engine names all chunks anew."""
    mover = server.mover_pid()
    stop(mover)
    engine.call("add", "asleep", prompt(3, LENGTH), 400)
    until("the store to be under way", lambda: server.status().stores >= 1)
    engine.send("sleep", 1, "abort")
    resume(mover)
    engine.receive()
    assert settled(server)
    assert engine.call("wake")
    answer_of(engine, "asleep")
    found = engine.generate([prompt(1, LENGTH)], tokens=TOKENS)[0]
    assert found.cached_tokens == 0
    assert_same(found, stored)
    assert_finds(engine, server, stored)
