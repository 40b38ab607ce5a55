"""Jobs that end when all ranks have reported. One rank's failure fails the job, and each rank's report counts once."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvclient.offload.request import Request
from kvclient.offload.values import RetrieveOrder, StoreOrder

Order = TypeVar("Order", RetrieveOrder, StoreOrder)


@dataclass(eq=False, slots=True)
class Job(Generic[Order]):
    order: Order
    owner: Request
    ranks_left: set[int]
    chunks: int
    """Stores only: the fewest chunks that any rank holds."""
    why: str = ""
    """The first rank's reason, if any rank had one."""


class Jobs(Generic[Order]):
    """Jobs of one kind in flight, by number."""

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
        """Take a rank's report. Returns the job if this was its last rank."""
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
