"""The ranks' loads and stores in flight. They advance at any moment, check what they store, and load block by block."""

from collections import Counter
from collections.abc import Callable, Sequence
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


@dataclass(eq=False)
class Load:
    """A load. It may wait for chunks of another engine."""

    rank: int
    lease: Lease
    blocks: Sequence[Blocks]
    chunk_blocks: int
    rng: Random
    due_s: float | None
    """None: it waits for nothing."""
    future: "Future[RetrieveResult]" = field(default_factory=Future)
    is_begun: bool = False
    fails: str = ""
    right_chunks: int = 0
    keys: list[bytes] = field(default_factory=list)
    awaited: list[bytes] = field(default_factory=list)
    to_write: list[tuple[int, list[bytes]]] = field(default_factory=list)

    @property
    def end_chunk(self) -> int:
        return max(-(-(item.first_block + len(item.block_ids)) // self.chunk_blocks) for item in self.blocks)

    def came(self, key: bytes, parts: dict[tuple[int, int], list[list[bytes]]]) -> None:
        """The next chunk of the prefix is there."""
        chunk = len(self.keys)
        self.keys.append(key)
        del self.awaited[:1]
        self._write(chunk, lambda group, within: parts[group, self.rank][within])

    def fail(self, why: str) -> None:
        """It ends with what it has. Nobody says what lies in the blocks behind that."""
        self.fails, self.right_chunks = why, len(self.keys) if why == "not-coming" else 0
        if self.awaited and self.rng.random() < 0.5:
            self._write(len(self.keys), lambda group, within: GARBAGE)
        self.awaited.clear()

    def _write(self, chunk: int, content: Callable[[int, int], list[bytes]]) -> None:
        for item in self.blocks:
            for index, block in enumerate(item.block_ids, item.first_block):
                if index // self.chunk_blocks == chunk:
                    self.to_write.append((block, content(item.group, index % self.chunk_blocks)))
        self.rng.shuffle(self.to_write)


class RankClient:
    """The part of kvclient's Client that a worker's half uses."""

    problem = None
    connected = True

    def __init__(self, rank: int, jobs: "Jobs") -> None:
        self._rank, self._jobs = rank, jobs

    def retrieve(
        self,
        cache: object,
        lease: Lease,
        blocks: Sequence[Blocks],
        *,
        after: object,
        timeout_s: float | None,
        beside: Sequence[object] = (),
    ) -> "Future[RetrieveResult]":
        return self._jobs.load(self._rank, lease, blocks, timeout_s).future

    def store(
        self,
        cache: object,
        first_chunk: int,
        parent: bytes,
        keys: bytes,
        blocks: Sequence[Blocks],
        *,
        after: object = None,
        beside: Sequence[object] = (),
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
        self._may_wait = options.on_failed_loads == "recompute"
        self._waiting_blocks_max = options.blocks * options.await_blocks_percent // 100

    def load(self, rank: int, lease: Lease, blocks: Sequence[Blocks], timeout_s: float | None) -> Load:
        due_s = self._server.now_s + timeout_s if timeout_s is not None else None
        load = Load(rank, lease, blocks, self._chunk_blocks, self._rng, due_s)
        self.under_way.append(load)
        require(due_s is not None or load.end_chunk <= lease.chunks, "a load waits, and nobody says how long")
        require(due_s is None or self._may_wait, "a load waits, and its request would fail if it ended short")
        waiting = [
            max(item.first_block + len(item.block_ids) for item in other.blocks)
            for other in self.under_way
            if isinstance(other, Load) and other.rank == rank and other.due_s is not None
        ]
        require(sum(waiting) <= self._waiting_blocks_max, f"{waiting} blocks wait for others")
        return load

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
        elif job.awaited and job.due_s is not None and self._server.now_s >= job.due_s:
            job.fail("not-coming")
        elif job.to_write:
            block, held = job.to_write.pop()
            self._require_held(block, "a load writes")
            self._slots.overwrite(job.rank, block, held)
        elif not job.awaited:
            self.under_way.remove(job)
            if job in self._server.waiters:
                self._server.waiters.remove(job)
            self.counts["loads"] += 1
            self.counts["loads failed"] += bool(job.fails)
            self.counts["loads that ended short"] += job.right_chunks > job.lease.chunks
            job.future.set_result(RetrieveResult(not job.fails, 1, job.fails, job.right_chunks))

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
        for key in promise.keys[: job.end_chunk]:
            job.came(key, self._server.chunks[key])
        job.awaited = promise.awaited[: job.end_chunk - len(job.keys)]
        if self.is_faulty and self._rng.random() < self._day.load_fails:
            job.fail("mover-lost")
            job.to_write = [(block, GARBAGE) for block, _ in job.to_write[: self._rng.randint(0, 3)]]
        elif len(job.keys) + len(job.awaited) < job.end_chunk:
            job.fail("not-coming")
        elif job.awaited:
            self.counts["loads that wait"] += 1
            self._server.waiters.append(job)

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
