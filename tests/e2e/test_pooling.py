"""Pooling models: a prefix may come from the server only if the pooled vector depends on the last position alone."""

from pathlib import Path

import pytest

from tests.e2e.checks import CLOSE, prompt, settled, whole_chunks
from tests.e2e.engine import Engine
from tests.process.harness import Server, until

pytestmark = pytest.mark.long

LENGTH = 900


def engine_with(pooling: str, models: Path, server: Server) -> Engine:
    options: dict[str, object] = {
        "runner": "pooling",
        "convert": "embed",
        "pooler_config": {"pooling_type": pooling},
        "skip_tokenizer_init": False,
        "enable_prefix_caching": pooling == "LAST",  # vLLM's default
        "max_num_batched_tokens": 2048,  # whole prompts, for models that cannot compute them in parts
    }
    return Engine(models / "llama", server.path, block_size=32, **options)


def embedded(engine: Engine, seed: int) -> tuple[list[float], int]:
    ((vector, cached_tokens),) = engine.call("embed", [prompt(seed, LENGTH)])
    return list(vector), cached_tokens


def test_a_prompt_whose_prefix_comes_back_has_the_same_vector(models: Path, server: Server) -> None:
    with engine_with("LAST", models, server) as engine:
        wanted, cached_tokens = embedded(engine, 1)
        assert cached_tokens == 0
        until("the stores to end", lambda: server.status().chunks == LENGTH // 256 and settled(server))
        engine.evict()
        other, _ = embedded(engine, 2)
        assert other != pytest.approx(wanted, abs=CLOSE)
        found, cached_tokens = embedded(engine, 1)
        assert cached_tokens == whole_chunks(LENGTH)
        assert found == pytest.approx(wanted, abs=CLOSE)
        until("the server to be at rest", lambda: settled(server))


def test_a_mean_over_all_positions_is_refused_at_the_start(models: Path, server: Server) -> None:
    """vLLM dies if a prompt of such a model is computed in parts."""
    engine = engine_with("MEAN", models, server)
    try:
        with pytest.raises(AssertionError, match="pools over all positions"):
            engine.wait_started()
    finally:
        engine.close()
