"""A server, an engine that survives every fault, and the conditions that must hold whenever all is quiet again.

Each round of a fault scenario is: begin() → the fault → end(). end() waits for quiet and then asserts that nothing
leaked. It also asserts that a new worker is served every byte that was stored before the fault."""

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from kvclient import Blocks, Timeouts
from kvserver.wire.status import Status
from tests.process.checked import CheckedServer
from tests.process.engine import LARGE, Engine, Prompt, prompt
from tests.process.harness import (
    OBSERVER_SESSIONS,
    WAIT_S,
    Server,
    descriptors_of,
    is_gone,
    maps,
    pids_below,
    resume,
    stop,
    until,
)

STORED_CHUNKS = (3, 2)
"""Sizes of the prompts that are stored at the beginning of each round."""
FLIGHT_CHUNKS = 29
"""Chunks of a prompt that is interrupted in flight: 30 MB, several milliseconds of copying."""
FREED_S = 5.0
"""Time limit for freeing everything of a dead worker."""
ATTEMPTS_MAX = 200

SETTINGS: dict[str, object] = {
    "arena_bytes": 128 << 20,
    "slab_bytes": 8 << 20,
    "mover_grace_ms": 700,
    "copy_threads": 1,
}
TIMEOUTS = Timeouts(lookup_s=20.0, probe_s=0.5, backoff_first_s=0.005, backoff_max_s=0.05, connect_s=2.0)
"""A stopped brain accepts connections and says nothing: connect_s and probe_s set how soon the client tries again."""

T = TypeVar("T")


class Scene:
    """State of the scenarios; create it with open_scene()."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.seen: Counter[str] = Counter()
        """Counts of events in the rounds, for the script's report."""
        self.survivor = self.engine("survivor")
        self.stored: list[Prompt] = []
        self._seeds = itertools.count(1)
        self._quiet: dict[str, int] = {}

    def engine(self, name: str) -> Engine:
        return Engine(self.server.path, LARGE, name=name, timeouts=TIMEOUTS)

    def fresh_prompt(self, chunks: int = FLIGHT_CHUNKS) -> Prompt:
        return prompt(next(self._seeds), chunks)

    def fresh_seed(self) -> int:
        """Seed of a prompt that a Worker makes: prompt(seed, FLIGHT_CHUNKS)."""
        return next(self._seeds)

    # ---------------------------------------------------------------- rounds

    def begin(self) -> None:
        """Leaves only a few known prompts stored. The first call also records each process's number of descriptors."""
        self.survivor.ready()
        self.forget_all()
        self.stored = [self.fresh_prompt(chunks) for chunks in STORED_CHUNKS]
        for story in self.stored:
            assert self.survivor.store(story).chunks == story.chunks
        self.wait_quiet()
        if not self._quiet:
            with self.engine("visitor") as visitor:  # the first visitor's permanent descriptors are no leak
                visitor.ready().retrieve(self.stored[0])
            self.recover()
            self._quiet = self.descriptors()

    def end(self) -> None:
        status = self.recover()
        assert status.arena.used_bytes == status.chunks * LARGE.slot_bytes(), "each slot in use is one of a chunk"
        self._wait_no_descriptor_leaked()
        with self.engine("visitor") as visitor:
            visitor.ready()
            for story in self.stored:
                assert visitor.retrieve(story) == story.chunks, "what was sealed is served"
                self.seen["chunks compared"] += story.chunks
        self.recover()  # a mover that unmapped the visitor's pool too late was killed for it
        assert self.survivor.retrieve(self.stored[0]) == self.stored[0].chunks, "the engine that lived on goes on"
        assert self.survivor.pool.wrong() == 0, "nobody wrote into the pool of the engine that lived on"
        self.wait_quiet()
        self.seen["rounds"] += 1

    def forget_all(self) -> None:
        """Clears the cache and asserts that every slot comes back; a leaked pin or slot would keep one."""
        self.wait_quiet()
        self.survivor.client.clear(self.survivor.namespace)
        status = self.server.status()
        assert (status.chunks, status.arena.used_bytes) == (0, 0), status

    def wait_quiet(self, engines: int = 1) -> Status:
        """Waits until only the survivor and `engines` - 1 others are there, and nothing is in flight or held.

        All of them must be registered with a live mover."""

        def quiet() -> Status | None:
            status = self.server.status()
            there = (status.sessions - OBSERVER_SESSIONS, status.caches)
            held = (status.leases, status.pledges, status.pins, status.stores, status.retrieves)
            ready = {mover.state for mover in status.movers} | {cache.state for cache in status.shown_caches}
            return status if there == (engines, engines) and not any(held) and ready == {"ready", "mapped"} else None

        return until("sessions, caches, leases, pledges and jobs to end", quiet)

    def recover(self) -> Status:
        """Waits until the survivor has recovered by itself."""
        status = self.wait_quiet()
        self.survivor.ready()
        return status

    def wait_freed(self, pool: str) -> None:
        """Waits until no process of the server maps or holds a dead worker's pool."""
        until(f"{pool} to be unmapped", lambda: not self._is_held(pool), FREED_S)

    def descriptors(self) -> dict[str, int]:
        """Number of open descriptors by process."""
        pids = {"supervisor": self.server.pid, "brain": self.server.brain_pid(), "mover": self.server.mover_pid()}
        # While a mover fills its page tables it holds the arena a second time: growth, not a leak.
        return {
            name: sum("memfd:kvserver-arena" not in held for held in descriptors_of(pid)) for name, pid in pids.items()
        }

    def _wait_no_descriptor_leaked(self) -> None:
        until(
            f"descriptors to be as at the begin ({self._quiet}), they are {self.descriptors()}",
            lambda: self.descriptors() == self._quiet,
            FREED_S,
        )

    def _is_held(self, pool: str) -> bool:
        for pid in pids_below(self.server.pid):
            try:
                if maps(pid, pool):
                    return True
            except (FileNotFoundError, ProcessLookupError):
                continue
        return False

    # ---------------------------------------------------------------- jobs in flight

    def begin_store(self, timeout_s: float | None = None) -> "Flight":
        """Begins to store a new prompt from the survivor."""
        story = self.fresh_prompt()
        where = self.survivor.place(story)
        self.survivor.pool.compute(story, where)
        return Flight(story, where, self.survivor.begin_store(story, where, timeout_s=timeout_s))

    def begin_retrieve(self, story: Prompt, timeout_s: float | None = None) -> "Flight":
        """Begins to retrieve a stored prompt into the survivor's blocks, which hold other content before."""
        found = self.survivor.lookup(story)
        assert found.lease is not None, found
        assert found.chunks == story.chunks
        where = self.survivor.place(story)
        self.survivor.pool.spoil(where)
        return Flight(story, where, self.survivor.begin_retrieve(found.lease, where, timeout_s))

    def hold(self, begin: Callable[[], "Flight"], *, copying: bool) -> "tuple[int, Flight]":
        """Begins a job of the survivor and holds it in flight on a stopped mover. Returns (mover's pid, job)."""
        if not copying:
            return self.hold_unread(begin)
        return self.hold_copying(begin, lambda flight: flight.future.done(), self._land)

    def hold_unread(self, begin: Callable[[], T]) -> tuple[int, T]:
        """Stops the mover, begins a job and waits until the brain has sent it.

        Returns (mover's pid, begin's result)."""
        mover = self.server.mover_pid()
        stop(mover)
        begun = begin()
        until("the job to be in flight", lambda: _in_flight(self.server.status()))
        return mover, begun

    def hold_copying(
        self, begin: Callable[[], T], has_ended: Callable[[T], bool], land: Callable[[T], None]
    ) -> tuple[int, T]:
        """Begins jobs until it catches one while its bytes move, and stops the mover in the middle of that copy."""
        mover = self.server.mover_pid()
        with watching_apart(mover):
            return self._meet_copying(mover, begin, has_ended, land)

    def _meet_copying(
        self, mover: int, begin: Callable[[], T], has_ended: Callable[[T], bool], land: Callable[[T], None]
    ) -> tuple[int, T]:
        for _ in range(ATTEMPTS_MAX):
            boards = self.server.boards()
            begun = begin()
            while not boards.any_submitted() and not has_ended(begun):
                os.sched_yield()
            stop(mover)
            met = boards.any_submitted()
            boards.close()
            if met:
                self.seen["met while copying"] += 1
                return mover, begun
            resume(mover)
            until("the job to end", partial(has_ended, begun))
            land(begun)
            self.touch()
            self.seen["missed"] += 1
        raise TimeoutError(f"no job was met while copying in {ATTEMPTS_MAX} attempts")

    def _land(self, flight: "Flight") -> None:
        """Finishes a job that ended before it could be stopped: its blocks are reused."""
        flight.future.result(WAIT_S)
        self.survivor.pool.spoil(flight.where)

    def touch(self) -> None:
        """Looks up the prompts that must stay, so that others are the least recently used."""
        self.survivor.ready()  # else an abandoned job's shut gate would keep the lookups from being sent
        for story in self.stored:
            found = self.survivor.lookup(story)
            if found.lease is not None:
                self.survivor.client.release(found.lease)


@contextmanager
def watching_apart(mover: int) -> Iterator[None]:
    """Keeps this thread and a mover's threads on different processors.

    On the copying thread's processor this thread would run only between two pieces, and never see a copy under way."""
    everywhere = os.sched_getaffinity(0)
    here = {min(everywhere)}
    if len(everywhere) == 1:
        yield
        return
    threads = [int(task.name) for task in Path(f"/proc/{mover}/task").iterdir()]
    try:
        os.sched_setaffinity(0, here)
        for thread in threads:
            os.sched_setaffinity(thread, everywhere - here)
        yield
    finally:
        os.sched_setaffinity(0, everywhere)
        for thread in threads:
            with suppress(ProcessLookupError):
                os.sched_setaffinity(thread, everywhere)


class Flight(NamedTuple):
    """A job of the survivor."""

    story: Prompt
    where: list[Blocks]
    future: "Future[Any]"


def _in_flight(status: Status) -> int:
    return status.stores + status.retrieves


@contextmanager
def open_scene(**settings: object) -> Iterator[Scene]:
    with CheckedServer(**{**SETTINGS, **settings}) as server:
        scene = Scene(server)
        try:
            yield scene
        finally:
            for pid in pids_below(server.pid):
                resume(pid)
            scene.survivor.close()


def assert_no_process(pids: list[int]) -> None:
    until("all of the server's processes to end", lambda: all(is_gone(pid) for pid in pids), WAIT_S)
