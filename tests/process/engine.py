"""A minimal engine for tests: a paged pool in shared memory whose every byte is known, and a client.

A page's bytes are a function of namespace, chunk key, group, shard, block and region, so bytes from any other place
show as wrong. The pool remembers what each of its blocks must hold; Pool.wrong() compares all blocks, touched or not.
"""

import hashlib
import os
import random
import struct
from array import array
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kvclient import (
    Blocks,
    Cache,
    CacheSpec,
    Client,
    Found,
    GroupSpec,
    HostBuffer,
    Lease,
    RegionRun,
    RetrieveResult,
    StoreResult,
    Timeouts,
    chunk_keys,
    namespace_digest,
)
from kvserver._native import Pattern, create_memfd
from kvserver.tiers.slots import slot_bytes_for
from kvserver.wire.messages import KEY_BYTES, Kind
from tests.process.harness import WAIT_S

NAMESPACE = namespace_digest({"model": "tests", "layers": 3})
MODEL = "tests/Three-Layers"
PATIENT = Timeouts(lookup_s=5.0, backoff_first_s=0.005, backoff_max_s=0.05)
"""Long lookup deadline, so that a loaded machine does not turn a hit into a miss; short pauses between reconnects."""


class Group(NamedTuple):
    """One group as this rank holds it; blocks lie [region][block] in the pool."""

    block_tokens: int
    blocks: int
    regions: int
    page_bytes: int
    kind: Kind = "full"
    window_tokens: int = 0
    shards: int = 1
    shard: int = 0
    writers: int = 1
    writer: int = 0


@dataclass(frozen=True)
class Shape:
    """A cache's geometry: odd sizes, several blocks in a chunk."""

    chunk_tokens: int = 12
    groups: tuple[Group, ...] = (Group(block_tokens=4, blocks=47, regions=3, page_bytes=517),)

    def blocks_per_chunk(self, group: int) -> int:
        return self.chunk_tokens // self.groups[group].block_tokens

    def slot_bytes(self) -> int:
        """Slot bytes of one chunk over all groups and shards, when every rank has this shape."""
        return sum(
            slot_bytes_for(self.blocks_per_chunk(index) * group.regions * group.page_bytes) * group.shards
            for index, group in enumerate(self.groups)
        )


SMALL = Shape()
LARGE = Shape(chunk_tokens=12, groups=(Group(block_tokens=4, blocks=97, regions=5, page_bytes=69_632),))
"""A chunk of just under 1 MiB: a copy of thirty lasts long enough to be interrupted half-way."""


class Prompt(NamedTuple):
    """The chain of keys of some tokens."""

    keys: bytes

    @property
    def chunks(self) -> int:
        return len(self.keys) // KEY_BYTES

    def key(self, chunk: int) -> bytes:
        return self.keys[chunk * KEY_BYTES : (chunk + 1) * KEY_BYTES]

    def head(self, chunks: int) -> "Prompt":
        return Prompt(self.keys[: chunks * KEY_BYTES])


def prompt(seed: int, chunks: int, chunk_tokens: int = SMALL.chunk_tokens) -> Prompt:
    """A prompt that depends on its seed alone."""
    tokens = array("I", random.Random(seed).randbytes(4 * chunks * chunk_tokens))
    return Prompt(chunk_keys(tokens, chunk_tokens))


class Pool:
    """One rank's memory and its expected content."""

    def __init__(self, shape: Shape, namespace: bytes, name: str) -> None:
        self.shape = shape
        self.name = name
        self._namespace = namespace
        self._offsets: list[int] = []
        self._spoiled = 0
        self.bytes = 0
        for group in shape.groups:
            self._offsets.append(self.bytes)
            self.bytes += group.regions * group.blocks * group.page_bytes
        self.fd = create_memfd(name, self.bytes)
        self._pattern = Pattern(self.fd, self.bytes)
        self._holds: dict[tuple[int, int], int] = {}
        for index, group in enumerate(shape.groups):
            self.spoil([Blocks(index, 0, list(range(group.blocks)))])

    def specs(self) -> list[GroupSpec]:
        return [
            GroupSpec(
                block_tokens=group.block_tokens,
                blocks=group.blocks,
                kind=group.kind,
                window_tokens=group.window_tokens,
                shards=group.shards,
                shard=group.shard,
                writers=group.writers,
                writer=group.writer,
                regions=[
                    RegionRun(
                        0, offset, group.regions, group.blocks * group.page_bytes, group.page_bytes, group.page_bytes
                    )
                ],
            )
            for group, offset in zip(self.shape.groups, self._offsets, strict=True)
        ]

    def compute(self, prompt: Prompt, where: Sequence[Blocks]) -> None:
        """Stands in for the model: fills the blocks with the bytes of their place in the prompt."""
        self.expect(prompt, where)
        self._fill(where)

    def expect(self, prompt: Prompt, where: Sequence[Blocks]) -> None:
        """Expects the bytes of their place in the prompt in the blocks."""
        for group, first_block, ids in where:
            for position, block in enumerate(ids):
                self._holds[(group, block)] = self._seed(prompt, group, first_block + position)

    def spoil(self, where: Sequence[Blocks]) -> None:
        """Reuses the blocks: fills them with bytes that no prompt has, different each time."""
        for group, _, ids in where:
            for block in ids:
                self._spoiled += 1
                self._holds[(group, block)] = _seed_of(b"spoiled", struct.pack("<QQ", os.getpid(), self._spoiled))
        self._fill(where)

    def wrong(self) -> int:
        """The number of bytes in the whole pool that differ from the expected ones."""
        return self._pattern.wrong(self._ranges(list(self._holds)))

    def close(self) -> None:
        self._pattern.close()
        os.close(self.fd)

    def _fill(self, where: Sequence[Blocks]) -> None:
        self._pattern.fill(self._ranges([(group, block) for group, _, ids in where for block in ids]))

    def _seed(self, prompt: Prompt, group: int, block: int) -> int:
        chunk, index = divmod(block, self.shape.blocks_per_chunk(group))
        shard = self.shape.groups[group].shard
        return _seed_of(self._namespace + prompt.key(chunk), struct.pack("<HHQ", group, shard, index))

    def _ranges(self, blocks: Sequence[tuple[int, int]]) -> bytes:
        flat: list[int] = []
        for index, block in blocks:
            group, seed = self.shape.groups[index], self._holds[(index, block)]
            for region in range(group.regions):
                page = self._offsets[index] + (region * group.blocks + block) * group.page_bytes
                flat += (page, group.page_bytes, (seed + region * 0x9E3779B97F4A7C15) & (1 << 64) - 1)
        return array("Q", flat).tobytes()


def _seed_of(*parts: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(b"".join(parts), digest_size=8).digest(), "little")


@dataclass
class Engine:
    """One rank: pool, client and cache. Use it as a context manager."""

    path: Path
    shape: Shape = SMALL
    namespace: bytes = NAMESPACE
    name: str = "engine"
    epoch: int = field(default_factory=lambda: random.getrandbits(40))
    ranks: int = 1
    rank: int = 0
    timeouts: Timeouts = PATIENT
    tenant: str = ""
    seed: int = 1
    """Seed of the order in which blocks are taken."""

    def __post_init__(self) -> None:
        self.pool = Pool(self.shape, self.namespace, f"tests-pool-{os.getpid()}-{random.getrandbits(32):x}")
        self._random = random.Random(self.seed)
        self.client = Client(
            self.path, engine=self.name, epoch=self.epoch, ranks=self.ranks, rank=self.rank, timeouts=self.timeouts
        )
        self.cache: Cache | None = None

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.client.close()
        self.pool.close()

    # ---------------------------------------------------------------- registration

    def register(self, name: str = "kv") -> "Engine":
        """Registers without waiting."""
        self.cache = self.client.register_cache(
            CacheSpec(
                name=name,
                namespace=self.namespace,
                chunk_tokens=self.shape.chunk_tokens,
                buffers=[HostBuffer(self.pool.fd, self.pool.bytes)],
                groups=self.pool.specs(),
                tenant=self.tenant,
                model=MODEL,
            )
        )
        return self

    def ready(self, within_s: float = WAIT_S) -> "Engine":
        """Registers unless done before, and waits until the server has accepted the cache."""
        if self.cache is None:
            self.register()
        assert self.cache is not None
        assert self.client.wait_connected(within_s), f"not connected within {within_s:g} s"
        assert self.cache.wait_registered(within_s), f"not registered within {within_s:g} s"
        return self

    # ---------------------------------------------------------------- blocks

    def place(self, prompt: Prompt, first_chunk: int = 0) -> list[Blocks]:
        """Blocks of every group for whole chunks from first_chunk on, scattered over the pool."""
        places = []
        for index, group in enumerate(self.shape.groups):
            per_chunk = self.shape.blocks_per_chunk(index)
            count = (prompt.chunks - first_chunk) * per_chunk
            places.append(Blocks(index, first_chunk * per_chunk, self._random.sample(range(group.blocks), count)))
        return places

    def spare(self, where: Sequence[Blocks]) -> list[Blocks]:
        """As many blocks again, none of them among these."""
        return [
            Blocks(
                group,
                first,
                self._random.sample(sorted(set(range(self.shape.groups[group].blocks)) - set(ids)), len(ids)),
            )
            for group, first, ids in where
        ]

    # ---------------------------------------------------------------- verbs

    def begin_store(
        self, prompt: Prompt, where: Sequence[Blocks], first_chunk: int = 0, timeout_s: float | None = None
    ) -> "Future[StoreResult]":
        assert self.cache is not None
        parent = prompt.key(first_chunk - 1) if first_chunk else b""
        keys = prompt.keys[first_chunk * KEY_BYTES :]
        return self.client.store(self.cache, first_chunk, parent, keys, where, timeout_s=timeout_s)

    def store(self, prompt: Prompt) -> StoreResult:
        """Computes and stores a whole prompt."""
        where = self.place(prompt)
        self.pool.compute(prompt, where)
        return self.begin_store(prompt, where).result(WAIT_S + 20)

    def store_piece(self, prompt: Prompt, first_chunk: int) -> int:
        """Computes and stores the chunks of a prompt from first_chunk on. Returns how many are held then."""
        where = self.place(prompt, first_chunk)
        self.pool.compute(prompt, where)
        return self.begin_store(prompt, where, first_chunk).result(WAIT_S + 20).chunks

    def lookup(self, prompt: Prompt) -> Found:
        return self.client.lookup(self.namespace, prompt.keys)

    def begin_retrieve(
        self, lease: Lease, where: Sequence[Blocks], timeout_s: float | None = None
    ) -> "Future[RetrieveResult]":
        assert self.cache is not None
        return self.client.retrieve(self.cache, lease, where, timeout_s=timeout_s)

    def retrieve(self, prompt: Prompt) -> int:
        """Looks up, retrieves all chunks found and compares every byte of the pool. Returns the number of chunks.

        A miss is 0. A failed retrieve, or a wrong byte anywhere, is an AssertionError."""
        found = self.lookup(prompt)
        if found.lease is None:
            assert found.chunks == 0
            return 0
        held = prompt.head(found.chunks)
        where = self.place(held)
        self.pool.spoil(where)
        result = self.begin_retrieve(found.lease, where).result(WAIT_S + 20)
        assert result.ok, result
        self.pool.expect(held, where)
        wrong = self.pool.wrong()
        assert wrong == 0, f"{wrong} wrong bytes after a retrieve of {found.chunks} chunks"
        return found.chunks


class Waiting:
    """An engine that retrieves a prompt, of one group, into blocks of its own while another engine computes it."""

    def __init__(self, engine: Engine, story: Prompt, timeout_s: float | None = None) -> None:
        self.engine, self.story = engine, story
        self.where = engine.place(story)
        self.right = 0
        """Leading chunks of which it was told that its blocks hold their bytes."""
        self.begin(timeout_s)

    def begin(self, timeout_s: float | None = None) -> None:
        """Looks up, and retrieves what it lacks. Its blocks hold other content before."""
        self.found = self.engine.client.lookup(self.engine.namespace, self.story.keys, may_wait=True)
        assert self.found.lease is not None, self.found
        self.lease: Lease = self.found.lease
        lacks = self._blocks(self.right, self.story.chunks)
        self.engine.pool.spoil(lacks)
        self.future = self.engine.begin_retrieve(self.lease, lacks, timeout_s)

    def has(self, chunks: int) -> bool:
        """Whether these leading chunks have their bytes, and all else is as it was."""
        self.engine.pool.expect(self.story, self._blocks(0, chunks))
        return self.engine.pool.wrong() == 0

    def end(self) -> RetrieveResult:
        """The outcome. Gives the lease back, and compares all that is right, or as it was, by what the outcome says."""
        result = self.future.result(WAIT_S)
        self.engine.client.release(self.lease)
        if result.ok or result.why == "not-coming":
            self.right = self.story.chunks if result.ok else result.right_chunks
            assert self.has(self.right), f"{self.engine.pool.wrong()} wrong bytes after {result}"
        else:
            self.engine.pool.spoil(self._blocks(self.right, self.story.chunks))
        return result

    def _blocks(self, first: int, end: int) -> list[Blocks]:
        """Its blocks of these chunks."""
        per_chunk = self.engine.shape.blocks_per_chunk(0)
        return [Blocks(0, first * per_chunk, self.where[0].block_ids[first * per_chunk : end * per_chunk])]
