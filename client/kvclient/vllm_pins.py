"""Blocks that stores read, pinned in the engine's pool until all ranks have reported: neither the end of a request nor
its preemption can give them to somebody else meanwhile.

Apart from the decisions, so that blocks come back also when these have failed.
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from kvclient.offload_values import StoreOrder


class Pool(Protocol):
    """vLLM's BlockPool."""

    blocks: Sequence[Any]

    def touch(self, blocks: Sequence[Any]) -> None: ...
    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None: ...


class Pinned(NamedTuple):
    """What a store reads."""

    request: Hashable
    blocks: list[Any]
    ranks_left: set[int]
    """That have not reported its end."""


class Pins:
    """Of all stores in flight, by job."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._pool: Pool | None = None
        self._held: dict[int, Pinned] = {}
        self._kept: dict[Hashable, list[list[Any]]] = {}
        """Name of finished requests -> all their blocks, by request and group."""
        self._untold: list[int] = []
        """Jobs that no rank knows of yet."""

    def __len__(self) -> int:
        return len(self._held)

    def use_pool(self, pool: Pool) -> None:
        self._pool = pool

    def pin(self, order: StoreOrder) -> None:
        assert self._pool is not None, "the pool comes before the first step"
        blocks = [self._pool.blocks[block] for item in order.blocks for block in item.block_ids]
        self._pool.touch(blocks)
        self._held[order.job] = Pinned(order.request, blocks, set(range(self._ranks)))
        self._untold.append(order.job)

    def keep(self, request: Hashable, tables: Sequence[Sequence[int]]) -> None:
        """The request has finished: while stores of it run, all its blocks stay, and then go together, the last one
        first. Else those before the last store would go at once and those of it later, and the engine, which evicts
        first what it got back first, would lose the head of a prefix before the tail, which is of no use without."""
        if self._pool is not None and self._is_storing(request):
            tables_kept = [[self._pool.blocks[block] for block in table] for table in tables]
            for blocks in tables_kept:
                self._pool.touch(blocks)
            # Added: a name may be used again while a store of its earlier request still runs.
            self._kept.setdefault(request, []).extend(tables_kept)

    def told(self) -> None:
        """The ranks get the orders whose blocks were pinned since the last call."""
        self._untold.clear()

    def reported(self, job: int, rank: int) -> None:
        """A rank has ended a job. Said twice, or of something else than a store, it has no effect."""
        if job not in self._held:
            return
        ranks_left = self._held[job].ranks_left
        ranks_left.discard(rank)
        if not ranks_left:
            self._free(job)

    def drop_untold(self) -> None:
        """Nobody will carry out what was not told, nor report it."""
        while self._untold:
            self._free(self._untold.pop())

    def _free(self, job: int) -> None:
        assert self._pool is not None
        request, blocks, _ = self._held.pop(job)
        self._pool.free_blocks(reversed(blocks))
        if request in self._kept and not self._is_storing(request):
            for blocks in self._kept.pop(request):
                self._pool.free_blocks(reversed(blocks))

    def _is_storing(self, request: Hashable) -> bool:
        return any(held.request == request for held in self._held.values())
