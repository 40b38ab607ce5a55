"""The disk tier where the kernel, a container or the file system refuses its first choice.

The server takes its second choice and logs that, or does not use the device."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvserver.cli.doctor.doctor import io_uring_refused
from kvserver.wire.status import MoverStatus
from tests.process.disk.forbidding import can_forbid
from tests.process.disk.scene import ALL, SHAPE, bring_back, disk_ready, small, store_slowly
from tests.process.engine import Engine, Prompt
from tests.process.harness import WAIT_S, Server

FORBID = ["-m", "tests.process.disk.forbidding", "io-uring"]
NONE_HERE = pytest.mark.skipif(bool(io_uring_refused()), reason="this machine has no io_uring")
FOUND = [
    pytest.param([], "auto", "ok", marks=NONE_HERE),
    (FORBID, "auto", "warn"),
    (FORBID, "uring", "fail"),
    (FORBID, "threads", "ok"),
]

pytestmark = pytest.mark.skipif(not can_forbid(), reason="the calls of this machine have other numbers")


def without(what: str, directory: Path, **settings: object) -> Server:
    server = small(directory, **settings)
    server.PROGRAM = ("-m", "tests.process.disk.forbidding", what, *server.PROGRAM)
    return server


def disk_mover(server: Server) -> MoverStatus:
    disk_ready(server)
    return next(mover for mover in server.status().movers if mover.device == "disk")


def assert_serves(server: Server, stories: list[Prompt]) -> None:
    """Checks that chunks evicted from DRAM come back, every byte compared."""
    with Engine(server.path, SHAPE) as engine:
        engine.ready()
        store_slowly(server, engine, stories)
        assert bring_back(engine, stories) == ALL
        assert engine.pool.wrong() == 0
        assert server.status().counters["disk_reads"]


def test_threads_replace_a_forbidden_io_uring_and_it_is_logged(tmp_path: Path, stories: list[Prompt]) -> None:
    with without("io-uring", tmp_path) as server:
        backend = disk_mover(server).backend
        assert "threads" in backend
        assert "io_uring: Operation not permitted" in backend
        assert backend in server.log()
        assert_serves(server, stories)


def test_no_device_is_used_when_io_uring_is_asked_for_and_forbidden(tmp_path: Path) -> None:
    with without("io-uring", tmp_path, disk_engine="uring") as server:
        (disk,) = disk_ready(server).disks
        assert not disk.takes_writes
        assert "no io_uring: Operation not permitted" in disk.problem


@pytest.mark.parametrize(("forbids", "engine", "verdict"), FOUND)
def test_the_doctor_says_beforehand_what_devices_are_read_and_written_by(
    tmp_path: Path, forbids: list[str], engine: str, verdict: str
) -> None:
    flags = f"--disk-paths={tmp_path}", "--disk-bytes=2MiB", "--disk-segment-bytes=1MiB", "--http-port=0"
    command = [sys.executable, *forbids, "-m", "kvserver", "doctor", f"--disk-engine={engine}", *flags]
    said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_S + 40).stdout
    (line,) = [line for line in said.splitlines() if " disk engine " in line]
    assert line.split()[0] == verdict
    assert ("io_uring: Operation not permitted" in line) == (verdict != "ok")


def test_a_file_system_without_direct_access_goes_through_the_page_cache_and_it_is_said(
    tmp_path: Path, stories: list[Prompt]
) -> None:
    with without("direct", tmp_path) as server:
        mover = disk_mover(server)
        assert "through the page cache" in mover.backend
        assert mover.facts["device 0 direct"] == "no"
        assert mover.backend in server.log()
        assert_serves(server, stories)


def test_a_file_system_that_cannot_preallocate_is_not_used_and_holds_nothing(tmp_path: Path) -> None:
    with without("preallocation", tmp_path) as server:
        (disk,) = disk_ready(server).disks
        assert not disk.takes_writes
        assert "disk-filesystem" in disk.problem
        assert "cannot preallocate" in disk.problem
    assert list(tmp_path.iterdir()) == []
