"""The KV cache's memory is given back and made anew, as vLLM 0.33 does on GPUs around a sleep.

On CPUs vLLM keeps the memory, so these tests call the hooks themselves.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.checks import assert_same, prompt, settled, whole_chunks
from tests.e2e.engine import ONE_PROCESS, Answer, Engine
from tests.process.harness import Server, is_gone, maps, until

LENGTH = 900
TOKENS = 8


@pytest.fixture(scope="module")
def engine(models: Path, server: Server) -> Iterator[Engine]:
    with Engine(models / "llama", server.path, block_size=32, **ONE_PROCESS) as running:
        yield running


def ask(engine: Engine) -> Answer:
    return engine.generate([prompt(1, LENGTH)], tokens=TOKENS)[0]


def test_memory_that_is_given_back_is_let_go_and_the_prefix_is_found_behind_it(engine: Engine, server: Server) -> None:
    until("the cache to be registered", lambda: server.status().caches == 1)
    wanted = ask(engine)
    until("the prompt to be stored", lambda: server.status().chunks >= LENGTH // 256 and settled(server))
    mover = server.mover_pid()
    assert maps(mover, "kvserver-pool")
    engine.evict()
    for _ in range(2):  # vLLM may call each hook twice
        engine.call("tell_connector", "unregister_kv_caches")
    assert server.status().caches == 0
    assert is_gone(mover) or not maps(mover, "kvserver-pool")
    assert_same(ask(engine), wanted)
    engine.evict()
    for _ in range(2):
        engine.call("tell_connector", "restore_kv_caches")
    until("the cache to be registered anew", lambda: server.status().caches == 1)
    found = ask(engine)
    assert found.cached_tokens == whole_chunks(LENGTH)
    assert_same(found, wanted)
    until("the server to be at rest", lambda: settled(server))
