"""Faults in each disk request in turn, under a small workload that is always the same.

A run: copy a store that an earlier server filled → start a server whose disk mover fails as planned → run the workload
→ kill -9 → start a server with a sound disk on what is left → ask for everything again. A fault may cost only a miss,
and a counter must show it. No byte is wrong, every request is answered in time, and /healthz answers meanwhile."""

import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from kvclient import Timeouts
from kvserver.wire.status import Status
from tests.process.disk_faults.mover import Kind, Plan, leave, requests
from tests.process.disk_faults.scene import DiskServer, healthy, misses
from tests.process.disk_faults.stories import bring, keep
from tests.process.engine import Engine, Group, Shape, prompt
from tests.process.harness import until

SHAPE = Shape(groups=(Group(block_tokens=4, blocks=29, regions=3, page_bytes=17_777),))
SETTINGS = {
    "arena_bytes": 1 << 20,
    "slab_bytes": 512 << 10,
    "disk_bytes": 1400 << 10,
    "disk_segment_bytes": 660 << 10,
}
"""Six chunks fit in DRAM, eight on disk: two segments of four extents."""
OLD = (prompt(1, chunks=2), prompt(2, chunks=3))
"""Prompts on disk when the server begins."""
NEW = (prompt(3, chunks=3), prompt(4, chunks=2))
"""Prompts that overflow the disk together with OLD, so that something is overwritten."""
TIMEOUTS = Timeouts(lookup_s=2.0, backoff_first_s=0.005, backoff_max_s=0.05)
JOB_S = 4.0
ANSWER_S_MAX = JOB_S + 2.0
"""Upper bound for any request, also on a busy machine."""
READY_S = 30.0
DISK_JOB_MS = 10_000
"""Longer than a stall as well, so that no disk mover is killed for one."""


class Outcome(NamedTuple):
    """Measurements of one run."""

    requests: int
    """Requests to the disk, summed over the disk mover's lives as far as they were seen."""
    found: tuple[int, int]
    """Chunks on disk when each of the two servers began to serve."""
    served: tuple[int, ...]
    """Chunks of each story that were served at the end and again after the restart."""
    counted: Counter[str]
    """Problems that counters and logs report."""
    health_s: float
    """The slowest answer of /healthz."""
    answer_s: float
    """The slowest store or retrieve."""


@contextmanager
def filled_store() -> Iterator[Path]:
    """A store with the OLD stories, left by a server that was killed. Tests copy it."""
    with tempfile.TemporaryDirectory(prefix="kv-filled-") as name, DiskServer(None, **SETTINGS) as server:
        with Engine(server.path, SHAPE, timeouts=TIMEOUTS) as engine:
            server.disk_ready()
            engine.ready()
            for story in OLD:
                assert keep(engine, story, JOB_S) == story.chunks
            chunks = sum(story.chunks for story in OLD)
            until("the old stories to be on disk", lambda: server.status().chunks_on_disk == chunks)
        server.kill()
        assert set(server.verified()) == {"right"}
        yield shutil.copytree(server.store, Path(name) / "store")


def run(filled: Path, plan: Plan | None) -> Outcome:
    """Makes one run. Raises AssertionError when a promise is broken."""
    stall_s = plan.stall_s if plan is not None and plan.kind == "stall" else 0.0
    unstarted = DiskServer(filled, **SETTINGS, disk_job_ms=DISK_JOB_MS + int(1e3 * stall_s))
    leave(unstarted.folder, plan)
    with unstarted as server, Engine(server.path, SHAPE, timeouts=TIMEOUTS) as engine:
        with healthy(server) as health:
            found = server.disk_ready(READY_S).chunks_on_disk
            answers_s = _work(server, engine)
            asked = requests(server.folder)[0]
            first_life = [bring(engine, story, JOB_S) or 0 for story in (*OLD, *NEW)]
            counted = _counted(server, server.status())
        server.kill()
        leave(server.folder, None)
        counted += Counter({f"verify {fault}": count for fault, count in server.verified().items() if fault != "right"})
        server.start()
        found_again = server.disk_ready().chunks_on_disk
        engine.ready()
        second_life = [bring(engine, story, JOB_S) or 0 for story in (*OLD, *NEW)]
        counted += _counted(server, server.status())
    return Outcome(asked, (found, found_again), (*first_life, *second_life), counted, health.longest_s, max(answers_s))


def _work(server: DiskServer, engine: Engine) -> list[float]:
    """Runs the workload; returns how long each store and retrieve took."""
    engine.ready()
    answers_s = []
    for act, story in [*((bring, story) for story in OLD), *((keep, story) for story in NEW), (bring, OLD[1])]:
        began_s = time.monotonic()
        act(engine, story, JOB_S)
        answers_s.append(time.monotonic() - began_s)
        assert answers_s[-1] < ANSWER_S_MAX, f"{act.__name__} took {answers_s[-1]:.1f} s"
        until("writes to end, or to stall", lambda: _is_quiet(server), READY_S)
    until("writes to end", lambda: not server.status().disks[0].queued_bytes, READY_S)
    return answers_s


def _is_quiet(server: DiskServer) -> bool:
    return not server.status().disks[0].queued_bytes or requests(server.folder)[1] > 0


def _counted(server: DiskServer, status: Status) -> Counter[str]:
    """Problems that the server reports in this life."""
    counted = Counter(misses(status))
    damaged = status.counters["disk_damaged"]
    assert isinstance(damaged, int)
    counted["damaged"] = damaged
    counted["device"] = bool(status.disks[0].problem)
    return +counted


class Table:
    """Totals over the runs of one kind of fault."""

    def __init__(self) -> None:
        self.runs = self.missed = self.untold = 0
        self.counted: Counter[str] = Counter()
        self.health_s = self.answer_s = 0.0

    def add(self, kind: Kind, outcome: Outcome, sound: Outcome) -> None:
        """Adds a run. `sound` is the outcome of a run without faults.

        A device may report a write as done although it wrote elsewhere or not at all. Nothing can count that: a start
        does not find the record and cannot know of it. The same holds when the device reads its labels from elsewhere.

        A stall is only a delay. Retrieves miss by their deadline; stores find less room, and report it, in an arena
        whose slots wait for the disk."""
        self.runs += 1
        hurt = any(came < expected for came, expected in zip(outcome.served, sound.served, strict=True))
        if hurt and not outcome.counted and kind != "stall":
            lied = kind in ("torn", "misdirect") and outcome.found < sound.found
            assert lied, f"misses that nothing tells of: {outcome}, expected {sound}"
            self.untold += 1
        self.missed += hurt
        self.counted += Counter(outcome.counted.keys())
        self.health_s = max(self.health_s, outcome.health_s)
        self.answer_s = max(self.answer_s, outcome.answer_s)

    def __str__(self) -> str:
        told = ", ".join(f"{what} in {runs}" for what, runs in sorted(self.counted.items()))
        return (
            f"{self.runs} runs, misses in {self.missed} (not found and not countable: {self.untold}); counted: "
            f"{told or 'nothing'}; longest /healthz {self.health_s * 1e3:.0f} ms, longest answer "
            f"{self.answer_s * 1e3:.0f} ms"
        )
