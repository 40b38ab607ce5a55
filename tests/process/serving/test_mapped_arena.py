"""Real servers whose arena is no memory of the machine: a file on ext4 or xfs, or a character device.

The device is a node of /dev/zero with a made-up /sys. One process that maps it finds again what it wrote, as with a
device DAX; two processes share nothing, so nothing here outlives its mover."""

import os
import stat
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.process.disk.scene import ALL, SHAPE, bring_back, disk_ready, small, store_slowly, the_stories
from tests.process.engine import SMALL, Engine, prompt
from tests.process.harness import WAIT_S, Server, descriptors_of, kill, until
from tests.rigs.full_disk import mounted

MIB = 1 << 20
CHUNKS = 7
STORIES = [prompt(seed, CHUNKS) for seed in range(1, 76)]
"""More chunks than the arena holds."""
ARENA = {"arena_bytes": 4 * MIB, "slab_bytes": 2 * MIB, "chunks_max": 700}


@pytest.fixture(params=["storage", "device"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    """A server whose arena lies in one of the two places."""
    if request.param == "storage":
        made: Server = Server(arena_path=request.getfixturevalue("storage"), **ARENA)
    else:
        made = OnDevice(tmp_path)
    with made:
        yield made


class OnDevice(Server):
    def __init__(self, folder: Path, **settings: object) -> None:
        about, node = folder / "sys/dev/char/1:5", folder / "dax7.0"
        about.mkdir(parents=True)
        (about / "subsystem").symlink_to("/sys/bus/dax")
        (about / "size").write_text(f"{6 * MIB}\n")
        (about / "align").write_text(f"{2 * MIB}\n")
        try:
            os.mknod(node, stat.S_IFCHR | 0o600, os.makedev(1, 5))
            os.close(os.open(node, os.O_RDWR))
        except PermissionError:
            pytest.skip("this user may make no device")
        self.PROGRAM = (
            "-c",
            "import pathlib; from kvserver.supervisor import mapped_arena; from kvserver.cli.main import main;"
            f"mapped_arena.SYS = pathlib.Path({str(folder / 'sys')!r}); main()",
        )
        super().__init__(arena_path=node, **ARENA, **settings)


def mapped(pid: int) -> list[str]:
    """What a process maps that is no library and has the arena's size."""
    lines = [line.split(maxsplit=5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    sizes = [(int(line[0].split("-")[1], 16) - int(line[0].split("-")[0], 16), line[-1]) for line in lines]
    return [name for size, name in sizes if size == ARENA["arena_bytes"] and name.startswith("/")]


def refusal(server: Server) -> str:
    """The log of a start that is refused."""
    try:
        assert server.spawn().wait(WAIT_S) == 2
        return server.log()
    finally:
        server.close()


def test_chunks_are_stored_evicted_and_brought_back_byte_by_byte(server: Server) -> None:
    with Engine(server.path) as engine:
        engine.ready()
        for story in STORIES:
            assert engine.store(story).chunks == CHUNKS
        fit = ARENA["arena_bytes"] // SMALL.slot_bytes()
        assert fit - CHUNKS <= server.status().chunks <= fit < len(STORIES) * CHUNKS
        assert engine.retrieve(STORIES[0]) == 0, "the oldest made room"
        assert [engine.retrieve(story) for story in STORIES[-5:]] == [CHUNKS] * 5
        (name,) = mapped(server.mover_pid())
        assert name.startswith("/dev/zero" if isinstance(server, OnDevice) else f"{server.settings['arena_path']}/"), (
            name
        )
        assert str(server.settings["arena_path"]) in server.status().arena.placement


def test_a_second_server_is_refused_and_the_first_goes_on(server: Server) -> None:
    second = Server(**{key: value for key, value in server.settings.items() if key != "socket"})
    second.PROGRAM = server.PROGRAM
    with Engine(server.path) as engine:
        engine.ready().store(STORIES[0])
        assert "arena-in-use: " in refusal(second)
        assert engine.retrieve(STORIES[0]) == CHUNKS


def test_a_brain_that_dies_costs_nothing_and_a_restart_costs_all(storage: Path) -> None:
    with Server(arena_path=storage, **ARENA) as server:
        with Engine(server.path) as engine:
            assert engine.ready().store(STORIES[0]).chunks == CHUNKS
        assert held_in(storage), "otherwise this test sees nothing"
        brain = server.brain_pid()
        kill(brain)
        until("another brain", lambda: server.brain_pid() != brain)
        with Engine(server.path) as engine:
            assert engine.ready().retrieve(STORIES[0]) == CHUNKS
        server.kill()
        assert list(storage.iterdir()) == [], "also SIGKILL leaves no file"
        assert held_in(storage) == [], "nobody keeps the space of a file without a name"
        server.start()
        with Engine(server.path) as engine:
            assert engine.ready().retrieve(STORIES[0]) == 0, "what lies there is not believed"
            assert engine.store(STORIES[1]).chunks == CHUNKS
            assert engine.retrieve(STORIES[1]) == CHUNKS
    assert (list(storage.iterdir()), held_in(storage)) == ([], [])


def held_in(directory: Path) -> list[str]:
    """Files there that some process has open, also those without a name. Other tests fill the same file system."""
    held: list[str] = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            held += (target for target in descriptors_of(int(process.name)) if target.startswith(f"{directory}/"))
    return held


def test_a_mover_that_dies_is_replaced_and_the_new_one_finds_the_bytes(storage: Path) -> None:
    with Server(arena_path=storage, **ARENA) as server, Engine(server.path) as engine:
        engine.ready().store(STORIES[0])
        mover = server.mover_pid()
        kill(mover)
        until("another mover", lambda: server.mover_pid_now() not in (0, mover))
        until("the cache to be registered again", lambda: engine.ready().retrieve(STORIES[0]) == CHUNKS)


@pytest.mark.parametrize("disk_engine", ["uring", "threads"])
def test_chunks_go_to_disk_and_come_back_into_such_an_arena(storage: Path, tmp_path: Path, disk_engine: str) -> None:
    """Linux registers no buffers of such a file with io_uring; then they are named with each request."""
    (tmp_path / "disk").mkdir(mode=0o700)
    with small(tmp_path / "disk", arena_path=storage, disk_engine=disk_engine) as server:
        disk_ready(server)
        stories = the_stories()
        with Engine(server.path, SHAPE) as engine:
            engine.ready()
            store_slowly(server, engine, stories)
            assert bring_back(engine, stories) == ALL
            assert engine.pool.wrong() == 0
        counters = server.status().counters
        assert (counters["disk_lost"], counters["disk_damaged"]) == (0, 0)


def test_a_file_system_that_others_fill_costs_the_arena_nothing(tmp_path: Path) -> None:
    """All its bytes are there from the start. Without them this would be a SIGBUS in a mover."""
    with mounted("ext4", tmp_path, 16 * MIB) as root:
        with Server(arena_path=root / "own", **ARENA) as server, Engine(server.path) as engine:
            engine.ready()
            full = subprocess.run(
                ["dd", "if=/dev/zero", f"of={root}/theirs", "bs=64k"], capture_output=True, text=True, check=False
            )
            assert "No space left" in full.stderr
            for story in STORIES:
                assert engine.store(story).chunks == CHUNKS
            assert engine.retrieve(STORIES[-1]) == CHUNKS
            assert not server.status().arena.problem
        larger = {**ARENA, "arena_bytes": 32 * MIB}
        assert f"arena-memory: {root}/own on ext4 has " in refusal(Server(arena_path=root / "own", **larger))
