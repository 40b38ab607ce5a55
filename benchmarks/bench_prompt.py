"""How long do stores and retrieves of one long prompt take, and of a single chunk?

`python -m benchmarks.bench_prompt [--tokens 129792,65536] [--rounds 5] [--json]`; needs torch and a GPU with room
for 30 GB.

One rank of two of a model with 62 layers and 8 KV heads of 128 in fp8 with fp32 scales, as AITER lays them out:
pages of 8 KiB for K and V and of 256 bytes for their scales, 16-token blocks, 65,472 bytes a token. One request at a
time, from the call to the completed future; a retrieve includes its lookup; blocks in random order, mode staged.

Ceiling: the bytes over the link, the best of three contiguous copies of pinned memory next to each round; a ratio of
105 % is 5 % slower. Every retrieved byte is compared on the device, outside the timed part. `first_chunk`: one
chunk, after the pause that comparing takes; `chunk_in_a_row`: one retrieve of it right after another.
"""

import os
import random
import time
from array import array
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from benchmarks import device_cache
from benchmarks.bench_copy import Link
from benchmarks.rows import Rows, option_parser, say
from benchmarks.serving import serving
from kvclient import Blocks, Client, namespace_digest
from kvserver.wire.messages import KEY_BYTES

LAYERS, HEADS, HEAD, BLOCK_TOKENS, CHUNK_TOKENS = 62, 4, 128, 16, 256
BLOCKS_PER_CHUNK = CHUNK_TOKENS // BLOCK_TOKENS
PAGE_BYTES = HEADS * HEAD * BLOCK_TOKENS
SCALES = HEADS * BLOCK_TOKENS
TOKEN_BYTES = LAYERS * 2 * (HEADS * HEAD + HEADS * 4)
MIB = 1 << 20
SLAB_BYTES = 512 * MIB
NAMESPACE = namespace_digest({"model": "bench_prompt"})
CHUNK_ROUNDS = 60
T = TypeVar("T")


class Pool:
    """The caches of all layers: values in one allocation, scales in another."""

    def __init__(self, client: Client, blocks: int) -> None:
        self.client = client
        self.blocks = blocks
        self.values = torch.zeros((2 * LAYERS, blocks, PAGE_BYTES), dtype=torch.uint8, device="cuda")
        self.scales = torch.zeros((2 * LAYERS, blocks, SCALES), dtype=torch.float32, device="cuda")
        self.cache = device_cache.register(
            client,
            [*self.values, *self.scales],
            namespace=NAMESPACE,
            blocks=blocks,
            block_dim=0,
            block_tokens=BLOCK_TOKENS,
            chunk_tokens=CHUNK_TOKENS,
        )

    @property
    def memory(self) -> tuple[Tensor, Tensor]:
        """Both allocations as bytes."""
        return self.values, self.scales.view(torch.uint8)

    def fill(self) -> None:
        """Fills the pool with all byte values, including NaNs."""
        for bytes_ in self.memory:
            for region in bytes_:
                region.random_(0, 256)

    def zero(self) -> None:
        for bytes_ in self.memory:
            bytes_.zero_()


class Prompt:
    """Keys, and the blocks that they are stored from."""

    def __init__(self, pool: Pool, tokens: int) -> None:
        self._pool = pool
        self.chunks = tokens // CHUNK_TOKENS
        self.bytes = self.chunks * CHUNK_TOKENS * TOKEN_BYTES
        self.keys = os.urandom(self.chunks * KEY_BYTES)
        self._sources = self._order()
        pool.fill()
        self._sources_there = torch.tensor(self._sources, device=pool.values.device)
        self._truth = [memory[:, self._sources_there] for memory in pool.memory]

    def store(self) -> tuple[float, int]:
        """Milliseconds, and the chunks written."""
        pool, where = self._pool, [Blocks(0, 0, array("i", self._sources))]
        for memory, truth in zip(pool.memory, self._truth, strict=True):
            memory[:, self._sources_there] = truth
        stored, took_ms = timed(lambda: pool.client.store(pool.cache, 0, b"", self.keys, where).result(60))
        assert stored.chunks == self.chunks, stored
        return took_ms, stored.chunks_written

    def store_again(self) -> float:
        """Clears the namespace, and stores under new keys. Returns milliseconds."""
        self._pool.client.clear(NAMESPACE)
        self.keys = os.urandom(len(self.keys))
        took_ms, written = self.store()
        assert written == self.chunks, written
        return took_ms

    def retrieve(self, chunks: int) -> tuple[float, float]:
        """Retrieves the first chunks into other blocks, and compares. Returns total and lookup milliseconds."""
        pool, blocks = self._pool, chunks * BLOCKS_PER_CHUNK
        pool.zero()
        targets = self._order()[:blocks]
        where = [Blocks(0, 0, array("i", targets))]
        found, lookup_ms = timed(lambda: pool.client.lookup(NAMESPACE, self.keys[: chunks * KEY_BYTES]))
        assert found.lease is not None, found
        lease = found.lease
        result, retrieve_ms = timed(lambda: pool.client.retrieve(pool.cache, lease, where).result(60))
        assert result.ok, result
        self._compare(targets)
        return lookup_ms + retrieve_ms, lookup_ms

    def retrieve_chunk_in_a_row(self, times: int) -> list[float]:
        """Retrieves the first chunk repeatedly without pauses. Returns milliseconds of each, including the lookup."""
        pool, targets = self._pool, self._order()[:BLOCKS_PER_CHUNK]
        pool.zero()
        torch.cuda.synchronize()
        took_ms = []
        for _ in range(times):
            began = time.perf_counter()
            found = pool.client.lookup(NAMESPACE, self.keys[:KEY_BYTES])
            assert found.lease is not None, found
            result = pool.client.retrieve(pool.cache, found.lease, [Blocks(0, 0, array("i", targets))]).result(60)
            took_ms.append((time.perf_counter() - began) * 1e3)
            assert result.ok, result
        self._compare(targets)
        return took_ms

    def _order(self) -> list[int]:
        order = list(range(self._pool.blocks))
        random.shuffle(order)
        return order[: self.chunks * BLOCKS_PER_CHUNK]

    def _compare(self, targets: list[int]) -> None:
        at = torch.tensor(targets, device=self._pool.values.device)
        wrong = touched = 0
        for memory, truth in zip(self._pool.memory, self._truth, strict=True):
            for region, expected in zip(memory, truth, strict=True):
                wrong += int((region[at] != expected[: len(targets)]).sum())
                region[at] = 0
                touched += int(region.count_nonzero())
        assert (wrong, touched) == (0, 0), f"{wrong} wrong bytes, {touched} in blocks that are somebody else's"


def timed(action: Callable[[], T]) -> tuple[T, float]:
    """Waits for the device, then runs `action`. Returns its result and its milliseconds."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    result = action()
    return result, (time.perf_counter() - began) * 1e3


def measure(pool: Pool, rows: Rows, link: Link, *, tokens: int, rounds: int) -> None:
    prompt = Prompt(pool, tokens)
    took: dict[str, list[float]] = {kind: [] for kind in ("store", "retrieve", "store_warm", "lookup")}
    limit: dict[str, list[float]] = {"store": [], "retrieve": []}
    for number in range(rounds + 1):
        rates = {kind: link.sample(kind) for kind in limit}
        store_ms = prompt.store_again()
        warm_ms, written = prompt.store()
        assert written == 0, f"{written} chunks written again"
        retrieve_ms, lookup_ms = prompt.retrieve(prompt.chunks)
        say(f"{tokens}, {number}: store {store_ms:.1f} ms, again {warm_ms:.2f}, retrieve {retrieve_ms:.1f}; {rates}")
        if number:  # the first one warms up
            for kind, value in zip(took, (store_ms, retrieve_ms, warm_ms, lookup_ms), strict=True):
                took[kind].append(value)
            for kind, rate in rates.items():
                limit[kind].append(prompt.bytes / rate / 1e6)
    for kind, runs in took.items():
        rows.add(f"{kind}_{tokens}_ms", runs, "ms", ceilings=limit.get(kind, ()))
    rows.add(f"retrieve_{tokens}_a_chunk_us", [1e3 * ms / prompt.chunks for ms in took["retrieve"]], "us")
    chunk = [prompt.retrieve(1) for _ in range(CHUNK_ROUNDS)]
    chunk_us = CHUNK_TOKENS * TOKEN_BYTES / link.sample("retrieve") / 1e3
    alone = [1e3 * ms for ms, _ in chunk]
    rows.add(f"retrieve_{tokens}_first_chunk_us", alone, "us", ceilings=[chunk_us] * CHUNK_ROUNDS)
    in_a_row = [1e3 * ms for ms in prompt.retrieve_chunk_in_a_row(CHUNK_ROUNDS)]
    rows.add(f"retrieve_{tokens}_chunk_in_a_row_us", in_a_row, "us", ceilings=[chunk_us] * CHUNK_ROUNDS)
    rows.add(f"lookup_{tokens}_first_chunk_us", [1e3 * ms for _, ms in chunk], "us")
    pool.client.clear(NAMESPACE)


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--tokens", default="129792,65536")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    lengths = [int(tokens) for tokens in given.tokens.split(",")]
    arena = -(-max(lengths) * TOKEN_BYTES // SLAB_BYTES) * SLAB_BYTES + 2 * SLAB_BYTES
    config = f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, {TOKEN_BYTES} bytes a token, shuffled"
    rows = Rows("prompt", as_json=given.json, config=config)
    with serving(("--slab-bytes", str(SLAB_BYTES)), arena, engine="bench-prompt") as (_, client):
        pool = Pool(client, 2 * max(lengths) // BLOCK_TOKENS)
        link = Link(256 * MIB)
        for tokens in lengths:
            measure(pool, rows, link, tokens=tokens, rounds=given.rounds)
        say(str([mover["facts"] for mover in client.status()["movers"]]))


if __name__ == "__main__":
    main()
