"""The connector's edge to the engine: no exception of ours reaches it while it serves.

This file guards the scheduler half, with the same methods. offload/guard.py guards the worker half, and says what the
guard does. After a bug a promised retrieve is reported as failed, and the engine computes the request. Running jobs end
by themselves and are reported, and then their blocks are unpinned.
"""

import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvclient.offload.guard import WHY, Guard, refusal
from kvclient.offload.job_ends import Report
from kvclient.offload.values import Group, RetrieveOrder, StoreOrder, Tables
from kvclient.values import Blocks, Lease
from kvclient.vllm.keys import Request
from kvclient.vllm.pins import Pool
from kvclient.vllm.release_differences import lacking
from kvclient.vllm.scheduler import Scheduled, Scheduler

log = logging.getLogger("vllm.kvserver")

NO_LEASE = Lease(0, 0, 0, 0.0)


class GuardedScheduler:
    """Scheduler behind a guard. After a bug only its pins and its untold retrieves are used."""

    def __init__(self, half: Scheduler, groups: Sequence[Group], *, release: str = "") -> None:
        """release: the engine's version, for error messages."""
        self._half = half
        self._groups = groups
        self._guard = Guard(
            log, on_bug=half.give_up, explain=lambda problem: lacking(problem, release) or refusal(problem)
        )
        self._promised: dict[str, int] = {}
        """Request -> its tokens in HBM, for requests that match() promised a retrieve."""
        self._numbers = itertools.count(-1, -1)
        """Job numbers after a bug; negative, so that they differ from those of Offload."""

    def use_pool(self, pool: Pool) -> None:
        self._half.use_pool(pool)

    def use_namespace(self, namespaces: set[bytes]) -> None:
        self._half.use_namespace(namespaces)

    def new(self, request: Request) -> None:
        self._guard.run(self._half.new, request)

    def match(self, request: Request, hbm_tokens: int) -> tuple[int | None, bool]:
        tokens, between_steps = self._guard.run(self._half.match, request, hbm_tokens) or (0, False)
        if tokens:
            self._promised[request.request_id] = hbm_tokens
        return tokens, between_steps

    def allocated(self, request: Request, tables: Tables, external_tokens: int) -> None:
        """As Scheduler.allocated(). tables: needed only if something is retrieved."""
        name = request.request_id
        hbm_tokens = self._promised.pop(name, 0)
        self._guard.run(self._half.allocated, request, tables, external_tokens)
        if self._guard.tripped and external_tokens:
            self._half.untold.append(self._owed(name, tables, hbm_tokens, end_tokens=hbm_tokens + external_tokens))

    def disk_tokens(self, name: str) -> int:
        return self._guard.run(self._half.disk_tokens, name) or 0

    def step(
        self, read: Callable[[], tuple[Iterable[Scheduled], Callable[[str], Tables]]]
    ) -> tuple[tuple[RetrieveOrder, ...], tuple[StoreOrder, ...]]:
        """read: returns the requests that the engine computes in this step, and a function from request to block
        tables."""
        orders = self._guard.run(lambda: self._half.step(*read()))
        if orders is None:
            orders = tuple(order._replace(refused=WHY) for order in self._half.untold), ()
            self._half.untold.clear()
        return orders

    def preempted(self, names: Iterable[str]) -> None:
        self._guard.run(self._half.preempted, names)

    def collect(self) -> None:
        self._guard.run(self._half.collect)

    def take_events(self) -> list[Any]:
        return self._guard.run_always(self._half.take_events) or []

    def failed(self, blocks: Iterable[int]) -> None:
        self._guard.run(self._half.failed, blocks)

    def ended(self, reports: Sequence[Report], *, namespaces: Iterable[tuple[int, bytes]], is_inert: bool) -> None:
        """Take the workers' reports and namespaces, by rank. is_inert: a rank fails every job from now on."""
        if is_inert and not self._guard.tripped:
            log.error("no cache from now on: a rank has said so, its log says why")
            self._guard.trip()
        self._guard.run(self._half.learn, namespaces)
        self._guard.run(self._half.ended, reports)
        if self._guard.tripped:
            for report in reports:
                self._half.pins.reported(report.job, report.rank)

    def finished(self, name: str, tables: Sequence[Sequence[int]]) -> dict[str, Any] | None:
        self._promised.pop(name, None)
        return self._guard.run(self._half.finished, name, tables)

    def busy(self) -> bool:
        busy = self._guard.run(self._half.busy)
        return bool(self._half.untold) or len(self._half.pins) > 0 if busy is None else busy

    def take_counts(self) -> dict[str, int | list[float]]:
        return (self._guard.run(self._half.take_counts) or {}) | self._guard.take_bugs()

    def reset(self) -> None:
        """As Scheduler.reset(). Safe if it fails: after a failure nothing is found any more."""
        self._guard.run(self._half.reset)

    def close(self) -> None:
        self._guard.run_always(self._half.close)

    def _owed(self, request: str, tables: Tables, hbm_tokens: int, *, end_tokens: int) -> RetrieveOrder:
        """A retrieve that the engine waits for and that the next step fails.

        A request that is noted twice before a step still ends once, because ranks name requests, not jobs.
        """
        blocks = [
            Blocks(index, first, tables[index][first : -(-end_tokens // group.block_tokens)])
            for index, group in enumerate(self._groups)
            for first in [hbm_tokens // group.block_tokens]
        ]
        return RetrieveOrder(next(self._numbers), request, NO_LEASE, tuple(blocks), hbm_tokens, end_tokens, WHY)
