"""Prefill and decode beside NIXL, in MultiConnector: vLLM's NixlConnector brings the blocks, ours stores and finds.

NIXL is no dependency. Without its package every test here is skipped: `pip install --no-deps nixl nixl-cu12`. On a CPU
it copies with UCX, over shared memory and loopback.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.checks import assert_same, prompt, settled, whole_chunks
from tests.e2e.engine import ONE_PROCESS, Engine, transfer_config
from tests.process.harness import Server, free_port, until
from tests.rigs.proxies import PROXIES

pytestmark = pytest.mark.long
pytest.importorskip("nixl", reason="NIXL is not installed")

LENGTH = 900
TOY = PROXIES["vllm-toy"]
CONNECTORS = ("MultiConnector", "NixlConnector")
RETRIEVED = "vllm:kvserver_tokens_retrieved"
COMPUTED = "vllm:prompt_tokens_by_source:local_compute"


def engine(models: Path, server: Server) -> Engine:
    outer, nixl = (
        {
            "kv_connector": name,
            "kv_role": "kv_both",
            "kv_buffer_device": "cpu",
            "kv_load_failure_policy": "recompute",
        }
        for name in CONNECTORS
    )
    both = outer | {"kv_connector_extra_config": {"connectors": [nixl, transfer_config(server.path, {})]}}
    environment = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
    sizes: dict[str, object] = {"block_size": 32, "kv_transfer_config": both}
    return Engine(models / "llama", server.path, environment=environment, **sizes, **ONE_PROCESS)


@pytest.fixture(scope="module")
def pair(models: Path, server: Server) -> Iterator[tuple[Engine, Engine]]:
    first, second = engine(models, server), engine(models, server)  # they start at once
    with first, second:
        for each in (first, second):
            each.generate([prompt(90, 40)], tokens=1)  # after this the scheduler knows the namespace
        assert server.status().caches == 2
        yield first, second


def test_nixl_brings_the_prompt_and_ours_stores_it_and_brings_it_back(
    pair: tuple[Engine, Engine], server: Server
) -> None:
    first, second = pair
    wanted = second.generate([prompt(1, LENGTH)], cache_salt="alone")[0]
    until("the stores to end", lambda: settled(server))
    chunks = server.status().chunks
    told = first.call("compute", prompt(1, LENGTH), TOY.first)
    assert (told["do_remote_prefill"], told["remote_num_tokens"]) == (True, LENGTH)
    before = second.call("metrics")[COMPUTED]
    found = second.generate([prompt(1, LENGTH)], kv_transfer_params=TOY.second(told))[0]
    assert_same(found, wanted)
    assert second.call("metrics")[COMPUTED] - before <= 1, "it brought the tail too"
    assert second.call("metrics").get(RETRIEVED, 0) == 0
    until("the stores to end", lambda: settled(server))
    assert server.status().chunks == chunks + LENGTH // 256, "the first engine stored it once, and the second not again"

    for each in pair:
        before = each.call("metrics").get(RETRIEVED, 0)
        each.evict()
        again = each.generate([prompt(1, LENGTH)])[0]
        assert_same(again, wanted)
        assert again.cached_tokens == whole_chunks(LENGTH)
        assert each.call("metrics")[RETRIEVED] - before == whole_chunks(LENGTH)


def test_a_prompt_goes_on_that_a_dead_engine_has_computed(pair: tuple[Engine, Engine], server: Server) -> None:
    """The last test here: the first engine does not come back."""
    first, second = pair
    wanted = [second.generate([prompt(seed, LENGTH)], cache_salt="alone")[0] for seed in (2, 3)]
    told = [first.call("compute", prompt(seed, LENGTH), TOY.first) for seed in (2, 3)]
    until("the stores to end", lambda: settled(server))
    first.kill()
    assert_same(second.generate([prompt(2, LENGTH)], kv_transfer_params=told[0])[0], wanted[0])
    found = second.generate([prompt(3, LENGTH)])[0]
    assert_same(found, wanted[1])
    assert found.cached_tokens == whole_chunks(LENGTH), "ours has what the dead one stored"
    until("the server to be at rest", lambda: settled(server))
