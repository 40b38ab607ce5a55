"""Clears that a disk cannot note, or misses: after a kill of the server no cleared chunk is served."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvclient import ResourceError, namespace_digest
from tests.process.disk.scene import CHUNKS, SHAPE, bring_back, disk_ready, small, store_slowly
from tests.process.engine import NAMESPACE, Engine, Prompt, prompt
from tests.process.harness import Server, free_port, until
from tests.process.http.site import ask
from tests.rigs.full_disk import fill, make_room, mounted

ROOM_BYTES = 24 << 20
MISSED = 100
"""Clears while a device is away."""
NOT_DURABLE = "1 clears are not durable yet"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with mounted("tmpfs", tmp_path, ROOM_BYTES) as root:
        yield root


@pytest.fixture
def stories() -> list[Prompt]:
    return [prompt(seed, chunks=CHUNKS) for seed in (3, 4)]


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Makes a folder read-only: the kernel refuses writes in it, the rest of the file system goes on."""
    for options in (["--bind", str(folder)], ["-o", "remount,bind,ro"]):
        subprocess.run(["mount", *options, str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def is_owed(server: Server) -> bool:
    """Whether the server warns of a clear that is not durable."""
    return any(warning.startswith(NOT_DURABLE) for warning in server.status().warnings)


def found(engine: Engine, stories: list[Prompt]) -> list[int]:
    chunks = []
    for story in stories:
        lease = engine.lookup(story).lease
        chunks.append(lease.chunks if lease is not None else 0)
    return chunks


def test_a_clear_on_a_full_disk_holds_after_the_server_was_killed(disk: Path, stories: list[Prompt]) -> None:
    with small(disk) as server, Engine(server.path, SHAPE) as engine:
        disk_ready(server)
        engine.ready()
        store_slowly(server, engine, stories)
        fill(disk)
        assert engine.client.clear(engine.namespace) == len(stories) * CHUNKS
        assert not is_owed(server)
        server.kill()
    with small(disk) as server, Engine(server.path, SHAPE) as engine:
        disk_ready(server)
        engine.ready()
        assert found(engine, stories) == [0, 0]
        make_room(disk)
        store_slowly(server, engine, stories[:1])
        server.kill()
    with small(disk) as server, Engine(server.path, SHAPE) as engine:
        disk_ready(server)
        assert found(engine.ready(), stories) == [CHUNKS, 0]


def test_a_prefix_that_was_cleared_on_a_full_disk_is_not_back_after_the_server_was_killed(
    disk: Path, tmp_path: Path, stories: list[Prompt]
) -> None:
    """The prefix has no note of its own, so that restart drops its whole namespace, and nothing earlier."""
    tokens = tmp_path / "tokens"
    tokens.write_text("alice: 0123456789abcdef0123456789abcdef\n")
    tokens.chmod(0o600)
    with (
        small(disk, http_port=free_port(), admin_token_file=tokens) as server,
        Engine(server.path, SHAPE) as engine,
    ):
        disk_ready(server)
        engine.ready()
        store_slowly(server, engine, stories)
        fill(disk)
        prefix = {"namespace": NAMESPACE.hex(), "key": stories[0].key(2).hex()}
        token = "0123456789abcdef0123456789abcdef"
        assert ask(server, "/admin/clear", prefix, token=token) == (200, {"chunks": CHUNKS - 2})
        assert found(engine, stories) == [2, CHUNKS]
        assert "prefix noted as its namespace" in server.log()
        server.kill()
    with small(disk) as server, Engine(server.path, SHAPE) as engine:
        disk_ready(server)
        assert found(engine.ready(), stories) == [0, 0]


def test_a_clear_that_no_disk_can_note_is_said_and_tried_again_until_one_can(
    disk: Path, tmp_path: Path, stories: list[Prompt]
) -> None:
    with small(disk, cache_dir=tmp_path / "cache") as server, Engine(server.path, SHAPE) as engine:
        disk_ready(server)
        engine.ready()
        store_slowly(server, engine, stories)
        with read_only(disk / "kvserver.notes"):
            with pytest.raises(ResourceError, match=r"not durable yet on .*Read-only file system"):
                engine.client.clear(engine.namespace)
            assert found(engine, stories) == [0, 0]
            assert is_owed(server)
            assert "clear not durable" in server.log()
        until("the clear to be durable", lambda: not is_owed(server))
        assert "clear durable" in server.log()
        server.kill()
    with small(disk) as server, Engine(server.path, SHAPE) as engine:
        disk_ready(server)
        assert found(engine.ready(), stories) == [0, 0]


def test_a_clear_that_no_disk_could_note_holds_when_the_server_is_killed_before_one_can(
    disk: Path, tmp_path: Path, stories: list[Prompt]
) -> None:
    cache = {"cache_dir": tmp_path / "cache"}
    with small(disk, **cache) as server, Engine(server.path, SHAPE) as engine:
        disk_ready(server)
        engine.ready()
        store_slowly(server, engine, stories)
        with read_only(disk / "kvserver.notes"):
            with pytest.raises(ResourceError, match="not durable yet"):
                engine.client.clear(engine.namespace)
            server.kill()
            with small(disk, **cache) as unwell, Engine(unwell.path, SHAPE) as other:
                until("a warning", lambda: any("nothing of it is served" in why for why in unwell.status().warnings))
                assert found(other.ready(), stories) == [0, 0]
                unwell.kill()
    with small(disk, **cache) as server, Engine(server.path, SHAPE) as engine:
        disk_ready(server)
        assert found(engine.ready(), stories) == [0, 0]


def test_a_device_that_missed_many_clears_loses_only_what_was_cleared(tmp_path: Path, stories: list[Prompt]) -> None:
    devices = [tmp_path / "stays", tmp_path / "leaves"]
    for device in devices:
        device.mkdir()
    other = namespace_digest({"model": "another one"})
    with small(*devices) as server, Engine(server.path, SHAPE) as engine:
        disk_ready(server)
        engine.ready()
        store_slowly(server, engine, stories)
        with Engine(server.path, SHAPE, name="other", namespace=other) as its_engine:
            its_engine.ready()
            for number, story in enumerate(stories, 1 + len(stories)):
                assert its_engine.store(story).chunks == CHUNKS
                until("it to be on disk", lambda number=number: server.status().chunks_on_disk >= number * CHUNKS)
        before = [disk.used_bytes for disk in server.status().disks]
        assert all(before)
    devices[1].rename(tmp_path / "away")
    devices[1].mkdir()
    (devices[1] / "kvserver.store").touch(mode=0o600)
    (devices[1] / "kvserver.store").write_text("somebody else's\n")
    with small(*devices) as server, Engine(server.path, SHAPE) as engine:
        disk_ready(server)
        engine.ready()
        engine.client.clear(NAMESPACE)
        for number in range(MISSED):
            engine.client.clear(namespace_digest({"model": f"old {number}"}))
        server.kill()
    shutil.rmtree(devices[1])
    (tmp_path / "away").rename(devices[1])
    with small(*devices) as server:
        assert disk_ready(server).chunks_on_disk == len(stories) * CHUNKS
        with Engine(server.path, SHAPE, namespace=other) as engine:
            engine.ready()
            assert bring_back(engine, stories) == len(stories) * CHUNKS
            assert engine.pool.wrong() == 0
        with Engine(server.path, SHAPE) as engine:
            assert found(engine.ready(), stories) == [0, 0]
