"""The engine's paged KV: blocks with reference counts, a prefix cache over unused blocks, pages on every rank."""

from collections import OrderedDict

from .content import Page, require
from .shapes import NULL

Name = tuple[int, bytes]
"""A whole block's name: its group, and the tokens up to its end."""


class Pool:
    """The block pool. Block NULL has no owner. A free block keeps its name and can be found until it is reused."""

    def __init__(self, blocks: int, ranks: int) -> None:
        self.pages: list[dict[int, Page]] = [{} for _ in range(ranks)]
        self._counts = [0] * blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, blocks))
        self._names: dict[int, Name] = {}
        self._blocks: dict[Name, int] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> list[int]:
        return [block for block, count in enumerate(self._counts) if count]

    def find(self, name: Name) -> int | None:
        return self._blocks.get(name)

    def take(self, block: int) -> None:
        """Adds one user."""
        require(block != NULL, "the null block is used")
        self._counts[block] += 1
        self._free.pop(block, None)

    def allocate(self) -> int:
        block, _ = self._free.popitem(last=False)
        name = self._names.pop(block, None)
        if name is not None:
            del self._blocks[name]
        self._counts[block] = 1
        return block

    def give(self, block: int) -> None:
        require(self._counts[block] > 0, f"block {block} is given back by nobody")
        self._counts[block] -= 1
        if not self._counts[block]:
            self._free[block] = None

    def publish(self, block: int, name: Name) -> None:
        """Lets other requests find the block; the first block of a name stays."""
        if name not in self._blocks and block not in self._names:
            self._blocks[name], self._names[block] = block, name

    def forget(self) -> None:
        """Makes all free blocks unfindable."""
        for block in [block for block in self._free if block in self._names]:
            del self._blocks[self._names.pop(block)]

    def is_private(self, block: int) -> bool:
        """True if the block has one user and cannot be found."""
        return self._counts[block] == 1 and block not in self._names
