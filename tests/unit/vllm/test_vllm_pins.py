"""Blocks return to the engine in its intended order of eviction, whichever stores had pinned them."""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvclient.offload.values import StoreOrder
from kvclient.values import Blocks
from kvclient.vllm.pins import Pins


class Pool:
    """vLLM's BlockPool: blocks without a holder are evicted in the order in which they came back."""

    def __init__(self) -> None:
        self.blocks = [SimpleNamespace(number=number) for number in range(40)]
        self.references: Counter[int] = Counter()
        self.free: deque[int] = deque()

    def touch(self, blocks: Sequence[Any]) -> None:
        for block in blocks:
            if not self.references[block.number] and block.number in self.free:
                self.free.remove(block.number)
            self.references[block.number] += 1

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        for block in list(ordered_blocks):
            self.references[block.number] -= 1
            assert self.references[block.number] >= 0
            if not self.references[block.number]:
                self.free.append(block.number)


class Engine:
    """One request that holds blocks of two groups, and its stores."""

    TABLES = ([3, 4, 5, 6, 7, 8, 9], [21, 22, 23])

    def __init__(self, ranks: int = 1) -> None:
        self.pool, self.pins = Pool(), Pins(ranks)
        self.pins.use_pool(self.pool)
        self._hold = [self.pool.blocks[block] for table in self.TABLES for block in table]
        self.pool.touch(self._hold)

    def store(self, job: int, blocks: list[int]) -> None:
        self.pins.pin(StoreOrder(job, "r", 0, b"", b"", (Blocks(0, 0, blocks),)))

    def finish(self) -> None:
        """Frees blocks as the scheduler does: the connector first, then each group, the last block first."""
        self.pins.keep("r", self.TABLES)
        for table in self.TABLES:
            self.pool.free_blocks([self.pool.blocks[block] for block in reversed(table)])


IN_ORDER = [9, 8, 7, 6, 5, 4, 3, 23, 22, 21]


def test_without_stores_nothing_is_kept() -> None:
    engine = Engine()
    engine.finish()
    assert list(engine.pool.free) == IN_ORDER


def test_the_tail_does_not_outlive_the_head_when_its_store_ends_last() -> None:
    engine = Engine()
    engine.store(1, [3, 4, 5])
    engine.store(2, [6, 7, 8])
    engine.pins.reported(1, 0)
    engine.finish()
    assert not engine.pool.free
    engine.pins.reported(2, 0)
    assert list(engine.pool.free) == IN_ORDER
    assert not +engine.pool.references


@pytest.mark.parametrize("last", [1, 2])
def test_blocks_stay_until_the_last_rank_of_the_last_store(last: int) -> None:
    engine = Engine(ranks=2)
    engine.store(1, [3, 4])
    engine.store(2, [5, 6])
    engine.finish()
    for job in (3 - last, last):
        engine.pins.reported(job, 1)
        assert not engine.pool.free
        engine.pins.reported(job, 0)
        engine.pins.reported(job, 0)
    assert list(engine.pool.free) == IN_ORDER
    assert len(engine.pins) == 0


def test_a_name_that_is_used_again_while_its_first_store_runs_loses_no_blocks() -> None:
    engine = Engine()
    engine.store(1, [3, 4])
    engine.finish()
    engine.pool.touch(again := [engine.pool.blocks[block] for block in (31, 32, 33)])
    engine.pins.keep("r", [[31, 32, 33]])
    engine.pool.free_blocks(reversed(again))
    assert not engine.pool.free
    engine.pins.reported(1, 0)
    assert list(engine.pool.free) == [*IN_ORDER, 33, 32, 31]
    assert not +engine.pool.references


def test_stores_that_nobody_was_told_of_give_everything_back() -> None:
    engine = Engine()
    engine.store(1, [3, 4])
    engine.finish()
    engine.pins.drop_untold()
    assert list(engine.pool.free) == IN_ORDER


def test_stores_that_ranks_were_told_of_keep_their_blocks() -> None:
    engine = Engine()
    engine.store(1, [3, 4])
    engine.pins.told()
    engine.store(2, [5, 6])
    engine.finish()
    engine.pins.drop_untold()
    assert len(engine.pins) == 1
    assert not engine.pool.free
    engine.pins.reported(1, 0)
    assert list(engine.pool.free) == IN_ORDER
