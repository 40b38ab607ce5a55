"""A server with a disk tier, seen from outside: evicted chunks come back, also after the whole server was killed."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvserver.movers.disk_hits import HitCounts, Hits
from kvserver.wire.status import Status
from tests.process.engine import Engine, Group, Prompt, Shape, prompt
from tests.process.harness import WAIT_S, Server, kill, until

SHAPE = Shape(groups=(Group(block_tokens=4, blocks=47, regions=3, page_bytes=9001),))
CHUNKS = 5
PROMPTS = 9
"""More prompts than the arena holds."""


class CountedSoon(Server):
    """A server whose disk mover saves its read counts twice a second."""

    PROGRAM = ("-m", "tests.process.counted_soon")


def small(directory: Path, kind: type[Server] = Server, **settings: object) -> Server:
    """A server whose arena holds a few prompts and whose disk holds all."""
    return kind(
        arena_bytes=1 << 20,
        slab_bytes=256 << 10,
        disk_paths=str(directory),
        disk_bytes=16 << 20,
        disk_segment_bytes=512 << 10,
        disk_write_policy="through",
        **settings,
    )


def disk_ready(server: Server) -> Status:
    return until("the disk", lambda: status if (status := server.status()).disk_state == "ready" else None)


def store_slowly(server: Server, engine: Engine, stories: list[Prompt]) -> None:
    """Stores one prompt after the other; each is written to disk before the next takes its place in DRAM."""
    for number, story in enumerate(stories, 1):
        assert engine.store(story).chunks == story.chunks
        until("its chunks to be on disk", lambda number=number: server.status().chunks_on_disk >= number * CHUNKS)


def bring_back(engine: Engine, stories: list[Prompt]) -> int:
    """Retrieves each prompt and compares every byte; returns the chunks that came."""
    chunks = 0
    for story in stories:
        lease = until("a lease", lambda story=story: engine.lookup(story).lease)
        assert lease.chunks == story.chunks
        where = engine.ready().spare(engine.place(story))
        assert engine.begin_retrieve(lease, where).result(20).ok
        engine.pool.expect(story, where)
        chunks += lease.chunks
    return chunks


def said_of(directory: Path, what: str, *, status: int) -> str:
    """The output of `kvserver disk` for a directory."""
    flags = f"--disk-paths={directory}", "--disk-bytes=16MiB", "--disk-segment-bytes=512KiB"
    command = [sys.executable, "-m", "kvserver", "disk", *flags, what]
    run = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S + 20, check=False)
    assert run.returncode == status, run.stderr
    return run.stdout + run.stderr


@pytest.fixture
def stories() -> list[Prompt]:
    return [prompt(seed, chunks=CHUNKS) for seed in range(PROMPTS)]


def test_what_left_dram_comes_back_from_disk(tmp_path: Path, stories: list[Prompt]) -> None:
    with small(tmp_path) as server, Engine(server.path, SHAPE) as engine:
        disk_ready(server)
        engine.ready()
        store_slowly(server, engine, stories)
        assert bring_back(engine, stories) == PROMPTS * CHUNKS
        assert engine.pool.wrong() == 0
        counters = server.status().counters
        assert counters["disk_reads"] > 0
        assert counters["disk_faults"] == dict.fromkeys(counters["disk_faults"], 0)


def test_a_device_tells_how_often_it_was_read_also_in_earlier_lives_of_the_server(
    tmp_path: Path, stories: list[Prompt]
) -> None:
    reads = 0
    for life in range(2):
        with small(tmp_path, CountedSoon) as server, Engine(server.path, SHAPE) as engine:
            disk_ready(server)
            engine.ready()
            if not life:
                store_slowly(server, engine, stories)
            assert bring_back(engine, stories) == PROMPTS * CHUNKS
            count = server.status().counters["disk_reads"]
            assert isinstance(count, int)
            assert count > 0
            reads += count
            until("its counts", lambda reads=reads: [hits.chunks for hits in counted(tmp_path)] == [reads])
        said = said_of(tmp_path, "inspect", status=0)
        assert f"\n  {reads} chunks read, counted for " in said
        assert f", {reads} chunks read, the last " in said


def counted(directory: Path) -> list[Hits]:
    return list(HitCounts.load(str(directory)).by_namespace.values())


def test_a_server_that_was_killed_finds_on_disk_what_it_had(tmp_path: Path, stories: list[Prompt]) -> None:
    with small(tmp_path) as server, Engine(server.path, SHAPE) as engine:
        disk_ready(server)
        engine.ready()
        store_slowly(server, engine, stories)
        server.kill()
    assert f"{PROMPTS * CHUNKS} right" in said_of(tmp_path, "verify", status=0)
    assert f"{PROMPTS * CHUNKS} chunks" in said_of(tmp_path, "inspect", status=0)
    with small(tmp_path) as server, Engine(server.path, SHAPE) as engine:
        status = disk_ready(server)
        assert status.chunks_on_disk == PROMPTS * CHUNKS
        engine.ready()
        assert bring_back(engine, stories) == PROMPTS * CHUNKS
        assert engine.pool.wrong() == 0


def test_the_disk_mover_dies_and_comes_back(tmp_path: Path, stories: list[Prompt]) -> None:
    with small(tmp_path) as server, Engine(server.path, SHAPE) as engine:
        disk_ready(server)
        engine.ready()
        store_slowly(server, engine, stories)
        kill(server.disk_mover_pid())
        until("another disk mover", lambda: server.status().counters["mover_restarts"] == 1)
        disk_ready(server)
        assert bring_back(engine, stories) == PROMPTS * CHUNKS
        assert engine.pool.wrong() == 0


def test_a_second_server_on_one_directory_is_refused(tmp_path: Path) -> None:
    with small(tmp_path) as server:
        disk_ready(server)
        second = small(tmp_path)
        try:
            assert second.spawn().wait(WAIT_S) == 2
            assert "disk-locked" in second.log()
        finally:
            second.close()


def test_a_directory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    server = small(tmp_path / "absent")
    try:
        assert server.spawn().wait(WAIT_S) == 2
        assert "disk-path" in server.log()
    finally:
        server.close()
