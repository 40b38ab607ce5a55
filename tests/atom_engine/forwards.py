"""Forwards of all ranks: what each attends to is compared byte by byte before it writes.

ATOM (ffdf3bb) leaves some KV of output out itself, without any connector. A sequence that was preempted when it had
output is computed anew, in chunks; a chunk that ends at or behind the end of the prompt passes for the last one, though
tokens of the output follow. These are not computed again, and the next token is, behind them.

Which ones they are is seen here in what ATOM schedules: tokens of output behind the end of a forward, until one
computes them. They are known by block and place, because ATOM publishes blocks of output in its prefix index as if all
of it were computed. Only they are not looked at, and only where they are output. A prompt with such a gap in it is
wrong, whoever left it there.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from tests.atom_engine.memory import Memory
from tests.atom_engine.scheduler import Batch


class Forwards:
    def __init__(self, memories: Sequence[Memory], block_tokens: int) -> None:
        """memories: of the ranks, as they are at each forward. block_tokens: of all contexts together."""
        self._memories, self._block_tokens = memories, block_tokens
        self._gaps: dict[tuple[int, int], list[int]] = {}
        """By block and place the tokens up to the one that was to be computed there, and was not."""

    def run(self, batch: Batch) -> None:
        for seq, first, count in zip(batch.seqs, batch.first, batch.counts, strict=True):
            wrong = self.wrong(seq, first)
            assert wrong == [], f"request {seq.id} attends to {len(wrong)} wrong pieces before {first}: {wrong[:3]}"
            self._compute(seq, first, first + count)

    def left_out(self, seq: Any, end: int) -> list[int]:
        """Its output tokens before this one whose KV nobody has computed where its blocks have it."""
        if not self._gaps:
            return []
        tokens = range(seq.num_prompt_tokens, end)
        return [at for at in tokens if self._gaps.get(self._place(seq, at)) == seq.token_ids[: at + 1]]

    def wrong(self, seq: Any, end: int) -> list[str]:
        """Where ranks do not hold what they must of its tokens before this one."""
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
        # Where the prompt is not over, more of it follows.
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
