"""Servers whose arena holds a few prompts and whose disks hold all, and what is done with them."""

import shutil
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from kvserver.wire.status import Status
from tests.process.engine import Engine, Group, Prompt, Shape, prompt
from tests.process.harness import Server, until

SHAPE = Shape(groups=(Group(block_tokens=4, blocks=47, regions=3, page_bytes=9001),))
CHUNKS = 5
PROMPTS = 9
"""More prompts than the arena holds."""
ALL = PROMPTS * CHUNKS


def small(*directories: Path, kind: type[Server] = Server, **settings: object) -> Server:
    """A server whose arena holds a few prompts, and whose devices hold all of them each. A prompt has three runs."""
    return kind(
        **{
            "arena_bytes": 1 << 20,
            "slab_bytes": 256 << 10,
            "disk_paths": ",".join(map(str, directories)),
            "disk_bytes": 16 << 20,
            "disk_segment_bytes": 512 << 10,
            "disk_run_tokens": 2 * SHAPE.chunk_tokens,
            "disk_write_policy": "through",
            **settings,
        }
    )


def disk_ready(server: Server) -> Status:
    return until("the disk", lambda: status if (status := server.status()).disk_state == "ready" else None)


def store_slowly(server: Server, engine: Engine, stories: list[Prompt]) -> None:
    """Stores one prompt after the other; each is written to disk before the next takes its place in DRAM."""
    for number, story in enumerate(stories, 1):
        assert engine.store(story).chunks == story.chunks
        until("its chunks to be on disk", lambda number=number: server.status().chunks_on_disk >= number * CHUNKS)


def bring_back(engine: Engine, stories: list[Prompt]) -> int:
    """Retrieves each prompt and compares every byte; returns the chunks that came."""
    chunks = 0
    for story in stories:
        lease = until("a lease", lambda story=story: engine.lookup(story).lease)
        assert lease.chunks == story.chunks
        where = engine.ready().spare(engine.place(story))
        assert engine.begin_retrieve(lease, where).result(20).ok
        engine.pool.expect(story, where)
        chunks += lease.chunks
    return chunks


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


def live_in(directories: Sequence[Path]) -> None:
    """Runs a server there until all of the stories are on disk."""
    with small(*directories) as server, Engine(server.path, SHAPE) as engine:
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
