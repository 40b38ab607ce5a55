"""The connector's edge to the engine: no exception of ours reaches it while it serves.

This file guards the scheduler half, with the same methods. offload/guard.py guards the worker half. After the first
unexpected exception, InertScheduler (after_bug.py) takes over.
"""

import logging
from collections.abc import Callable, Iterable, Sequence

from kvclient.offload.ends import Report
from kvclient.offload.guard import Guard, refusal
from kvclient.offload.values import Group, RetrieveOrder, StoreOrder, Tables
from kvclient.vllm.after_bug import InertScheduler
from kvclient.vllm.keys import Request
from kvclient.vllm.pins import Pool
from kvclient.vllm.scheduler import Scheduled, Scheduler
from kvclient.vllm.versions import lacking

log = logging.getLogger("vllm.kvserver")


class GuardedScheduler:
    """Scheduler behind a guard; InertScheduler after the first unexpected exception."""

    def __init__(self, half: Scheduler, groups: Sequence[Group], *, release: str = "") -> None:
        """release: the engine's version, for error messages."""
        self._half = half
        self._groups = groups
        self._inert: InertScheduler | None = None
        self._guard = Guard(self._give_up, log, explain=lambda problem: lacking(problem, release) or refusal(problem))
        self._promised: dict[str, int] = {}
        """Request -> its tokens in HBM, for requests that match() promised a retrieve."""

    def _give_up(self) -> None:
        self._inert = InertScheduler(self._groups, self._half.pins, self._half.untold)

    def use_pool(self, pool: Pool) -> None:
        self._half.use_pool(pool)

    def use_namespace(self, namespaces: set[bytes]) -> None:
        self._half.use_namespace(namespaces)

    def new(self, request: Request) -> None:
        with self._guard as serves:
            if serves:
                self._half.new(request)

    def match(self, request: Request, hbm_tokens: int) -> tuple[int | None, bool]:
        with self._guard as serves:
            if serves:
                tokens, between_steps = self._half.match(request, hbm_tokens)
                if tokens:
                    self._promised[request.request_id] = hbm_tokens
                return tokens, between_steps
        return 0, False

    def allocated(self, request: Request, tables: Tables, external_tokens: int) -> None:
        """As Scheduler.allocated(). tables: needed only if something is retrieved."""
        hbm_tokens = self._promised.pop(request.request_id, 0)
        with self._guard as serves:
            if serves:
                self._half.allocated(request, tables, external_tokens)
                return
        if external_tokens:
            assert self._inert is not None
            name = request.request_id
            self._inert.owe(name, tables, hbm_tokens=hbm_tokens, external_tokens=external_tokens)

    def disk_tokens(self, name: str) -> int:
        with self._guard as serves:
            if serves:
                return self._half.disk_tokens(name)
        return 0

    def step(
        self, read: Callable[[], tuple[Iterable[Scheduled], Callable[[str], Tables]]]
    ) -> tuple[tuple[RetrieveOrder, ...], tuple[StoreOrder, ...]]:
        """read: returns the requests that the engine computes in this step, and a function from request to block
        tables."""
        with self._guard as serves:
            if serves:
                return self._half.step(*read())
        assert self._inert is not None
        return self._inert.step(), ()

    def collect(self) -> None:
        with self._guard as serves:
            if serves:
                self._half.collect()

    def ended(self, reports: Sequence[Report], *, namespaces: Iterable[tuple[int, bytes]], is_inert: bool) -> None:
        """Take the workers' reports and namespaces, by rank. is_inert: a rank fails every job from now on."""
        if is_inert and not self._guard.tripped:
            log.error("no cache from now on: a rank has said so, its log says why")
            self._guard.trip()
        with self._guard as serves:
            if serves:
                self._half.learn(namespaces)
                self._half.ended(reports)
                return
        assert self._inert is not None
        self._inert.ended(reports)

    def finished(self, name: str, tables: Sequence[Sequence[int]]) -> None:
        self._promised.pop(name, None)
        with self._guard as serves:
            if serves:
                self._half.finished(name, tables)

    def busy(self) -> bool:
        with self._guard as serves:
            if serves:
                return self._half.busy()
        assert self._inert is not None
        return self._inert.busy()

    def take_counts(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        with self._guard as serves:
            if serves:
                counts = self._half.take_counts()
        bugs = self._guard.take_bugs()
        return {**counts, "bugs": bugs} if bugs else counts

    def reset(self) -> None:
        """As Scheduler.reset(). Safe if it fails: after a failure nothing is found any more."""
        with self._guard as serves:
            if serves:
                self._half.reset()

    def close(self) -> None:
        with self._guard:
            self._half.close()
