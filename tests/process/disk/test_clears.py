"""A Clear on a disk that takes no new notes: after a kill of the server no cleared chunk is served."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvclient import ResourceError
from tests.process.disk.scene import CHUNKS, SHAPE, disk_ready, small, store_slowly
from tests.process.engine import NAMESPACE, Engine, Prompt, prompt
from tests.process.harness import Server, free_port, until
from tests.process.http.site import ask
from tests.rigs.full_disk import fill, make_room, mounted

ROOM_BYTES = 24 << 20
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
