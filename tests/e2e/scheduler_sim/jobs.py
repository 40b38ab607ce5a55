"""The ranks' loads and stores in flight. They advance at any moment, check what they store, and load block by block."""

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from random import Random
from typing import Any

from kvclient.values import Blocks, Lease, RetrieveResult, StoreResult

from .content import BLOCK_TOKENS, NULL_BLOCK, Meanings, Slots, cut, kv, require
from .server import Server
from .shapes import Day, Options

GARBAGE = [b"garbage"] * BLOCK_TOKENS


@dataclass
class Store:
    rank: int
    first_chunk: int
    parent: bytes
    keys: list[bytes]
    blocks: Sequence[Blocks]
    future: "Future[StoreResult]" = field(default_factory=Future)


@dataclass
class Load:
    rank: int
    lease: Lease
    blocks: Sequence[Blocks]
    future: "Future[RetrieveResult]" = field(default_factory=Future)
    is_begun: bool = False
    fails: str = ""
    to_write: list[tuple[int, list[bytes]]] = field(default_factory=list)


class RankClient:
    """The part of kvclient's Client that a worker's half uses."""

    problem = None
    connected = True

    def __init__(self, rank: int, jobs: "Jobs") -> None:
        self._rank, self._jobs = rank, jobs

    def retrieve(
        self, cache: object, lease: Lease, blocks: Sequence[Blocks], *, after: object = None
    ) -> "Future[RetrieveResult]":
        load = Load(self._rank, lease, blocks)
        self._jobs.under_way.append(load)
        return load.future

    def store(
        self,
        cache: object,
        first_chunk: int,
        parent: bytes,
        keys: bytes,
        blocks: Sequence[Blocks],
        *,
        after: object = None,
    ) -> "Future[StoreResult]":
        store = Store(self._rank, first_chunk, parent, cut(keys), blocks)
        self._jobs.under_way.append(store)
        return store.future

    def close(self) -> None:
        """Does nothing: the seed is over."""


class Jobs:
    def __init__(
        self, options: Options, day: Day, *, rng: Random, server: Server, slots: Slots, meanings: Meanings
    ) -> None:
        self.under_way: list[Store | Load] = []
        self.counts: Counter[str] = Counter()
        self.pool: Any = None
        """vLLM's block pool, set when there is an engine."""
        self.is_faulty = True
        self._day, self._rng, self._server = day, rng, server
        self._slots, self._meanings = slots, meanings
        self._chunk_tokens = options.chunk_tokens
        self._chunk_blocks = options.chunk_tokens // BLOCK_TOKENS
        self._ranks = options.ranks

    def progress(self) -> None:
        """Advances one job. A rank's stores run in order."""
        if not self.under_way:
            return
        job = self._rng.choice(self.under_way)
        if isinstance(job, Store):
            rank = job.rank
            self._store(next(other for other in self.under_way if isinstance(other, Store) and other.rank == rank))
        elif not job.is_begun:
            self._begin(job)
        elif job.to_write:
            block, held = job.to_write.pop()
            self._require_held(block, "a load writes")
            self._slots.overwrite(job.rank, block, held)
        else:
            self.under_way.remove(job)
            self.counts["loads"] += 1
            self.counts["loads failed"] += bool(job.fails)
            job.future.set_result(RetrieveResult(not job.fails, 1, job.fails))

    # ---------------------------------------------------------------- stores

    def _store(self, job: Store) -> None:
        count, why = self._store_chunks(job, self._stop(len(job.keys)))
        self.under_way.remove(job)
        self.counts["stores"] += 1
        self.counts["stores short"] += bool(why)
        job.future.set_result(StoreResult(count, 0, 0, why))

    def _stop(self, chunks: int) -> int:
        """The number of chunks after which this store stops."""
        is_short = self.is_faulty and self._rng.random() < self._day.store_short
        return self._rng.randrange(chunks) if is_short else chunks

    def _store_chunks(self, job: Store, stop: int) -> tuple[int, str]:
        """The number of chunks stored, and why not all."""
        if not self._server.is_up:
            return 0, "connection-lost"
        parent = job.parent
        for index, key in enumerate(job.keys):
            if index == stop or (parent and parent not in self._server.chunks):
                self._server.not_stored(job.keys[index:])
                return index, "full" if index == stop else "parent-absent"
            parts: dict[tuple[int, int], list[list[bytes]]] = {}
            for item in job.blocks:
                begin = (job.first_chunk + index) * self._chunk_blocks - item.first_block
                if begin >= 0:  # the first chunks of a window are left out
                    blocks = item.block_ids[begin : begin + self._chunk_blocks]
                    held = self._read(job.rank, item.group, key, job.first_chunk + index, blocks)
                    parts[item.group, job.rank] = held
            self._server.holds(key, parts)
            parent = key
        return len(job.keys), ""

    def _read(self, rank: int, group: int, key: bytes, chunk: int, blocks: Sequence[int]) -> list[list[bytes]]:
        """Reads blocks, and checks that they hold exactly what the key names."""
        weights, tokens = self._meanings.of(key)
        require(len(tokens) == (chunk + 1) * self._chunk_tokens, "a key is stored in the place of another")
        read = []
        for index, block in enumerate(blocks):
            self._require_held(block, "a store reads")
            held = self._slots.block(rank, block)
            first = chunk * self._chunk_tokens + index * BLOCK_TOKENS
            for position, found in enumerate(held, first):
                is_right = found == kv(weights, group, tokens[: position + 1])
                require(is_right, f"wrong KV is stored: rank {rank} group {group} token {position} block {block}")
            read.append(held)
        return read

    # ---------------------------------------------------------------- loads

    def _begin(self, job: Load) -> None:
        job.is_begun = True
        promise = self._server.promise(job.lease)
        if promise is None:
            job.fails = "lease-lost"
            return
        require(job.rank not in promise.ranks_used, f"rank {job.rank} uses lease {job.lease.number} twice")
        promise.ranks_used.add(job.rank)
        if len(promise.ranks_used) == self._ranks:
            self._server.release(job.lease)
        for item in job.blocks:
            for index, block in enumerate(item.block_ids, item.first_block):
                chunk, within = divmod(index, self._chunk_blocks)
                held = self._server.chunks[promise.keys[chunk]][item.group, job.rank][within]
                job.to_write.append((block, held))
        self._rng.shuffle(job.to_write)
        if self.is_faulty and self._rng.random() < self._day.load_fails:
            job.fails = "mover-lost"
            job.to_write = [(block, GARBAGE) for block, _ in job.to_write[: self._rng.randint(0, 3)]]

    def _require_held(self, block: int, what: str) -> None:
        is_held = block != NULL_BLOCK and self.pool.blocks[block].ref_cnt > 0
        require(is_held, f"{what} block {block}, which nobody holds")


def computed(meanings: Meanings, options: Options, key: bytes) -> dict[tuple[int, int], list[list[bytes]]]:
    """The chunk of this key as any engine computes it: (group, rank) -> contents of its blocks."""
    weights, tokens = meanings.of(key)
    begin = len(tokens) - options.chunk_tokens
    found = {}
    for group in range(len(options.groups)):
        slots = [kv(weights, group, tokens[: position + 1]) for position in range(begin, len(tokens))]
        blocks = [slots[at : at + BLOCK_TOKENS] for at in range(0, len(slots), BLOCK_TOKENS)]
        found.update({(group, rank): blocks for rank in range(options.ranks)})
    return found
