"""Drafts: what was computed for tokens that are rejected is not stored as if it were the output. And what a draft
model, or a head, has of a prefix comes back with what the model has."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.e2e.arena import flip_stored_bytes
from tests.e2e.checks import assert_same, prompt, settled, whole_chunks
from tests.e2e.engine import Answer, Engine
from tests.process.harness import Server, until

pytestmark = pytest.mark.long

CHUNK_TOKENS = 64
TOKENS = 300
N_GRAMS = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
DRAFTED = 3
LLAMA_BYTES = 4 * 2 * 2 * 64 * 4
"""Layers, K and V, heads, their size, float32."""


@pytest.fixture(scope="module")
def engine(models: Path, server: Server) -> Iterator[Engine]:
    connector: dict[str, object] = {"chunk_tokens": CHUNK_TOKENS}
    options: dict[str, object] = {"block_size": 32, "speculative_config": N_GRAMS}
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


# ---------------------------------------------------------------- a draft model, and a head


AGREED_MIN = {"draft_model": 40 * DRAFTED // (DRAFTED + 1) - DRAFTED, "eagle": 8}
"""Of 40 tokens those that were drafted. The model drafts for itself, or its head has its layers: it agrees always, or
with some (of 512 tokens), as long as those saw the right prefix."""


class Drafted(NamedTuple):
    answer: Answer
    accepted: float
    """Tokens of drafts that the model agreed with."""


@pytest.fixture(scope="module", params=list(AGREED_MIN))
def method(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture(scope="module")
def drafting(
    method: str, models: Path, server: Server, engine: Engine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    engine.close()  # two engines at once are too much for two cores
    drafter = models / "llama"
    if method == "eagle":
        drafter = tmp_path_factory.mktemp("head")
        importlib.import_module("tests.e2e.models").build_head(drafter)
    drafts = {"method": method, "model": str(drafter), "num_speculative_tokens": DRAFTED}
    connector: dict[str, object] = {"chunk_tokens": CHUNK_TOKENS}
    options: dict[str, object] = {"block_size": 32, "speculative_config": drafts}
    with Engine(models / "llama", server.path, connector=connector, **options) as running:
        yield running


def drafted(engine: Engine, seed: int) -> Drafted:
    name = "vllm:spec_decode_num_accepted_tokens"
    before = engine.call("metrics").get(name, 0)
    answer = engine.generate([prompt(seed, TOKENS)], tokens=40)[0]
    return Drafted(answer, engine.call("metrics")[name] - before)


def test_what_drafts_are_made_from_comes_back_with_a_prefix(drafting: Engine, method: str, server: Server) -> None:
    before = server.status().arena.used_bytes
    computed = drafted(drafting, 3)
    assert computed.accepted >= AGREED_MIN[method]
    until("the stores to end", lambda: settled(server))
    held = whole_chunks(TOKENS + 40 - 1, CHUNK_TOKENS)
    assert server.status().arena.used_bytes - before == held * 2 * LLAMA_BYTES
    drafting.evict()
    drafting.generate([prompt(50, 700)], tokens=2)  # other blocks are free now
    found = drafted(drafting, 3)
    assert found.answer.cached_tokens == whole_chunks(TOKENS, CHUNK_TOKENS)
    assert_same(found.answer, computed.answer)
    assert found.accepted == computed.accepted


def test_drafts_without_their_prefix_are_disagreed_with_and_change_no_output(drafting: Engine, server: Server) -> None:
    """Its layers lie behind the model's own in every chunk."""
    right = drafted(drafting, 4)
    until("the stores to end", lambda: settled(server))
    drafting.evict()
    drafting.generate([prompt(51, 700)], tokens=2)
    slot_bytes = CHUNK_TOKENS * 2 * LLAMA_BYTES
    flip_stored_bytes(server.mover_pid(), slot_bytes=slot_bytes, first=slot_bytes // 2)
    try:
        found = drafted(drafting, 4)
    finally:
        flip_stored_bytes(server.mover_pid(), slot_bytes=slot_bytes, first=slot_bytes // 2)
    assert found.answer.cached_tokens == whole_chunks(TOKENS, CHUNK_TOKENS)
    assert_same(found.answer, right.answer)
    assert found.accepted < right.accepted / 2
