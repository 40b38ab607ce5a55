"""One of two ranks or pipeline stages is killed: vLLM ends the engine, and the server frees what both ranks held.

A new engine then finds the stored chunks, with the same tokens. The mover is stopped when the rank is killed, so the
job is in flight, on this rank and on the other.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.cases import STAGES
from tests.e2e.checks import assert_same, prompt, settled, whole_chunks
from tests.e2e.engine import POOL, Engine
from tests.process.harness import (
    OBSERVER_SESSIONS,
    Server,
    command_of,
    is_gone,
    kill,
    maps,
    pids_below,
    resume,
    stop,
    until,
)

pytestmark = pytest.mark.long

RANKS = 2
LENGTH = 900
TOKENS = 8
ENDS_S = 60.0
"""vLLM polls for ended workers, tells the remaining ones, and waits for them."""

Running = Callable[[], Engine]


@pytest.fixture(scope="module", params=["ranks", "stages"])
def running(request: pytest.FixtureRequest, models: Path, server: Server) -> Iterator[Running]:
    """Returns the live engine, or starts another."""
    engines: list[Engine] = []
    ranks: dict[str, object] = {"block_size": 32, "tensor_parallel_size": RANKS}
    options = STAGES if request.param == "stages" else ranks

    def engine() -> Engine:
        if engines and not ranks_of(engines[-1]):
            engines.pop().close()
        if not engines:
            engines.append(Engine(models / "llama", server.path, **options))
            engines[-1].wait_started()
            until("both ranks to be registered", lambda: server.status().caches == RANKS)
        return engines[-1]

    yield engine
    for left in engines:
        left.close()


def ranks_of(engine: Engine) -> list[int]:
    """Pids of its live workers, by rank."""
    below = [pid for child in pids_below(engine.process.pid) for pid in pids_below(child)]
    found = {command_of(pid): pid for pid in below if "Worker" in command_of(pid) and not is_gone(pid)}
    return [found[name] for name in sorted(found)]


def kill_a_rank(engine: Engine, rank: int, server: Server) -> None:
    """Kills a rank while the stopped mover has a job of it. Returns when the server holds nothing of any rank."""
    workers, mover = ranks_of(engine), server.mover_pid()
    assert len(workers) == RANKS
    assert maps(mover, POOL)
    kill(workers[rank])
    with pytest.raises(AssertionError, match="EngineDead"):
        engine.end()
    until("the other rank to end", lambda: all(map(is_gone, workers)), ENDS_S)
    resume(mover)  # unless the server has killed it meanwhile
    until("the ranks' memory to be let go", lambda: is_rid_of_all(server))
    until("the server to be at rest", lambda: settled(server))


def is_rid_of_all(server: Server) -> bool:
    status, mover = server.status(), server.mover_pid_now()
    has_gone = status.caches == 0 and status.sessions <= OBSERVER_SESSIONS
    return has_gone and not (mover and maps(mover, POOL))


def test_a_rank_that_is_killed_within_a_load_leaves_nothing_behind(running: Running, server: Server) -> None:
    engine, before = running(), server.status().chunks
    wanted = engine.generate([prompt(1, LENGTH)], tokens=TOKENS)[0]
    assert wanted.cached_tokens == 0
    until("the prompt to be stored", lambda: server.status().chunks == before + LENGTH // 256 and settled(server))
    engine.evict()
    stop(server.mover_pid())
    engine.begin([prompt(1, LENGTH)], tokens=TOKENS)
    until("the load of both ranks to be under way", lambda: server.status().retrieves >= 1)
    kill_a_rank(engine, 1, server)
    found = running().generate([prompt(1, LENGTH)], tokens=TOKENS)[0]
    assert found.cached_tokens == whole_chunks(LENGTH)
    assert_same(found, wanted)


def test_a_rank_that_is_killed_within_a_store_leaves_nothing_behind(running: Running, server: Server) -> None:
    """No chunk is found if one rank's part was not stored."""
    engine = running()
    first = engine.generate([prompt(1, LENGTH)], tokens=TOKENS, cache_salt="first")[0]
    wanted = engine.generate([prompt(2, LENGTH)], tokens=TOKENS, cache_salt="alone")[0]
    until("the stores to end", lambda: settled(server))
    chunks = server.status().chunks
    stop(server.mover_pid())
    engine.begin([prompt(2, LENGTH)], tokens=1000)
    until("the store to be under way", lambda: server.status().stores >= 1)
    kill_a_rank(engine, 0, server)
    assert server.status().chunks >= chunks
    again = running()
    computed = again.generate([prompt(2, LENGTH)], tokens=TOKENS)[0]
    assert_same(computed, wanted)
    found = again.generate([prompt(1, LENGTH)], tokens=TOKENS, cache_salt="first")[0]
    assert found.cached_tokens == whole_chunks(LENGTH)
    assert_same(found, first)
    until("the stores to end", lambda: settled(server))
    again.evict()
    found = again.generate([prompt(2, LENGTH)], tokens=TOKENS)[0]
    assert found.cached_tokens == whole_chunks(LENGTH)
    assert_same(found, wanted)
