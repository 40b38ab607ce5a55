"""Speculative decoding: KV of rejected draft tokens is never stored as output.

The KV of a draft model or head comes back together with the model's.
"""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.e2e.arena import Slots, flip_stored_bytes
from tests.e2e.cases import LATENT
from tests.e2e.checks import assert_same, prompt, settled, whole_chunks
from tests.e2e.engine import Answer, Engine
from tests.process.checked import CheckedServer
from tests.process.harness import Server, until

pytestmark = pytest.mark.long

CHUNK_TOKENS = 64
TOKENS = 300
N_GRAMS = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
DRAFTED = 3
KV_BYTES = {"draft_model": (4 * 2 * 2 * 64 * 4,) * 2, "eagle": (4 * 2 * 2 * 64 * 4,) * 2, "mtp": ((512 + 64) * 4,) * 2}
"""Bytes of a token, in the model and in the drafter: layers, K and V, heads, head size, float32; latent KV is one."""


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


AGREED_MIN = {"draft_model": 40 * DRAFTED // (DRAFTED + 1) - DRAFTED, "eagle": 8, "mtp": 8}
"""Minimum of drafted tokens that are accepted, of 40.

The model drafts for itself, or a head with its layers does. They agree always, or with some (of 512 tokens), as long
as the drafter saw the right prefix.
"""


VARIES = ("mtp",)
"""Latent attention on CPUs computes four tokens at once differently from one, even without a connector.

So after its first token the output depends on the drafts.
"""


class Drafted(NamedTuple):
    answer: Answer
    accepted: float
    """Draft tokens that the model accepted."""


@pytest.fixture(scope="module", params=list(AGREED_MIN))
def method(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture(scope="module")
def drafting(
    method: str, models: Path, server: Server, engine: Engine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    engine.close()  # two engines at once are too much for two cores
    model = drafter = models / "llama"
    more: dict[str, object] = {}
    backend: dict[str, object] = {}
    builder = importlib.import_module("tests.e2e.models")
    if method == "eagle":
        drafter = tmp_path_factory.mktemp("head")
        builder.build_head(drafter)
    elif method == "mtp":
        model = drafter = tmp_path_factory.mktemp("mtp")
        builder.build_mtp(model)
        more, backend = LATENT, {"attention_backend": "CPU_MLA"}
    drafts = {"method": method, "model": str(drafter), "num_speculative_tokens": DRAFTED, **backend}
    connector: dict[str, object] = {"chunk_tokens": CHUNK_TOKENS}
    options: dict[str, object] = {"block_size": 32, "speculative_config": drafts, **more}
    with Engine(model, server.path, connector=connector, **options) as running:
        yield running


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server that delivers bytes that were changed: a test changes those of the drafter's layers alone."""
    with CheckedServer(arena_bytes=256 << 20, digests="off") as running:
        yield running


def drafted(engine: Engine, seed: int) -> Drafted:
    name = "vllm:spec_decode_num_accepted_tokens"
    before = engine.call("metrics").get(name, 0)
    answer = engine.generate([prompt(seed, TOKENS)], tokens=40)[0]
    return Drafted(answer, engine.call("metrics")[name] - before)


def found_again(drafting: Engine, seed: int) -> Drafted:
    """The answer with its prefix loaded from the server into other blocks."""
    drafting.evict()
    drafting.generate([prompt(50, 700)], tokens=2)  # now other blocks are free
    found = drafted(drafting, seed)
    assert found.answer.cached_tokens == whole_chunks(TOKENS, CHUNK_TOKENS)
    return found


def test_what_drafts_are_made_from_comes_back_with_a_prefix(drafting: Engine, method: str, server: Server) -> None:
    before = server.status().arena.used_bytes
    computed = drafted(drafting, 3)
    assert computed.accepted >= AGREED_MIN[method]
    until("the stores to end", lambda: settled(server))
    held = whole_chunks(TOKENS + 40 - 1, CHUNK_TOKENS)
    assert server.status().arena.used_bytes - before == held * sum(KV_BYTES[method])
    found = found_again(drafting, 3)
    if method in VARIES:
        computed = found
        found = found_again(drafting, 3)
    assert_same(found.answer, computed.answer)
    assert found.accepted == computed.accepted >= AGREED_MIN[method]


def test_drafts_from_a_wrong_prefix_are_rejected_and_change_no_output(
    drafting: Engine, method: str, server: Server
) -> None:
    """The drafter's layers follow the model's own in every chunk."""
    right = drafted(drafting, 4)
    until("the stores to end", lambda: settled(server))
    if method in VARIES:
        right = found_again(drafting, 4)
    of_model, of_drafts = (CHUNK_TOKENS * token_bytes for token_bytes in KV_BYTES[method])
    only_drafts = Slots(server.status().arena.slab_bytes, of_model + of_drafts, of_model)
    flip_stored_bytes(server.mover_pid(), only_drafts)
    try:
        found = found_again(drafting, 4)
    finally:
        flip_stored_bytes(server.mover_pid(), only_drafts)
    if method in VARIES:
        assert found.answer.tokens[0] == right.answer.tokens[0]
        assert found.answer.logprobs[0] == right.answer.logprobs[0]
    else:
        assert_same(found.answer, right.answer)
    assert found.accepted < right.accepted / 2
