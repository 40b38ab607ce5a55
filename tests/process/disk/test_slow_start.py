"""A disk tier whose devices open slowly because a large store is preallocated or its headers are read.

Meanwhile the server answers and serves from DRAM; it takes the tier in when it is open."""

import os
from pathlib import Path

import pytest

from kvclient import Found
from tests.process.disk.scene import CHUNKS, SHAPE, bring_back, disk_ready, small, store_slowly
from tests.process.engine import Engine, prompt
from tests.process.harness import Server, is_gone, resume, state_of, until

HALTED = Path(__file__).parent / "halted"
STORES = ["kvserver.headers", "kvserver.notes", "kvserver.store"]
START_MS = 2000


@pytest.fixture
def halt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes disk movers stop themselves before they open anything, as long as this file exists."""
    file = tmp_path / "halt"
    file.touch()
    monkeypatch.setenv("HALT_DISK_MOVERS", str(file))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HALTED), os.environ.get("PYTHONPATH", "")]))
    return file


def halted_mover(server: Server) -> int:
    """Pid of the stopped mover. One that does not stop in time is replaced, so the pid is asked for each time."""
    return until(
        "the disk's mover to stop", lambda: (mover := server.disk_mover_pid_now()) and state_of(mover) == "T" and mover
    )


def test_a_server_serves_from_dram_while_its_disk_is_opened(tmp_path: Path, halt: Path) -> None:
    story, disk = prompt(1, chunks=CHUNKS), tmp_path / "disk"
    disk.mkdir()
    with small(disk) as server:
        mover = halted_mover(server)
        assert server.status().disk_state == "away"
        with Engine(server.path, SHAPE) as engine:
            engine.ready()
            assert engine.store(story).chunks == CHUNKS
            assert bring_back(engine, [story]) == CHUNKS
            assert engine.pool.wrong() == 0
        assert (list(disk.iterdir()), server.status().chunks_on_disk) == ([], 0)
        resume(mover)
        disk_ready(server)
        until("what was stored meanwhile to be on disk", lambda: server.status().chunks_on_disk == CHUNKS)


def test_lookups_say_so_while_the_disk_that_may_hold_the_rest_is_opened(tmp_path: Path, halt: Path) -> None:
    story, disk = prompt(1, chunks=CHUNKS), tmp_path / "disk"
    disk.mkdir()
    halt.unlink()
    with small(disk) as server, Engine(server.path, SHAPE) as engine:
        engine.ready()
        store_slowly(server, engine, [story])
    halt.touch()
    with small(disk) as server:
        mover = halted_mover(server)
        with Engine(server.path, SHAPE) as engine:
            engine.ready()
            assert engine.lookup(story) == Found(0, None, "recovering")
            assert engine.client.counters.lookups_unserved == 1
            resume(mover)
            disk_ready(server)
            assert bring_back(engine, [story]) == CHUNKS
            assert engine.pool.wrong() == 0
            assert engine.lookup(prompt(2, chunks=CHUNKS)) == Found(0, None, "")


def test_a_disk_that_does_not_open_in_time_is_tried_again(tmp_path: Path, halt: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    with small(disk, mover_start_ms=START_MS) as server:
        first = halted_mover(server)
        halt.unlink()
        until("the mover to be given up", lambda: is_gone(first))
        disk_ready(server)
        assert server.disk_mover_pid() != first
        until(
            "the store and its first note to be there", lambda: sorted(path.name for path in disk.iterdir()) == STORES
        )
