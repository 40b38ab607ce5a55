"""A bit flips in a chunk that nobody asks for. Within seconds the chunk is gone, and the log says so."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvserver.config.config import SUPERBLOCKS_BYTES
from kvserver.supervisor.arena_files import ARENA
from kvserver.transfer.native import DiskStore
from tests.process.disk.scene import (
    ALL,
    CHUNKS,
    SHAPE,
    bring_back,
    disk_ready,
    served,
    small,
    store_slowly,
    the_stories,
)
from tests.process.engine import Engine, Prompt, prompt
from tests.process.harness import Server, kill, until

RATE = 64 << 20
KEPT = {"arena_bytes": 8 << 20, "chunks_max": 100}
"""For an arena in `memory`. With the default of chunks_max each brain would read a ledger of 538 MiB there."""
STORY = prompt(7, chunks=CHUNKS)


@pytest.fixture
def memory() -> Iterator[Path]:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm")
    made = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="kvserver-test-"))
    yield made
    shutil.rmtree(made)


def flip(path: Path, at: int) -> None:
    """Flips a bit of the first byte from there on that is not zero."""
    with path.open("r+b") as file:
        file.seek(at)
        content = file.read()
        at_it = len(content) - len(content.lstrip(b"\0"))
        file.seek(at + at_it)
        file.write(bytes([content[at_it] ^ 16]))


def arena_file(memory: Path) -> Path:
    (path,) = memory.glob(f"{ARENA}.*")
    return path


def mismatches(server: Server) -> list[str]:
    return [line for line in server.log().splitlines() if "digest mismatch" in line]


def stored(server: Server, story: Prompt = STORY) -> Engine:
    engine = Engine(server.path, SHAPE)
    engine.ready()
    assert engine.store(story).chunks == CHUNKS
    return engine


def scrubbed_bytes(server: Server, tier: str) -> int:
    counted = server.status().counters["scrubbed_bytes"]
    assert isinstance(counted, dict)
    return counted[tier]


def is_found_in_dram(server: Server) -> None:
    """The mismatch is told, and the chunk and what continues it are gone."""
    (line,) = until("the mismatch", lambda: mismatches(server))
    assert "tier=dram" in line
    assert "mode=scrub" in line
    until("it to be dropped", lambda: server.status().chunks < CHUNKS)


def test_a_bit_that_flips_in_dram_is_found_by_the_mover_of_the_host(memory: Path) -> None:
    with Server(arena_path=memory, scrub_bytes_per_s=RATE, **KEPT) as server, stored(server) as engine:
        until("a round", lambda: scrubbed_bytes(server, "dram") >= 2 * CHUNKS * SHAPE.slot_bytes())
        assert server.status().chunks == CHUNKS
        flip(arena_file(memory), 0)
        is_found_in_dram(server)
        assert engine.lookup(STORY).chunks < CHUNKS


def test_a_bit_that_flips_in_dram_is_found_by_the_mover_of_the_disks(memory: Path, tmp_path: Path) -> None:
    """No engine is there."""
    settings = {"arena_path": memory, "disk_write_policy": "evict", **KEPT}
    with small(tmp_path, **settings) as server, stored(server):
        pass
    flip(arena_file(memory), 0)
    with small(tmp_path, **settings, scrub_bytes_per_s=RATE) as server:
        is_found_in_dram(server)


def test_a_bit_that_flips_on_a_disk_is_found(tmp_path: Path) -> None:
    with small(tmp_path) as server:
        disk_ready(server)
        with stored(server):
            until("it to be on disk", lambda: server.status().chunks_on_disk == CHUNKS)
    flip(tmp_path / DiskStore.FILE, SUPERBLOCKS_BYTES)
    with small(tmp_path, scrub_bytes_per_s=RATE) as server:
        (line,) = until("the mismatch", lambda: mismatches(server))
        assert "tier=disk" in line
        assert "mode=scrub" in line
        until("it to be dropped", lambda: server.status().chunks_on_disk < CHUNKS)
        status = server.status()
        assert status.arena.used_bytes == 0, "nothing was brought to DRAM"
        assert status.counters["disk_lost"] == 1


@pytest.mark.parametrize("victim", ["brain", "mover", "disk mover"])
def test_what_is_right_stays_whoever_dies_beside_it(tmp_path: Path, victim: str) -> None:
    """At full speed, so that something is being read at every instant."""
    with small(tmp_path, arena_bytes=8 << 20, scrub_bytes_per_s=32 << 30) as server:
        disk_ready(server)
        stories = the_stories()
        with Engine(server.path, SHAPE) as engine:
            engine.ready()
            store_slowly(server, engine, stories)
            assert bring_back(engine, stories) == ALL
            pids = {"brain": server.brain_pid, "mover": server.mover_pid, "disk mover": server.disk_mover_pid}
            kill(pids[victim]())
        before = {tier: scrubbed_bytes(server, tier) for tier in ("dram", "disk")}
        until("a disk mover", server.disk_mover_pid_now)
        disk_ready(server)
        assert served(server, stories) == ALL
        until("more to be read", lambda: all(scrubbed_bytes(server, tier) > before[tier] for tier in before))
        assert not mismatches(server)
        assert server.status().counters["disk_lost"] == 0
