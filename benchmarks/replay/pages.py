"""The paged KV of one worker: real bytes in shared memory, determined by the prefix that they represent.

The memory is laid out as in engines, [region][block][page_bytes]. A page's bytes are the stream of a 64-bit seed,
made of the region and the digest of the whole token prefix up to the block's end (which starts with the namespace).
So any byte from another prefix, block, region or namespace is noticed, and any byte that never arrived.
"""

import hashlib
import os
from array import array
from collections.abc import Sequence

from kvserver._native import Pattern, create_memfd

STALE_SALT = int.from_bytes(hashlib.blake2b(b"stale", digest_size=8).digest(), "little")


class Pages:
    """Fills and compares pages. Owns the descriptor and the mapping until close()."""

    def __init__(self, *, blocks: int, regions: int, page_bytes: int) -> None:
        self.bytes = blocks * regions * page_bytes
        self.region_stride = blocks * page_bytes
        self.page_bytes = page_bytes
        self.block_bytes = regions * page_bytes
        self.fd = create_memfd("kvserver-replay-pool", self.bytes)
        self._pattern = Pattern(self.fd, self.bytes)
        self._region_salts = [_region_salt(region) for region in range(regions)]

    def compute(self, blocks: Sequence[int], digests: Sequence[bytes]) -> None:
        """Replaces the model: writes the pages of these blocks."""
        self._pattern.fill(self._ranges(blocks, digests, 0))

    def spoil(self, blocks: Sequence[int], digests: Sequence[bytes]) -> None:
        """Writes bytes that are wrong everywhere for these digests.

        Otherwise a retrieve that moves nothing could pass, because the block still had the right bytes from its last
        use.
        """
        self._pattern.fill(self._ranges(blocks, digests, STALE_SALT))

    def wrong(self, blocks: Sequence[int], digests: Sequence[bytes]) -> int:
        """Number of bytes in these blocks that differ from what compute() writes."""
        return self._pattern.wrong(self._ranges(blocks, digests, 0))

    def close(self) -> None:
        self._pattern.close()
        os.close(self.fd)

    def _ranges(self, blocks: Sequence[int], digests: Sequence[bytes], salt: int) -> bytes:
        seeds = [int.from_bytes(digest[:8], "little") ^ salt for digest in digests]
        flat: list[int] = []
        for region, region_salt in enumerate(self._region_salts):
            base = region * self.region_stride
            for block, seed in zip(blocks, seeds, strict=True):
                flat += (base + block * self.page_bytes, self.page_bytes, seed ^ region_salt)
        return array("Q", flat).tobytes()


def _region_salt(region: int) -> int:
    return int.from_bytes(hashlib.blake2b(b"region %d" % region, digest_size=8).digest(), "little")
