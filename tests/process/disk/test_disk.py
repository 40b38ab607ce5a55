"""A server with a disk tier, seen from outside: evicted chunks come back, also after the whole server was killed."""

import subprocess
import sys
from pathlib import Path

from kvserver.movers.disk_hits import HitCounts, Hits
from tests.process.disk.scene import ALL, SHAPE, bring_back, disk_ready, small, store_slowly
from tests.process.engine import Engine, Prompt
from tests.process.harness import WAIT_S, Server, kill, until


class CountedSoon(Server):
    """A server whose disk mover saves its read counts twice a second."""

    PROGRAM = ("-m", "tests.process.disk.frequent_hit_counts")


def said_of(directory: Path, what: str, *, status: int) -> str:
    """The output of `kvserver disk` for a directory."""
    flags = f"--disk-paths={directory}", "--disk-bytes=16MiB", "--disk-segment-bytes=512KiB"
    command = [sys.executable, "-m", "kvserver", "disk", *flags, what]
    run = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S + 20, check=False)
    assert run.returncode == status, run.stderr
    return run.stdout + run.stderr


def test_what_left_dram_comes_back_from_disk(tmp_path: Path, stories: list[Prompt]) -> None:
    with small(tmp_path) as server, Engine(server.path, SHAPE) as engine:
        disk_ready(server)
        engine.ready()
        store_slowly(server, engine, stories)
        assert bring_back(engine, stories) == ALL
        assert engine.pool.wrong() == 0
        counters = server.status().counters
        assert counters["disk_reads"] > 0
        assert counters["disk_faults"] == dict.fromkeys(counters["disk_faults"], 0)


def test_a_device_tells_how_often_it_was_read_also_in_earlier_lives_of_the_server(
    tmp_path: Path, stories: list[Prompt]
) -> None:
    reads = 0
    for life in range(2):
        with small(tmp_path, kind=CountedSoon) as server, Engine(server.path, SHAPE) as engine:
            disk_ready(server)
            engine.ready()
            if not life:
                store_slowly(server, engine, stories)
            assert bring_back(engine, stories) == ALL
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
    assert f"{ALL} right" in said_of(tmp_path, "verify", status=0)
    assert f"{ALL} chunks" in said_of(tmp_path, "inspect", status=0)
    with small(tmp_path) as server, Engine(server.path, SHAPE) as engine:
        status = disk_ready(server)
        assert status.chunks_on_disk == ALL
        engine.ready()
        assert bring_back(engine, stories) == ALL
        assert engine.pool.wrong() == 0


def test_the_disk_mover_dies_and_comes_back(tmp_path: Path, stories: list[Prompt]) -> None:
    with small(tmp_path) as server, Engine(server.path, SHAPE) as engine:
        disk_ready(server)
        engine.ready()
        store_slowly(server, engine, stories)
        kill(server.disk_mover_pid())
        until("another disk mover", lambda: server.status().counters["mover_restarts"] == 1)
        disk_ready(server)
        assert bring_back(engine, stories) == ALL
        assert engine.pool.wrong() == 0
