"""A cache on a device that movers cannot reach. Its bytes go through a buffer on the host, by torch alone.

The server sees a cache on the host, whose blocks are places in that buffer. For a store, a part takes places, its
blocks are gathered there, and then the server is asked. For a retrieve, the server fills the places, and then they are
scattered. This path is used only on request, and logs that it is slow.

Rule 1: copies run one after another in a separate thread, because a device may be slow or hang. A job that waits for a
gather may give up, and its bytes are dropped. A scatter is always waited for, beyond any deadline, because it writes
the engine's blocks until it ends.

Rule 2: places are returned when neither thread nor mover uses them any more. A job takes all its places at once, in the
order of requests, so jobs cannot wait for each other.
"""

import logging
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from kvclient.base.loop import Loop, Overdue, Waiter
from kvclient.memory.blocks import BLOCK_ID_BYTES, StorePart, pack_ids
from kvclient.memory.tensor_pages import Moves, TensorPages
from kvclient.values import CacheSpec, HostBuffer, RetrieveResult, StoreResult, TensorBuffer
from kvserver._native import create_memfd
from kvserver.errors import RequestError
from kvserver.wire.messages import GroupBlocks, GroupSpec

log = logging.getLogger(__name__)

CHUNKS_MIN = 2
"""Fewest chunks in the buffer: while the server reads one, the next is gathered."""
CHUNKS_MAX = 256
POLL_S = 0.001
POLL_S_MAX = 0.02

T = TypeVar("T")
Asking = Coroutine[Waiter, Any, T]


class Portable:
    """The portable part of one Cache. Belongs to the loop's thread from attach() on."""

    def __init__(self, spec: CacheSpec) -> None:
        """Take the buffer. RequestError("device" | "layout" | "mode") if the spec does not fit."""
        if spec.chosen_mode != "engine-driven":
            raise RequestError("mode", f"mode={spec.mode!r} of cache {spec.name!r} must be engine-driven, or not said")
        tensors = [_tensor(spec, index) for index in range(len(spec.buffers))]
        self._chunk_blocks = [spec.chunk_tokens // group.block_tokens for group in spec.groups]
        self._chunks = _chunks_of(spec, self._chunk_blocks)
        self._pages = TensorPages(tensors, spec.groups, chunk_tokens=spec.chunk_tokens, chunks=self._chunks)
        self.part_chunks_max = self._chunks // 2
        """Most chunks in one request, so that two requests fit."""
        self._free = list(range(self._chunks))
        self._queue: deque[tuple[int, Waiter]] = deque()
        """Waiting jobs with the number of places each needs."""
        self._copies = _Copies()
        self._loop: Loop | None = None
        self.descriptor = create_memfd(f"kvserver-portable-{spec.name}", self._pages.bytes)
        self._pages.attach(self.descriptor)
        log.warning(
            "portable path name=%s device=%s bytes=%d staging=%s: slow, as every byte goes through torch and the host",
            spec.name,
            self._pages.device,
            self._pages.bytes,
            self._pages.staging,
        )

    @property
    def groups(self) -> list[GroupSpec]:
        """The groups as registered with the server, in the one buffer."""
        return self._pages.groups

    @property
    def buffer(self) -> HostBuffer:
        return HostBuffer(self.descriptor, self._pages.bytes)

    def attach(self, loop: Loop) -> None:
        self._loop = loop

    # ---------------------------------------------------------------- parts of jobs

    async def store(
        self, part: StorePart, due_s: float, ask: Callable[[StorePart], Asking[StoreResult]]
    ) -> StoreResult:
        """Store a part. ask: the conversation with the server. RequestError for blocks that do not exist, as the
        server's."""
        self._check(part.groups)
        places = await self._take(part.chunks, due_s)
        if not places:
            return StoreResult(0, 0, 0, "timeout")
        groups, moves = self._moved(part.groups, part.first_chunk, places)
        if why := await self._gathered(moves, places, due_s):
            return StoreResult(0, 0, 0, why)
        try:
            return await ask(part._replace(groups=groups))
        finally:
            self._give(places)  # a mover that still reads for an abandoned store does no harm

    async def retrieve(
        self, items: list[GroupBlocks], due_s: float, ask: Callable[[list[GroupBlocks]], Asking[RetrieveResult]]
    ) -> RetrieveResult:
        """Retrieve a part. ask: ends when no mover writes the places any more. RequestError as in store()."""
        self._check(items)
        first, end = self._chunk_range(items)
        places = await self._take(end - first, due_s)
        if not places:
            return RetrieveResult(False, 0, "timeout")
        groups, moves = self._moved(items, first, places)
        try:
            result = await ask(groups)
            if result.ok and await self._scattered(moves):
                return RetrieveResult(False, 0, "client-copy")
            return result if result.ok else result._replace(right_chunks=0)  # nothing has left the places
        finally:
            self._give(places)

    async def happened(self, event: Any, due_s: float) -> None:
        """Wait until an event of the engine is done. Overdue if that takes too long."""
        pause_s = POLL_S
        while not event.query():
            if time.monotonic() > due_s:
                raise Overdue
            await self._on.pause(pause_s)
            pause_s = min(POLL_S_MAX, pause_s * 2)

    @property
    def quiet(self) -> bool:
        """Whether nothing reads or writes the engine's memory, or is about to."""
        return len(self._free) == self._chunks

    # ---------------------------------------------------------------- copies

    async def _gathered(self, moves: Moves, places: list[int], due_s: float) -> str:
        """Gather the blocks into their places. Returns why it failed, or an empty text.

        On failure the places are given back, perhaps later.
        """
        ended = Waiter(due_s)

        def end(why: str) -> None:
            if why or ended.settled:
                self._give(places)
            self._on.settle(ended, why)

        self._copies.begin(self._on, lambda: self._pages.gather(moves), end)
        try:
            return str(await ended)
        except Overdue as overdue:
            return overdue.why

    async def _scattered(self, moves: Moves) -> str:
        """Scatter the places into the blocks. Returns why it failed, or an empty text. Afterwards nobody writes the
        blocks."""
        ended = Waiter()
        self._copies.begin(self._on, lambda: self._pages.scatter(moves), lambda why: self._on.settle(ended, why))
        return str(await ended)

    # ---------------------------------------------------------------- places

    async def _take(self, count: int, due_s: float) -> list[int]:
        """Take `count` places. Empty if they do not become free in time."""
        assert 0 < count <= self._chunks
        waiter = Waiter(due_s)
        self._queue.append((count, waiter))
        self._serve()
        try:
            places: list[int] = await waiter
        except Overdue:
            self._serve()  # requests after it may need fewer
            return []
        return places

    def _give(self, places: list[int]) -> None:
        self._free += places
        self._serve()

    def _serve(self) -> None:
        while self._queue:
            count, waiter = self._queue[0]
            if not waiter.settled:
                if count > len(self._free):
                    return
                self._on.settle(waiter, self._picked(count))
            self._queue.popleft()

    def _picked(self, count: int) -> list[int]:
        """Free places, such as follow each other if there are: these are copied without a detour."""
        free = sorted(self._free)
        starts = (at for at in range(len(free) - count + 1) if free[at + count - 1] - free[at] == count - 1)
        start = next(starts, 0)
        self._free = free[:start] + free[start + count :]
        return free[start : start + count]

    def _moved(self, items: list[GroupBlocks], first_chunk: int, places: list[int]) -> tuple[list[GroupBlocks], Moves]:
        """The blocks as registered with the server, and the moves between blocks and places."""
        groups, moves = [], []
        for item in items:
            per_chunk, blocks = self._chunk_blocks[item.group], _ids(item)
            there = [
                places[block // per_chunk - first_chunk] * per_chunk + block % per_chunk
                for block in range(item.first_block, item.first_block + len(blocks))
            ]
            groups.append(GroupBlocks(item.group, item.first_block, pack_ids(there)))
            moves.append((item.group, blocks, there))
        return groups, moves

    def _chunk_range(self, items: list[GroupBlocks]) -> tuple[int, int]:
        """[first, end) of the chunks that the blocks touch."""
        per_chunk = [self._chunk_blocks[item.group] for item in items]
        ends = [item.first_block + len(item.block_ids) // BLOCK_ID_BYTES for item in items]
        first = min(item.first_block // count for item, count in zip(items, per_chunk, strict=True))
        return first, max(-(-end // count) for end, count in zip(ends, per_chunk, strict=True))

    def _check(self, items: list[GroupBlocks]) -> None:
        for item in items:
            self._pages.check(item.group, _ids(item))

    @property
    def _on(self) -> Loop:
        assert self._loop is not None
        return self._loop


class _Copies:
    """A thread that lives while there is something to copy. Queued copies hold places, which bounds the queue."""

    def __init__(self) -> None:
        self._queued: deque[tuple[Loop, Callable[[], None], Callable[[str], None]]] = deque()
        self._lock = threading.Lock()
        self._running = False

    def begin(self, loop: Loop, copy: Callable[[], None], end: Callable[[str], None]) -> None:
        """Queue a copy. `end` is called in the loop's thread with the reason of a failure, or an empty text."""
        with self._lock:
            self._queued.append((loop, copy, end))
            if self._running:
                return
            self._running = True
        threading.Thread(target=self._run, name="kvclient-portable", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._queued:
                    self._running = False
                    return
                loop, copy, end = self._queued.popleft()
            why = ""
            try:
                copy()
            except Exception as problem:  # torch's devices raise anything, and every job has to end
                log.error("portable copy failed %s: %s", type(problem).__name__, problem)
                why = "client-copy"
            loop.post(partial(end, why))


def has_query(event: object) -> bool:
    """Whether it is an event that happened() can wait for, such as a torch.Event or a device's kind of it."""
    return callable(getattr(event, "query", None))


def _ids(item: GroupBlocks) -> list[int]:
    return array("i", item.block_ids).tolist()


def _tensor(spec: CacheSpec, index: int) -> Any:
    buffer = spec.buffers[index]
    if isinstance(buffer, TensorBuffer):
        return buffer.tensor
    raise RequestError("device", f"buffers[{index}] of cache {spec.name!r} on {spec.device} must be a TensorBuffer")


def _chunks_of(spec: CacheSpec, chunk_blocks: list[int]) -> int:
    """Number of chunks that fit into the buffer."""
    chunk_bytes = sum(
        blocks * run.regions * run.page_bytes
        for group, blocks in zip(spec.groups, chunk_blocks, strict=True)
        for run in group.regions
    )
    return min(CHUNKS_MAX, max(CHUNKS_MIN, spec.staging_bytes // max(1, chunk_bytes)))
