"""Digests of chunks on their way to and from a remote store (docs/digest.md).

A writer sums what it sends, and writes no head over a payload whose digest is not the ledger's. A reader sums what
came, and uses a chunk only if all of it has the digests of its head.
"""

from collections.abc import Iterator, Sequence

from kvserver.remote.chunk_value import ChunkName, Head, Shard
from kvserver.remote.store import WrongSource
from kvserver.tiers.records import NO_SUM
from kvserver.transfer.native import digest_copy, digest_sum, payload_digest


class CheckedSources:
    """Payloads of a chunk on their way to a store, each compared with its digest when it is taken.

    A store that sends a chunk in parts sends the first one before the last one was summed."""

    def __init__(self, name: ChunkName, head: Head, payloads: Sequence[memoryview]) -> None:
        """payloads: one for each shard of the head."""
        self._name, self._head, self._payloads = name, head, payloads
        self._is_right = [False] * len(payloads)

    def __iter__(self) -> Iterator[memoryview]:
        return (self[index] for index in range(len(self._payloads)))

    def __getitem__(self, index: int) -> memoryview:
        """Raises WrongSource. It is summed once."""
        payload = self._payloads[index]
        if not self._is_right[index]:
            self._compare(index, digest_sum(payload, 0, len(payload), 0))
        return payload

    def copy_to(self, target: memoryview, index: int) -> None:
        """Raises WrongSource. Bytes are summed as they are copied, so these are right whatever happens meanwhile."""
        self._compare(index, digest_copy(self._payloads[index], target, 0))

    def _compare(self, index: int, summed: tuple[int, int]) -> None:
        """summed: the sum, and of how many bytes."""
        shard, (total, count) = self._head.shards[index], summed
        if count != shard.payload_bytes or digest_from(self._name, shard, total) != shard.digest:
            raise WrongSource(f"shard {shard.shard} of group {shard.group}")
        self._is_right[index] = True


def sums_of(payloads: Sequence[memoryview | None]) -> list[int]:
    """The sum of each payload; NO_SUM for None."""
    return [NO_SUM if payload is None else digest_sum(payload, 0, len(payload), 0)[0] for payload in payloads]


def wrong_sums(name: ChunkName, head: Head, sums: Sequence[int]) -> list[int]:
    """Indices of shards whose sum does not make the digest of the head. NO_SUM says nothing of its shard."""
    pairs = enumerate(zip(head.shards, sums, strict=True))
    return [
        index for index, (shard, total) in pairs if total != NO_SUM and digest_from(name, shard, total) != shard.digest
    ]


def digest_from(name: ChunkName, shard: Shard, total: int) -> int | None:
    """The digest of a payload of the shard's size that has this sum."""
    whole = total, shard.payload_bytes
    return payload_digest(whole, name.of.namespace, name.key, shard.group, shard.shard, shard.payload_bytes)


def digest_of(name: ChunkName, shard: Shard, payload: bytes | memoryview) -> int | None:
    """The digest of a payload under its name; None if it does not have the shard's size."""
    total = digest_sum(payload, 0, len(payload), 0)
    return payload_digest(total, name.of.namespace, name.key, shard.group, shard.shard, shard.payload_bytes)
