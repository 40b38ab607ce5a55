"""The ends of a worker's jobs: each job that an order names is reported once, whatever becomes of it.

A retrieve that is never reported would keep its request waiting for ever, a store its blocks pinned. So a job is noted
before anything is done for it, and what nobody has begun can be ended from outside. Belongs to the worker's main
thread, but for end(), which the client's thread calls, and stores_over().
"""

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from kvclient.offload_values import RetrieveOrder, StoreOrder
from kvclient.values import RetrieveResult, StoreResult


class Report(NamedTuple):
    """One rank's end of one job."""

    job: int
    rank: int
    result: RetrieveResult | StoreResult
    ended_s: float
    """On the worker's monotonic clock."""


class Ended(NamedTuple):
    """What has ended since the last step."""

    reports: list[Report]
    retrieved: set[str]
    """Requests whose retrieve has ended, well or not."""
    failed: set[str]
    """Of them, those with blocks that do not hold their bytes."""
    failed_blocks: set[int]
    seconds: dict[str, list[float]]
    """How long the jobs took, for the statistics."""


@dataclass(eq=False, slots=True)
class _Job:
    order: RetrieveOrder | StoreOrder
    began_s: float


class Ends:
    """Of one rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._lock = threading.Lock()
        self._open: dict[int, _Job] = {}
        """Jobs whose end was not taken yet."""
        self._unbegun: set[int] = set()
        """Of them, those that nobody carries out yet."""
        self._reports: list[Report] = []

    def note(self, orders: Iterable[RetrieveOrder | StoreOrder]) -> None:
        """New jobs. Those that are known are left as they are."""
        for order in orders:
            if order.job not in self._open:
                self._open[order.job] = _Job(order, time.monotonic())
                self._unbegun.add(order.job)

    def begin(self, job: int) -> None:
        """Its time counts from now."""
        self._open[job].began_s = time.monotonic()

    def begun(self, job: int) -> None:
        """From now on somebody else ends the job."""
        self._unbegun.discard(job)

    def end(self, job: int, result: RetrieveResult | StoreResult) -> None:
        with self._lock:
            self._reports.append(Report(job, self._rank, result, time.monotonic()))

    def stores_over(self) -> list[tuple[int, int]]:
        """(job, rank) of stores that have ended and were not taken yet. From any thread."""
        with self._lock:
            return [(report.job, report.rank) for report in self._reports if isinstance(report.result, StoreResult)]

    def end_unbegun(self, why: str) -> None:
        """Nobody will begin these."""
        while self._unbegun:
            job = self._unbegun.pop()
            is_retrieve = isinstance(self._open[job].order, RetrieveOrder)
            self.end(job, RetrieveResult(False, 0, why) if is_retrieve else StoreResult(0, 0, 0, why))

    def take(self) -> Ended:
        """Each end once."""
        with self._lock:
            reports, self._reports = self._reports, []
        ended = Ended([], set(), set(), set(), {})
        for report in reports:
            found = self._open.pop(report.job, None)
            if found is None:
                continue  # its first end counted
            self._unbegun.discard(report.job)
            ended.reports.append(report)
            is_retrieve = isinstance(found.order, RetrieveOrder)
            name = "retrieve_seconds" if is_retrieve else "store_seconds"
            ended.seconds.setdefault(name, []).append(report.ended_s - found.began_s)
            if is_retrieve:
                request = str(found.order.request)
                ended.retrieved.add(request)
                if not (isinstance(report.result, RetrieveResult) and report.result.ok):
                    ended.failed.add(request)
                    ended.failed_blocks.update(block for item in found.order.blocks for block in item.block_ids)
        return ended
