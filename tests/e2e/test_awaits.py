"""Two engines that get one long prompt: the second one waits for what the first one computes, and says the same.

Each waits for others by itself, or because a proxy for prefill and decode says so.
"""

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.checks import assert_same, prompt, settled, whole_chunks
from tests.e2e.engine import ONE_PROCESS, Engine
from tests.process.checked import CheckedServer
from tests.process.harness import Server, until

pytestmark = pytest.mark.long

LENGTH = 1900
STEP_TOKENS = 64
"""So small that the prompt takes the producer thirty steps."""


TO_COMPUTE = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}
"""As vLLM's own proxies send it to the engine that computes."""
TO_GO_ON = {"do_remote_prefill": True, "do_remote_decode": False}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server that tells each part of a load in its log, and is patient with a producer on an overloaded machine."""
    with CheckedServer(arena_bytes=256 << 20, log_level="debug", pledge_patience_ms=60_000) as running:
        yield running


def engine(models: Path, server: Server, **others: object) -> Engine:
    connector = {"await_producer_ms": 30_000, "await_wait_ms": 60_000, **others}
    sizes: dict[str, object] = {"block_size": 32, "max_num_batched_tokens": STEP_TOKENS, "enable_chunked_prefill": True}
    return Engine(models / "llama", server.path, connector=connector, **sizes, **ONE_PROCESS)


def begun(producer: Engine, other: Engine, server: Server, seed: int) -> None:
    """Both engines get one prompt, the second one when the first has pledged it."""
    producer.begin([prompt(seed, LENGTH)])
    until("the pledge", lambda: server.status().pledges)
    other.begin([prompt(seed, LENGTH)])


def counted(server: Server, name: str) -> int:
    value = server.status().counters[name]
    assert isinstance(value, int)
    return value


def test_a_prompt_that_two_engines_get_at_once_is_computed_once_or_by_whoever_is_left(
    models: Path, server: Server
) -> None:
    on: dict[str, object] = {"await_others": "on"}
    with engine(models, server, **on) as producer, engine(models, server, **on) as other:
        for each in (producer, other):
            each.generate([prompt(90, 40)], tokens=1)  # after this the scheduler knows the namespace
        assert server.status().caches == 2

        before = len(server.log())
        begun(producer, other, server, seed=1)
        wanted, found = producer.end()[0], other.end()[0]
        assert wanted.cached_tokens == 0
        assert found.cached_tokens == whole_chunks(LENGTH)
        assert_same(found, wanted)
        assert counted(server, "chunks_awaited") > 0
        until("the server to be at rest", lambda: settled(server))
        ended = re.findall(r" (store|retrieve) .*status=done", server.log()[before:])
        assert ended.count("retrieve") >= LENGTH // 256 - 1, "chunk by chunk"
        last_store = len(ended) - 1 - ended[::-1].index("store")
        assert ended.index("retrieve") < last_store, "the first chunk was loaded before the last one was stored"

        alone = other.generate([prompt(2, LENGTH)])[0]
        other.evict()
        assert alone.cached_tokens == 0
        until("the stores to end", lambda: settled(server))
        begun(producer, other, server, seed=3)
        producer.process.send_signal(signal.SIGKILL)
        survived = other.end()[0]
        again = other.generate([prompt(3, LENGTH)])[0]
        assert_same(again, survived)
        assert f"loaded={whole_chunks(LENGTH)}" in other.log()
        assert "why=not-coming" in other.log(), "it was told of the death"
        until("the server to be at rest", lambda: settled(server) and not server.status().pledges)


def test_a_proxy_may_send_both_requests_at_once_or_one_after_the_other_or_nonsense(
    models: Path, server: Server
) -> None:
    without_blocks: dict[str, object] = {"await_blocks_percent": 0}
    with engine(models, server, **without_blocks) as producer, engine(models, server, **without_blocks) as consumer:
        for each in (producer, consumer):
            each.generate([prompt(90, 40)], tokens=1)
        pledged = counted(server, "chunks_pledged")
        alone = [consumer.generate([prompt(seed, LENGTH)], cache_salt="alone")[0] for seed in (5, 6)]
        assert counted(server, "chunks_pledged") == pledged, "no proxy, no pledge"

        asked = counted(server, "lookups")
        consumer.begin([prompt(5, LENGTH)], kv_transfer_params=TO_GO_ON)
        until("the consumer to ask more than once", lambda: counted(server, "lookups") > asked + 2)
        told = producer.call("compute", prompt(5, LENGTH), TO_COMPUTE)
        found = consumer.end()[0]
        assert_same(found, alone[0])
        assert found.cached_tokens == whole_chunks(LENGTH)
        assert counted(server, "chunks_pledged") == pledged + LENGTH // 256

        told = producer.call("compute", prompt(6, LENGTH), TO_COMPUTE)
        assert told["do_remote_prefill"]
        assert all(isinstance(block, int) for block in told["remote_block_ids"][0])
        retrieved = counted(server, "retrieves")
        assert_same(consumer.generate([prompt(6, LENGTH)], kv_transfer_params=told)[0], alone[1])
        assert counted(server, "retrieves") > retrieved
        until("the server to be at rest", lambda: settled(server) and not server.status().pledges)

        wrong = {"do_remote_prefill": True, "do_remote_decode": True}
        assert consumer.generate([prompt(7, LENGTH)], tokens=1, kv_transfer_params=wrong)[0].cached_tokens == 0
        assert "exclude each other" in consumer.log()
