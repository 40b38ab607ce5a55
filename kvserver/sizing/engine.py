"""One engine worker's logic: the life of a request in an inference engine with paged KV and a prefix cache.

    match HBM → allocate → look up → retrieve the blocks missing in HBM → compute the rest → store new chunks → end

Single-threaded: every method and every callback runs on the worker's one thread. Only the server moves bytes; the
engine fills pages instead of running a model, and compares every retrieved byte.

Blocks stay pinned while anything may touch them: a request's until it has computed, a store's until it has ended. A
pin always covers the whole prefix (pool.py says why).
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Protocol

from kvserver.sizing.outcome import Outcome


@dataclass(frozen=True)
class Hit:
    """The result of a lookup. `lease` is the link's own; None: none was granted."""

    chunks: int
    lease: object | None
    problem: str = ""
    """Why the server could not be asked; empty if it answered."""
    chunks_on_disk: int = 0
    """Chunks of the lease that must be read from disk first."""


@dataclass(frozen=True)
class Ended:
    """The end of a retrieve or store. `problem` is empty if it was completed."""

    problem: str
    at_ns: int
    chunks_held: int = 0
    bytes: int = 0


class Link(Protocol):
    """The server as the engine sees it. A failure is a miss; no method raises for it.

    `done` is called once, on the worker's thread, after the call has returned.
    """

    def lookup(self, keys: Sequence[bytes], chunks_wanted_min: int) -> Hit: ...
    def release(self, lease: object) -> None: ...
    def retrieve(
        self, lease: object, first_block: int, blocks: Sequence[int], done: Callable[[Ended], None]
    ) -> None: ...
    def store(
        self,
        first_chunk: int,
        parent: bytes,
        keys: Sequence[bytes],
        blocks: Sequence[int],
        done: Callable[[Ended], None],
    ) -> None: ...


class Names(Protocol):
    """Names of blocks and chunks (prefixes.Prefixes)."""

    def digests(self, blocks: Sequence[int]) -> list[bytes]: ...
    def keys(self, blocks: Sequence[int]) -> list[bytes]: ...


class Pool(Protocol):
    """The engine's block allocator and prefix cache (pool.PrefixPool)."""

    def match(self, digests: Sequence[bytes]) -> list[int]: ...
    def allocate(self, blocks: int) -> list[int] | None: ...
    def adopt(self, block: int, digest: bytes) -> int: ...
    def pin(self, prefix: Sequence[int]) -> None: ...
    def release(self, prefix: Sequence[int]) -> None: ...


class KV(Protocol):
    """The bytes of the blocks (pages.Pages)."""

    block_bytes: int

    def compute(self, blocks: Sequence[int], digests: Sequence[bytes]) -> None: ...
    def spoil(self, blocks: Sequence[int], digests: Sequence[bytes]) -> None: ...
    def wrong(self, blocks: Sequence[int], digests: Sequence[bytes]) -> int: ...


@dataclass(eq=False)
class _Request:
    outcome: Outcome
    digests: list[bytes]
    """Digests of its full blocks."""
    keys: list[bytes]
    """Keys of its whole chunks."""
    blocks: list[int]
    """Block table: the full blocks, then the block that the rest of the prompt partly fills."""
    held: int
    """Leading blocks that were in HBM."""
    found_chunks: int = 0
    chunks_on_disk: int = 0
    """Found chunks that are on disk: always the last ones, since the tail of a chain leaves DRAM before its head."""
    usable: int = 0
    """Leading blocks that may be served instead of computed."""
    stored: list[int] = field(default_factory=list)
    """The prefix that the store pins."""


class Engine:
    """The engine: begin() starts a request, and `ended` is called at its end."""

    def __init__(
        self,
        *,
        worker: int,
        block_tokens: int,
        blocks_per_chunk: int,
        prefixes: Names,
        pool: Pool,
        pages: KV,
        link: Link,
        ended: Callable[[Outcome], None],
    ) -> None:
        self.active = 0
        """Requests begun and not ended."""
        self._worker = worker
        self._block_tokens = block_tokens
        self._blocks_per_chunk = blocks_per_chunk
        self._prefixes = prefixes
        self._pool = pool
        self._pages = pages
        self._link = link
        self._ended = ended
        self._storing: set[bytes] = set()
        """Keys of stores in flight: lookups do not find them yet, and they must not be stored again."""
        self._sent: set[bytes] = set()
        """Keys that this worker has ever sent in a store."""

    def begin(self, index: int, tokens: int, trace_blocks: Sequence[int]) -> bool:
        """Starts a request. Returns False, and changes nothing, if the pool has too few unpinned blocks now."""
        digests = self._prefixes.digests(trace_blocks)
        # The last token is always computed: an engine needs its logits.
        usable = (tokens - 1) // self._block_tokens
        held = self._pool.match(digests[:usable])
        fresh = self._pool.allocate(-(-tokens // self._block_tokens) - len(held))
        if fresh is None:
            self._pool.release(held)
            return False
        request = _Request(
            Outcome(index=index, worker=self._worker, prompt_tokens=tokens),
            digests,
            self._prefixes.keys(trace_blocks),
            held + fresh,
            held=len(held),
            usable=min(usable, len(digests)),
        )
        self.active += 1
        self._spot_check(request)
        self._look_up(request)
        return True

    def _spot_check(self, request: _Request) -> None:
        if request.held:
            block = random.Random(request.outcome.index).randrange(request.held)
            one, digest = request.blocks[block : block + 1], request.digests[block : block + 1]
            request.outcome.spot_bytes = self._block_bytes
            request.outcome.spot_wrong_bytes = self._pages.wrong(one, digest)

    def _look_up(self, request: _Request) -> None:
        """Asks even if HBM holds everything: the answer says where storing has to begin."""
        if not request.keys:
            self._compute(request, request.held)
            return
        started_ns = monotonic_ns()
        hit = self._link.lookup(request.keys, request.held // self._blocks_per_chunk + 1)
        request.outcome.lookup_ns = monotonic_ns() - started_ns
        request.outcome.lookup_problem = hit.problem
        request.found_chunks = hit.chunks
        request.chunks_on_disk = hit.chunks_on_disk
        served = min(hit.chunks * self._blocks_per_chunk, request.usable)
        if served > request.held and hit.lease is not None:
            self._retrieve(request, hit.lease, served)
            return
        if hit.lease is not None:
            self._link.release(hit.lease)
        self._compute(request, request.held)

    def _retrieve(self, request: _Request, lease: object, served: int) -> None:
        """Retrieves blocks [held, served); both ends may be inside a chunk."""
        blocks = request.blocks[request.held : served]
        self._pages.spoil(blocks, request.digests[request.held : served])
        request.outcome.retrieve_asked_bytes = len(blocks) * self._block_bytes
        request.outcome.retrieve_began_ns = monotonic_ns()
        self._link.retrieve(lease, request.held, blocks, lambda end: self._retrieved(request, lease, served, end))

    def _retrieved(self, request: _Request, lease: object, served: int, end: Ended) -> None:
        outcome = request.outcome
        outcome.retrieve_ended_ns = end.at_ns
        outcome.retrieve_problem = end.problem
        if end.problem:
            self._link.release(lease)  # its lease may not be used up, and would keep the prefix in DRAM
            self._compute(request, request.held)
            return
        outcome.compared_bytes = outcome.retrieve_asked_bytes
        outcome.wrong_bytes = self._pages.wrong(
            request.blocks[request.held : served], request.digests[request.held : served]
        )
        outcome.foreign_tokens = self._block_tokens * sum(
            request.keys[block // self._blocks_per_chunk] not in self._sent for block in range(request.held, served)
        )
        first_on_disk = (request.found_chunks - request.chunks_on_disk) * self._blocks_per_chunk
        outcome.disk_tokens = self._block_tokens * max(0, served - max(request.held, first_on_disk))
        self._compute(request, served)

    def _compute(self, request: _Request, done: int) -> None:
        """Computes all blocks after the first `done`, caches the request's blocks, and stores new chunks."""
        full = len(request.digests)
        self._pages.compute(request.blocks[done:full], request.digests[done:])
        for i in range(request.held, full):
            request.blocks[i] = self._pool.adopt(request.blocks[i], request.digests[i])
        outcome = request.outcome
        outcome.hbm_tokens = request.held * self._block_tokens
        outcome.retrieved_tokens = (done - request.held) * self._block_tokens
        outcome.computed_tokens = outcome.prompt_tokens - done * self._block_tokens
        self._store(request)
        self._pool.release(request.blocks)

    def _store(self, request: _Request) -> None:
        """Stores the whole chunks after those that the server holds or is receiving."""
        first = request.found_chunks
        while first < len(request.keys) and request.keys[first] in self._storing:
            first += 1
        keys = request.keys[first:]
        if not keys:
            self._end(request)
            return
        request.stored = request.blocks[: len(request.keys) * self._blocks_per_chunk]
        self._pool.pin(request.stored)
        self._storing.update(keys)
        self._sent.update(keys)
        request.outcome.store_chunks_asked = len(keys)
        request.outcome.store_began_ns = monotonic_ns()
        self._link.store(
            first,
            request.keys[first - 1] if first else b"",
            keys,
            request.stored[first * self._blocks_per_chunk :],
            lambda end: self._stored(request, keys, end),
        )

    def _stored(self, request: _Request, keys: Sequence[bytes], end: Ended) -> None:
        self._storing.difference_update(keys)
        self._pool.release(request.stored)
        outcome = request.outcome
        outcome.store_ended_ns = end.at_ns
        outcome.store_chunks_held = end.chunks_held
        outcome.store_bytes = end.bytes
        outcome.store_why = end.problem
        self._end(request)

    def _end(self, request: _Request) -> None:
        self.active -= 1
        self._ended(request.outcome)

    @property
    def _block_bytes(self) -> int:
        return self._pages.block_bytes
