"""Forwards of all ranks: the attended context is compared byte by byte before each forward writes.

ATOM (ffdf3bb) itself leaves some KV of output out, without any connector. A sequence preempted after its first
output is recomputed in chunks. A chunk that ends at or after the end of the prompt counts as the last one, even if
output tokens follow. These tokens are not recomputed, and the next token is computed after them.

This file finds these tokens from ATOM's schedule: output tokens after the end of a forward, until a forward computes
them. They are recorded by block and place, because ATOM publishes blocks of output in its prefix index as if they
were complete. Only these tokens are not compared, and only where they are output. A prompt with a gap is an error,
whoever left it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from tests.atom_engine.memory import Memory
from tests.atom_engine.scheduler import Batch


class Forwards:
    def __init__(self, memories: Sequence[Memory], block_tokens: int) -> None:
        """memories: of the ranks, as they are at each forward. block_tokens: over all contexts."""
        self._memories, self._block_tokens = memories, block_tokens
        self._gaps: dict[tuple[int, int], list[int]] = {}
        """(block, place) -> all tokens up to the one that should have been computed there, and was not."""

    def run(self, batch: Batch) -> None:
        for seq, first, count in zip(batch.seqs, batch.first, batch.counts, strict=True):
            wrong = self.wrong(seq, first)
            assert wrong == [], f"request {seq.id} attends to {len(wrong)} wrong pieces before {first}: {wrong[:3]}"
            self._compute(seq, first, first + count)

    def left_out(self, seq: Any, end: int) -> list[int]:
        """Its output tokens before `end` whose KV nobody has computed in its blocks."""
        if not self._gaps:
            return []
        tokens = range(seq.num_prompt_tokens, end)
        return [at for at in tokens if self._gaps.get(self._place(seq, at)) == seq.token_ids[: at + 1]]

    def wrong(self, seq: Any, end: int) -> list[str]:
        """Places where ranks do not hold the right bytes of its tokens before `end`."""
        pieces = list(_between(self.left_out(seq, end), end))
        return [
            place
            for memory in self._memories
            for begin, until in pieces
            for place in memory.wrong(seq.block_table, seq.token_ids, begin, until)
        ]

    def _compute(self, seq: Any, first: int, end: int) -> None:
        for memory in self._memories:
            memory.write(seq.block_table, seq.token_ids, first, end)
        for at in range(first, end):
            self._gaps.pop(self._place(seq, at), None)
        # If the prompt is not finished, more of it follows, so there is no gap.
        for at in range(end, seq.num_tokens) if end >= seq.num_prompt_tokens else ():
            self._gaps[self._place(seq, at)] = seq.token_ids[: at + 1]

    def _place(self, seq: Any, at: int) -> tuple[int, int]:
        block, place = divmod(at, self._block_tokens)
        return seq.block_table[block], place


def _between(tokens: list[int], end: int) -> Iterator[tuple[int, int]]:
    begin = 0
    for at in [*tokens, end]:
        if begin < at:
            yield begin, at
        begin = at + 1
