"""Retrieves from disk in parts: every byte is right, also when one of the parts fails."""

from pathlib import Path

import pytest

from tests.process.disk.scene import ALL, CHUNKS, PROMPTS, SHAPE, bring_back, disk_ready, small, store_slowly
from tests.process.engine import Engine, Prompt
from tests.process.harness import kill, stop, until


@pytest.fixture(autouse=True)
def chunk_by_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvclient.memory.blocks.STREAMED_BYTES", 1)


def test_every_byte_comes_in_parts(tmp_path: Path, stories: list[Prompt]) -> None:
    with small(tmp_path) as server, Engine(server.path, SHAPE) as engine:
        disk_ready(server)
        engine.ready()
        store_slowly(server, engine, stories)
        assert bring_back(engine, stories) == ALL
        assert engine.pool.wrong() == 0
        status = server.status()
        assert status.counters["retrieves"] > PROMPTS * (CHUNKS - 1), "in parts, but for what was in DRAM"
        assert status.leases == 0


def test_parts_that_wait_end_with_the_disk_mover_and_leave_nothing(tmp_path: Path, stories: list[Prompt]) -> None:
    with small(tmp_path) as server, Engine(server.path, SHAPE) as engine:
        disk_ready(server)
        engine.ready()
        store_slowly(server, engine, stories)
        stop(server.disk_mover_pid())
        lease = until("a lease", lambda: engine.lookup(stories[0]).lease)
        assert lease.chunks_on_disk == CHUNKS
        future = engine.begin_retrieve(lease, engine.place(stories[0]))
        until("the first parts to wait", lambda: server.status().counters["retrieves"] > 0)
        kill(server.disk_mover_pid())
        assert future.result(20).why == "disk-lost"
        disk_ready(server)
        engine.ready()
        assert bring_back(engine, stories) == ALL
        assert engine.pool.wrong() == 0
