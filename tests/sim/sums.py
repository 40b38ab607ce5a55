"""The simulated digests: sums of the contents of blocks, made of parts as in docs/digest.md, and hashes of names."""

import hashlib
import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache

from kvserver.tiers.records import Record

from .content import Block

PRIME = (1 << 61) - 1
NOTHING: Block = ("nothing",)
"""The content of a block that nobody has written."""


@lru_cache(maxsize=1 << 16)
def part_of(place: int, content: Block | None) -> int:
    """What one block adds to the sum of its shard."""
    told = repr((place, content or NOTHING)).encode()
    return int.from_bytes(hashlib.sha256(told).digest()[:8], "little") % PRIME


def sum_of(blocks: Iterable[Block | None]) -> int:
    return sum(part_of(place, content) for place, content in enumerate(blocks)) % PRIME


def packed(sums: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(sums)}Q", *sums)


def names_of(records: Sequence[Record]) -> bytes:
    """The hash of what a copy's slots hold, all of one shard of one group (kvserver._native.Ledger.sums)."""
    first = records[0]
    keys = b"".join(record.key for record in records)
    return hashlib.sha256(first.namespace + struct.pack("<HH", first.group, first.shard) + keys).digest()[:8]
