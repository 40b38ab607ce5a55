"""The block allocator and prefix cache of one engine worker ("HBM"): contents of blocks, and which may be evicted.

A block is in exactly one place: unused, pinned (by a request or a store), or idle: unpinned and still cached. Idle
blocks are evicted least recently used first. A pin on a block always includes the whole prefix before it, and
release() goes from the tail to the head. So a cached block never leaves before the cached blocks that continue it,
and a hit never has a hole. Blocks are named by the digest of the whole token prefix up to their end.
"""

from collections import OrderedDict
from collections.abc import Sequence


class PrefixPool:
    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.evictions = 0
        self._unused = list(range(blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._pins = [0] * blocks
        self._digest: list[bytes | None] = [None] * blocks
        self._by_digest: dict[bytes, int] = {}

    def match(self, digests: Sequence[bytes]) -> list[int]:
        """Pins and returns the blocks of the longest cached prefix of `digests`."""
        found: list[int] = []
        for digest in digests:
            block = self._by_digest.get(digest)
            if block is None:
                break
            found.append(block)
        self.pin(found)
        return found

    def allocate(self, blocks: int) -> list[int] | None:
        """Pins and returns blocks without content, evicting idle ones.

        Returns None, and changes nothing, if too few are unpinned.
        """
        if blocks > len(self._unused) + len(self._idle):
            return None
        taken: list[int] = []
        for _ in range(blocks):
            block = self._unused.pop() if self._unused else self._evict()
            self._pins[block] = 1
            taken.append(block)
        return taken

    def adopt(self, block: int, digest: bytes) -> int:
        """Caches a pinned block under its digest; a digest has only one block.

        If another block has the digest already, the pin moves to that block, which is returned; the given one
        becomes unused.
        """
        assert self._pins[block] == 1
        assert self._digest[block] is None
        cached = self._by_digest.get(digest)
        if cached is None:
            self._by_digest[digest] = block
            self._digest[block] = digest
            return block
        self.pin([cached])
        self.release([block])
        return cached

    def pin(self, prefix: Sequence[int]) -> None:
        for block in prefix:
            if self._pins[block] == 0:
                del self._idle[block]
            self._pins[block] += 1

    def release(self, prefix: Sequence[int]) -> None:
        """Removes one pin from each block, the last block first, so that a tail is evicted before its head."""
        for block in reversed(prefix):
            assert self._pins[block] > 0
            self._pins[block] -= 1
            if self._pins[block] > 0:
                continue
            if self._digest[block] is None:
                self._unused.append(block)
            else:
                self._idle[block] = None

    @property
    def pinned(self) -> int:
        return self.blocks - len(self._unused) - len(self._idle)

    def check(self) -> None:
        """Asserts the invariants; for tests and the end of a run."""
        unused, idle = set(self._unused), set(self._idle)
        assert len(unused) == len(self._unused)
        assert not unused & idle
        for block in range(self.blocks):
            digest = self._digest[block]
            assert (self._pins[block] == 0) == (block in unused or block in idle)
            assert (digest is None) or self._by_digest[digest] == block
            assert (block not in unused) or digest is None
            assert (block not in idle) or digest is not None
        assert len(self._by_digest) == sum(digest is not None for digest in self._digest)

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        digest = self._digest[block]
        assert digest is not None
        del self._by_digest[digest]
        self._digest[block] = None
        self.evictions += 1
        return block
