"""Directories, sizes and files that the disk tier cannot use as they are: refused or set aside, with a message."""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvserver.errors import RequestError
from tests.process.disk.scene import (
    ALL,
    CHUNKS,
    SHAPE,
    bring_back,
    disk_ready,
    filled,
    live_in,
    served,
    small,
    store_slowly,
)
from tests.process.engine import Engine, Group, Prompt, Shape
from tests.process.harness import WAIT_S, Server

OTHER_SHAPE = Shape(chunk_tokens=15, groups=(Group(block_tokens=5, blocks=53, regions=2, page_bytes=7001),))


def refused(server: Server, *said: str) -> None:
    """Checks that the server refuses to start and gives its reason in one line."""
    try:
        assert server.spawn().wait(WAIT_S) == 2
        log = server.log()
        assert "Traceback" not in log
        for text in said:
            assert text in log
    finally:
        server.close()


# ---------------------------------------------------------------- directories


def test_what_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused(small(tmp_path / "absent"), "disk-path", f"{tmp_path}/absent is missing")
    refused(small(tmp_path / "file"), "disk-path", "is no directory")


def test_what_is_missing_below_a_mount_point_is_made_and_told() -> None:
    if not os.path.ismount("/dev/shm"):
        pytest.skip("/dev/shm is no mount of its own here")
    directory = Path("/dev/shm") / f"kv-made-{os.getpid()}"
    try:
        with small(directory) as server:
            assert disk_ready(server).disks[0].takes_writes
            assert f"disk directory made path={directory} file_system=tmpfs" in server.log()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def start_by(prefix: list[str], server: Server, before: str = "true") -> subprocess.CompletedProcess[str]:
    """Starts a server that must refuse, run by another program and after a line of shell."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in server.settings.items()]
    program = [sys.executable, "-m", "kvserver", "serve", f"--socket={server.path}", *flags]
    command = [*prefix, "sh", "-c", f"{before} && exec {shlex.join(program)}"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    finally:
        server.close()


def test_a_directory_mounted_read_only_is_refused(tmp_path: Path) -> None:
    if subprocess.run(["unshare", "-rm", "true"], check=False, capture_output=True).returncode:
        pytest.skip("this machine allows no mounts")
    mount = f"mount -t tmpfs -o ro,size=64m none {tmp_path}"
    run = start_by(["unshare", "-rm"], small(tmp_path), mount)
    assert run.returncode == 2
    assert "mounted read-only" in run.stderr


def test_the_second_server_on_a_directory_is_told_who_holds_it(tmp_path: Path) -> None:
    with small(tmp_path) as server:
        disk_ready(server)
        refused(small(tmp_path), "disk-locked", f"(process {server.disk_mover_pid()})")
        assert server.status().disks[0].takes_writes


def test_memory_serves_as_a_device_and_says_whether_it_is_reached_directly(stories: list[Prompt]) -> None:
    directory = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        with small(directory) as server, Engine(server.path, SHAPE) as engine:
            disk_ready(server)
            facts = next(mover.facts for mover in server.status().movers if mover.device == "disk")
            assert facts["device 0 direct"] in ("yes", "no")
            engine.ready()
            store_slowly(server, engine, stories)
            assert bring_back(engine, stories) == ALL
            assert engine.pool.wrong() == 0
    finally:
        shutil.rmtree(directory)


def test_files_that_are_not_ours_are_left_alone(tmp_path: Path) -> None:
    strange = {f"file {number}": bytes([number]) * (100 + number) for number in range(50)}
    strange |= {"kvserver.notes.txt": b"mine", "kvserver.store.old": b"a copy"}
    for name, content in strange.items():
        (tmp_path / name).write_bytes(content)
    live_in([tmp_path])
    assert {name: (tmp_path / name).read_bytes() for name in strange} == strange


# ---------------------------------------------------------------- sizes


def test_records_larger_than_a_segment_are_not_written_and_counted(tmp_path: Path, stories: list[Prompt]) -> None:
    """The server still serves what DRAM holds."""
    with small(tmp_path, disk_segment_bytes=64 << 10) as server, Engine(server.path, SHAPE) as engine:
        disk_ready(server)
        engine.ready()
        for story in stories:
            assert engine.store(story).chunks == CHUNKS
        refused_by = server.status().counters["disk_refused"]
        assert isinstance(refused_by, dict)
        assert refused_by["shape"] > 0
        assert server.status().chunks_on_disk == 0


# ---------------------------------------------------------------- files of an earlier server


def test_another_segment_size_sets_the_device_aside_until_it_is_taken_back(
    tmp_path: Path, stories: list[Prompt]
) -> None:
    filled([tmp_path])
    with small(tmp_path, disk_segment_bytes=1 << 20) as server:
        status = disk_ready(server)
        assert not status.disks[0].takes_writes
        assert "has segments of 524288 bytes, expected disk_segment_bytes=1048576" in status.disks[0].problem
        assert served(server, stories) == 0
    with small(tmp_path) as server:
        assert disk_ready(server).chunks_on_disk == ALL
        assert served(server, stories) == ALL


def test_a_device_that_is_to_be_smaller_says_what_became_of_it(tmp_path: Path, stories: list[Prompt]) -> None:
    filled([tmp_path])
    with small(tmp_path, disk_bytes=4 << 20) as server:
        disk_ready(server)
        assert 0 < served(server, stories) < ALL
        assert f"WARNING disk mover disk resized directory={tmp_path} from_bytes=16269312 bytes=3686400" in server.log()


def test_a_namespace_that_comes_back_with_another_chunk_size_is_refused_and_misreads_nothing(
    tmp_path: Path, stories: list[Prompt]
) -> None:
    """Clients put the chunk size into the digest. The server refuses one that does not, by the records on disk."""
    filled([tmp_path])
    with small(tmp_path) as server:
        disk_ready(server)
        refused = pytest.raises(RequestError, match=r"chunk_tokens=12.*chunk_tokens=15")
        with Engine(server.path, OTHER_SHAPE, name="careless") as engine, refused:
            engine.ready()
        assert served(server, stories) == ALL
