"""The ends of a worker's jobs. Each job in an order is reported exactly once, whatever happens to it.

An unreported retrieve would block its request forever, and an unreported store would keep its blocks pinned. So a job
is noted before anything is done for it, and a job that nobody has begun can be ended from outside.

Belongs to the worker's main thread, except end(), which the client's thread calls, and stores_over().
"""

import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kvclient.offload.values import RetrieveOrder, StoreOrder
from kvclient.values import RetrieveResult, StoreResult


class Report(NamedTuple):
    """One rank's end of one job."""

    job: int
    rank: int
    result: RetrieveResult | StoreResult
    seconds: float
    """Duration of the job on this rank."""


class Ended(NamedTuple):
    """The jobs that have ended since the last step."""

    reports: list[Report]
    retrieved: set[str]
    """Requests whose retrieve has ended, successfully or not."""
    failed: set[str]
    """Requests whose retrieve failed, so that some of their blocks have undefined content."""
    failed_blocks: set[int]


@dataclass(eq=False, slots=True)
class _Job:
    order: RetrieveOrder | StoreOrder
    began_s: float


class Ends:
    """The jobs of one rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._lock = threading.Lock()
        self._open: dict[int, _Job] = {}
        """Jobs whose end was not taken yet."""
        self._unbegun: set[int] = set()
        """Jobs in `_open` that nobody carries out yet."""
        self._reports: list[Report] = []
        self._blocks_per_chunk: list[int] = []

    def begin_cache(self, blocks_per_chunk: list[int]) -> None:
        """A cache was registered whose groups have this many blocks a chunk."""
        self._blocks_per_chunk = blocks_per_chunk

    def note(self, orders: Iterable[RetrieveOrder | StoreOrder]) -> None:
        """Note new jobs. Known jobs stay as they are."""
        for order in orders:
            if order.job not in self._open:
                self._open[order.job] = _Job(order, time.monotonic())
                self._unbegun.add(order.job)

    def begin(self, job: int) -> None:
        """Start the job's clock."""
        self._open[job].began_s = time.monotonic()

    def begun(self, job: int) -> None:
        """Another part of the client ends the job from now on."""
        self._unbegun.discard(job)

    def end(self, job: int, result: RetrieveResult | StoreResult) -> None:
        began = self._open.get(job)
        seconds = time.monotonic() - began.began_s if began is not None else 0.0
        with self._lock:
            self._reports.append(Report(job, self._rank, result, seconds))

    def stores_over(self) -> list[tuple[int, int]]:
        """(job, rank) of ended stores that were not taken yet. Callable from any thread."""
        with self._lock:
            return [(report.job, report.rank) for report in self._reports if isinstance(report.result, StoreResult)]

    def end_unbegun(self, why: str) -> None:
        """End all jobs that nobody has begun, with the reason `why`."""
        while self._unbegun:
            job = self._unbegun.pop()
            is_retrieve = isinstance(self._open[job].order, RetrieveOrder)
            self.end(job, RetrieveResult(False, 0, why) if is_retrieve else StoreResult(0, 0, 0, why))

    def take(self) -> Ended:
        """Take all ends since the last call. Each end is returned once."""
        with self._lock:
            reports, self._reports = self._reports, []
        ended = Ended([], set(), set(), set())
        for report in reports:
            found = self._open.pop(report.job, None)
            if found is None:
                continue  # only the first end counts
            self._unbegun.discard(report.job)
            ended.reports.append(report)
            if isinstance(found.order, RetrieveOrder):
                request = str(found.order.request)
                ended.retrieved.add(request)
                result = report.result
                if not (isinstance(result, RetrieveResult) and result.ok):
                    ended.failed.add(request)
                    right = result.right_chunks if isinstance(result, RetrieveResult) else 0
                    ended.failed_blocks.update(self._wrong_blocks(found.order, right))
        return ended

    def _wrong_blocks(self, order: RetrieveOrder, right_chunks: int) -> Iterator[int]:
        """The blocks of a retrieve behind the leading chunks of the prefix that arrived whole."""
        for item in order.blocks:
            first = right_chunks * self._blocks_per_chunk[item.group] if right_chunks else 0
            yield from item.block_ids[max(0, first - item.first_block) :]
