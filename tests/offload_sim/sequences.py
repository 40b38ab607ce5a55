"""A sequence in the engine: its tokens, its tables, and the check that it computes only with right bytes."""

from collections.abc import Hashable
from dataclasses import dataclass, field

from kvclient.offload.values import Options

from .content import Page, page, require
from .pool import Pool
from .shapes import NULL
from .watch import Life


@dataclass(eq=False)
class Sequence:
    name: Hashable
    life: Life
    tokens: bytearray
    """The prompt and the output so far."""
    output_left: int
    tables: list[list[int]]
    computed: int = 0
    state: list[bytes] = field(default_factory=list)
    """Rank -> the tokens that a state group's running state represents."""
    aborted: bool = False
    untold: bool = False
    """Preempted, and offload was not told."""
    retrieve_end: int = 0
    ranks_left: int = 0
    """Ranks that have not reported its retrieve."""
    retrieve_failed: bool = False


class Memory:
    """Tables and pages of sequences: the engine's block manager and its model in one."""

    def __init__(self, options: Options, pool: Pool, *, window_slack: int) -> None:
        self._options = options
        self._pool = pool
        self._slack = window_slack
        """Engines differ by one in the length of a window."""

    # ---------------------------------------------------------------- the prefix cache

    def hbm_hit(self, tokens: bytes | bytearray) -> int:
        """The longest prefix that all groups can serve from the pool, leaving one token to compute."""
        step = max(group.block_tokens for group in self._options.groups)
        for end in range((len(tokens) - 1) // step * step, 0, -step):
            needed = self._needed(end)
            if all(self._find(index, block, tokens) is not None for index, block in needed):
                return end
        return 0

    def adopt(self, sequence: Sequence, end: int) -> None:
        """Takes the blocks of a hit into the tables."""
        for index, group in enumerate(self._options.groups):
            sequence.tables[index] = [NULL] * (end // group.block_tokens)
        for index, block in self._needed(end):
            found = self._find(index, block, sequence.tokens)
            assert found is not None
            self._pool.take(found)
            sequence.tables[index][block] = found
        self._load_state(sequence, end)
        sequence.computed = end

    def publish(self, sequence: Sequence) -> None:
        for index, group in enumerate(self._options.groups):
            for block, held in enumerate(sequence.tables[index]):
                end = (block + 1) * group.block_tokens
                if held != NULL and end <= sequence.computed:
                    self._pool.publish(held, (index, bytes(sequence.tokens[:end])))

    # ---------------------------------------------------------------- tables

    def missing(self, sequence: Sequence, end: int) -> list[tuple[int, int]]:
        """(group, block) pairs to add to the tables before [computed, end) can be written."""
        grown = []
        for index, group in enumerate(self._options.groups):
            if group.kind != "state":
                last = -(-end // group.block_tokens)
                grown += [(index, block) for block in range(len(sequence.tables[index]), last)]
            elif end % group.block_tokens == 0 and end > sequence.computed:
                grown.append((index, end // group.block_tokens - 1))
        return grown

    def missing_for_retrieve(self, sequence: Sequence, end: int, *, ahead: int) -> list[tuple[int, int]]:
        """The same for blocks that a retrieve writes: windows need only their end. ahead: end of full groups."""
        held = [(index, block) for index, block in self._needed(end) if block >= len(sequence.tables[index])]
        last = -(-ahead // self._options.groups[0].block_tokens)
        if ahead > end and len(self._options.groups) == 1:
            held += [(0, block) for block in range(-(-end // self._options.groups[0].block_tokens), last)]
        return held

    def grow(self, sequence: Sequence, missing: list[tuple[int, int]]) -> None:
        for index, block in missing:
            table = sequence.tables[index]
            table.extend([NULL] * (block + 1 - len(table)))
            require(table[block] == NULL, "the model engine allocates a block twice")
            table[block] = self._pool.allocate()

    def free(self, sequence: Sequence) -> None:
        for table in sequence.tables:
            for block in reversed(table):
                if block != NULL:
                    self._pool.give(block)
            table.clear()
        sequence.computed = 0

    # ---------------------------------------------------------------- the model

    def compute(self, sequence: Sequence, count: int) -> None:
        """Reads and compares everything that attention reads, then writes the new tokens' pages."""
        self.check(sequence)
        begin, end = sequence.computed, sequence.computed + count
        for rank, pages in enumerate(self._pool.pages):
            for index, group in enumerate(self._options.groups):
                bt = group.block_tokens
                if group.kind == "state":
                    sequence.state[rank] = bytes(sequence.tokens[:end])
                    blocks = range(end // bt - 1, end // bt) if end % bt == 0 else range(0)
                else:
                    blocks = range(begin // bt, -(-end // bt))
                for block in blocks:
                    made = page(rank, index, bt, block, sequence.tokens[:end])
                    pages[sequence.tables[index][block]] = made
        sequence.computed = end
        self.publish(sequence)
        self._slide(sequence)

    def check(self, sequence: Sequence) -> None:
        end = sequence.computed
        for rank, pages in enumerate(self._pool.pages):
            for index, block in self._needed(end):
                group = self._options.groups[index]
                if group.kind == "state":
                    continue
                wanted = page(rank, index, group.block_tokens, block, sequence.tokens[:end])
                held = pages.get(sequence.tables[index][block])
                require(
                    held is not None and _begins_with(held, wanted),
                    f"{sequence.name} computes with wrong bytes: group {index} block {block} rank {rank}: {held}",
                )
            if any(group.kind == "state" for group in self._options.groups) and end:
                require(sequence.state[rank] == sequence.tokens[:end], f"{sequence.name} goes on from a wrong state")

    def retrieved(self, sequence: Sequence, end: int) -> None:
        """Continues after the retrieved prefix, as far as the engine allows."""
        self._load_state(sequence, end)
        sequence.computed = min(end, len(sequence.tokens) - 1)
        self.check(sequence)
        self.publish(sequence)

    # ---------------------------------------------------------------- helpers

    def _needed(self, end: int) -> list[tuple[int, int]]:
        """(group, block) of every block needed to continue at `end`."""
        needed = []
        for index, group in enumerate(self._options.groups):
            bt = group.block_tokens
            first = 0
            if group.kind == "window":
                first = max(0, end - max(1, group.window_tokens - self._slack)) // bt
            elif group.kind == "state":
                first = max(0, end // bt - 1)
            last = end // bt if group.kind == "state" else -(-end // bt)
            needed += [(index, block) for block in range(first, last)]
        return needed

    def _find(self, index: int, block: int, tokens: bytes | bytearray) -> int | None:
        end = (block + 1) * self._options.groups[index].block_tokens
        return self._pool.find((index, bytes(tokens[:end])))

    def _load_state(self, sequence: Sequence, end: int) -> None:
        sequence.state = [b""] * len(self._pool.pages)
        for index, group in enumerate(self._options.groups):
            if group.kind == "state" and end:
                block = sequence.tables[index][end // group.block_tokens - 1]
                sequence.state = [pages[block].tokens if block in pages else b"" for pages in self._pool.pages]

    def _slide(self, sequence: Sequence) -> None:
        """Frees the blocks that have left the windows, and all states but the last."""
        kept = set(self._needed(sequence.computed))
        for index, group in enumerate(self._options.groups):
            if group.kind != "full":
                for block, held in enumerate(sequence.tables[index]):
                    if (
                        held != NULL
                        and (index, block) not in kept
                        and (block + 1) * group.block_tokens <= sequence.computed
                    ):
                        self._pool.give(held)
                        sequence.tables[index][block] = NULL


def _begins_with(held: Page, wanted: Page) -> bool:
    return held[:3] == wanted[:3] and held.tokens[: len(wanted.tokens)] == wanted.tokens
