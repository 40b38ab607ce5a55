"""The sequences whose blocks a job in flight reads or writes, so that blocks are freed neither too early nor never.

Separate from the decisions, so that blocks are freed even after these have failed.
"""

import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from kvclient.atom.steps import Name, Seq
from kvclient.offload.values import RetrieveOrder, StoreOrder


class _Job(NamedTuple):
    seq: Seq
    """Reference that keeps its id() from being reused."""
    order: RetrieveOrder | StoreOrder
    began_s: float


class EndedJob(NamedTuple):
    is_retrieve: bool
    chunks: int
    """Chunks that a store was to write."""
    seconds: float
    """Duration from the order to the report of the last rank."""


class AtomJobs:
    """Jobs in flight by number. ATOM calls this number the generation of an operation."""

    def __init__(self) -> None:
        self._jobs: dict[int, _Job] = {}
        self._of: dict[int, set[int]] = {}
        """id() of a sequence -> its jobs."""

    def __len__(self) -> int:
        return len(self._jobs)

    def begin(self, order: RetrieveOrder | StoreOrder, seq: Seq) -> None:
        assert order.job not in self._jobs
        self._jobs[order.job] = _Job(seq, order, time.monotonic())
        self._of.setdefault(id(seq), set()).add(order.job)

    def holds(self, seq: Seq) -> bool:
        return id(seq) in self._of

    def ended(self, operations: Iterable[Any]) -> dict[Any, EndedJob]:
        """The ended operations that were in flight for exactly this request."""
        return {one: job for one in operations if (job := self._taken(one)) is not None}

    def _taken(self, operation: Any) -> EndedJob | None:
        number = getattr(operation, "generation", -1)
        job = self._jobs.get(number)
        if job is None:
            return None
        order = job.order
        assert isinstance(order.request, Name)
        if order.request.id != operation.req_id:
            return None
        del self._jobs[number]
        left = self._of[id(job.seq)]
        left.discard(number)
        if not left:
            del self._of[id(job.seq)]
        chunks = order.chunks if isinstance(order, StoreOrder) else 0
        return EndedJob(isinstance(order, RetrieveOrder), chunks, time.monotonic() - job.began_s)
