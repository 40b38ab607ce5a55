"""Too few blocks in the engine and too little room in the server: preemptions, evictions, and still right tokens.

Uses float32, because bfloat16 rounds differently in another batch, which would hide errors. The server's copies are
slow, so that blocks are reclaimed while they are being read; without pins these tests fail.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.checks import assert_same, prompt, settled
from tests.e2e.engine import Answer, Engine
from tests.process.checked import CheckedServer
from tests.process.harness import Server, resume, stop, until

TOKENS = 200
PROMPTS = [prompt(seed, 260 + 7 * seed) for seed in range(6)]
CHUNK_TOKENS = 64
BLOCKS = 44
"""Blocks of 32 tokens, including the engine's null block: two of the sequences fit, four are begun."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server with room for 64 chunks of 256 tokens, which is less than these tests store."""
    with CheckedServer(arena_bytes=64 << 20) as running:
        yield running


@pytest.fixture(scope="module")
def engine(models: Path, server: Server) -> Iterator[Engine]:
    options: dict[str, object] = {"block_size": 32, "num_gpu_blocks_override": BLOCKS, "max_model_len": 1024}
    with Engine(models / "llama", server.path, connector={"chunk_tokens": CHUNK_TOKENS}, **options) as running:
        yield running


@pytest.fixture(scope="module")
def wanted(engine: Engine) -> list[Answer]:
    """Computed one by one, under a salt of their own."""
    return [engine.generate([item], tokens=TOKENS, cache_salt="alone")[0] for item in PROMPTS]


@contextmanager
def slow_mover(server: Server) -> Iterator[None]:
    """Lets the mover work a hundredth of the time, with pauses of a second: long enough for blocks to be reassigned."""
    over = threading.Event()

    def hold_up() -> None:
        while not over.is_set():
            mover = server.mover_pid_now()
            if mover:
                stop(mover)
                over.wait(1.0)
                resume(mover)
            over.wait(0.01)

    thread = threading.Thread(target=hold_up)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def preemptions(engine: Engine) -> float:
    return float(engine.call("metrics")["vllm:num_preemptions"])


def retrieved_tokens(engine: Engine) -> float:
    return float(engine.call("metrics")["vllm:kvserver_tokens_retrieved"])


def test_preempted_requests_are_right_while_stores_are_slow(
    engine: Engine, wanted: list[Answer], server: Server
) -> None:
    until("the server to be at rest", lambda: settled(server))
    before = preemptions(engine)
    with slow_mover(server):
        found = engine.generate(PROMPTS, tokens=TOKENS)
    assert preemptions(engine) > before
    for answer, alone in zip(found, wanted, strict=True):
        assert_same(answer, alone)
    until("the server to be at rest", lambda: settled(server))


def test_preempted_requests_stored_the_right_chunks(engine: Engine, wanted: list[Answer], server: Server) -> None:
    """A chunk read after its blocks were reused would show here.

    Each prompt is the next turn of a conversation, and contains the generated tokens.
    """
    for item, alone in zip(PROMPTS, wanted, strict=True):
        following = [*item, *alone.tokens, 7]
        computed = engine.generate([following], tokens=8, cache_salt="alone, next")[0]
        engine.evict()
        found = engine.generate([following], tokens=8)[0]
        assert found.cached_tokens > len(item) + TOKENS - 2 * CHUNK_TOKENS
        assert_same(found, computed)


def test_preempted_requests_are_right_while_loads_are_slow(
    engine: Engine, wanted: list[Answer], server: Server
) -> None:
    until("the server to be at rest", lambda: settled(server))
    engine.evict()
    before, retrieved = preemptions(engine), retrieved_tokens(engine)
    with slow_mover(server):
        found = engine.generate(PROMPTS, tokens=TOKENS)
    assert preemptions(engine) > before
    assert retrieved_tokens(engine) - retrieved >= CHUNK_TOKENS
    for answer, alone in zip(found, wanted, strict=True):
        assert_same(answer, alone)
    until("the server to be at rest", lambda: settled(server))


def test_a_full_server_evicts_and_says_nothing_wrong(engine: Engine, wanted: list[Answer], server: Server) -> None:
    for seed in range(100, 120):
        engine.generate([prompt(seed, 900)], tokens=2)
    until("the server to be at rest", lambda: settled(server))
    assert server.status().counters["evictions"]
    for item, alone in zip(PROMPTS, wanted, strict=True):
        engine.evict()
        assert_same(engine.generate([item], tokens=TOKENS)[0], alone)
