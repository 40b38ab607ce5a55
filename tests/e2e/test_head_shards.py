"""Engines of one and of two tensor ranks that divide KV into the same head shards: each finds what the other stored.

Compared is what an engine says after a load with what the same engine says by itself. Log-probabilities of engines of
different sizes differ in their last digits anyway.

Latent attention has one shard, which all ranks hold. vLLM computes it so coarsely on CPUs that engines of one and of
two ranks say other things, with no cache at all: their log-probabilities differed by 0.06, and then their tokens. So
the KV itself is compared there. That of the first layer comes from the tokens alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.e2e.arena import Slots, stored_slots
from tests.e2e.cases import LATENT, LATENT_BYTES, LLAMA_BYTES
from tests.e2e.checks import assert_same, is_uniform, prompt, settled, whole_chunks
from tests.e2e.engine import Answer, Engine
from tests.process.checked import CheckedServer
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


HEADS = Kind("llama", {"block_size": 32}, LLAMA_BYTES, shards=2)
"""The model has two KV heads."""
LATENT_KV = Kind("mla", LATENT, LATENT_BYTES, shards=1)
LATENT_LAYERS, LATENT_VALUES = 2, 576
CHUNK_TOKENS = 256
SLAB_BYTES = 4 << 20
LATENT_SLOTS = Slots(SLAB_BYTES, CHUNK_TOKENS * LATENT_BYTES, 0)
CLOSE = 1e-4
"""For values of about 1, which are float32 sums in another order."""


@contextmanager
def engine(models: Path, server: Server, kind: Kind, ranks: int) -> Iterator[Engine]:
    connector: dict[str, object] = {"head_shards": 2, "self_test": "on"}
    options: dict[str, object] = {**kind.options, "tensor_parallel_size": ranks}
    with Engine(models / kind.model, server.path, connector=connector, **options) as running:
        until("every shard to be registered", lambda: server.status().caches == max(ranks, kind.shards))
        yield running
    until("the engine's sessions to end", lambda: server.status().caches == 0)


def finds(running: Engine, seed: int) -> None:
    """The prompt comes from the server, and what follows is what this engine computes without it."""
    found = loads(running, seed)
    salt = running.log_path.name  # no other engine has stored under it
    computed = running.generate([prompt(seed, LENGTH)], tokens=TOKENS, cache_salt=salt)[0]
    assert computed.cached_tokens == 0
    assert_same(found, computed)


def loads(running: Engine, seed: int) -> Answer:
    found = running.generate([prompt(seed, LENGTH)], tokens=TOKENS)[0]
    assert found.cached_tokens == whole_chunks(LENGTH)
    assert not is_uniform(found.logprob, TOKENS)
    return found


def stores(running: Engine, server: Server, kind: Kind, seed: int) -> None:
    """The prompt is computed and stored once."""
    until("the stores to end", lambda: settled(server))
    used = server.status().arena.used_bytes
    computed = running.generate([prompt(seed, LENGTH)], tokens=TOKENS)[0]
    assert computed.cached_tokens == 0
    until("the stores to end", lambda: settled(server))
    assert server.status().arena.used_bytes - used == whole_chunks(LENGTH) * kind.token_bytes


def test_one_rank_finds_what_two_stored_and_two_what_one_stored(models: Path, server: Server) -> None:
    with engine(models, server, HEADS, ranks=1) as one:
        assert "self-test of the layout rank=0 passed" in one.log()
        stores(one, server, HEADS, seed=1)
        one.evict()
        one.generate([prompt(50, 200)], tokens=2)  # now other blocks are free
        finds(one, seed=1)
    with engine(models, server, HEADS, ranks=2) as two:
        finds(two, seed=1)
        stores(two, server, HEADS, seed=2)
    with engine(models, server, HEADS, ranks=1) as one:
        finds(one, seed=2)


# ---------------------------------------------------------------- latent attention


def test_one_rank_finds_the_latent_kv_that_two_stored_and_two_what_one_stored(models: Path) -> None:
    with CheckedServer(arena_bytes=32 * SLAB_BYTES, slab_bytes=SLAB_BYTES) as server:
        with engine(models, server, LATENT_KV, ranks=2) as two:
            stores(two, server, LATENT_KV, seed=1)
        with engine(models, server, LATENT_KV, ranks=1) as one:
            loads_what_it_would_compute(one, server, seed=1)
            stores(one, server, LATENT_KV, seed=2)
        with engine(models, server, LATENT_KV, ranks=2) as two:
            loads_what_it_would_compute(two, server, seed=2)


def loads_what_it_would_compute(running: Engine, server: Server, seed: int) -> None:
    """The prompt comes from the server, into any blocks. This engine's own KV of it has the same first layer."""
    found = loads(running, seed)
    running.evict()
    running.generate([prompt(50 + seed, 200)], tokens=2)  # now other blocks are free
    assert_same(loads(running, seed), found, close=0)
    until("the stores to end", lambda: settled(server))
    before = stored_slots(server.mover_pid(), LATENT_SLOTS)
    salt = running.log_path.name  # no other engine has stored under it
    assert running.generate([prompt(seed, LENGTH)], tokens=TOKENS, cache_salt=salt)[0].cached_tokens == 0
    until("the stores to end", lambda: settled(server))
    after = stored_slots(server.mover_pid(), LATENT_SLOTS)
    own = [data for slot, data in after.items() if before.get(slot) != data]
    assert len(own) == LENGTH // CHUNK_TOKENS
    for data in own:
        layer = first_layer(data)
        assert sum(torch.allclose(layer, first_layer(other), atol=CLOSE) for other in before.values()) == 1


def first_layer(chunk: bytes) -> torch.Tensor:
    """[token, value] of the first layer of a stored chunk."""
    values = torch.frombuffer(bytearray(chunk), dtype=torch.float32)
    return values.view(LATENT_LAYERS, CHUNK_TOKENS, LATENT_VALUES)[0]


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
