"""Scenarios that stop the disk mover with SIGSTOP.

Lookups and stores go on, and chunks that are only on disk miss in time. Afterwards everything is there and right, also
when the brain lost its patience and had the mover killed. Each scenario takes a StopScene and the number of the round.
"""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from tests.process.disk_faults.io import JOB_S, SHAPE, TIMEOUTS
from tests.process.disk_faults.scene import DiskServer, healthy, misses
from tests.process.disk_faults.stories import bring, keep
from tests.process.engine import Engine, Prompt, prompt
from tests.process.harness import resume, stop, until

SETTINGS = {
    "arena_bytes": 2 << 20,
    "slab_bytes": 512 << 10,
    "disk_bytes": 3500 << 10,
    "disk_segment_bytes": 660 << 10,
}
"""Twelve chunks fit in DRAM, twenty on disk."""
STORIES_CHUNKS = 4, 3, 5, 4
FRESH_CHUNKS = 2
LATE_S = 10.0
"""Slack beyond a deadline, for a busy machine."""
GRANTED_S = 0.5
"""Deadline of a retrieve that waits for a stopped disk mover."""


class StopScene:
    """State of the scenarios; create it with open_stop_scene()."""

    def __init__(self, server: DiskServer, engine: Engine) -> None:
        self.server = server
        self.engine = engine
        self.seen: Counter[str] = Counter()
        self.health_s = 0.0
        self.stories: list[Prompt] = []

    def begin(self, round_: int) -> None:
        """Stores stories that do not fit in DRAM together, and waits until all of them are on disk."""
        self.engine.ready()
        self.server.disk_ready()
        self.engine.client.clear(self.engine.namespace)
        self.stories = [prompt(10 * round_ + number, chunks) for number, chunks in enumerate(STORIES_CHUNKS)]
        chunks = 0
        for story in self.stories:
            assert keep(self.engine, story, JOB_S) == story.chunks
            chunks += story.chunks
            self._wait_on_disk(chunks)

    def end(self) -> None:
        """Checks that everything is on disk or in DRAM, and right."""
        status = self.server.disk_ready()
        assert not misses(status)
        self._wait_written()
        for story in self.stories:
            until(f"all {story.chunks} chunks of a story to come", partial(self._comes, story))
            self.seen["chunks compared"] += story.chunks
        self.seen["rounds"] += 1

    def use_while_stopped(self, fresh: Prompt) -> None:
        """Checks that work without the disk goes on.

        A retrieve from disk misses by its deadline, with its blocks untouched."""
        story = self.stories[0]  # the coldest, evicted from DRAM by the others
        lease = self.engine.lookup(story).lease
        assert lease is not None
        where = self.engine.place(story)
        self.engine.pool.spoil(where)
        began_s = time.monotonic()
        result = self.engine.begin_retrieve(lease, where, GRANTED_S).result(GRANTED_S + LATE_S)
        assert not result.ok, "it can come from the disk alone"
        assert time.monotonic() - began_s < GRANTED_S + LATE_S
        self.seen[f"retrieve: {result.why}"] += 1
        # After a timeout the client waits for a probe, which the brain answers at once.
        until("the server to be asked again", lambda: not self.engine.lookup(fresh).why)
        assert keep(self.engine, fresh, JOB_S) == fresh.chunks
        assert bring(self.engine, fresh, JOB_S) == fresh.chunks
        assert self.engine.pool.wrong() == 0

    def _comes(self, story: Prompt) -> bool:
        """Whether the story arrives whole.

        Nothing arrives from a disk mover that was killed over a slow read on a busy machine."""
        return bring(self.engine, story, TIMEOUTS.retrieve_s) == story.chunks

    def _wait_on_disk(self, chunks: int) -> None:
        """Waits for chunks on disk.

        A busy machine may get a disk mover killed over a slow write; the next one writes it again."""

        def there() -> bool:
            status = self.server.status()
            return status.disk_state == "ready" and status.chunks_on_disk >= chunks

        until(f"{chunks} chunks to be on disk", there)
        self._wait_written()

    def _wait_written(self) -> None:
        def written() -> bool:
            disk = self.server.status().disks[0]
            return not disk.queued_bytes and not self.server.account().writing

        until("writes to end", written)


def goes_on(scene: StopScene, round_: int) -> None:
    pid = scene.server.disk_mover_pid()
    stop(pid)
    try:
        scene.use_while_stopped(prompt(10 * round_ + 7, FRESH_CHUNKS))
    finally:
        resume(pid)
    assert scene.server.disk_mover_pid() == pid, "patience was long enough"


def is_replaced(scene: StopScene, round_: int) -> None:
    pid = scene.server.disk_mover_pid()
    stop(pid)
    scene.use_while_stopped(prompt(10 * round_ + 7, FRESH_CHUNKS))
    until("another disk mover", lambda: scene.server.disk_mover_pid_now() not in (0, pid))
    assert "did not end disk job" in scene.server.log()


@contextmanager
def open_stop_scene(*, patience_ms: int) -> Iterator[StopScene]:
    with (
        DiskServer(None, **SETTINGS, disk_job_ms=patience_ms) as server,
        Engine(server.path, SHAPE, timeouts=TIMEOUTS) as engine,
        healthy(server) as health,
    ):
        scene = StopScene(server, engine)
        yield scene
        scene.health_s = health.longest_s
