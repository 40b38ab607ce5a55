"""Blocks that stores read, pinned in the engine's pool until all ranks have reported: neither the end of a request nor
its preemption can give them to somebody else meanwhile.

Apart from the decisions, so that blocks come back also when these have failed.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from kvclient.offload_values import StoreOrder


class Pool(Protocol):
    """vLLM's BlockPool."""

    blocks: Sequence[Any]

    def touch(self, blocks: Sequence[Any]) -> None: ...
    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None: ...


class Pins:
    """Of all stores in flight, by job."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._pool: Pool | None = None
        self._held: dict[int, tuple[list[Any], set[int]]] = {}
        """The blocks of a job, and the ranks that have not reported."""
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
        self._held[order.job] = blocks, set(range(self._ranks))
        self._untold.append(order.job)

    def told(self) -> None:
        """The ranks get the orders whose blocks were pinned since the last call."""
        self._untold.clear()

    def reported(self, job: int, rank: int) -> None:
        """A rank has ended a job. Said twice, or of something else than a store, it has no effect."""
        if job not in self._held:
            return
        ranks_left = self._held[job][1]
        ranks_left.discard(rank)
        if not ranks_left:
            self._free(job)

    def drop_untold(self) -> None:
        """Nobody will carry out what was not told, nor report it."""
        while self._untold:
            self._free(self._untold.pop())

    def _free(self, job: int) -> None:
        assert self._pool is not None
        blocks, _ = self._held.pop(job)
        self._pool.free_blocks(reversed(blocks))
