"""Digests of chunks on their way to and from a remote store (docs/digest.md).

A writer sums what it sends, and does not send a payload whose digest is not the ledger's. A reader sums what came, and
uses a chunk only if all of it has the digests of its head.
"""

from collections.abc import Sequence

from kvserver.remote.chunk_value import ChunkName, Head, Shard
from kvserver.transfer.native import digest_sum, payload_digest


def wrong_shards(name: ChunkName, head: Head, payloads: Sequence[memoryview | None]) -> list[int]:
    """Indices of shards whose payload does not have the digest of the head; of None nothing is said."""
    pairs = enumerate(zip(head.shards, payloads, strict=True))
    return [
        index
        for index, (shard, payload) in pairs
        if payload is not None and digest_of(name, shard, payload) != shard.digest
    ]


def digest_of(name: ChunkName, shard: Shard, payload: bytes | memoryview) -> int | None:
    """The digest of a payload under its name; None if it does not have the shard's size."""
    total = digest_sum(payload, 0, len(payload), 0)
    return payload_digest(total, name.of.namespace, name.key, shard.group, shard.shard, shard.payload_bytes)
