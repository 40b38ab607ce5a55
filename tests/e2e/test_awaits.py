"""Two engines that get one long prompt: the second one waits for what the first one computes, and says the same."""

import signal
from pathlib import Path

import pytest

from tests.e2e.checks import assert_same, prompt, settled, whole_chunks
from tests.e2e.engine import ONE_PROCESS, Engine
from tests.process.harness import Server, until

pytestmark = pytest.mark.long

LENGTH = 1900
STEP_TOKENS = 64
"""So small that the prompt takes the producer thirty steps."""


def engine(models: Path, server: Server) -> Engine:
    connector: dict[str, object] = {"await_others": "on"}
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
    with engine(models, server) as producer, engine(models, server) as other:
        for each in (producer, other):
            each.generate([prompt(90, 40)], tokens=1)  # after this the scheduler knows the namespace
        assert server.status().caches == 2

        begun(producer, other, server, seed=1)
        wanted, found = producer.end()[0], other.end()[0]
        assert wanted.cached_tokens == 0
        assert found.cached_tokens == whole_chunks(LENGTH)
        assert_same(found, wanted)
        assert counted(server, "chunks_awaited") > 0
        until("the server to be at rest", lambda: settled(server))

        alone = other.generate([prompt(2, LENGTH)])[0]
        other.evict()
        assert alone.cached_tokens == 0
        until("the stores to end", lambda: settled(server))
        begun(producer, other, server, seed=3)
        producer.process.send_signal(signal.SIGKILL)
        survived = other.end()[0]
        assert survived.cached_tokens < whole_chunks(LENGTH)
        again = other.generate([prompt(3, LENGTH)])[0]
        assert_same(again, survived)
        until("the server to be at rest", lambda: settled(server) and not server.status().pledges)
