"""Failed loads of models with several groups of layers, on two ranks, and on two pipeline stages.

vLLM is told of these failures by request, not by block. With two ranks or stages each reports for itself.
test_faults.py covers one group and one rank.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.e2e.cases import STAGES
from tests.e2e.checks import assert_same, prompt, settled, skip_what_does_not_run
from tests.e2e.engine import ONE_PROCESS, RANK_FAILS, Answer, Engine, transfer_config
from tests.process.harness import Server, stop, until

pytestmark = pytest.mark.long

LENGTH = 900
TOKENS = 8
PATIENCE: dict[str, object] = {"load_timeout_ms": 2000}
ONE_RANK_FAILS = {"kv_connector": "FailsOnOneRank", "kv_connector_module_path": "tests.e2e.one_rank"}


class Case(NamedTuple):
    model: str
    options: dict[str, object]


CASES = {
    "windows alone": Case("mistral", {"block_size": 32, **ONE_PROCESS}),
    "windows-tp2": Case("gemma3", {"block_size": 32, "tensor_parallel_size": 2}),
    "windows-pp2": Case("gemma3", STAGES),
    "pp2": Case("llama", STAGES),
    "states": Case("lfm2", {"block_size": 32, "prefix_cache_retention_interval": 256}),
}


@pytest.fixture(scope="module")
def switch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file exists, rank 1 fails its loads."""
    return tmp_path_factory.mktemp("switch") / "fails"


@pytest.fixture(scope="module", params=list(CASES))
def engine(request: pytest.FixtureRequest, models: Path, server: Server, switch: Path) -> Iterator[Engine]:
    case = CASES[request.param]
    skip_what_does_not_run(case.model)
    config = {**transfer_config(server.path, PATIENCE), **ONE_RANK_FAILS}
    environment = {RANK_FAILS: str(switch)}
    with Engine(
        models / case.model, server.path, environment=environment, kv_transfer_config=config, **case.options
    ) as running:
        yield running
    until("the engine's sessions to end", lambda: server.status().caches == 0)


def ask(engine: Engine) -> Answer:
    return engine.generate([prompt(1, LENGTH)], tokens=TOKENS)[0]


def found_again(engine: Engine, server: Server) -> bool:
    """Asks until the prompt comes from the server: chunks evicted before they were stored are computed and stored."""
    until("the server to be at rest", lambda: settled(server))
    engine.evict()
    return ask(engine).cached_tokens > LENGTH // 2


def failed(engine: Engine) -> float:
    return float(engine.call("metrics")["vllm:kvserver_retrieves_failed"])


def test_a_request_whose_load_fails_is_computed_and_finds_its_prefix_the_next_time(
    engine: Engine, server: Server
) -> None:
    computed = ask(engine)
    assert computed.cached_tokens == 0
    until("the prompt to be found", lambda: found_again(engine, server))
    engine.evict()
    found = ask(engine)
    engine.evict()
    before, caches = failed(engine), server.status().caches
    stop(server.mover_pid())
    engine.begin([prompt(1, LENGTH)], tokens=TOKENS)
    until("the load to be under way", lambda: server.status().retrieves >= 1)
    server.kill()
    assert_same(engine.end()[0], computed)
    assert failed(engine) == before + 1
    server.start()
    until("the caches to be registered", lambda: server.status().caches == caches)
    until("the prompt to be found again", lambda: found_again(engine, server))
    engine.evict()
    assert_same(ask(engine), found)
    until("the server to be at rest", lambda: settled(server))


def test_a_load_that_one_rank_fails_is_computed_by_all(engine: Engine, server: Server, switch: Path) -> None:
    """The other rank's loaded blocks are not used."""
    if server.status().caches < 2:
        pytest.skip("one rank")
    wanted = ask(engine)
    until("the prompt to be found", lambda: found_again(engine, server))
    engine.evict()
    before = failed(engine)
    switch.touch()
    computed = ask(engine)
    switch.unlink()
    assert failed(engine) == before + 1
    assert_same(computed, wanted)
    engine.evict()
    found = ask(engine)
    assert found.cached_tokens > LENGTH // 2
    assert_same(found, wanted)
    until("the server to be at rest", lambda: settled(server))
