"""Requests whose KV depends on more than their tokens: LoRA adapters and prompts of embeddings.

Also requests that need all positions computed: log-probabilities of the prompt.
"""

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.checks import CLOSE, assert_same, prompt, settled, whole_chunks
from tests.e2e.engine import Answer, Engine
from tests.process.harness import Server, until

pytestmark = pytest.mark.long

LENGTH = 600


@pytest.fixture(scope="module")
def engine(models: Path, server: Server) -> Iterator[Engine]:
    options: dict[str, object] = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8, "enable_prompt_embeds": True}
    with Engine(models / "llama", server.path, block_size=32, **options) as running:
        yield running


def test_with_an_adapter_a_prompt_is_another(engine: Engine, server: Server, tmp_path: Path) -> None:
    importlib.import_module("tests.e2e.models").build_adapter(tmp_path / "adapter")
    adapted = {"adapter": str(tmp_path / "adapter")}
    plain = engine.generate([prompt(1, LENGTH)])[0]
    until("the stores to end", lambda: settled(server))
    engine.evict()
    wanted = engine.generate([prompt(1, LENGTH)], **adapted)[0]
    assert wanted.cached_tokens == 0
    assert wanted.tokens != plain.tokens
    until("the stores to end", lambda: settled(server))
    for more, answer in ((adapted, wanted), ({}, plain)):
        engine.evict()
        found = engine.generate([prompt(1, LENGTH)], **more)[0]
        assert found.cached_tokens == whole_chunks(LENGTH)
        assert_same(found, answer)


def test_prompts_of_embeddings_are_computed_and_not_stored(engine: Engine, server: Server) -> None:
    until("the stores to end", lambda: settled(server))
    chunks = server.status().chunks
    first, second = (embedded(engine, seed) for seed in (1, 2))
    assert abs(first.logprob - second.logprob) > CLOSE
    engine.evict()
    again = embedded(engine, 1)
    assert again.cached_tokens == 0
    assert_same(again, first)
    until("the server to be at rest", lambda: settled(server))
    assert server.status().chunks == chunks


def test_a_prompt_whose_own_log_probabilities_are_wanted_is_computed_and_stored(engine: Engine, server: Server) -> None:
    wanted, cached_tokens = engine.call("prompt_logprob", prompt(3, LENGTH))
    assert cached_tokens == 0
    until("the stores to end", lambda: settled(server))
    engine.evict()
    again, cached_tokens = engine.call("prompt_logprob", prompt(3, LENGTH))
    assert cached_tokens == 0
    assert again == pytest.approx(wanted, abs=CLOSE)
    engine.evict()
    assert engine.generate([prompt(3, LENGTH)])[0].cached_tokens == whole_chunks(LENGTH)
    until("the server to be at rest", lambda: settled(server))


def embedded(engine: Engine, seed: int) -> Answer:
    (answer,) = engine.call("generate_embedded", [(seed, LENGTH)], 8)
    return Answer(*answer)
