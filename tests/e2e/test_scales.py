"""ATOM's plug-in with FP8, on layers that keep scales as its own do: every block comes back with its scales."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.checks import assert_same, prompt, settled, whole_chunks
from tests.e2e.engine import Answer, Engine, transfer_config
from tests.process.harness import Server, until

TOKENS = 8
PROMPTS = ((1, 900), (2, 517))


def engine_with(models: Path, server: Server, connector: str) -> Engine:
    transfer = transfer_config(server.path, {"device": "portable"})  # the scales are not in memory that can be shared
    transfer |= {"kv_connector": connector, "kv_connector_module_path": "tests.e2e.atom_layers"}
    return Engine(models / "llama", server.path, kv_transfer_config=transfer, block_size=64)


@pytest.fixture
def engine(models: Path, server: Server) -> Iterator[Engine]:
    with engine_with(models, server, "ScaledLayers") as running:
        yield running


def registered(engine: Engine, server: Server) -> None:
    """The scales are made by the first forward pass, and the cache is registered behind it."""
    engine.generate([prompt(90, 40)], tokens=2)
    until("the cache to be registered", lambda: server.status().caches == 1)
    engine.evict()


def brought(engine: Engine, seed: int, tokens: int) -> Answer:
    """The answer with the prompt's prefix from the server, in blocks that other tokens used before."""
    engine.evict()
    engine.generate([prompt(50, 1100)], tokens=2)
    answer = engine.generate([prompt(seed, tokens)], tokens=TOKENS)[0]
    assert answer.cached_tokens == whole_chunks(tokens)
    return answer


def test_a_prefix_comes_back_with_its_scales(engine: Engine, models: Path, server: Server) -> None:
    registered(engine, server)
    computed = [engine.generate([prompt(seed, tokens)], tokens=TOKENS)[0] for seed, tokens in PROMPTS]
    until("the stores to end", lambda: settled(server))
    for (seed, tokens), wanted in zip(PROMPTS, computed, strict=True):
        assert_same(brought(engine, seed, tokens), wanted)
    engine.close()
    until("the session to end", lambda: server.status().caches == 0)
    with engine_with(models, server, "LostScales") as other:
        registered(other, server)
        seed, tokens = PROMPTS[0]
        found = brought(other, seed, tokens)
        with pytest.raises(AssertionError):
            assert_same(found, computed[0])
