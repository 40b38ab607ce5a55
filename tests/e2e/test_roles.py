"""One server and two engines: a consumer loads what a producer computes, and neither does more.

Two engines with both roles find each other's chunks.
"""

from pathlib import Path

import pytest

from tests.e2e.checks import assert_same, prompt, settled, whole_chunks
from tests.e2e.engine import ONE_PROCESS, Engine, transfer_config
from tests.process.harness import Server, until

pytestmark = pytest.mark.long

LENGTH = 900


def engine_with(role: str, models: Path, server: Server) -> Engine:
    config = {**transfer_config(server.path, {}), "kv_role": role}
    return Engine(models / "llama", server.path, block_size=32, kv_transfer_config=config, **ONE_PROCESS)


def count(engine: Engine, name: str) -> float:
    return float(engine.call("metrics")[f"vllm:kvserver_{name}"])


def test_what_a_producer_stores_a_consumer_loads(models: Path, server: Server) -> None:
    with engine_with("kv_producer", models, server) as producer:
        producer.generate([prompt(90, 40)], tokens=1)  # after this the scheduler knows the namespace
        wanted = producer.generate([prompt(1, LENGTH)])[0]
        until("the prompt to be stored", lambda: server.status().chunks >= whole_chunks(LENGTH) // 256)
        until("the stores to end", lambda: settled(server))
        producer.evict()
        assert producer.generate([prompt(1, LENGTH)], tokens=1)[0].cached_tokens == 0
        assert count(producer, "tokens_retrieved") == 0
        chunks = server.status().chunks
        with engine_with("kv_consumer", models, server) as consumer:
            consumer.generate([prompt(90, 40)], tokens=1)
            assert server.status().caches == 2
            found = consumer.generate([prompt(1, LENGTH)])[0]
            assert found.cached_tokens == count(consumer, "tokens_retrieved") == whole_chunks(LENGTH)
            assert_same(found, wanted)
            assert consumer.generate([prompt(2, LENGTH)])[0].cached_tokens == 0
            until("the server to be at rest", lambda: settled(server))
            assert (count(consumer, "stores"), server.status().chunks) == (0, chunks)


def test_two_engines_at_once_find_what_each_other_computes(models: Path, server: Server) -> None:
    seeds = (11, 12)
    with engine_with("kv_both", models, server) as one, engine_with("kv_both", models, server) as other:
        engines = (one, other)
        for engine in engines:
            engine.generate([prompt(90, 40)], tokens=1)
        assert server.status().caches == 2
        for engine, seed in zip(engines, seeds, strict=True):
            engine.begin([prompt(seed, LENGTH)])
        computed = [engine.end()[0] for engine in engines]
        assert [answer.cached_tokens for answer in computed] == [0, 0]
        until("the stores to end", lambda: server.status().chunks and settled(server))
        for engine, seed in zip(engines, reversed(seeds), strict=True):
            engine.begin([prompt(seed, LENGTH)])
        found = [engine.end()[0] for engine in engines]
        for answer, wanted in zip(found, reversed(computed), strict=True):
            assert answer.cached_tokens == whole_chunks(LENGTH)
            assert_same(answer, wanted)
        until("the server to be at rest", lambda: settled(server))
