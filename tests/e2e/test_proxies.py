"""Other people's proxies between two real engines: each conversation of tests/rigs/proxies.py.

The second engine says what it says alone, and loads what the first one computed.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.checks import assert_same, prompt, settled, whole_chunks
from tests.e2e.engine import ONE_PROCESS, Engine
from tests.process.checked import CheckedServer
from tests.process.harness import Server, until
from tests.rigs.proxies import PROXIES

pytestmark = pytest.mark.long

LENGTH = 900
STEP_TOKENS = 64
"""So small that the prompt takes the first engine many steps."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server that is patient with an engine on an overloaded machine."""
    with CheckedServer(arena_bytes=256 << 20, pledge_patience_ms=60_000) as running:
        yield running


@pytest.fixture(scope="module")
def pair(models: Path, server: Server) -> Iterator[tuple[Engine, Engine]]:
    connector: dict[str, object] = {"await_producer_ms": 30_000, "await_wait_ms": 60_000}
    options: dict[str, object] = {"block_size": 32, "max_num_batched_tokens": STEP_TOKENS, **ONE_PROCESS}
    first, second = (Engine(models / "llama", server.path, connector=connector, **options) for _ in range(2))
    with first, second:  # they start at once
        for each in (first, second):
            each.generate([prompt(90, 40)], tokens=1)  # after this the scheduler knows the namespace
        assert server.status().caches == 2
        yield first, second


def loaded(engine: Engine) -> float:
    """Tokens that the engine has loaded so far. Its answers count what the first engine had cached instead."""
    metrics: dict[str, float] = engine.call("metrics")
    return metrics.get("vllm:kvserver_tokens_retrieved", 0)


@pytest.mark.parametrize(("seed", "name"), enumerate(PROXIES), ids=PROXIES)
def test_the_second_engine_loads_what_the_first_computed_and_says_what_it_says_alone(
    seed: int, name: str, pair: tuple[Engine, Engine], server: Server
) -> None:
    (first, second), proxy, tokens = pair, PROXIES[name], prompt(seed, LENGTH)
    wanted = second.generate([tokens], cache_salt="alone")[0]
    before = loaded(second)
    if proxy.at_once:
        second.begin([tokens], kv_transfer_params=proxy.second(None))
        first.call("compute", tokens, proxy.first)
        found = second.end()[0]
    else:
        told = first.call("compute", tokens, proxy.first)
        if proxy.first is None:  # its second engine waits for nobody
            until("the stores to end", lambda: settled(server))
        found = second.generate([tokens], kv_transfer_params=proxy.second(told))[0]
    assert_same(found, wanted)
    assert loaded(second) - before == whole_chunks(LENGTH)
    until("the server to be at rest", lambda: settled(server) and not server.status().pledges)
