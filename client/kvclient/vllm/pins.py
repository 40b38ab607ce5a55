"""Pins on the blocks that stores read, in the engine's pool, until all ranks have reported the store's end.

Neither the end of a request nor its preemption can give a pinned block to another request. Kept apart from the
decisions, so that blocks are freed even after the decisions have failed.
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from kvclient.offload.values import StoreOrder


class Pool(Protocol):
    """The part of vLLM's BlockPool that is used here."""

    blocks: Sequence[Any]

    def touch(self, blocks: Sequence[Any]) -> None: ...
    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None: ...


class Pinned(NamedTuple):
    """The blocks that one store reads."""

    request: Hashable
    blocks: list[Any]
    ranks_left: set[int]
    """Ranks that have not reported the store's end."""


class Pins:
    """Pinned blocks of all stores in flight, by job."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._pool: Pool | None = None
        self._held: dict[int, Pinned] = {}
        self._kept: dict[Hashable, list[list[Any]]] = {}
        """Name of a finished request -> all its blocks, by request and group."""
        self._untold: list[int] = []
        """Jobs that no rank has received yet."""

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
        """The request has finished. Its stores keep all its blocks until they end; then they are freed last block
        first.

        Otherwise the blocks before the last store would be freed now and the later ones after the store. The engine
        evicts first what was freed first, so it would lose the head of a prefix before the tail, and the tail is
        useless alone.
        """
        if self._pool is not None and self._is_storing(request):
            tables_kept = [[self._pool.blocks[block] for block in table] for table in tables]
            for blocks in tables_kept:
                self._pool.touch(blocks)
            # Extended, not replaced: a name may be used again while a store of the earlier request still runs.
            self._kept.setdefault(request, []).extend(tables_kept)

    def told(self) -> None:
        """All orders pinned so far have gone to the ranks."""
        self._untold.clear()

    def reported(self, job: int, rank: int) -> None:
        """A rank has ended a job. No effect if reported twice, or if the job is not a store."""
        if job not in self._held:
            return
        ranks_left = self._held[job].ranks_left
        ranks_left.discard(rank)
        if not ranks_left:
            self._free(job)

    def drop_untold(self) -> None:
        """Unpin the blocks of orders that no rank received, because nobody will report their end."""
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
