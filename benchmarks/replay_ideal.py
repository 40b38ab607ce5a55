"""The hits of infinitely fast caches in a replay: the ceiling of `kvserver replay` with the same capacities.

    python -m benchmarks.replay_ideal --server-mib 384,1152,3456 --requests 600

The same requests, workers and HBM pools as in the replay, one request after another. One simulated server holds that
many chunks, and writes and reads in no time. It evicts either the least recently used chunks, tails before heads, or
those needed last in the future (Belady: no policy hits more). No other process runs.
"""

import argparse
import heapq
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from benchmarks.replay.options import MIB, ReplayOptions
from kvserver.sizing.pool import PrefixPool
from kvserver.sizing.trace import load
from kvserver.sizing.workload import Prompt, make_workload

NEVER = 1 << 60


class Ask(NamedTuple):
    """One request as the server sees it. A chunk is named by its last block, whose id stands for the whole prefix."""

    prompt_tokens: int
    held_blocks: int
    """Blocks held in HBM."""
    usable_blocks: int
    chunks: list[int]


class Cache(Protocol):
    def holds(self, chunk: int) -> bool: ...
    def take_in(self, number: int, chunks: Sequence[int]) -> None:
        """Request `number` has these chunks: all of them are stored or touched."""


class Lru:
    def __init__(self, chunks_max: int) -> None:
        self._chunks_max = chunks_max
        self._order: OrderedDict[int, None] = OrderedDict()

    def holds(self, chunk: int) -> bool:
        return chunk in self._order

    def take_in(self, number: int, chunks: Sequence[int]) -> None:
        for chunk in reversed(chunks):  # the head last, so that it is the most recently used
            self._order[chunk] = None
            self._order.move_to_end(chunk)
        while len(self._order) > self._chunks_max:
            self._order.popitem(last=False)


class Belady:
    """Evicts the chunks that are needed last. needed: chunk -> needs() in order."""

    def __init__(self, chunks_max: int, needed: dict[int, list[int]]) -> None:
        self._chunks_max = chunks_max
        self._needed = {chunk: list(reversed(numbers)) for chunk, numbers in needed.items()}
        self._next: dict[int, int] = {}
        self._heap: list[tuple[int, int, int]] = []

    def holds(self, chunk: int) -> bool:
        return chunk in self._next

    def take_in(self, number: int, chunks: Sequence[int]) -> None:
        for depth, chunk in enumerate(chunks):
            later = self._needed.get(chunk, [])
            while later and later[-1] <= number:
                later.pop()
            when = later[-1] if later else NEVER
            if self._next.get(chunk) != when:
                self._next[chunk] = when
                heapq.heappush(self._heap, (-when, -depth, chunk))
        while len(self._next) > self._chunks_max:
            when, _, chunk = heapq.heappop(self._heap)
            if self._next.get(chunk) == -when:
                del self._next[chunk]


def asks(options: ReplayOptions) -> list[Ask]:
    """The requests that HBM leaves to the server, with pools of the replay's size."""
    pools = [PrefixPool(options.pool_blocks) for _ in range(options.workers)]
    return [_ask(prompt, pools[prompt.worker], options) for prompt in make_workload(load(options.trace), options)]


def _ask(prompt: Prompt, pool: PrefixPool, options: ReplayOptions) -> Ask:
    names = [block.to_bytes(8, "little") for block in prompt.blocks]
    usable = min((prompt.tokens - 1) // options.block_tokens, len(names))
    held = pool.match(names[:usable])
    fresh = pool.allocate(-(-prompt.tokens // options.block_tokens) - len(held))
    assert fresh is not None, "one request at a time fits"
    blocks = held + fresh
    for i in range(len(held), len(names)):
        blocks[i] = pool.adopt(blocks[i], names[i])
    pool.release(blocks)
    step = options.blocks_per_chunk
    return Ask(prompt.tokens, len(held), usable, prompt.blocks[step - 1 :: step])


def hit_tokens(asked: Sequence[Ask], cache: Cache, options: ReplayOptions) -> int:
    """Tokens hit in HBM and in a server with this cache."""
    tokens = 0
    for number, ask in enumerate(asked):
        found = next((i for i, chunk in enumerate(ask.chunks) if not cache.holds(chunk)), len(ask.chunks))
        served = min(found * options.blocks_per_chunk, ask.usable_blocks)
        tokens += max(ask.held_blocks, served) * options.block_tokens
        cache.take_in(number, ask.chunks)
    return tokens


def needs(asked: Sequence[Ask]) -> dict[int, list[int]]:
    """Chunk -> the requests that it helps, because HBM lacks some of their blocks.

    A chunk also helps where HBM holds the chunk itself: a server serves prefixes from the head on, so a chain needs
    its head whenever it needs its tail.
    """
    needed: dict[int, list[int]] = {}
    for number, ask in enumerate(asked):
        if ask.held_blocks < ask.usable_blocks:
            for chunk in ask.chunks:
                needed.setdefault(chunk, []).append(number)
    return needed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server-mib", default="384,1152,3456", help="what the server holds, DRAM and disk together")
    parser.add_argument("--requests", type=int, default=ReplayOptions.requests)
    parser.add_argument("--trace", default=ReplayOptions.trace)
    arguments = parser.parse_args()
    options = replace(ReplayOptions(), requests=arguments.requests, trace=arguments.trace)
    asked = asks(options)
    prompt_tokens = sum(ask.prompt_tokens for ask in asked)
    needed = needs(asked)

    def show(case: str, cache: Cache) -> None:
        percent = 100 * hit_tokens(asked, cache, options) / prompt_tokens
        print(json.dumps({"bench": "replay_ideal", "case": case, "value": round(percent, 2), "unit": "% of tokens"}))

    show("hbm_only", Lru(0))
    for mib in map(int, arguments.server_mib.split(",")):
        chunks = mib * MIB // (options.blocks_per_chunk * options.block_bytes)
        show(f"lru_{mib}_mib", Lru(chunks))
        show(f"belady_{mib}_mib", Belady(chunks, needed))
    show("unbounded", Lru(NEVER))


if __name__ == "__main__":
    main()
