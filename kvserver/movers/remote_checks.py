"""Digests of chunks on their way to and from a remote store (docs/digest.md).

A writer sums what it sends, and writes no head over a payload whose digest is not the ledger's. A reader sums what
came, and uses a chunk only if all of it has the digests of its head.
"""

from collections.abc import Sequence
from typing import overload

from kvserver.remote.chunk_value import ChunkName, Head, Shard
from kvserver.remote.store import WrongSource
from kvserver.tiers.records import NO_SUM
from kvserver.transfer.native import digest_sum, payload_digest


class CheckedSources(Sequence[memoryview]):
    """Payloads of a chunk on their way to a store, each compared with its digest when it is first taken.

    A store that sends a chunk in parts sends the first one before the last one was summed."""

    def __init__(self, name: ChunkName, head: Head, payloads: Sequence[memoryview]) -> None:
        """payloads: one for each shard of the head."""
        self._name, self._head, self._payloads = name, head, payloads
        self._is_right = [False] * len(payloads)

    def __len__(self) -> int:
        return len(self._payloads)

    @overload
    def __getitem__(self, index: int) -> memoryview: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[memoryview]: ...
    def __getitem__(self, index: int | slice) -> memoryview | Sequence[memoryview]:
        """Raises WrongSource."""
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        payload = self._payloads[index]
        if not self._is_right[index]:
            shard = self._head.shards[index]
            if digest_of(self._name, shard, payload) != shard.digest:
                raise WrongSource(f"shard {shard.shard} of group {shard.group}")
            self._is_right[index] = True
        return payload


def sums_of(payloads: Sequence[memoryview | None]) -> list[int]:
    """The sum of each payload; NO_SUM for None."""
    return [NO_SUM if payload is None else digest_sum(payload, 0, len(payload), 0)[0] for payload in payloads]


def wrong_sums(name: ChunkName, head: Head, sums: Sequence[int]) -> list[int]:
    """Indices of shards whose sum does not make the digest of the head. NO_SUM says nothing of its shard."""
    pairs = enumerate(zip(head.shards, sums, strict=True))
    return [
        index for index, (shard, total) in pairs if total != NO_SUM and digest_from(name, shard, total) != shard.digest
    ]


def wrong_shards(name: ChunkName, head: Head, payloads: Sequence[memoryview | None]) -> list[int]:
    """Indices of shards whose payload does not have the digest of the head; of None nothing is said."""
    return wrong_sums(name, head, sums_of(payloads))


def digest_from(name: ChunkName, shard: Shard, total: int) -> int | None:
    """The digest of a payload of the shard's size that has this sum."""
    whole = total, shard.payload_bytes
    return payload_digest(whole, name.of.namespace, name.key, shard.group, shard.shard, shard.payload_bytes)


def digest_of(name: ChunkName, shard: Shard, payload: bytes | memoryview) -> int | None:
    """The digest of a payload under its name; None if it does not have the shard's size."""
    total = digest_sum(payload, 0, len(payload), 0)
    return payload_digest(total, name.of.namespace, name.key, shard.group, shard.shard, shard.payload_bytes)
