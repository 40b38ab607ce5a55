"""How fast are the small pages of head shards copied on a processor?

`python -m benchmarks.bench_head_shards [--json] [--smoke]`

The KV of Llama-3.1-8B in bf16 (32 layers, 8 KV heads of 128) with the heads of a token together, as one rank holds it.
It is stored and retrieved whole, as without the setting head_shards, and in 1, 2, 4 and 8 shards, by turns. One request
of 256 MiB at a time, block ids shuffled. GB/s = its bytes / the time from the call to the end of its future. Every byte
is compared, outside the timed part.
"""

import os
import random
import struct
import time
from array import array

from benchmarks.bursts import WAIT_S
from benchmarks.rows import Rows, option_parser
from benchmarks.serving import serving
from kvclient.client import Client
from kvclient.values import Blocks, CacheSpec, HostBuffer, full_group
from kvserver._native import Pattern, create_memfd
from kvserver.wire.messages import KEY_BYTES, RegionRun

LAYERS, HEADS, HEAD_BYTES = 32, 8, 512
"""HEAD_BYTES: K and V of one head and token."""
BLOCK_TOKENS, BLOCKS_PER_CHUNK = 16, 16
TOKEN_BYTES = HEADS * HEAD_BYTES
PAGE_BYTES = BLOCK_TOKENS * TOKEN_BYTES
SHARDS = (0, 1, 2, 4, 8)
"""0: without the setting."""
RANGE = struct.Struct("<QQQ")


def regions(blocks: int, shard: int, shards: int) -> list[RegionRun]:
    """A run for each layer: of whole blocks, or of the shard's heads of each token."""
    starts = [layer * blocks * PAGE_BYTES for layer in range(LAYERS)]
    if not shards:
        return [RegionRun(0, 0, LAYERS, blocks * PAGE_BYTES, PAGE_BYTES, PAGE_BYTES)]
    bytes_ = TOKEN_BYTES // shards
    return [RegionRun(0, start + shard * bytes_, BLOCK_TOKENS, TOKEN_BYTES, PAGE_BYTES, bytes_) for start in starts]


class Case:
    """The caches of one number of shards."""

    def __init__(self, client: Client, memory: int, blocks: int, shards: int) -> None:
        self.shards, self.rates = shards, {"store": [], "retrieve": []}
        self._client, self._namespace = client, bytes([shards]) * 32
        self._caches = [
            client.register_cache(
                CacheSpec(
                    name=f"{shards}.{shard}",
                    namespace=self._namespace,
                    chunk_tokens=BLOCK_TOKENS * BLOCKS_PER_CHUNK,
                    buffers=[HostBuffer(memory, LAYERS * blocks * PAGE_BYTES)],
                    groups=[
                        full_group(
                            block_tokens=BLOCK_TOKENS,
                            blocks=blocks,
                            regions=regions(blocks, shard, shards),
                            shards=max(1, shards),
                            shard=shard,
                        )
                    ],
                )
            )
            for shard in range(max(1, shards))
        ]
        for cache in self._caches:
            assert cache.wait_registered(WAIT_S), cache.problem

    def store(self, keys: bytes, ids: list[int]) -> int:
        first, *beside = self._caches
        stored = self._client.store(first, 0, b"", keys, [Blocks(0, 0, array("i", ids))], beside=beside).result(WAIT_S)
        assert stored.chunks == stored.chunks_written == len(keys) // KEY_BYTES, stored
        return stored.bytes

    def retrieve(self, keys: bytes, ids: list[int]) -> int:
        first, *beside = self._caches
        lease = self._client.lookup(self._namespace, keys).lease
        assert lease is not None
        blocks = [Blocks(0, 0, array("i", ids))]
        retrieved = self._client.retrieve(first, lease, blocks, beside=beside).result(WAIT_S)
        assert retrieved.ok, retrieved
        return retrieved.bytes

    def clear(self) -> None:
        self._client.clear(self._namespace)


def ranges(blocks: int, content_of: list[int], at: list[int]) -> bytes:
    """Pattern ranges: block at[i] of every layer holds the original content of block content_of[i]."""
    return b"".join(
        RANGE.pack((layer * blocks + to) * PAGE_BYTES, PAGE_BYTES, layer * blocks + source + 1)
        for layer in range(LAYERS)
        for source, to in zip(content_of, at, strict=True)
    )


def run(*, chunks: int, rounds: int, as_json: bool) -> None:
    blocks = chunks * BLOCKS_PER_CHUNK
    request_bytes = blocks * LAYERS * PAGE_BYTES
    rows = Rows("head_shards", as_json=as_json, config=f"requests of {request_bytes >> 20} MiB, shuffled blocks")
    memory = create_memfd("bench-head-shards", request_bytes)
    pattern = Pattern(memory, request_bytes)
    shuffled = random.Random(1).shuffle
    flags = ("--slab-bytes", str(64 << 20))
    with serving(flags, 2 * request_bytes + (128 << 20), engine="bench-head-shards") as (_, client):
        cases = [Case(client, memory, blocks, shards) for shards in SHARDS]
        for number in range(rounds + 1):  # the first warms up
            for case in cases:
                sources, targets, keys = list(range(blocks)), list(range(blocks)), os.urandom(chunks * KEY_BYTES)
                shuffled(sources)
                shuffled(targets)
                pattern.fill(ranges(blocks, sources, sources))
                for name, move, ids in (("store", case.store, sources), ("retrieve", case.retrieve, targets)):
                    began = time.perf_counter()
                    moved = move(keys, ids)
                    if number:
                        case.rates[name].append(moved / (time.perf_counter() - began) / 1e9)
                    assert moved == request_bytes
                    if name == "store":
                        pattern.fill(RANGE.pack(0, request_bytes, 0))
                assert pattern.wrong(ranges(blocks, sources, targets)) == 0
                case.clear()
        for case in cases:
            how = f"{case.shards}_shards_{TOKEN_BYTES // case.shards}b" if case.shards else "whole"
            for name, rates in case.rates.items():
                rows.add(f"{name}_{how}", rates, "GB/s")
    pattern.close()
    os.close(memory)


def main() -> None:
    given = option_parser(__doc__, smoke="one small request").parse_args()
    if given.smoke:
        run(chunks=1, rounds=1, as_json=given.json)
    else:
        run(chunks=8, rounds=7, as_json=given.json)


if __name__ == "__main__":
    main()
