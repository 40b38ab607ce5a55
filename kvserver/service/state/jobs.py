"""Stores and retrieves in flight."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from kvserver.index.space import Node, Space
from kvserver.service.state.caches import Cache
from kvserver.service.state.chunk_waits import Fetch
from kvserver.service.state.pledges import Wait
from kvserver.service.state.sessions import Session
from kvserver.service.state.table import Table
from kvserver.service.state.transitions import JOB, JobState, moved
from kvserver.wire.messages import Retrieve, Why


class GroupRun(NamedTuple):
    """One group's chunks that a store writes: chunks [first, first + len(slots)) of the job's walk."""

    group: int
    first: int
    slots: list[int]


class Walk(NamedTuple):
    """The chunks of a store's request that could be reserved."""

    nodes: list[Node]
    runs: list[GroupRun]
    why: Why
    """Why the walk is shorter than the request."""


class Held(NamedTuple):
    """A retrieve that waits for its chunks to be read from disk."""

    request: Retrieve
    fetch: Fetch


class Awaiting(NamedTuple):
    """A retrieve that waits for its chunks to be computed and stored."""

    request: Retrieve
    wait: Wait


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """A store or retrieve in flight on a mover."""

    number: int
    kind: Literal["store", "retrieve"]
    session: Session
    cache: Cache
    space: Space
    peer: int
    request_id: int
    began_ns: int
    walk: list[Node] = field(default_factory=list)
    """Store: see Walk, also for `runs` and `why`."""
    runs: list[GroupRun] = field(default_factory=list)
    why: Why = ""
    tail: Node | None = None
    """Retrieve: the pinned node."""
    state: JobState = "begun"
    held: Held | None = None
    """Retrieve in state held: what it waits for."""
    awaiting: Awaiting | None = None
    """Retrieve in state awaiting: the same."""
    chain: list[Node] = field(default_factory=list)
    """Retrieve: the chunks of the prefix when the mover was told of it. Some may have been cut off since."""
    copied: list[tuple[int, int, int]] = field(default_factory=list)
    """Retrieve: (group, first, last) of the chunks [first, last) of the prefix that the mover copies, in its order."""

    @property
    def is_waiting(self) -> bool:
        """It is a retrieve of which the mover was not told yet."""
        return self.held is not None or self.awaiting is not None

    def become(self, state: JobState) -> None:
        self.state = moved(JOB, self.state, state)

    def hold(self, held: Held) -> None:
        """The mover is not told of it before its chunks are in DRAM."""
        self.become("held")
        self.held = held

    def awaits(self, awaiting: Awaiting) -> None:
        """Nothing is asked of the mover or of a disk before its chunks were stored."""
        self.become("awaiting")
        self.awaiting = awaiting

    def take_awaiting(self) -> Awaiting:
        assert self.awaiting is not None
        awaiting, self.awaiting = self.awaiting, None
        return awaiting

    def moves_on(self, tail: Node) -> None:
        """The next chunk that it awaits has come."""
        self.tail = tail

    def copies(self, chain: list[Node], chunks: list[tuple[int, int, int]]) -> None:
        """The mover copies these (see `copied`) of the chain."""
        self.chain, self.copied = chain, chunks

    def take_held(self) -> Held:
        """The wait is over."""
        held, self.held = self.held, None
        assert held is not None
        return held

    def move_to(self, space: Space) -> None:
        """Its chunks were cut off, and hang in this space now."""
        self.space = space


class Jobs(Table[Job]):
    """All jobs: here, and by number at their session, cache and mover."""

    def begin(self, job: Job) -> None:
        self._rows[job.number] = job
        for numbers in (job.session.jobs, job.cache.jobs, job.cache.mover.jobs):
            numbers.add(job.number)

    def end(self, job: Job) -> None:
        job.become("ended")
        del self._rows[job.number]
        for numbers in (job.session.jobs, job.cache.jobs, job.cache.mover.jobs):
            numbers.discard(job.number)
