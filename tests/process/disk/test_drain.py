"""Devices that come and go: drained, removed without notice, in another order, with files that changed places."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.disk.scene import ALL, SHAPE, bring_back, disk_ready, filled, served, small, store_slowly
from tests.process.engine import Engine, Prompt
from tests.process.harness import WAIT_S, Server, until


def drained(server: Server, device: str, *, status: int = 0) -> str:
    """The output of `kvserver disk drain`."""
    command = [sys.executable, "-m", "kvserver", "disk", f"--socket={server.path}", "drain", device]
    run = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S + 30, check=False)
    assert run.returncode == status, run.stderr
    return run.stdout + run.stderr


@pytest.fixture
def devices(tmp_path: Path) -> list[Path]:
    directories = [tmp_path / "a", tmp_path / "b"]
    for directory in directories:
        directory.mkdir()
    return directories


def test_a_drained_device_can_be_taken_away_and_nothing_is_lost(devices: list[Path], stories: list[Prompt]) -> None:
    (devices[1] / "not ours").write_bytes(b"stays")
    with small(*devices) as server, Engine(server.path, SHAPE) as engine:
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
    with small(*devices[:1]) as server:
        assert disk_ready(server).chunks_on_disk == ALL
        assert served(server, stories) == ALL
    with small(*devices) as server:
        status = disk_ready(server)
        assert (status.disks[1].drain, status.disks[1].takes_writes) == ("drained", False)
        assert "remove kvserver.drained" in status.disks[1].problem


def test_a_drain_outlives_the_server_that_began_it(devices: list[Path], stories: list[Prompt]) -> None:
    filled(devices)
    (devices[0] / "kvserver.drained").touch()
    with small(*devices) as server:
        until("the drain to end", lambda: server.status().disks[0].drain == "drained")
        assert server.status().chunks_on_disk == ALL
        assert served(server, stories) == ALL
    (devices[0] / "kvserver.drained").unlink()
    with small(*devices) as server:
        status = disk_ready(server)
        assert (status.disks[0].drain, status.disks[0].takes_writes) == ("", True)


def test_drain_names_the_devices_that_there_are(devices: list[Path]) -> None:
    with small(*devices) as server:
        disk_ready(server)
        assert f"0 ({devices[0]}), 1 ({devices[1]})" in drained(server, "7", status=2)


def test_paths_in_another_order_and_stores_that_changed_places_are_all_found(
    devices: list[Path], stories: list[Prompt]
) -> None:
    filled(devices)
    with small(*devices[::-1]) as server:
        assert disk_ready(server).chunks_on_disk == ALL
        assert served(server, stories) == ALL
    spare = devices[0].with_name("spare")
    for source, target in ((devices[0], spare), (devices[1], devices[0]), (spare, devices[1])):
        source.rename(target)
    with small(*devices) as server:
        assert disk_ready(server).chunks_on_disk == ALL
        assert served(server, stories) == ALL


def test_a_device_taken_away_without_a_word_costs_its_chunks_and_what_hangs_on_them(
    devices: list[Path], stories: list[Prompt]
) -> None:
    filled(devices)
    with small(*devices[:1]) as server:
        status = disk_ready(server)
        assert 0 < status.chunks_on_disk < ALL
        assert "disk chunks not reached" in server.log()
        served(server, stories)
    with small(*devices) as server:
        disk_ready(server)
        served(server, stories)
