"""Engines of one and of two tensor ranks that divide KV into the same head shards: each finds what the other stored.

With KV heads, and with latent attention, whose KV is one shard that all ranks hold. Compared is what an engine says
after a load with what the same engine says by itself. Log-probabilities of engines of different sizes differ in their
last digits anyway.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.e2e.cases import LATENT, LATENT_BYTES, LLAMA_BYTES
from tests.e2e.checks import assert_same, is_uniform, prompt, settled, whole_chunks
from tests.e2e.engine import Engine
from tests.process.harness import Server, until

pytestmark = pytest.mark.long

LENGTH = 600
TOKENS = 5


class Kind(NamedTuple):
    model: str
    options: dict[str, object]
    token_bytes: int
    shards: int
    """Shards of a chunk."""
    agrees_with_itself: bool = True
    """As in cases.Case."""


HEADS = Kind("llama", {"block_size": 32}, LLAMA_BYTES, shards=2)
"""The model has two KV heads."""
LATENT_KV = Kind("mla", LATENT, LATENT_BYTES, shards=1, agrees_with_itself=False)


@contextmanager
def engine(models: Path, server: Server, kind: Kind, ranks: int) -> Iterator[Engine]:
    connector: dict[str, object] = {"head_shards": 2, "self_test": "on"}
    options: dict[str, object] = {**kind.options, "tensor_parallel_size": ranks}
    with Engine(models / kind.model, server.path, connector=connector, **options) as running:
        until("every shard to be registered", lambda: server.status().caches == max(ranks, kind.shards))
        yield running
    until("the engine's sessions to end", lambda: server.status().caches == 0)


def finds(running: Engine, kind: Kind, seed: int) -> None:
    """The prompt comes from the server, and what follows is what this engine says without the other one's KV."""
    salt = running.log_path.name  # no other engine has stored under it
    found = running.generate([prompt(seed, LENGTH)], tokens=TOKENS)[0]
    assert found.cached_tokens == whole_chunks(LENGTH)
    assert not is_uniform(found.logprob, TOKENS)
    own = running.generate([prompt(seed, LENGTH)], tokens=TOKENS, cache_salt=salt)[0]
    assert own.cached_tokens == 0
    if not kind.agrees_with_itself:
        running.evict()
        own = running.generate([prompt(seed, LENGTH)], tokens=TOKENS, cache_salt=salt)[0]
        assert own.cached_tokens == whole_chunks(LENGTH)
    assert_same(found, own)


def stores(running: Engine, server: Server, kind: Kind, seed: int) -> None:
    """The prompt is computed and stored once."""
    until("the stores to end", lambda: settled(server))
    used = server.status().arena.used_bytes
    computed = running.generate([prompt(seed, LENGTH)], tokens=TOKENS)[0]
    assert computed.cached_tokens == 0
    until("the stores to end", lambda: settled(server))
    assert server.status().arena.used_bytes - used == whole_chunks(LENGTH) * kind.token_bytes


@pytest.mark.parametrize("kind", [HEADS, LATENT_KV], ids=lambda kind: kind.model)
def test_one_rank_finds_what_two_stored_and_two_what_one_stored(models: Path, server: Server, kind: Kind) -> None:
    with engine(models, server, kind, ranks=1) as one:
        assert "self-test of the layout rank=0 passed" in one.log()
        stores(one, server, kind, seed=1)
        one.evict()
        one.generate([prompt(50, 200)], tokens=2)  # now other blocks are free
        finds(one, kind, seed=1)
    with engine(models, server, kind, ranks=2) as two:
        finds(two, kind, seed=1)
        stores(two, server, kind, seed=2)
    with engine(models, server, kind, ranks=1) as one:
        finds(one, kind, seed=2)


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
