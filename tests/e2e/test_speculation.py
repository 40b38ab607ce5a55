"""Drafts by n-grams: what was computed for tokens that are rejected must not be stored as if it were the output's."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.checks import assert_same, prompt, settled, whole_chunks
from tests.e2e.engine import Engine
from tests.process.harness import Server, until

pytestmark = pytest.mark.long

CHUNK_TOKENS = 64
TOKENS = 300
DRAFTS = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


@pytest.fixture(scope="module")
def engine(models: Path, server: Server) -> Iterator[Engine]:
    connector: dict[str, object] = {"chunk_tokens": CHUNK_TOKENS}
    options: dict[str, object] = {"block_size": 32, "speculative_config": DRAFTS}
    with Engine(models / "llama", server.path, connector=connector, **options) as running:
        yield running


def test_output_with_rejected_drafts_is_stored_as_it_was_sampled(engine: Engine, server: Server) -> None:
    first = engine.generate([prompt(1, 300)], tokens=TOKENS)[0]
    metrics = engine.call("metrics")
    accepted, drafted = (metrics[f"vllm:spec_decode_num_{name}_tokens"] for name in ("accepted", "draft"))
    assert 0 < accepted < drafted
    until("the stores to end", lambda: settled(server))
    following = [*prompt(1, 300), *first.tokens, 7]
    computed = engine.generate([following], tokens=8, cache_salt="computed")[0]
    engine.evict()
    found = engine.generate([following], tokens=8)[0]
    assert found.cached_tokens == whole_chunks(300 + TOKENS - 1, CHUNK_TOKENS)
    assert_same(found, computed)
