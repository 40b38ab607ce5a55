"""Chunks for remote stores: names, heads and payloads made from a seed."""

import random
from collections.abc import Sequence

from kvserver.remote.chunk_value import ChunkName, Head, NamespaceName, Shard, fragment_bytes_for
from kvserver.tiers.records import NO_PARENT

NAMESPACE = NamespaceName("-", bytes(range(32)))
EPOCH = 0xFEDC_BA98_7654_3210
SIZES = (1, 4099, 70_001)


def name_of(seed: int, *, of: NamespaceName = NAMESPACE, epoch: int = EPOCH, ranks: str = "") -> ChunkName:
    return ChunkName(of, epoch, random.Random(seed).randbytes(32), ranks)


def head_of(name: ChunkName, *, write: int = 1, sizes: Sequence[int] = SIZES) -> Head:
    shards = tuple(Shard(number % 2, number // 2, size, 1000 + number) for number, size in enumerate(sizes))
    return Head(
        namespace=name.of.namespace,
        key=name.key,
        parent=NO_PARENT,
        epoch=name.epoch,
        write=write,
        written_s=1_700_000_000 + write,
        shards=shards,
        fragment_bytes=fragment_bytes_for(shards),
    )


class Payloads(list[memoryview]):
    """Payloads on their way to a store that nobody compares with anything."""

    def copy_to(self, target: memoryview, index: int) -> None:
        target[:] = self[index]


def payloads_of(head: Head) -> Payloads:
    """Bytes that differ from write to write and from shard to shard."""
    return Payloads(
        memoryview(bytearray(random.Random(f"{head.write} {number}").randbytes(shard.payload_bytes)))
        for number, shard in enumerate(head.shards)
    )


def targets_of(head: Head) -> list[memoryview]:
    return [memoryview(bytearray(b"\xee" * shard.payload_bytes)) for shard in head.shards]
