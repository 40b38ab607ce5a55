"""Pipeline stages that hold different numbers of layers, lack a group's layers, or draft. test_models.py has even ones.

An engine whose layers are divided in another way finds nothing: its workers hold other bytes.
"""

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.arena import flip_stored_bytes
from tests.e2e.cases import LLAMA_BYTES, STAGES
from tests.e2e.checks import CLOSE, assert_same, prompt, settled, whole_chunks
from tests.e2e.engine import Answer, Engine
from tests.process.checked import CheckedServer
from tests.process.harness import Server, until

pytestmark = pytest.mark.long

LENGTH = 900
TOKENS = 8


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server that delivers bytes that were changed: a test changes those of one stage alone."""
    with CheckedServer(arena_bytes=256 << 20, digests="off") as running:
        yield running


def split(layers: str) -> dict[str, str]:
    return {"VLLM_PP_LAYER_PARTITION": layers}


@pytest.fixture(scope="module")
def uneven(models: Path, server: Server) -> Iterator[Engine]:
    with Engine(models / "llama", server.path, environment=split("3,1"), **STAGES) as engine:
        yield engine


@pytest.fixture(scope="module")
def wanted(uneven: Engine, server: Server) -> Answer:
    answer = uneven.generate([prompt(1, LENGTH)], tokens=TOKENS)[0]
    assert answer.cached_tokens == 0
    until("the stores to end", lambda: settled(server))
    return answer


def test_stages_of_three_layers_and_one_store_what_they_hold_and_find_it_again(
    uneven: Engine, wanted: Answer, server: Server
) -> None:
    assert server.status().arena.used_bytes == whole_chunks(LENGTH) * LLAMA_BYTES
    uneven.evict()
    uneven.generate([prompt(50, 200)], tokens=2)  # now other blocks are free
    found = uneven.generate([prompt(1, LENGTH)], tokens=TOKENS)[0]
    assert found.cached_tokens == whole_chunks(LENGTH)
    assert_same(found, wanted)


def test_changed_bytes_of_any_stage_change_the_output(uneven: Engine, wanted: Answer, server: Server) -> None:
    """A control: what the other tests compare can differ."""
    uneven.evict()
    until("the server to be at rest", lambda: settled(server))
    flip_stored_bytes(server.mover_pid())
    try:
        found = uneven.generate([prompt(1, LENGTH)], tokens=TOKENS)[0]
    finally:
        flip_stored_bytes(server.mover_pid())
    assert abs(found.logprob - wanted.logprob) > 100 * CLOSE


def test_an_engine_with_another_split_finds_nothing_and_says_the_same(
    uneven: Engine, wanted: Answer, models: Path, server: Server
) -> None:
    uneven.close()
    until("the engine's sessions to end", lambda: server.status().caches == 0)
    with Engine(models / "llama", server.path, environment=split("1,3"), **STAGES) as other:
        found = other.generate([prompt(1, LENGTH)], tokens=TOKENS)[0]
        assert found.cached_tokens == 0
        assert_same(found, wanted)
    until("the engine's sessions to end", lambda: server.status().caches == 0)


def test_a_stage_without_layers_of_a_group_stops_the_engine_at_its_start(models: Path, server: Server) -> None:
    """The last of six layers has full attention. The other two groups have windows."""
    engine = Engine(models / "gemma3", server.path, environment=split("5,1"), **STAGES)
    try:
        with pytest.raises(AssertionError, match="has ended"):
            engine.wait_started()
        assert "stage 1 has no layers of groups" in engine.log()
    finally:
        engine.close()


N_GRAMS = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


@pytest.fixture(scope="module", params=["ngram", "eagle"])
def drafting(
    request: pytest.FixtureRequest, models: Path, server: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """The last stage drafts; with a head it holds a layer more."""
    drafts: dict[str, object] = dict(N_GRAMS)
    if request.param == "eagle":
        head = tmp_path_factory.mktemp("head")
        importlib.import_module("tests.e2e.models").build_head(head)
        drafts = {"method": "eagle", "model": str(head), "num_speculative_tokens": 3}
    with Engine(models / "llama", server.path, speculative_config=drafts, **STAGES) as engine:
        yield engine
    until("the engine's sessions to end", lambda: server.status().caches == 0)


def test_beside_speculation_every_stage_stores_and_finds_it_again(drafting: Engine, server: Server) -> None:
    computed = drafting.generate([prompt(7, LENGTH)], tokens=300)[0]
    until("the stores to end", lambda: settled(server))
    drafting.evict()
    drafting.generate([prompt(51, 200)], tokens=2)
    following = [*prompt(7, LENGTH), *computed.tokens, 7]
    fresh = drafting.generate([following], tokens=TOKENS, cache_salt="computed")[0]
    drafting.evict()
    found = drafting.generate([following], tokens=TOKENS)[0]
    assert found.cached_tokens == whole_chunks(LENGTH + 300 - 1)
    assert_same(found, fresh)
