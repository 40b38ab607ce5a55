#!/usr/bin/env python3
"""Stores random bytes through a server, loads them into other memory and compares them. No engine, no GPU.

    kvserver serve --socket /run/kvserver/kvserver.sock --arena-bytes 64MiB &
    python roundtrip.py --socket /run/kvserver/kvserver.sock

Exit status 1: no server answered, or it did not return what was stored. An engine's pool is shared memory as here, or
memory of a GPU.
"""

import argparse
import os
import sys
from array import array

from kvclient import Blocks, CacheSpec, Client, HostBuffer, RegionRun, chunk_keys, full_group, namespace_digest

REGIONS, PAGE_BYTES = 5, 4103
BLOCK_TOKENS, BLOCKS_A_CHUNK, CHUNKS = 16, 3, 7
CHUNK_TOKENS, BLOCKS = BLOCK_TOKENS * BLOCKS_A_CHUNK, 2 * BLOCKS_A_CHUNK * CHUNKS
POOL_BYTES = REGIONS * BLOCKS * PAGE_BYTES


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", maxsplit=1)[0])
    parser.add_argument("--socket", default="/run/kvserver/kvserver.sock", help="the server's socket")
    parser.add_argument("--wait-s", type=float, default=30.0, help="how long each answer may take")
    given = parser.parse_args()
    client = Client(given.socket)

    # The first half of the blocks is stored, the second half is loaded. A block has a page in each region (layer).
    pool = os.memfd_create("roundtrip")
    os.ftruncate(pool, POOL_BYTES)
    stored, loaded = range(BLOCKS // 2), range(BLOCKS // 2, BLOCKS)
    for block in stored:
        for region in range(REGIONS):
            os.pwrite(pool, os.urandom(PAGE_BYTES), offset(region, block))

    pages = RegionRun(0, 0, REGIONS, BLOCKS * PAGE_BYTES, PAGE_BYTES, PAGE_BYTES)
    group = full_group(block_tokens=BLOCK_TOKENS, blocks=BLOCKS, regions=[pages])
    # Another namespace in each run: nothing that an earlier one stored is found.
    namespace = namespace_digest({"example": "roundtrip", "run": os.urandom(8).hex()})
    buffers = [HostBuffer(pool, POOL_BYTES)]
    cache = client.register_cache(
        CacheSpec(name="roundtrip", namespace=namespace, chunk_tokens=CHUNK_TOKENS, buffers=buffers, groups=[group])
    )
    if not cache.wait_registered(given.wait_s):
        sys.exit(f"no server takes the cache: {client.problem or 'nothing listens there'}")
    server = client.status()["server"]

    keys = chunk_keys(array("I", range(CHUNKS * CHUNK_TOKENS)), CHUNK_TOKENS)
    result = client.store(cache, 0, b"", keys, [Blocks(0, 0, array("i", stored))]).result(given.wait_s)
    if result.chunks != CHUNKS:
        sys.exit(f"{result.chunks} of {CHUNKS} chunks were stored: {result.why}")
    found = client.lookup(namespace, keys)
    if found.lease is None or found.chunks != CHUNKS:
        sys.exit(f"{found.chunks} of {CHUNKS} chunks were found: {found.why}")
    if not client.retrieve(cache, found.lease, [Blocks(0, 0, array("i", loaded))]).result(given.wait_s).ok:
        sys.exit("the chunks were not loaded")
    client.clear(namespace)
    client.close()

    for source, target in zip(stored, loaded, strict=True):
        for region in range(REGIONS):
            here, there = (os.pread(pool, PAGE_BYTES, offset(region, block)) for block in (source, target))
            if here != there:
                sys.exit(f"block {target} has other bytes in region {region} than block {source}")
    print(f"{server}: {CHUNKS} chunks, {result.bytes} bytes: stored, found, loaded and compared")


def offset(region: int, block: int) -> int:
    return (region * BLOCKS + block) * PAGE_BYTES


if __name__ == "__main__":
    main()
