"""The copy engine's workers run next to each other on different processors, and only on allowed ones."""

import os
from contextlib import suppress
from pathlib import Path

import pytest

from tests.rigs.native_rig import BIG, BIG_POOL, Memory, all_big, rig, until

WORKERS = 3


def workers() -> list[int]:
    found = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            if (task / "comm").read_text().startswith("kv-copy-"):
                found.append(int(task.name))
    return found


@pytest.mark.parametrize("processors", [1, 2])
def test_workers_that_move_apart_keep_the_affinity_that_somebody_gave_them(processors: int) -> None:
    until(lambda: not workers())  # of the test before: a thread that was joined may still be listed
    everywhere = os.sched_getaffinity(0)
    allowed = set(sorted(everywhere)[:processors])
    with rig(BIG_POOL, WORKERS) as session:
        pool = Memory(BIG_POOL)
        pool.fill(3)
        session.map(1, [BIG], [pool])
        for worker in workers():
            os.sched_setaffinity(worker, allowed)
        for _ in range(7):
            assert session.run("store", 1, all_big())[1] == "done"
        assert [os.sched_getaffinity(worker) for worker in workers()] == [allowed] * WORKERS
        assert session.arena.view[:] == pool.view[:]
        pool.close()
    assert os.sched_getaffinity(0) == everywhere
