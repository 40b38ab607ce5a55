"""vLLM's OpenAI server, for each shape of KV: many requests at once, the same tokens from the server, and the metrics.

Chunks are named by vLLM's block hashes.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.cases import CASES, HASHES, Case
from tests.e2e.checks import CLOSE, prompt, settled, skip_what_does_not_run, whole_chunks
from tests.e2e.endpoint import Endpoint, serving
from tests.e2e.engine import transfer_config
from tests.process.harness import Server, until

pytestmark = pytest.mark.long

LENGTHS = (300, 520, 777, 1300)


@pytest.fixture(scope="module", params=list(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    skip_what_does_not_run(request.param)
    return CASES[request.param]


@pytest.fixture(scope="module")
def endpoint(case: Case, models: Path, server: Server) -> Iterator[Endpoint]:
    options: dict[str, object] = {**case.options, **HASHES, "kv_transfer_config": transfer_config(server.path, {})}
    with serving(models / case.model, options, workers=case.ranks, log=server.folder / "openai.log") as running:
        until("its caches to be registered", lambda: server.status().caches == case.ranks)
        yield running
    until("its sessions to end", lambda: server.status().caches == 0)


def test_the_same_tokens_for_many_at_once(endpoint: Endpoint, case: Case, server: Server) -> None:
    prompts = [prompt(10 + place, tokens) for place, tokens in enumerate(LENGTHS)]
    held = sum(whole_chunks(tokens, case.chunk_tokens) for tokens in LENGTHS)
    computed = one_by_one(endpoint, server, prompts)
    if not case.agrees_with_itself:  # after a hit the rest is computed in another way, so compare with a hit
        computed = one_by_one(endpoint, server, prompts)
    again = one_by_one(endpoint, server, prompts)
    assert_same(again, computed)
    before = endpoint.metric("vllm:external_prefix_cache_hits_total")
    with ThreadPoolExecutor(len(prompts) * 2) as crowd:
        found = list(crowd.map(endpoint.complete, [*prompts, *prompts]))
    if case.agrees_with_itself:
        assert_same(found, [*computed, *computed])
    assert endpoint.metric("vllm:external_prefix_cache_hits_total") - before >= held
    until("the server to be at rest", lambda: settled(server))


def one_by_one(endpoint: Endpoint, server: Server, prompts: list[list[int]]) -> list[tuple[list[str], list[float]]]:
    """Answers one prompt after another. Afterwards the server holds the prompts, and the engine none."""
    answers = [endpoint.complete(item) for item in prompts]
    until("the server to be at rest", lambda: settled(server))
    until("the engine to forget its prefixes", endpoint.evict)
    return answers


def assert_same(found: list[tuple[list[str], list[float]]], wanted: list[tuple[list[str], list[float]]]) -> None:
    for (tokens, logprobs), (theirs, of_theirs) in zip(found, wanted, strict=True):
        assert tokens == theirs
        assert logprobs == pytest.approx(of_theirs, abs=CLOSE)


def test_the_connectors_counts_are_among_vllms_metrics(endpoint: Endpoint, case: Case) -> None:
    held = sum(whole_chunks(tokens, case.chunk_tokens) for tokens in LENGTHS)
    assert endpoint.metric("vllm:kvserver_tokens_stored_total") >= held
    assert endpoint.metric("vllm:kvserver_tokens_retrieved_total") >= 2 * held
    assert endpoint.metric("vllm:kvserver_retrieves_failed_total") == 0
    assert endpoint.metric("vllm:kvserver_retrieve_seconds_count") >= 2 * len(LENGTHS)
