"""The stand-in's block manager: reference counts, and a prefix index whose blocks stay until they are needed.

It keeps no checkpoints of states. So a request with a state finds nothing in HBM.
"""

from collections import OrderedDict

from tests.atom_engine.sequence import Sequence

Prefix = tuple[int, ...]


class Blocks:
    def __init__(self, blocks: int, block_tokens: int, *, slots: int = 0) -> None:
        self.total = blocks
        self.block_tokens = block_tokens
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))
        """Free blocks, oldest first; they keep their contents until they are reused."""
        self._free_slots = list(range(slots))
        """The one that was freed last is used first."""
        self._users = [0] * blocks
        self._index: dict[Prefix, int] = {}
        self._prefix_of: dict[int, Prefix] = {}
        self.spoiled: list[int] = []
        """Blocks reused since the last take_spoiled()."""

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def free_slots(self) -> int:
        return len(self._free_slots)

    def cached(self, seq: Sequence) -> int | None:
        """Number of its prefix blocks in HBM, leaving one token to compute; None if the sequence does not fit."""
        if seq.has_per_req_cache and not self._free_slots:
            return None
        hits, most = 0, 0 if seq.has_per_req_cache else seq.num_tokens - 1
        while (hits + 1) * self.block_tokens <= most and self._prefix(seq, hits + 1) in self._index:
            hits += 1
        blocks = -(-seq.num_tokens // self.block_tokens)
        held = [self._index[self._prefix(seq, at + 1)] for at in range(hits)]
        unused = sum(self._users[block] == 0 for block in held)
        return hits if blocks - hits <= self.free - unused else None

    def allocate(self, seq: Sequence, hits: int) -> None:
        seq.block_table = [self._index[self._prefix(seq, at + 1)] for at in range(hits)]
        for block in seq.block_table:
            self._users[block] += 1
            self._free.pop(block, None)
        seq.num_cached_tokens = hits * self.block_tokens
        if seq.has_per_req_cache:
            seq.per_req_cache_group = self._free_slots.pop()
        self.grow(seq)

    def grow(self, seq: Sequence) -> bool:
        """Allocates blocks for all of its tokens; False if there are none."""
        while len(seq.block_table) * self.block_tokens < seq.num_tokens:
            if not self._free:
                return False
            block, _ = self._free.popitem(last=False)
            prefix = self._prefix_of.pop(block, None)
            if prefix is not None and self._index.get(prefix) == block:
                del self._index[prefix]
            self._users[block] = 1
            self.spoiled.append(block)
            seq.block_table.append(block)
        return True

    def publish(self, seq: Sequence, first_token: int, end_token: int) -> None:
        """Makes the blocks filled by these tokens findable."""
        for at in range(first_token // self.block_tokens, end_token // self.block_tokens):
            prefix, block = self._prefix(seq, at + 1), seq.block_table[at]
            if self._index.setdefault(prefix, block) == block:
                self._prefix_of[block] = prefix
            seq.num_hashed_tokens = (at + 1) * self.block_tokens

    def deallocate(self, seq: Sequence) -> None:
        for block in reversed(seq.block_table):
            assert self._users[block] > 0
            self._users[block] -= 1
            if self._users[block] == 0:
                self._free[block] = None
        if seq.has_per_req_cache and seq.per_req_cache_group >= 0:
            self._free_slots.append(seq.per_req_cache_group)
            seq.per_req_cache_group = -1
        seq.block_table = []
        seq.num_cached_tokens = seq.num_hashed_tokens = 0

    def forget_prefixes(self) -> None:
        """Drops all blocks from the index that nobody uses."""
        for block in self._free:
            prefix = self._prefix_of.pop(block, None)
            if prefix is not None and self._index.get(prefix) == block:
                del self._index[prefix]

    def _prefix(self, seq: Sequence, blocks: int) -> Prefix:
        return tuple(seq.token_ids[: blocks * self.block_tokens])
