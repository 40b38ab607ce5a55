"""A server in a dict, for tests of the replay's engine: it moves real bytes between a worker's pages and its chunks."""

import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic_ns

from benchmarks.replay.pages import Pages
from benchmarks.replay.prefixes import Prefixes, replay_namespace
from kvserver.sizing.engine import Ended, Engine, Hit
from kvserver.sizing.outcome import Outcome
from kvserver.sizing.pool import PrefixPool

BLOCK_TOKENS = 4
BLOCKS_PER_CHUNK = 3
REGIONS = 2
PAGE_BYTES = 24


@dataclass
class Standin:
    """State that all links of a test share. Chunk bytes are [block of the chunk][region][page]."""

    chunks: dict[bytes, list[bytes]] = field(default_factory=dict)
    calls: list[Callable[[], None]] = field(default_factory=list)
    """Job ends that have not been reported."""
    lookups: list[int] = field(default_factory=list)
    retrieves: list[tuple[int, int]] = field(default_factory=list)
    """(first block, blocks)."""
    stores: list[tuple[int, int]] = field(default_factory=list)
    """(first chunk, chunks)."""
    released: list[object] = field(default_factory=list)
    spoil_byte: bool = False
    """Flips one byte of every retrieve."""
    move_nothing: bool = False
    """Reports every retrieve as done without moving any byte."""
    on_disk: set[bytes] = field(default_factory=set)
    """Keys of chunks that a lookup reports as on disk, to be read first."""
    refuse_retrieves: str = ""
    refuse_stores: str = ""

    def run_calls(self) -> None:
        while self.calls:
            self.calls.pop(0)()


class StandinLink:
    def __init__(self, server: Standin, pages: Pages) -> None:
        self.server = server
        self.pages = pages
        self.leases: dict[object, list[bytes]] = {}

    def lookup(self, keys: Sequence[bytes], chunks_wanted_min: int) -> Hit:
        found = 0
        while found < len(keys) and keys[found] in self.server.chunks:
            found += 1
        self.server.lookups.append(found)
        if found < chunks_wanted_min:
            return Hit(found, None)
        lease = len(self.leases) + 1
        self.leases[lease] = list(keys[:found])
        return Hit(found, lease, chunks_on_disk=sum(key in self.server.on_disk for key in keys[:found]))

    def release(self, lease: object) -> None:
        self.server.released.append(lease)
        del self.leases[lease]

    def retrieve(self, lease: object, first_block: int, blocks: Sequence[int], done: Callable[[Ended], None]) -> None:
        server = self.server
        server.retrieves.append((first_block, len(blocks)))
        if server.refuse_retrieves:  # the lease stays unchanged
            server.calls.append(lambda: done(Ended(server.refuse_retrieves, monotonic_ns())))
            return
        keys = self.leases.pop(lease)
        for i, block in enumerate(blocks):
            chunk, inside = divmod(first_block + i, BLOCKS_PER_CHUNK)
            self._write(block, server.chunks[keys[chunk]][inside], spoiled=server.spoil_byte and i == 0)
        server.calls.append(lambda: done(Ended("", monotonic_ns())))

    def store(
        self,
        first_chunk: int,
        parent: bytes,
        keys: Sequence[bytes],
        blocks: Sequence[int],
        done: Callable[[Ended], None],
    ) -> None:
        server = self.server
        server.stores.append((first_chunk, len(keys)))
        assert len(blocks) == len(keys) * BLOCKS_PER_CHUNK
        assert (parent == b"") == (first_chunk == 0)

        def end() -> None:
            if server.refuse_stores:
                done(Ended(server.refuse_stores, monotonic_ns()))
                return
            pages = [self._read(block) for block in blocks]  # late, so that freeing a block too early shows
            for i, key in enumerate(keys):
                server.chunks[key] = pages[i * BLOCKS_PER_CHUNK : (i + 1) * BLOCKS_PER_CHUNK]
            done(Ended("", monotonic_ns(), chunks_held=len(keys), bytes=sum(map(len, pages))))

        server.calls.append(end)

    def _read(self, block: int) -> bytes:
        return b"".join(os.pread(self.pages.fd, PAGE_BYTES, self._offset(r, block)) for r in range(REGIONS))

    def _write(self, block: int, page_bytes: bytes, *, spoiled: bool) -> None:
        if self.server.move_nothing:
            return
        if spoiled:
            page_bytes = bytes([page_bytes[0] ^ 1]) + page_bytes[1:]
        for r in range(REGIONS):
            os.pwrite(self.pages.fd, page_bytes[r * PAGE_BYTES : (r + 1) * PAGE_BYTES], self._offset(r, block))

    def _offset(self, region: int, block: int) -> int:
        return region * self.pages.region_stride + block * PAGE_BYTES


class Rig:
    """One engine over a stand-in, with the outcomes of all its requests."""

    def __init__(self, server: Standin, *, blocks: int = 31, worker: int = 0) -> None:
        namespace = replay_namespace(
            block_tokens=BLOCK_TOKENS, blocks_per_chunk=BLOCKS_PER_CHUNK, regions=REGIONS, page_bytes=PAGE_BYTES
        )
        self.server = server
        self.pages = Pages(blocks=blocks, regions=REGIONS, page_bytes=PAGE_BYTES)
        weakref.finalize(self, self.pages.close)
        self.pool = PrefixPool(blocks)
        self.outcomes: list[Outcome] = []
        self.engine = Engine(
            worker=worker,
            block_tokens=BLOCK_TOKENS,
            blocks_per_chunk=BLOCKS_PER_CHUNK,
            prefixes=Prefixes(namespace, block_tokens=BLOCK_TOKENS, blocks_per_chunk=BLOCKS_PER_CHUNK),
            pool=self.pool,
            pages=self.pages,
            link=StandinLink(server, self.pages),
            ended=self.outcomes.append,
        )

    def ask(self, trace_blocks: list[int], more_tokens: int = 1) -> Outcome:
        """Runs one prompt of these blocks plus a few tokens of its own, to its end."""
        assert self.engine.begin(len(self.outcomes), len(trace_blocks) * BLOCK_TOKENS + more_tokens, trace_blocks)
        self.server.run_calls()
        return self.outcomes[-1]

    def forget(self) -> None:
        """Evicts everything from HBM."""
        taken = self.pool.allocate(self.pool.blocks)
        assert taken is not None
        self.pool.release(taken)
