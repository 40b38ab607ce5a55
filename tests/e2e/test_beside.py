"""Per-block state of attention layers that vLLM does not register: no block comes back without it."""

from pathlib import Path

import pytest

from tests.e2e.checks import assert_same, prompt, settled, whole_chunks
from tests.e2e.engine import ONE_PROCESS, Engine, transfer_config
from tests.process.harness import Server, until

pytestmark = pytest.mark.long

LENGTH = 600


def engine(server: Server, models: Path, name: str) -> Engine:
    """An engine with a connector of beside.py."""
    transfer = {**transfer_config(server.path, {}), "kv_connector": name}
    options = {**ONE_PROCESS, "kv_transfer_config": {**transfer, "kv_connector_module_path": "tests.e2e.beside"}}
    return Engine(models / "llama", server.path, block_size=32, **options)


def test_an_engine_that_keeps_more_from_the_start_does_not_start(server: Server, models: Path) -> None:
    with (
        pytest.raises(AssertionError, match=r"layer model.layers.3\S* keeps impl.more of shape \(\d+, 3\)"),
        engine(server, models, "KeepsMoreFromTheStart"),
    ):
        pass


def test_one_that_keeps_more_later_goes_on_without_a_cache_and_has_stored_nothing(server: Server, models: Path) -> None:
    with engine(server, models, "KeepsMoreLater") as running:
        wanted = running.generate([prompt(1, LENGTH)])[0]
        running.evict()
        again = running.generate([prompt(1, LENGTH)])[0]
        assert_same(again, wanted)
        assert again.cached_tokens == 0
        assert server.status().chunks == 0
        assert running.log().count("no cache from now on: layout: layer model.layers.3") == 1


def test_an_engine_whose_scales_come_with_the_first_forward_caches_from_then_on(server: Server, models: Path) -> None:
    until("the engines before to be gone", lambda: server.status().caches == 0)
    with engine(server, models, "HasScalesLater") as running:
        assert server.status().caches == 0
        wanted = running.generate([prompt(1, LENGTH)])[0]
        until("the cache to be registered", lambda: server.status().caches == 1)
        running.evict()
        running.generate([prompt(1, LENGTH)])
        until("the stores to end", lambda: settled(server))
        running.evict()
        found = running.generate([prompt(1, LENGTH)])[0]
        assert_same(found, wanted)
        assert found.cached_tokens == whole_chunks(LENGTH)
