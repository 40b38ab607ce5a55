"""The workers: they carry out orders some time later, in any order, and report each end in the next step."""

from dataclasses import dataclass, field
from random import Random

from kvclient.offload.values import RetrieveOrder, StoreOrder
from kvclient.values import RetrieveResult, StoreResult

from .content import GARBAGE, Page, require
from .pool import Pool
from .server import Server

GOOD = RetrieveResult(True, 1, "")


@dataclass
class Task:
    """One rank's part of a job."""

    order: RetrieveOrder | StoreOrder
    rank: int
    to_write: list[tuple[int, Page]] = field(default_factory=list)
    """Blocks and their new pages, once the server has agreed."""
    begun: bool = False
    result: RetrieveResult = GOOD


@dataclass
class Report:
    order: RetrieveOrder | StoreOrder
    rank: int
    result: RetrieveResult | StoreResult


class Ranks:
    def __init__(self, count: int, pool: Pool, server: Server, rng: Random) -> None:
        self.tasks: list[Task] = []
        self.reports: list[Report] = []
        self._count = count
        self._pool = pool
        self._server = server
        self._rng = rng

    def begin(self, order: RetrieveOrder | StoreOrder) -> None:
        self.tasks += [Task(order, rank) for rank in range(self._count)]

    def writes_to(self, block: int) -> bool:
        """True if a retrieve in flight may write the block."""
        return any(
            block in item.block_ids
            for task in self.tasks
            if isinstance(task.order, RetrieveOrder)
            for item in task.order.blocks
        )

    def advance(self, now_s: float) -> None:
        """Advances a task on a random rank."""
        if not self.tasks:
            return
        task = self._rng.choice(self.tasks)
        if isinstance(task.order, StoreOrder):
            # A client's stores reach the server in order, so that a chunk finds its parent there.
            first = next(it for it in self.tasks if isinstance(it.order, StoreOrder) and it.rank == task.rank)
            assert isinstance(first.order, StoreOrder)
            self._store(first, first.order)
        else:
            self._retrieve(task, task.order, now_s)

    def server_died(self) -> None:
        """Running retrieves stop half-way; those that have not begun will be refused."""
        for task in self.tasks:
            if task.begun:
                task.result = RetrieveResult(False, 0, "connection-lost")
                task.to_write = [(block, GARBAGE) for block, _ in task.to_write[: self._rng.randint(0, 2)]]

    # ---------------------------------------------------------------- helpers

    def _store(self, task: Task, order: StoreOrder) -> None:
        pages = [[self._pool.pages[task.rank].get(block, GARBAGE) for block in item.block_ids] for item in order.blocks]
        self._end(task, self._server.store(order, task.rank, pages))

    def _retrieve(self, task: Task, order: RetrieveOrder, now_s: float) -> None:
        if not task.begun:
            self._ask(task, order, now_s)
        elif task.to_write:
            block, page = task.to_write.pop()
            self._pool.pages[task.rank][block] = page
        else:
            self._end(task, task.result)

    def _ask(self, task: Task, order: RetrieveOrder, now_s: float) -> None:
        if order.refused:
            self._end(task, RetrieveResult(False, 0, order.refused))
            return
        brought = self._server.read(order.lease, task.rank, order.blocks, now_s)
        task.begun = True
        blocks = [block for item in order.blocks for block in item.block_ids]
        require(len(blocks) == len(set(blocks)), "a retrieve names a block twice")
        if isinstance(brought, RetrieveResult):
            task.result = brought
            if self._rng.random() < 0.5:
                task.to_write = [(self._rng.choice(blocks), GARBAGE)]
            return
        pages = [page for pages in brought for page in pages]
        task.to_write = list(zip(blocks, pages, strict=True))
        self._rng.shuffle(task.to_write)

    def _end(self, task: Task, result: RetrieveResult | StoreResult) -> None:
        self.tasks.remove(task)
        self.reports.append(Report(task.order, task.rank, result))
