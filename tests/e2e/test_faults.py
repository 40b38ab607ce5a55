"""The server fails in all ways: the engine's answers stay the same, it serves on, and later uses the cache again.

All tests share one engine and leave it with a server that answers; CI skips the long ones. A stopped mover simulates
a slow one: its copies hang until it is resumed, or until the server kills it, two seconds after a job's deadline.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.checks import CLOSE, assert_same, prompt, settled, whole_chunks
from tests.e2e.engine import POOL, Answer, Engine
from tests.process.harness import Server, kill, maps, resume, stop, stopped, until

TOKENS = 8
LENGTH = 900
LOAD_S = 2.0
"""Timeout of the engine's loads; short, because most tests here wait for it."""


@pytest.fixture(scope="module")
def engine(models: Path, server: Server) -> Iterator[Engine]:
    connector = {"load_timeout_ms": int(LOAD_S * 1000)}
    with Engine(models / "llama", server.path, connector=connector, block_size=32) as running:
        yield running


@pytest.fixture(scope="module")
def wanted(engine: Engine, server: Server) -> Answer:
    """The answer to the prompt that all tests use, computed before anything is stored."""
    answer = engine.generate([prompt(1, LENGTH)], tokens=TOKENS)[0]
    assert answer.cached_tokens == 0
    return answer


@pytest.fixture
def stored(engine: Engine, wanted: Answer, server: Server) -> Iterator[Answer]:
    """The server holds the prompt, the engine does not. After the test nothing may be in flight or held."""
    until("the engine's cache to be registered", lambda: server.status().caches == 1)
    until("the prompt to be stored", lambda: has_stored(engine, server))
    engine.evict()
    yield wanted
    until("the server to be at rest", lambda: settled(server))


def has_stored(engine: Engine, server: Server) -> bool:
    """Asks until the prompt comes from the server. If it was evicted too early, it is computed and stored."""
    engine.evict()
    answer = engine.generate([prompt(1, LENGTH)], tokens=1)[0]
    until("the server to be at rest", lambda: settled(server))
    return answer.cached_tokens == whole_chunks(LENGTH)


def ask(engine: Engine) -> Answer:
    return engine.generate([prompt(1, LENGTH)], tokens=TOKENS)[0]


def count(engine: Engine, name: str) -> float:
    """One of the connector's counters."""
    return float(engine.call("metrics")[f"vllm:kvserver_{name}"])


def assert_back(engine: Engine, server: Server, wanted: Answer) -> None:
    """The engine serves on, and finds again what it stores."""
    until("the engine's cache to be registered", lambda: server.status().caches == 1)
    until("the prompt to be found again", lambda: has_stored(engine, server))
    engine.evict()
    found = ask(engine)
    assert found.cached_tokens == whole_chunks(LENGTH)
    assert_same(found, wanted)
    until("the server to be at rest", lambda: settled(server))


# ---------------------------------------------------------------- the server


@pytest.mark.long
def test_a_server_that_is_away_is_a_miss(engine: Engine, stored: Answer, server: Server) -> None:
    server.kill()
    assert_same(ask(engine), stored)
    engine.evict()
    assert_same(ask(engine), stored)
    server.start()
    assert_back(engine, server, stored)


@pytest.mark.long
def test_a_brain_that_dies_loses_nothing_that_was_stored(engine: Engine, stored: Answer, server: Server) -> None:
    kill(server.brain_pid())
    until("the engine's cache to be registered anew", lambda: server.status().caches == 1)
    until("the prompt to be found again", lambda: found_again(engine))
    assert_same(ask(engine), stored)


def found_again(engine: Engine) -> bool:
    engine.evict()
    return engine.generate([prompt(1, LENGTH)], tokens=1)[0].cached_tokens == whole_chunks(LENGTH)


def test_a_stopped_server_does_not_stop_the_engine(engine: Engine, stored: Answer, server: Server) -> None:
    with stopped(server.brain_pid()):
        assert_same(ask(engine), stored)
    assert_back(engine, server, stored)


def test_a_server_that_dies_within_a_load_is_a_miss(engine: Engine, stored: Answer, server: Server) -> None:
    failed = count(engine, "retrieves_failed")
    stop(server.mover_pid())
    engine.begin([prompt(1, LENGTH)], tokens=TOKENS)
    until("the load to be under way", lambda: server.status().retrieves == 1)
    server.kill()
    assert_same(engine.end()[0], stored)
    assert count(engine, "retrieves_failed") == failed + 1
    server.start()
    assert_back(engine, server, stored)


@pytest.mark.long
def test_a_server_that_dies_behind_a_load_takes_nothing_back(engine: Engine, stored: Answer, server: Server) -> None:
    """The server loses neither the loaded prompt nor the output that the request stores."""
    brought = server.status().counters["bytes_retrieved"]
    engine.begin([prompt(1, LENGTH)], tokens=500)
    until("the load to be over", lambda: has_brought(server, brought))
    server.kill()
    found = engine.end()[0]
    assert found.cached_tokens == whole_chunks(LENGTH)
    assert found.tokens[:TOKENS] == stored.tokens
    assert found.logprobs[:TOKENS] == pytest.approx(stored.logprobs, abs=CLOSE)
    server.start()
    assert_back(engine, server, stored)


def has_brought(server: Server, before: object) -> bool:
    status = server.status()
    return status.counters["bytes_retrieved"] != before and not status.retrieves


def test_a_server_that_is_restarted_at_once_within_a_load_is_a_miss(
    engine: Engine, stored: Answer, server: Server
) -> None:
    """The new server answers while the request still waits, but knows nothing of its questions to the old one."""
    failed = count(engine, "retrieves_failed")
    stop(server.mover_pid())
    engine.begin([prompt(1, LENGTH)], tokens=TOKENS)
    until("the load to be under way", lambda: server.status().retrieves == 1)
    server.kill()
    server.start()
    assert_same(engine.end()[0], stored)
    assert count(engine, "retrieves_failed") == failed + 1
    assert_back(engine, server, stored)


def test_a_server_that_dies_within_a_store_costs_that_store(engine: Engine, stored: Answer, server: Server) -> None:
    short = count(engine, "stores_short")
    stop(server.mover_pid())
    engine.begin([prompt(2, LENGTH)], tokens=TOKENS)
    until("the store to be under way", lambda: server.status().stores >= 1)
    first = engine.end()[0]
    server.kill()
    server.start()
    until("the engine's cache to be registered", lambda: server.status().caches == 1)
    engine.evict()
    again = engine.generate([prompt(2, LENGTH)], tokens=TOKENS)[0]
    assert_same(again, first)
    assert count(engine, "stores_short") > short
    assert_back(engine, server, stored)


# ---------------------------------------------------------------- the mover


@pytest.mark.long
def test_a_slow_load_is_waited_for(engine: Engine, stored: Answer, server: Server) -> None:
    mover = server.mover_pid()
    stop(mover)
    engine.begin([prompt(1, LENGTH)], tokens=TOKENS)
    until("the load to be under way", lambda: server.status().retrieves == 1)
    resume(mover)
    found = engine.end()[0]
    assert found.cached_tokens == whole_chunks(LENGTH)
    assert_same(found, stored)


@pytest.mark.long
def test_others_go_on_while_a_load_hangs(engine: Engine, stored: Answer, server: Server) -> None:
    mover = server.mover_pid()
    stop(mover)
    engine.call("add", "hangs", prompt(1, LENGTH), TOKENS)
    until("the load to be under way", lambda: server.status().retrieves == 1)
    engine.call("add", "other", prompt(3, 200), TOKENS)
    until("the other request to finish", lambda: "other" in engine.call("drain"))
    assert server.status().retrieves == 1
    resume(mover)
    until("the request to finish", lambda: "hangs" in engine.call("drain"))


@contextmanager
def every_mover_stopped(server: Server) -> Iterator[None]:
    """Stops every mover, including those that the server starts as replacements."""
    over = threading.Event()

    def go_on_stopping() -> None:
        while not over.wait(0.01):
            mover = server.mover_pid_now()
            if mover and mover not in seen:
                seen.append(mover)
                stop(mover)

    seen: list[int] = []
    thread = threading.Thread(target=go_on_stopping)
    thread.start()
    try:
        until("a mover to be stopped", lambda: bool(seen))
        yield
    finally:
        over.set()
        thread.join()
        for mover in seen:
            resume(mover)


def test_a_load_that_always_fails_does_not_go_round_for_ever(engine: Engine, stored: Answer, server: Server) -> None:
    lookups, failed = count(engine, "lookups"), count(engine, "retrieves_failed")
    with every_mover_stopped(server):
        assert_same(ask(engine), stored)
    assert count(engine, "retrieves_failed") == failed + 1
    assert count(engine, "lookups") - lookups < 10
    assert_back(engine, server, stored)


def test_a_mover_that_dies_within_a_load_is_a_miss(engine: Engine, stored: Answer, server: Server) -> None:
    failed = count(engine, "retrieves_failed")
    mover = server.mover_pid()
    stop(mover)
    engine.begin([prompt(1, LENGTH)], tokens=TOKENS)
    until("the load to be under way", lambda: server.status().retrieves == 1)
    kill(mover)
    assert_same(engine.end()[0], stored)
    assert count(engine, "retrieves_failed") == failed + 1
    assert_back(engine, server, stored)


# ---------------------------------------------------------------- requests


def test_an_abort_within_a_load_gives_its_blocks_back(engine: Engine, stored: Answer, server: Server) -> None:
    mover = server.mover_pid()
    stop(mover)
    engine.call("add", "aborted", prompt(1, LENGTH), TOKENS)
    until("the load to be under way", lambda: server.status().retrieves == 1)
    engine.call("abort", "aborted")
    other = engine.generate([prompt(4, 300)], tokens=TOKENS)[0]
    assert other.tokens
    resume(mover)
    until("the server to be at rest", lambda: settled(server))
    engine.evict()  # fails while any block is held
    assert_same(ask(engine), stored)


@pytest.mark.long
def test_an_abort_within_a_store_gives_its_blocks_back(engine: Engine, stored: Answer, server: Server) -> None:
    mover = server.mover_pid()
    stop(mover)
    engine.call("add", "aborted", prompt(5, LENGTH), 400)
    until("the store to be under way", lambda: server.status().stores >= 1)
    engine.call("abort", "aborted")
    resume(mover)
    until("the server to be at rest", lambda: settled(server))
    engine.evict()
    assert_same(ask(engine), stored)


@pytest.mark.long
def test_a_reset_of_the_connector_finds_nothing_of_before(engine: Engine, stored: Answer, server: Server) -> None:
    """The last but one test: from now on this engine names all chunks anew."""
    until("the engine to forget", lambda: engine.call("reset", True))
    found = ask(engine)
    assert found.cached_tokens == 0
    assert_same(found, stored)


# ---------------------------------------------------------------- the worker


@pytest.mark.long
def test_an_engine_that_is_killed_within_a_load_leaves_nothing_behind(
    engine: Engine, stored: Answer, server: Server, models: Path
) -> None:
    """The last test: it kills the engine."""
    mover = server.mover_pid()
    assert maps(mover, POOL)
    stop(mover)
    engine.call("add", "killed", prompt(1, LENGTH), TOKENS)
    until("the load to be under way", lambda: server.status().retrieves == 1)
    engine.kill()
    resume(mover)
    until("its memory to be let go", lambda: server.status().caches == 0 and server.status().sessions <= 1)
    until("the server to be at rest", lambda: settled(server))
    left = server.mover_pid_now()
    assert not (left and maps(left, POOL))
    with Engine(models / "llama", server.path, block_size=32) as other:
        found = other.generate([prompt(1, LENGTH)], tokens=TOKENS)[0]
        assert found.cached_tokens == whole_chunks(LENGTH)
        assert_same(found, stored)
