"""A lease that expires before its retrieve: the request asks again or is computed, and its answer is the same.

The engine runs one request at a time. The next request is asked for ahead, so its lease ages while it waits.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.checks import prompt, settled, whole_chunks
from tests.e2e.engine import Engine
from tests.process.checked import CheckedServer
from tests.process.harness import Server, stopped, until

LENGTH = 900
TOKENS = 8
TTL_S = 4.0
"""Lease lifetime in seconds. The connector leaves the last second unused."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with CheckedServer(arena_bytes=256 << 20, lease_ttl_ms=int(TTL_S * 1000)) as running:
        yield running


@pytest.fixture(scope="module")
def engine(models: Path, server: Server) -> Iterator[Engine]:
    with Engine(models / "llama", server.path, block_size=32, max_num_seqs=1) as running:
        yield running


@pytest.fixture(scope="module")
def wanted(engine: Engine, server: Server) -> tuple[int, ...]:
    """The computed answer; from then on the server holds the prompt."""
    answer = engine.generate([prompt(1, LENGTH)], tokens=TOKENS)[0]
    assert answer.cached_tokens == 0
    until("the engine's cache to be registered", lambda: server.status().caches == 1)
    until("the prompt to be stored", lambda: has_stored(engine, server))
    return answer.tokens


def has_stored(engine: Engine, server: Server) -> bool:
    engine.evict()
    answer = engine.generate([prompt(1, LENGTH)], tokens=1)[0]
    until("the server to be at rest", lambda: settled(server))
    return answer.cached_tokens == whole_chunks(LENGTH)


@pytest.fixture
def waiting(engine: Engine, wanted: tuple[int, ...], server: Server) -> float:
    """The prompt waits for another request to end, and has a lease. Returns the time when the lease was seen."""
    engine.evict()
    engine.call("add", "before", prompt(2, 40), 2000)
    engine.call("add", "waits", prompt(1, LENGTH), TOKENS)
    until("the lease", lambda: server.status().leases == 1)
    return time.monotonic()


def answer_of(engine: Engine, name: str) -> tuple[int, ...]:
    answers: dict[str, tuple[int, ...]] = {}
    until("the request to finish", lambda: answers.update(engine.call("drain")) or name in answers)
    return answers[name]


def counts(engine: Engine) -> tuple[float, float]:
    """Retrieved tokens, and failed retrieves."""
    found = engine.call("metrics")
    return found["vllm:kvserver_tokens_retrieved"], found["vllm:kvserver_retrieves_failed"]


def test_a_lease_that_ends_while_its_request_waits_is_asked_for_anew(
    engine: Engine, wanted: tuple[int, ...], server: Server, waiting: float
) -> None:
    brought, failed = counts(engine)
    until("the lease to end", lambda: server.status().leases == 0)
    engine.call("abort", "before")
    assert answer_of(engine, "waits") == wanted
    assert counts(engine) == (brought + whole_chunks(LENGTH), failed)
    until("the server to be at rest", lambda: settled(server))


def test_a_lease_that_ends_before_its_retrieve_is_read_costs_that_retrieve(
    engine: Engine, wanted: tuple[int, ...], server: Server, waiting: float
) -> None:
    brought, failed = counts(engine)
    with stopped(server.brain_pid()):
        engine.call("abort", "before")
        until("the lease to be over", lambda: time.monotonic() > waiting + TTL_S)
    assert answer_of(engine, "waits") == wanted
    assert counts(engine) == (brought, failed + 1)
    until("the engine's cache to be registered", lambda: server.status().caches == 1)
    until("the prompt to be found again", lambda: has_stored(engine, server))
    until("the server to be at rest", lambda: settled(server))
