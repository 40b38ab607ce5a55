"""Jobs that end when all ranks have reported: a failure on any rank is the job's, a report counts once."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvclient.offload_request import Request
from kvclient.offload_values import RetrieveOrder, StoreOrder

Order = TypeVar("Order", RetrieveOrder, StoreOrder)


@dataclass(eq=False, slots=True)
class Job(Generic[Order]):
    order: Order
    owner: Request
    ranks_left: set[int]
    chunks: int
    """Stores: the fewest that any rank holds."""
    why: str = ""
    """The first rank's reason that had one."""


class Jobs(Generic[Order]):
    """Those of one kind that are in flight, by number."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._jobs: dict[int, Job[Order]] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def begin(self, order: Order, owner: Request, *, chunks: int = 0) -> None:
        assert order.job not in self._jobs
        self._jobs[order.job] = Job(order, owner, set(range(self._ranks)), chunks)
        owner.jobs += 1

    def reported(self, job: int, rank: int, *, chunks: int = 0, why: str = "") -> Job[Order] | None:
        """The job, when this was the last rank that it waited for."""
        entry = self._jobs.get(job)
        if entry is None or rank not in entry.ranks_left:
            return None
        entry.ranks_left.remove(rank)
        entry.chunks = min(entry.chunks, chunks)
        entry.why = entry.why or why
        if entry.ranks_left:
            return None
        del self._jobs[job]
        entry.owner.jobs -= 1
        return entry

    def are_of(self, name: Hashable) -> bool:
        return any(entry.owner.name == name for entry in self._jobs.values())
