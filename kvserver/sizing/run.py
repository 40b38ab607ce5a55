"""Sends the same requests once for each arena size to one service: engines, schedule and paged KV of a replay.

Work overlaps as in a replay: each worker has begun as many requests as it may, and copies end in the order in which
they began. So hit rates equal those of `kvserver replay`, as far as they depend only on the chunks held.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvserver.brain.bounds import bounds_from
from kvserver.config.config import Config
from kvserver.config.remotes import Remote
from kvserver.errors import ConfigError
from kvserver.service.state.bounds import Bounds
from kvserver.sizing.brain import Brain, key_of
from kvserver.sizing.engine import Engine
from kvserver.sizing.keylog import is_key_log, read
from kvserver.sizing.options import Policy, RemoteWrite, SizingOptions
from kvserver.sizing.outcome import Outcome
from kvserver.sizing.pool import PrefixPool
from kvserver.sizing.schedule import Schedule
from kvserver.sizing.store import SharedStore
from kvserver.sizing.trace import SAMPLES, load
from kvserver.sizing.workload import Prompt, make_workload
from kvserver.tiers.slots import slot_bytes_for
from kvserver.wire.messages import BLOCKS_MAX, CHUNKS_MAX

MIB = 1 << 20
SLAB_BYTES_MAX = 256 * MIB
SLABS_MIN = 16
INDEX_CHUNKS_MAX = 100_000_000
REMOTE = Remote("sizing", "file:///sizing")
"""With the server's own defaults: fewer than 1,024 tokens are not read."""
TELL_EVERY = 50
"""Requests between two progress reports."""


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """The result for one size. hbm + server + computed = all tokens."""

    arena_bytes: int
    hbm_tokens: int
    server_tokens: int
    computed_tokens: int
    evicted_chunks: int
    stores: int
    stores_short: int
    """Stores cut short: the rest of their prompts found no room, because the whole arena was pinned."""
    remote_tokens: int
    """Tokens of chunks that a machine read from the remote store. It may serve them more than once."""
    remote_written_bytes: int


class Sizing(msgspec.Struct, frozen=True, kw_only=True):
    trace: str
    requests: int
    prompt_tokens: int
    workers: int
    pool_tokens: int
    token_bytes: int
    chunk_tokens: int
    policy: Policy
    machines: int
    remote_write: RemoteWrite
    remote_bytes: int
    unique_bytes: int
    """KV of all requests, each chunk once: a larger arena has no benefit."""
    infinite_tokens: int
    """Tokens that an engine or a server with unlimited memory would have hit."""
    sizes: list[Size]


class Progress(NamedTuple):
    done: int
    total: int
    line: str


def run(options: SizingOptions, progress: Callable[[Progress], None]) -> Sizing:
    """Replays all sizes. Raises ConfigError if the trace or a size is impossible."""
    prompts = _prompts(options)
    _check_longest(prompts, options)
    chunks = _unique_chunks(prompts, options)
    chunk_bytes = slot_bytes_for(options.chunk_tokens * options.token_bytes)
    unique_bytes = chunks * chunk_bytes
    sizes = options.arena_bytes or _powers(unique_bytes, chunk_bytes)
    found = []
    for number, arena_bytes in enumerate(sizes):
        done = number * len(prompts)

        def tell(ended: int, done: int = done, arena_bytes: int = arena_bytes) -> None:
            line = f"{arena_bytes / 1e9:.3g} GB: {ended:,} of {len(prompts):,} requests"
            progress(Progress(done + ended, len(sizes) * len(prompts), line))

        found.append(_replay(prompts, options, arena_bytes, tell))
    return Sizing(
        trace=options.trace,
        requests=len(prompts),
        prompt_tokens=sum(prompt.tokens for prompt in prompts),
        workers=options.workers,
        pool_tokens=options.pool_tokens,
        token_bytes=options.token_bytes,
        chunk_tokens=options.chunk_tokens,
        policy=options.policy,
        machines=options.machines,
        remote_write=options.remote_write,
        remote_bytes=options.remote_bytes,
        unique_bytes=unique_bytes,
        infinite_tokens=_infinite(prompts, options),
        sizes=found,
    )


def _prompts(options: SizingOptions) -> list[Prompt]:
    path = Path(options.trace)
    if options.trace in SAMPLES or not is_key_log(path):
        return make_workload(load(options.trace), options)
    return read(
        path,
        block_tokens=options.block_tokens,
        blocks_per_chunk=options.blocks_per_chunk,
        workers=options.workers,
        requests=options.requests,
    )


def _check_longest(prompts: Sequence[Prompt], options: SizingOptions) -> None:
    """Checks that every prompt fits a worker's pool, and one request to the server."""
    longest = max((prompt.tokens for prompt in prompts), default=0)
    if options.pool_tokens and longest + options.block_tokens > options.pool_tokens:
        raise ConfigError(
            "sizing-options", f"a prompt of {longest} tokens does not fit pool_tokens={options.pool_tokens}; 0: no pool"
        )
    most = min(CHUNKS_MAX * options.chunk_tokens, BLOCKS_MAX * options.block_tokens)
    if longest > most:
        raise ConfigError(
            "sizing-options",
            f"a prompt of {longest} tokens is more than {CHUNKS_MAX} chunks or {BLOCKS_MAX} blocks of "
            f"block_tokens={options.block_tokens}",
        )


def _replay(prompts: Sequence[Prompt], options: SizingOptions, arena_bytes: int, tell: Callable[[int], None]) -> Size:
    """Replays all requests against arenas of this size."""
    bounds = _bounds(arena_bytes, slot_bytes_for(options.chunk_tokens * options.token_bytes), options)
    store = SharedStore(options.remote_bytes) if bounds.remotes else None
    brains = [
        Brain(
            bounds,
            block_tokens=options.block_tokens,
            blocks_per_chunk=options.blocks_per_chunk,
            token_bytes=options.token_bytes,
            store=store,
        )
        for _ in range(options.machines)
    ]
    schedule = Schedule(prompts, workers=options.workers, in_flight=options.in_flight)
    outcomes: list[Outcome] = []

    def ended(outcome: Outcome) -> None:
        outcomes.append(outcome)
        schedule.ended(outcome.worker, outcome.index)

    engines = [_engine(worker, options, brains[worker % len(brains)], ended) for worker in range(options.workers)]
    waiting: list[deque[Prompt]] = [deque() for _ in engines]
    while not schedule.finished:
        if not _begin(schedule, engines, waiting):
            busy = [brain for brain in brains if brain.copies]
            assert busy, "a prompt waits, and nothing is under way"
            for brain in busy:
                brain.end_oldest_copy()
        if len(outcomes) % TELL_EVERY == 0:
            tell(len(outcomes))
    counters = [brain.service.counters for brain in brains]
    return Size(
        arena_bytes=arena_bytes,
        hbm_tokens=sum(outcome.hbm_tokens for outcome in outcomes),
        server_tokens=sum(outcome.retrieved_tokens for outcome in outcomes),
        computed_tokens=sum(outcome.computed_tokens for outcome in outcomes),
        evicted_chunks=sum(each.evictions for each in counters),
        stores=sum(each.stores for each in counters),
        stores_short=sum(each.short_stores["full"] for each in counters),
        remote_tokens=sum(each.remote_reads for each in counters) * options.chunk_tokens,
        remote_written_bytes=sum(each.remote_written_bytes for each in counters),
    )


def _begin(schedule: Schedule, engines: Sequence[Engine], waiting: list[deque[Prompt]]) -> bool:
    """Begins one request on each worker that has room. Returns False if all wait for copies."""
    begun = False
    for worker, engine in enumerate(engines):
        prompt = waiting[worker].popleft() if waiting[worker] else schedule.take(worker)
        if prompt is None:
            continue
        if engine.begin(prompt.index, prompt.tokens, prompt.blocks):
            begun = True
        else:
            waiting[worker].appendleft(prompt)
    return begun


def _engine(worker: int, options: SizingOptions, brain: Brain, ended: Callable[[Outcome], None]) -> Engine:
    return Engine(
        worker=worker,
        block_tokens=options.block_tokens,
        blocks_per_chunk=options.blocks_per_chunk,
        prefixes=Names(options.blocks_per_chunk),
        pool=PrefixPool(options.pool_blocks) if options.pool_tokens else NoPool(),
        pages=NoPages(),
        link=brain,
        ended=ended,
    )


def _bounds(arena_bytes: int, slot_bytes: int, options: SizingOptions) -> Bounds:
    """Bounds with slabs as the server chooses them; an arena too small for a server has one slot per slab."""
    slab_bytes = slot_bytes
    if arena_bytes >= MIB:
        power = 1 << (arena_bytes // SLABS_MIN).bit_length() - 1
        slab_bytes = max(slot_bytes, min(SLAB_BYTES_MAX, max(MIB, power)))
    if arena_bytes < slab_bytes:
        raise ConfigError("sizing-options", f"{arena_bytes} bytes do not hold one chunk of {slot_bytes} bytes")
    return replace(
        bounds_from(Config()),
        request_lines="none",
        arena_bytes=arena_bytes // slab_bytes * slab_bytes,
        slab_bytes=slab_bytes,
        chunks_max=INDEX_CHUNKS_MAX,
        eviction_policy=options.policy,
        remotes=() if options.remote_write == "none" else (REMOTE._replace(write=options.remote_write),),
        jobs_max=4096,
        leases_max=4096,
    )


def _powers(unique_bytes: int, chunk_bytes: int) -> list[int]:
    """Eight sizes, each twice the one before, up to 1.5 times the bytes of all chunks.

    The margin is for rounding: a slab holds whole slots, and the arena whole slabs.
    """
    last = max(unique_bytes, chunk_bytes) * 3 // 2
    return [max(last >> shift, chunk_bytes) for shift in range(7, -1, -1)]


def _unique_chunks(prompts: Sequence[Prompt], options: SizingOptions) -> int:
    each = options.blocks_per_chunk
    return len({block for prompt in prompts for block in prompt.blocks[each - 1 :: each]})


def _infinite(prompts: Sequence[Prompt], options: SizingOptions) -> int:
    """Tokens that unlimited memory would hit: whole blocks, and never the last token, which an engine computes."""
    seen: set[int] = set()
    hit = 0
    for prompt in prompts:
        usable = min(len(prompt.blocks), (prompt.tokens - 1) // options.block_tokens)
        held = 0
        while held < usable and prompt.blocks[held] in seen:
            held += 1
        hit += held * options.block_tokens
        seen.update(prompt.blocks)
    return hit


class Names:
    """Names of prefixes (engine.Names): a block id stands for the whole prefix that ends in it."""

    def __init__(self, blocks_per_chunk: int) -> None:
        self._blocks_per_chunk = blocks_per_chunk

    def digests(self, blocks: Sequence[int]) -> list[bytes]:
        return [key_of(block) for block in blocks]

    def keys(self, blocks: Sequence[int]) -> list[bytes]:
        return [key_of(block) for block in blocks[self._blocks_per_chunk - 1 :: self._blocks_per_chunk]]


class NoPool:
    """A pool of an engine that keeps nothing of a request (engine.Pool)."""

    def match(self, digests: Sequence[bytes]) -> list[int]:
        return []

    def allocate(self, blocks: int) -> list[int]:
        return list(range(blocks))

    def adopt(self, block: int, digest: bytes) -> int:
        return block

    def pin(self, prefix: Sequence[int]) -> None:
        pass

    def release(self, prefix: Sequence[int]) -> None:
        pass


class NoPages:
    """KV without bytes (engine.KV)."""

    block_bytes = 0

    def compute(self, blocks: Sequence[int], digests: Sequence[bytes]) -> None:
        pass

    def spoil(self, blocks: Sequence[int], digests: Sequence[bytes]) -> None:
        pass

    def wrong(self, blocks: Sequence[int], digests: Sequence[bytes]) -> int:
        return 0
