"""The same tokens and log-probabilities, whether a prefix is computed or comes from the server.

For each shape of KV: stored by one engine, evicted there, and loaded into other blocks; found by a second engine in
another process with another hash seed; and found on disk after the server was killed. The output must change when
the stored bytes are corrupted: otherwise the comparison proves nothing.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.arena import flip_stored_bytes
from tests.e2e.cases import CASES, HASHES, Case
from tests.e2e.checks import CLOSE, assert_same, is_uniform, prompt, settled, skip_what_does_not_run, whole_chunks
from tests.e2e.engine import ONE_PROCESS, Answer, Engine
from tests.process.checked import CheckedServer
from tests.process.harness import Server, until

TOKENS = 12


LONG = ("tp2-mla", "pp2-gemma3", "qwen3-next", "lfm2", "mistral")
"""Only in `make e2e-all`."""


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in CASES]
)
def case(request: pytest.FixtureRequest) -> Case:
    skip_what_does_not_run(request.param)
    return CASES[request.param]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all models, one after the other."""
    with CheckedServer(
        arena_bytes=256 << 20,
        disk_paths=str(tmp_path_factory.mktemp("disk")),
        disk_bytes=256 << 20,
        disk_segment_bytes=8 << 20,
        disk_write_policy="through",
    ) as running:
        yield running


@pytest.fixture(scope="module")
def engine(case: Case, models: Path, server: Server) -> Iterator[Engine]:
    with Engine(models / case.model, server.path, connector={"self_test": "on"}, **case.options) as running:
        yield running


@pytest.fixture(scope="module")
def first(engine: Engine, server: Server) -> list[Answer]:
    """The answers to the prompts when nothing is cached; afterwards the server holds their whole chunks."""
    answers = [engine.generate([prompt(seed, tokens)], tokens=TOKENS)[0] for seed, tokens in PROMPTS]
    assert [answer.cached_tokens for answer in answers] == [0] * len(PROMPTS)
    until("the stores to end", lambda: settled(server))
    return answers


@pytest.fixture(scope="module")
def computed(case: Case, engine: Engine, first: list[Answer]) -> list[Answer]:
    """The answers that later answers are compared with."""
    if case.agrees_with_itself:
        return first
    engine.evict()
    return [engine.generate([prompt(seed, tokens)], tokens=TOKENS)[0] for seed, tokens in PROMPTS]


PROMPTS = ((1, 1300), (2, 517), (3, 300))
"""The last has one whole chunk and a block; none ends where a chunk does."""


def test_every_rank_has_registered(engine: Engine, case: Case, server: Server) -> None:
    until("the caches to be registered", lambda: server.status().caches == case.ranks)


def test_every_rank_has_tested_its_layout(engine: Engine, case: Case) -> None:
    passed = re.findall(r"self-test of the layout rank=(\d) passed", engine.log())
    assert sorted(map(int, passed)) == list(range(case.ranks))


def test_the_model_does_not_say_the_same_of_everything(computed: list[Answer]) -> None:
    assert not any(is_uniform(answer.logprob, TOKENS) for answer in computed)
    assert len({answer.tokens for answer in computed}) == len(computed)


def test_the_server_holds_the_kv_of_all_ranks_once(engine: Engine, case: Case, server: Server) -> None:
    if not case.token_bytes:
        pytest.skip("of a window only what the engine still has is stored")
    until("the server to be at rest", lambda: settled(server))
    before = server.status().arena.used_bytes
    engine.generate([prompt(90, 600)], tokens=2)
    until("the stores to end", lambda: settled(server))
    held = server.status().arena.used_bytes - before
    assert held == whole_chunks(600, case.chunk_tokens) * case.token_bytes


def test_an_evicted_prefix_comes_back_and_the_output_is_the_same(
    engine: Engine, case: Case, computed: list[Answer], server: Server
) -> None:
    engine.evict()
    engine.generate([prompt(50, 700)], tokens=2)  # now other blocks are free
    for (seed, tokens), wanted in zip(PROMPTS, computed, strict=True):
        found = engine.generate([prompt(seed, tokens)], tokens=TOKENS)[0]
        assert found.cached_tokens == whole_chunks(tokens, case.chunk_tokens)
        assert_same(found, wanted)
        engine.evict()
        assert_same(engine.generate([prompt(seed, tokens)], tokens=TOKENS)[0], found)
    until("leases and pins to go", lambda: settled(server))


def test_the_log_says_of_a_request_what_was_found_and_loaded(
    engine: Engine, case: Case, computed: list[Answer]
) -> None:
    seed, tokens = PROMPTS[1]
    held = whole_chunks(tokens, case.chunk_tokens)
    line = rf"prompt={tokens} hbm=0 hit={held} loaded={held} load_ms=\d+\.\d stored=0\n"
    before = len(re.findall(line, engine.log()))
    engine.evict()
    engine.generate([prompt(seed, tokens)], tokens=1)
    engine.evict()  # the request is over
    until("its line in the log", lambda: len(re.findall(line, engine.log())) == before + 1)


def test_a_conversation_goes_on_where_it_was(engine: Engine, case: Case, server: Server) -> None:
    """A second turn with its prefix from the server gives the tokens that the first turn generated in one go.

    The states are the same. The second prompt ends with a chunk that was stored while it was generated.
    """
    first = engine.generate([prompt(80, 500)], tokens=24)[0]
    until("the stores to end", lambda: settled(server))
    engine.evict()
    engine.generate([prompt(81, 300)], tokens=2)
    second = engine.generate([[*prompt(80, 500), *first.tokens[:12]]], tokens=12)[0]
    assert second.cached_tokens == whole_chunks(512 if case.token_bytes else 511, case.chunk_tokens)
    assert second.tokens == first.tokens[12:]
    close = 50 * CLOSE if case.step_tokens else CLOSE  # decoding computes a state in another way
    assert second.logprobs == pytest.approx(first.logprobs[12:], abs=close)


def test_a_shared_prefix_is_used_as_far_as_it_goes(engine: Engine, case: Case, computed: list[Answer]) -> None:
    seed, tokens = PROMPTS[0]
    shared = [*prompt(seed, tokens)[:700], *prompt(60, 400)]
    engine.evict()
    wanted = engine.generate([shared], tokens=TOKENS)[0]
    assert wanted.cached_tokens == whole_chunks(700, case.step_tokens or case.chunk_tokens)
    engine.evict()
    found = engine.generate([shared], tokens=TOKENS)[0]
    assert found.cached_tokens == whole_chunks(1100, case.chunk_tokens)
    if case.agrees_with_itself:
        assert_same(found, wanted)


def test_many_at_once_are_right(engine: Engine, case: Case, computed: list[Answer]) -> None:
    engine.evict()
    found = engine.generate([prompt(seed, tokens) for seed, tokens in PROMPTS] * 2, tokens=TOKENS)
    for answer, wanted in zip(found, [*computed, *computed], strict=True):
        assert answer.cached_tokens >= wanted.cached_tokens
        if case.agrees_with_itself:
            assert_same(answer, wanted)


def test_another_tenants_salt_finds_nothing(engine: Engine, case: Case, computed: list[Answer]) -> None:
    seed, tokens = PROMPTS[1]
    engine.evict()
    found = engine.generate([prompt(seed, tokens)], tokens=TOKENS, cache_salt="another")[0]
    assert found.cached_tokens == 0
    if case.agrees_with_itself:
        assert_same(found, computed[1])


def test_changed_bytes_are_noticed_and_computed_again(
    engine: Engine, case: Case, computed: list[Answer], server: Server
) -> None:
    until("the stores to end", lambda: settled(server))
    engine.evict()
    before = server.status().counters["digest_mismatches"]
    flip_stored_bytes(server.mover_pid())
    for (seed, tokens), wanted in zip(PROMPTS, computed, strict=True):
        found = engine.generate([prompt(seed, tokens)], tokens=TOKENS)[0]
        if case.agrees_with_itself:
            assert_same(found, wanted)
    assert server.status().counters["digest_mismatches"] != before
    until("the stores to end", lambda: settled(server))
    engine.evict()
    found = engine.generate([prompt(*PROMPTS[0])], tokens=TOKENS)[0]
    assert found.cached_tokens == whole_chunks(PROMPTS[0][1], case.chunk_tokens), "it is stored again"
    assert_same(found, computed[0])


@pytest.fixture
def unwatched(engine: Engine, case: Case, computed: list[Answer], server: Server) -> Iterator[Server]:
    """The server without digests, which holds the first prompt."""
    restart(server, case, digests="off")
    until("the engine to look up again", lambda: cached_tokens(engine, *PROMPTS[0]))
    until("the stores to end", lambda: settled(server))
    yield server
    restart(server, case, digests="on")


def restart(server: Server, case: Case, **settings: object) -> None:
    server.kill()
    server.settings |= settings
    server.start()
    until("the disk", lambda: server.status().disk_state == "ready")
    until("the caches to be registered", lambda: server.status().caches == case.ranks)


def test_without_digests_changed_bytes_change_the_output(
    engine: Engine, computed: list[Answer], unwatched: Server
) -> None:
    """A control: what other tests compare can differ."""
    engine.evict()
    flip_stored_bytes(unwatched.mover_pid())
    try:
        found = engine.generate([prompt(*PROMPTS[0])], tokens=TOKENS)[0]
    finally:
        flip_stored_bytes(unwatched.mover_pid())
    assert found.tokens != computed[0].tokens
    assert abs(found.logprob - computed[0].logprob) > 100 * CLOSE


def test_what_a_server_that_was_killed_has_on_disk_comes_back(
    engine: Engine, case: Case, computed: list[Answer], server: Server
) -> None:
    if case.model == "mistral":
        pytest.skip("a model without a full group is not written to disks: decision 0004")
    until("all chunks to be on disk", lambda: settled(server) and is_on_disk(server))
    restart(server, case)
    until("the engine to look up again", lambda: cached_tokens(engine, *PROMPTS[2]))
    for (seed, tokens), wanted in list(zip(PROMPTS, computed, strict=True))[:2]:
        engine.evict()
        read = server.status().counters["disk_reads"]
        found = engine.generate([prompt(seed, tokens)], tokens=TOKENS)[0]
        assert found.cached_tokens == whole_chunks(tokens, case.chunk_tokens)
        assert_same(found, wanted)
        assert server.status().counters["disk_reads"] != read


def is_on_disk(server: Server) -> bool:
    status = server.status()
    return status.chunks_on_disk > 0 and status.arena.used_bytes == status.clean_bytes


def cached_tokens(engine: Engine, seed: int, tokens: int) -> int:
    engine.evict()
    return engine.generate([prompt(seed, tokens)], tokens=1)[0].cached_tokens


def test_another_engine_finds_what_the_first_stored(
    case: Case, models: Path, engine: Engine, computed: list[Answer], server: Server
) -> None:
    engine.close()  # two engines at once are too much for two cores
    until("the engine's sessions to end", lambda: server.status().caches == 0)
    environment = {} if case.options.items() >= HASHES.items() else {"PYTHONHASHSEED": "7"}
    connector: dict[str, object] = {"device": ""}  # it shares its memory, also if the first one is told not to
    with Engine(
        models / case.model, server.path, environment=environment, connector=connector, **case.options
    ) as other:
        until("it to be registered", lambda: server.status().caches == case.ranks)
        for (seed, tokens), wanted in reversed(list(zip(PROMPTS, computed, strict=True))):
            found = other.generate([prompt(seed, tokens)], tokens=TOKENS)[0]
            assert found.cached_tokens == whole_chunks(tokens, case.chunk_tokens)
            assert_same(found, wanted)


def test_an_engine_without_a_connector_says_the_same(
    case: Case, models: Path, engine: Engine, first: list[Answer], server: Server
) -> None:
    engine.close()
    processes = {} if case.ranks > 1 else ONE_PROCESS
    options = {**processes, **case.options, "kv_transfer_config": None}
    with Engine(models / case.model, server.path, **options) as plain:
        for (seed, tokens), wanted in zip(PROMPTS, first, strict=True):
            assert_same(plain.generate([prompt(seed, tokens)], tokens=TOKENS)[0], wanted)
