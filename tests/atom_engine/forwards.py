"""Forwards of all ranks: the attended context is compared byte by byte before each forward writes.

A request's state is compared too, unless the forward begins at its first token, and the forward moves it on.

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
        self._ends: dict[int, int] = {}
        """id() of a sequence with a state -> the token that its last forward ended at."""
        self.compared_states = 0

    def run(self, batch: Batch) -> None:
        for memory in self._memories:
            for slot, blocks in batch.kept:
                memory.states.keep_checkpoint(slot, blocks)
                for block in blocks:
                    memory.spoil(block)
            for slot, blocks in batch.restored:
                memory.states.restore_checkpoint(slot, blocks)
        for (source, _), seq, first in zip(batch.slots, batch.seqs, batch.first, strict=False):
            assert not first or self._has_state(seq, first, source), f"request {seq.id} goes on at {first}: wrong state"
        self._compute_all(batch)
        for (_, slot), seq, first, count in zip(batch.slots, batch.seqs, batch.first, batch.counts, strict=False):
            for memory in self._memories:
                memory.states.write(slot, seq.token_ids[: first + count])
            self._ends[id(seq)] = first + count

    def _has_state(self, seq: Any, first: int, slot: int) -> bool:
        """Whether all ranks have its state. After a gap of ATOM's own it is that of the tokens before the gap.

        ATOM computes the last token of an aborted request again. Nobody reads what comes of it.
        """
        if seq.status.name == "ABORTED":
            return True
        self.compared_states += 1
        ends = {first, self._ends.get(id(seq), first)} if first >= seq.num_prompt_tokens else {first}
        return all(any(memory.states.is_right(slot, seq.token_ids[:end]) for end in ends) for memory in self._memories)

    def _compute_all(self, batch: Batch) -> None:
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
