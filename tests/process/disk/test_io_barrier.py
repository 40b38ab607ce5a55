"""Requests that outlive their disk mover: devices may still write into the arena after the mover was reaped."""

import mmap
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvserver.movers import disk_io_barrier
from kvserver.tiers.records import pack_disk
from kvserver.transfer.disk import completions
from kvserver.transfer.native import create_memfd
from tests.process.disk.late_read import ARENA_BYTES, PAYLOAD_BYTES, RECORD, engine_on
from tests.process.disk.scene import CHUNKS, SHAPE, disk_ready
from tests.process.engine import Engine, Prompt, prompt
from tests.process.harness import Server, kill, until

GROUPS = Path("/sys/fs/cgroup/blkio")
BYTES_PER_S = 128 << 10
"""Bandwidth of a slow device: the record takes two seconds."""


# ---------------------------------------------------------------- Linux's behaviour


@contextmanager
def slow(directory: Path, pid: int) -> Iterator[None]:
    """Throttles this process on the directory's device."""
    group = GROUPS / f"kv-{os.getpid()}"
    status = directory.stat()
    limit = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
    try:
        group.mkdir()
        (group / "blkio.throttle.read_bps_device").write_text(f"{limit} {BYTES_PER_S}")
        for task in os.listdir(f"/proc/{pid}/task"):
            (group / "tasks").write_text(task)
    except OSError as problem:
        pytest.skip(f"no device can be made slow here: {problem}")
    try:
        yield
    finally:
        (group / "blkio.throttle.read_bps_device").write_text(f"{limit} 0")
        until("the group to be empty", lambda: not (group / "tasks").read_text())
        group.rmdir()


@pytest.mark.parametrize("engine", ["uring", "threads"])
def test_a_read_that_outlives_its_process_is_over_when_the_disk_is_quiet(tmp_path: Path, engine: str) -> None:
    arena = create_memfd("late", ARENA_BYTES)
    filled_with(tmp_path, arena, b"A" * PAYLOAD_BYTES)
    command = [sys.executable, "-m", "tests.process.disk.late_read", str(tmp_path), engine, str(arena)]
    with (
        mmap.mmap(arena, ARENA_BYTES) as memory,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(arena,)) as reader,
    ):
        assert reader.stdin is not None
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"ready\n"
        with slow(tmp_path, reader.pid):
            reader.stdin.write(b"read\n")
            reader.stdin.flush()
            assert reader.stdout.readline() == b"reading\n"
            time.sleep(0.2)  # until the request is at the device; if it never gets there, nothing arrives late
            reader.kill()
            reader.wait()
            disk_io_barrier.wait(str(tmp_path))
            memory[:PAYLOAD_BYTES] = b"B" * PAYLOAD_BYTES
        time.sleep(2 * PAYLOAD_BYTES / BYTES_PER_S)
        assert memory[:PAYLOAD_BYTES] == b"B" * PAYLOAD_BYTES
    os.close(arena)


def filled_with(directory: Path, arena: int, payload: bytes) -> None:
    os.pwrite(arena, payload, 0)
    writer = engine_on(str(directory), arena, "auto")
    writer.submit(1, "write", pack_disk(RECORD))
    poll = select.poll()
    poll.register(writer.eventfd, select.POLLIN)
    assert poll.poll(10_000)
    assert [done.fault for done in completions(writer, 1)] == [None]
    writer.close()
    os.pwrite(arena, bytes(len(payload)), 0)


def test_to_wait_changes_nothing(tmp_path: Path) -> None:
    disk_io_barrier.wait(str(tmp_path))
    assert not list(tmp_path.iterdir())
    store = tmp_path / disk_io_barrier.FILE
    store.write_bytes(b"short")
    disk_io_barrier.wait(str(tmp_path))
    assert store.read_bytes() == b"short"
    store.unlink()
    store.mkdir()
    with pytest.raises(IsADirectoryError):
        disk_io_barrier.wait(str(tmp_path))


# ---------------------------------------------------------------- the server's behaviour


class Waiting(Server):
    """A server whose devices are at work as long as the file `at_work` exists."""

    PROGRAM = (
        "-c",
        "from kvserver.cli import main\nfrom kvserver.supervisor import supervisor\n"
        "supervisor.QUIET = 'tests.process.disk.busy_barrier'\nmain.main()",
    )
    at_work: Path

    def waits(self) -> int:
        """Pid of the process that waits for devices; 0 when there is none."""
        return self._child("tests.process.disk.busy_barrier")


@pytest.fixture
def waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Waiting]:
    memory = Path("/dev/shm") / f"kv-quiet-{os.getpid()}"
    (tmp_path / "disk").mkdir()
    server = Waiting(
        arena_bytes=1 << 20,
        slab_bytes=256 << 10,
        arena_path=memory,
        chunks_max=100,
        disk_paths=tmp_path / "disk",
        disk_bytes=16 << 20,
        disk_segment_bytes=512 << 10,
    )
    server.at_work = tmp_path / "at work"
    monkeypatch.setenv("DISKS_AT_WORK", str(server.at_work))
    with server:
        yield server
    for path in memory.glob("*"):
        path.unlink()
    memory.rmdir()


@pytest.fixture
def story() -> Prompt:
    return prompt(7, chunks=CHUNKS)


def test_no_disk_mover_starts_and_no_slot_comes_free_while_devices_are_at_work(waiting: Waiting, story: Prompt) -> None:
    disk_ready(waiting)
    mover_pid = waiting.disk_mover_pid()
    waiting.at_work.touch()
    with Engine(waiting.path, SHAPE) as engine:
        engine.ready()
        kill(mover_pid)
        until("the server to wait", waiting.waits)
        assert engine.store(story).chunks == CHUNKS, "others are served"
        assert "mover reaped" not in waiting.log()
        waiting.at_work.unlink()
        until("another disk mover", lambda: waiting.disk_mover_pid() != mover_pid)
        disk_ready(waiting)
        assert engine.retrieve(story) == CHUNKS


def test_no_brain_starts_while_devices_of_the_last_one_are_at_work(waiting: Waiting, story: Prompt) -> None:
    disk_ready(waiting)
    with Engine(waiting.path, SHAPE) as engine:
        engine.ready()
        assert engine.store(story).chunks == CHUNKS
        waiting.at_work.touch()
        kill(waiting.brain_pid())
        until("the server to wait", waiting.waits)
        assert waiting.log().count("name=brain") == 1
        waiting.at_work.unlink()
        until("the chunks to be found again", lambda: engine.lookup(story).chunks == CHUNKS)
        assert engine.ready().retrieve(story) == CHUNKS


def test_who_waits_for_devices_and_is_killed_is_replaced(waiting: Waiting) -> None:
    disk_ready(waiting)
    mover_pid = waiting.disk_mover_pid()
    waiting.at_work.touch()
    kill(mover_pid)
    first = until("the server to wait", waiting.waits)
    kill(first)
    until("another one to wait", lambda: waiting.waits() not in (0, first))
    assert "mover reaped" not in waiting.log()
    waiting.at_work.unlink()
    until("another disk mover", lambda: waiting.disk_mover_pid() != mover_pid)


def test_an_arena_that_was_kept_is_used_again_when_devices_are_quiet(waiting: Waiting, story: Prompt) -> None:
    with Engine(waiting.path, SHAPE) as engine:
        disk_ready(waiting)
        engine.ready()
        assert engine.store(story).chunks == CHUNKS
        waiting.at_work.touch()
        waiting.kill()
        waiting.spawn()
        until("the server to wait", waiting.waits)
        assert waiting.log().count("name=brain") == 1
        waiting.at_work.unlink()
        until("the chunks to be found again", lambda: engine.lookup(story).chunks == CHUNKS)
        assert "memory kept" in waiting.log()
        assert engine.ready().retrieve(story) == CHUNKS


def test_a_stop_does_not_wait_for_ever_for_devices(waiting: Waiting) -> None:
    disk_ready(waiting)
    waiting.at_work.touch()
    assert waiting.stop() == 0
    assert 'killed and does not end name="end of mover' in waiting.log()
    waiting.at_work.unlink()
