"""Beside another connector in vLLM's MultiConnector: its failed loads do not harm stored chunks."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.checks import assert_same, prompt, settled, whole_chunks
from tests.e2e.engine import Engine, transfer_config
from tests.e2e.other_connector import MARK
from tests.process.harness import Server, until

LENGTH = 900
OTHER = {
    "kv_connector": "Unreliable",
    "kv_connector_module_path": "tests.e2e.other_connector",
    "kv_role": "kv_both",
}


@pytest.fixture(scope="module")
def engine(models: Path, server: Server) -> Iterator[Engine]:
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [OTHER, transfer_config(server.path, {})]},
    }
    with Engine(models / "llama", server.path, block_size=32, kv_transfer_config=both) as running:
        running.generate([prompt(90, 40)], tokens=1)  # after this the scheduler knows the ranks' namespace
        yield running


def test_an_evicted_prefix_comes_back(engine: Engine, server: Server) -> None:
    wanted = engine.generate([prompt(1, LENGTH)])[0]
    until("the stores to end", lambda: settled(server))
    engine.evict()
    found = engine.generate([prompt(1, LENGTH)])[0]
    assert (wanted.cached_tokens, found.cached_tokens) == (0, whole_chunks(LENGTH))
    assert_same(found, wanted)
    assert engine.call("metrics")["vllm:kvserver_tokens_retrieved"] == whole_chunks(LENGTH)


def test_what_the_other_one_failed_to_load_is_not_stored(engine: Engine, server: Server) -> None:
    marked = [MARK, *prompt(2, LENGTH - 1)]
    wanted = engine.generate([marked], cache_salt="computed")[0]
    failures = engine.log().count("brings nothing")
    assert_same(engine.generate([marked])[0], wanted)
    assert engine.log().count("brings nothing") == failures + 1
    until("the stores to end", lambda: settled(server))
    engine.evict()
    found = engine.generate([marked])[0]
    assert found.cached_tokens == whole_chunks(LENGTH)
    assert_same(found, wanted)
