"""Engines of one and of two tensor ranks that divide KV into the same head shards: each finds what the other stored.

Compared is what an engine says after a load with what the same engine computes by itself. Log-probabilities of engines
of different sizes differ in their last digits anyway.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.cases import LLAMA_BYTES
from tests.e2e.checks import assert_same, prompt, settled, whole_chunks
from tests.e2e.engine import Engine
from tests.process.harness import Server, until

pytestmark = pytest.mark.long

SHARDS = 2
"""The model has two KV heads."""
LENGTH = 600
TOKENS = 5


@contextmanager
def engine(models: Path, server: Server, ranks: int, shards: int = SHARDS) -> Iterator[Engine]:
    connector: dict[str, object] = {"head_shards": shards, "self_test": "on"}
    options: dict[str, object] = {"block_size": 32, "tensor_parallel_size": ranks}
    with Engine(models / "llama", server.path, connector=connector, **options) as running:
        until("every shard to be registered", lambda: server.status().caches == max(ranks, shards))
        yield running
    until("the engine's sessions to end", lambda: server.status().caches == 0)


def finds(running: Engine, seed: int) -> None:
    """The prompt comes from the server, and what follows is what this engine computes without it."""
    salt = running.log_path.name  # no other engine has stored under it
    found = running.generate([prompt(seed, LENGTH)], tokens=TOKENS)[0]
    assert found.cached_tokens == whole_chunks(LENGTH)
    computed = running.generate([prompt(seed, LENGTH)], tokens=TOKENS, cache_salt=salt)[0]
    assert computed.cached_tokens == 0
    assert_same(found, computed)


def stores(running: Engine, server: Server, seed: int) -> None:
    """The prompt is computed and stored once."""
    until("the stores to end", lambda: settled(server))
    used = server.status().arena.used_bytes
    computed = running.generate([prompt(seed, LENGTH)], tokens=TOKENS)[0]
    assert computed.cached_tokens == 0
    until("the stores to end", lambda: settled(server))
    assert server.status().arena.used_bytes - used == whole_chunks(LENGTH) * LLAMA_BYTES


def test_one_rank_finds_what_two_stored_and_two_what_one_stored(models: Path, server: Server) -> None:
    with engine(models, server, ranks=1) as one:
        assert "self-test of the layout rank=0 passed" in one.log()
        stores(one, server, seed=1)
        one.evict()
        one.generate([prompt(50, 200)], tokens=2)  # now other blocks are free
        finds(one, seed=1)
    with engine(models, server, ranks=2) as two:
        finds(two, seed=1)
        stores(two, server, seed=2)
    with engine(models, server, ranks=1) as one:
        finds(one, seed=2)


def test_a_number_of_shards_that_does_not_divide_the_heads_stops_the_engine_at_its_start(
    models: Path, server: Server
) -> None:
    wrong: dict[str, object] = {"head_shards": 3}
    refused = Engine(models / "llama", server.path, connector=wrong, block_size=32)
    try:
        with pytest.raises(AssertionError, match="has ended"):
            refused.wait_started()
        assert "head_shards=3 must divide the model's 2 KV heads" in refused.log()
    finally:
        refused.close()
