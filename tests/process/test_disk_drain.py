"""Devices that come and go: drained, removed without notice, in another order, with files that changed places."""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from tests.process.engine import Engine, Prompt, prompt
from tests.process.harness import WAIT_S, Server, until
from tests.process.test_disk import CHUNKS, PROMPTS, SHAPE, bring_back, disk_ready, store_slowly

ALL = PROMPTS * CHUNKS


def small(directories: Sequence[Path], **settings: object) -> Server:
    """A server whose arena holds a few prompts, and whose devices hold all of them each."""
    return Server(
        **{
            "arena_bytes": 1 << 20,
            "slab_bytes": 256 << 10,
            "disk_paths": ",".join(map(str, directories)),
            "disk_bytes": 16 << 20,
            "disk_segment_bytes": 512 << 10,
            "disk_write_policy": "through",
            **settings,
        }
    )


def drained(server: Server, device: str, *, status: int = 0) -> str:
    """The output of `kvserver disk drain`."""
    command = [sys.executable, "-m", "kvserver", "disk", f"--socket={server.path}", "drain", device]
    run = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S + 30, check=False)
    assert run.returncode == status, run.stderr
    return run.stdout + run.stderr


def served(server: Server, stories: list[Prompt]) -> int:
    """Chunks of the prompts that come back whole, every byte compared. A missing chunk is a miss, not an error."""
    with Engine(server.path, SHAPE, name="reader") as engine:
        engine.ready()
        chunks = sum(bring_back(engine, [story]) for story in stories if is_whole(engine, story))
        assert engine.pool.wrong() == 0
        return chunks


def is_whole(engine: Engine, story: Prompt) -> bool:
    """Whether a lookup finds the whole prompt. Gives the lease back: leases on everything would fill the arena."""
    found = engine.lookup(story)
    if found.lease is not None:
        engine.client.release(found.lease)
    return found.chunks == story.chunks


def the_stories() -> list[Prompt]:
    return [prompt(seed, chunks=CHUNKS) for seed in range(PROMPTS)]


@pytest.fixture
def stories() -> list[Prompt]:
    return the_stories()


@pytest.fixture
def devices(tmp_path: Path) -> list[Path]:
    directories = [tmp_path / "a", tmp_path / "b"]
    for directory in directories:
        directory.mkdir()
    return directories


def live_in(directories: Sequence[Path]) -> None:
    """Runs a server there until all of the stories are on disk."""
    with small(directories) as server, Engine(server.path, SHAPE) as engine:
        disk_ready(server)
        engine.ready()
        store_slowly(server, engine, the_stories())


@cache
def _lived_in(count: int) -> "tempfile.TemporaryDirectory[str]":
    """Directories, `count` of them, in which one server has lived."""
    folder = tempfile.TemporaryDirectory(prefix="kv-lived-in-")
    directories = [Path(folder.name) / str(number) for number in range(count)]
    for directory in directories:
        directory.mkdir()
    live_in(directories)
    return folder


def filled(directories: Sequence[Path]) -> None:
    """Fills the directories with copies of what a server has left."""
    for number, directory in enumerate(directories):
        shutil.copytree(Path(_lived_in(len(directories)).name) / str(number), directory, dirs_exist_ok=True)


def test_a_drained_device_can_be_taken_away_and_nothing_is_lost(devices: list[Path], stories: list[Prompt]) -> None:
    (devices[1] / "not ours").write_bytes(b"stays")
    with small(devices) as server, Engine(server.path, SHAPE) as engine:
        disk_ready(server)
        engine.ready()
        store_slowly(server, engine, stories)
        said = drained(server, str(devices[1]))
        assert f"device 1 ({devices[1]}) is empty and can be taken out" in said
        status = server.status()
        assert (status.disks[1].used_bytes, status.disks[1].drain, status.chunks_on_disk) == (0, "drained", ALL)
        assert "is empty" in drained(server, "1")
        assert sorted(path.name for path in devices[1].iterdir()) == ["kvserver.drained", "not ours"]
        assert bring_back(engine, stories) == ALL
        assert engine.pool.wrong() == 0
        server.kill()
    with small(devices[:1]) as server:
        assert disk_ready(server).chunks_on_disk == ALL
        assert served(server, stories) == ALL
    with small(devices) as server:
        status = disk_ready(server)
        assert (status.disks[1].drain, status.disks[1].takes_writes) == ("drained", False)
        assert "remove kvserver.drained" in status.disks[1].problem


def test_a_drain_outlives_the_server_that_began_it(devices: list[Path], stories: list[Prompt]) -> None:
    filled(devices)
    (devices[0] / "kvserver.drained").touch()
    with small(devices) as server:
        until("the drain to end", lambda: server.status().disks[0].drain == "drained")
        assert server.status().chunks_on_disk == ALL
        assert served(server, stories) == ALL
    (devices[0] / "kvserver.drained").unlink()
    with small(devices) as server:
        status = disk_ready(server)
        assert (status.disks[0].drain, status.disks[0].takes_writes) == ("", True)


def test_drain_names_the_devices_that_there_are(devices: list[Path]) -> None:
    with small(devices) as server:
        disk_ready(server)
        assert f"0 ({devices[0]}), 1 ({devices[1]})" in drained(server, "7", status=2)


def test_paths_in_another_order_and_stores_that_changed_places_are_all_found(
    devices: list[Path], stories: list[Prompt]
) -> None:
    filled(devices)
    with small(devices[::-1]) as server:
        assert disk_ready(server).chunks_on_disk == ALL
        assert served(server, stories) == ALL
    spare = devices[0].with_name("spare")
    for source, target in ((devices[0], spare), (devices[1], devices[0]), (spare, devices[1])):
        source.rename(target)
    with small(devices) as server:
        assert disk_ready(server).chunks_on_disk == ALL
        assert served(server, stories) == ALL


def test_a_device_taken_away_without_a_word_costs_its_chunks_and_what_hangs_on_them(
    devices: list[Path], stories: list[Prompt]
) -> None:
    filled(devices)
    with small(devices[:1]) as server:
        status = disk_ready(server)
        assert 0 < status.chunks_on_disk < ALL
        assert "disk chunks not reached" in server.log()
        served(server, stories)
    with small(devices) as server:
        disk_ready(server)
        served(server, stories)
