"""Stores and retrieves, from the request until their blocks belong to the caller again.

A deadline alone never hands blocks back; the job's word does. A store may be abandoned at any time: its bytes are then
never sealed, and reading blocks that changed does no harm. A retrieve that a mover has begun (SUBMITTED) ends only when
its word says so, or when the mover's pidfd says that the mover is gone. Until then its future stays open, whatever
happens to the deadline, the session or the server.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from kvclient.base.loop import Overdue, Trouble, Waiter
from kvclient.counters import Counters
from kvclient.memory.blocks import StorePart
from kvclient.transport.caches import Cache, Registration
from kvclient.transport.connection import Connection
from kvclient.transport.gate import Slots
from kvclient.transport.session import Session
from kvclient.values import Lease, RetrieveResult, StoreResult
from kvserver._native import DONE, FAILED, SUBMITTED
from kvserver.errors import RequestError
from kvserver.wire.messages import ALL_RIGHT, GroupBlocks, Retrieve, Retrieved, Store, Stored

log = logging.getLogger(__name__)

QUIET_POLL_S = 0.001
QUIET_POLL_S_MAX = 0.02
"""Pause between polls of an overdue retrieve's word, which gives no signal when it changes. Grows with the wait."""

AWAITED_SPARE_S = 0.2
"""The server ends its wait for another engine so long before the caller's deadline. Otherwise a producer that is slow
would look like a server that does not answer."""

PARTS_AHEAD_MAX = 3
AWAITED_AHEAD_MAX = 8
"""Awaited chunks are a part each, and a producer's store brings several at once."""
SPARE_SHARE = 4
"""One in SPARE_SHARE of the jobs that the server allows a session is kept for further parts of running jobs."""

T = TypeVar("T")
R = TypeVar("R", StoreResult, RetrieveResult)


class Jobs:
    """The conversations of stores and retrieves. Each takes over its slots and completes its future in every case.

    caches: of the same blocks, each with another shard of every chunk. A job has a slot for each.
    """

    def __init__(self, connection: Connection, counters: Counters, slots: Slots) -> None:
        self._connection = connection
        self._counters = counters
        self._slots = slots
        self._parts_running = 0

    # ---------------------------------------------------------------- store

    async def store(
        self,
        caches: Sequence[Cache],
        parts: list[StorePart],
        due_s: float,
        answer: "Future[StoreResult]",
        *,
        after: object = None,
    ) -> None:
        """Store the parts in chain order, up to the first that is stored short."""
        total = StoreResult(0, 0, 0, "client-bug")
        problem: RequestError | None = None
        try:
            why = await self._happened(caches[0], after, due_s)
            total = StoreResult(0, 0, 0, why) if why else await self._store_parts(caches, parts, due_s)
        except RequestError as error:
            problem = error
        finally:
            self._counters.add("chunks_stored", total.chunks_written)
            self._counters.add("bytes_stored", total.bytes)
            if problem is not None or total.why:
                self._counters.add("stores_short")
            self._complete(answer, total, problem, slots=len(caches))

    async def _store_parts(self, caches: Sequence[Cache], parts: list[StorePart], due_s: float) -> StoreResult:
        """Sum up the parts' results. Chunks after a part that was stored short are not counted, though they may be
        written."""

        nothing = StoreResult(0, 0, 0, "client-bug")

        async def begin(index: int) -> StoreResult:
            shards = [self._store_part(cache, parts[index], due_s) for cache in caches]
            return _stored_by_all(await self._beside(shards, nothing))

        def is_whole(index: int, result: StoreResult) -> bool:
            return result.chunks == parts[index].chunks

        results = await self._in_parts(caches, len(parts), begin, is_whole, nothing)
        leading = next((index for index, result in enumerate(results) if not is_whole(index, result)), len(results) - 1)
        return StoreResult(
            sum(result.chunks for result in results[: leading + 1]),
            sum(result.chunks_written for result in results),
            sum(result.bytes for result in results),
            results[leading].why,
        )

    async def _store_part(self, cache: Cache, part: StorePart, due_s: float) -> StoreResult:
        if cache.portable is None:
            return await self._ask_to_store(cache, part, due_s)
        return await cache.portable.store(part, due_s, lambda moved: self._ask_to_store(cache, moved, due_s))

    async def _ask_to_store(self, cache: Cache, part: StorePart, due_s: float) -> StoreResult:
        registration = cache.registration
        if registration is None:
            return StoreResult(0, 0, 0, "not-registered")
        session = registration.session
        if not session.words:
            return StoreResult(0, 0, 0, "busy")
        word = session.words.popleft()
        generation = session.board.begin(word)
        asked_s = time.monotonic()
        try:
            head = next(session.ids), registration.number, word, generation, _patience_ms(due_s)
            request = Store(*head, part.first_chunk, part.parent, part.keys, part.groups)
            reply = await session.ask(request, Stored, due_s)
        except Trouble as trouble:
            self._note(session, "store", asked_s, trouble)
            late = session.board.abandon_store(word, generation) == DONE
            return StoreResult(0, 0, 0, "late" if late else trouble.why)
        finally:
            # Also after a reply: the server answers without using the word if there is nothing to copy.
            session.board.abandon_store(word, generation)
            session.words.append(word)
        return StoreResult(reply.chunks, reply.chunks_written, reply.bytes, reply.why)

    # ---------------------------------------------------------------- retrieve

    async def retrieve(
        self,
        caches: Sequence[Cache],
        lease: Lease,
        parts: list[list[GroupBlocks]],
        due_s: float,
        answer: "Future[RetrieveResult]",
        *,
        after: object = None,
    ) -> None:
        result = RetrieveResult(False, 0, "client-bug")
        problem: RequestError | None = None
        try:
            why = await self._happened(caches[0], after, due_s)
            result = RetrieveResult(False, 0, why) if why else await self._retrieve_parts(caches, lease, parts, due_s)
        except RequestError as error:
            problem = error
        finally:
            self._counters.add("bytes_retrieved", result.bytes)
            if not result.ok:
                self._counters.add("retrieves_failed")
            self._complete(answer, result, problem, slots=len(caches))

    async def _retrieve_parts(
        self, caches: Sequence[Cache], lease: Lease, parts: list[list[GroupBlocks]], due_s: float
    ) -> RetrieveResult:
        nothing = RetrieveResult(False, 0, "client-bug")

        async def begin(index: int) -> RetrieveResult:
            if index and time.monotonic() >= due_s:  # else each part could hold the blocks for a mover's grace
                return RetrieveResult(False, 0, "timeout")
            is_last = index + 1 == len(parts)
            shards = [
                self._retrieve_part(cache, lease, parts[index], due_s, more=not is_last or cache is not caches[-1])
                for cache in caches
            ]
            return _retrieved_by_all(await self._beside(shards, nothing))

        def is_whole(index: int, result: RetrieveResult) -> bool:
            return result.ok

        ahead = AWAITED_AHEAD_MAX if lease.awaited else PARTS_AHEAD_MAX
        results = await self._in_parts(caches, len(parts), begin, is_whole, nothing, ahead=ahead)
        done = sum(result.bytes for result in results)
        index = next((index for index, result in enumerate(results) if not result.ok), None)
        if index is None:
            return RetrieveResult(True, done, "")
        failed = results[index]._replace(bytes=done)
        if failed.why == "not-coming":  # all parts before it are whole
            failed = failed._replace(right_chunks=_first_chunk(caches[0], parts[index]))
        return failed

    async def _retrieve_part(
        self, cache: Cache, lease: Lease, groups: list[GroupBlocks], due_s: float, *, more: bool
    ) -> RetrieveResult:
        def ask(groups: list[GroupBlocks]) -> Coroutine[Waiter, Any, RetrieveResult]:
            return self._ask_to_retrieve(cache, lease, groups, due_s, more=more)

        return await (ask(groups) if cache.portable is None else cache.portable.retrieve(groups, due_s, ask))

    async def _ask_to_retrieve(
        self, cache: Cache, lease: Lease, groups: list[GroupBlocks], due_s: float, *, more: bool
    ) -> RetrieveResult:
        registration = cache.registration
        if registration is None:
            return RetrieveResult(False, 0, "not-registered")
        session = registration.session
        if session.welcome.incarnation != lease.incarnation:  # the server may have restarted since the job began
            return RetrieveResult(False, 0, "lease-lost")
        if not session.words:
            return RetrieveResult(False, 0, "busy")
        word = session.words.popleft()
        generation = session.board.begin(word)
        registration.users += 1
        if cache.device is not None:
            cache.device.retrieve_begins()
        asked_s, right_chunks = time.monotonic(), 0
        try:
            patience_ms = _patience_ms(due_s - AWAITED_SPARE_S if lease.awaited else due_s)
            head = next(session.ids), registration.number, lease.number, word, generation, patience_ms
            request = Retrieve(*head, groups, more)
            reply = await session.ask(request, Retrieved, due_s)
            why = "doubt"
            if reply.wrong_from != ALL_RIGHT:
                why, right_chunks = "digest", reply.wrong_from
        except Trouble as trouble:
            self._note(session, "retrieve", asked_s, trouble)
            why = trouble.why
        finally:
            state = await self._quiet(registration, word, generation)
            if cache.device is not None:
                if state == FAILED or (registration.gone and state != DONE):
                    await cache.device.untouched(self._connection.loop, mover_gone=registration.gone)
                cache.device.retrieve_ended()
            session.words.append(word)
            registration.leave()
        if state == DONE:
            return RetrieveResult(True, _bytes_of(cache, groups), "")
        return RetrieveResult(False, 0, why, right_chunks)

    async def _quiet(self, registration: Registration, word: int, generation: int) -> int:
        """The word's state once nobody can write the blocks any more."""
        board = registration.session.board
        state = board.abandon_retrieve(word, generation)
        if state == SUBMITTED:
            self._counters.add("retrieves_overdue")
        began_s = time.monotonic()
        while state == SUBMITTED and not registration.gone:
            await self._connection.loop.pause(min(QUIET_POLL_S_MAX, QUIET_POLL_S + (time.monotonic() - began_s) / 100))
            _, state = board.state(word)
        if state == SUBMITTED:
            # The mover is gone, so nobody else will end this word. DONE stays DONE, if that was the mover's last act.
            state = board.abandon_store(word, generation)
        return state

    # ---------------------------------------------------------------- both

    async def _in_parts(
        self,
        caches: Sequence[Cache],
        count: int,
        begin: Callable[[int], Coroutine[Waiter, Any, R]],
        is_whole: Callable[[int, R], bool],
        nothing: R,
        *,
        ahead: int = PARTS_AHEAD_MAX,
    ) -> list[R]:
        """The results of a job's parts, in order.

        At most `ahead` parts run at a time. None begins after a part that is not whole. Returns when all begun parts
        have ended, so that the blocks belong to the caller again.
        """
        if count == 1:
            return [await begin(0)]
        results: list[R] = []
        running: deque[Waiter] = deque()
        problem: RequestError | None = None
        begun, whole = 0, True
        while running or (whole and begun < count):
            while whole and begun < count and (not running or self._may_go_ahead(caches, len(running), ahead)):
                running.append(self._begin_part(begin(begun), nothing))
                begun += 1
            try:
                results.append(await running.popleft())
                whole = whole and is_whole(len(results) - 1, results[-1])
            except RequestError as error:
                problem, whole = problem or error, False
            finally:
                self._parts_running -= 1
        if problem is not None:
            raise problem
        return results

    def _may_go_ahead(self, caches: Sequence[Cache], running: int, ahead: int) -> bool:
        """Whether another part may begin beside a running one. Slots bound only the first part of each job."""
        registration = caches[0].registration
        spare = registration.session.welcome.limits.jobs_max // SPARE_SHARE if registration is not None else 0
        return running < ahead and self._parts_running <= spare // len(caches)

    async def _beside(self, shards: list[Coroutine[Waiter, Any, R]], nothing: R) -> list[R]:
        """The results of all shards of a part, begun in their order. Returns when all have ended."""
        if len(shards) == 1:
            return [await shards[0]]
        running = [Waiter() for _ in shards]
        for shard, ended in zip(shards, running, strict=True):
            self._connection.loop.start(self._settle_part(shard, nothing, ended))
        results: list[R] = []
        problem: RequestError | None = None
        for ended in running:
            try:
                results.append(await ended)
            except RequestError as error:
                problem = problem or error
        if problem is not None:
            raise problem
        return results

    def _begin_part(self, part: Coroutine[Waiter, Any, R], nothing: R) -> Waiter:
        ended = Waiter()
        self._parts_running += 1
        self._connection.loop.start(self._settle_part(part, nothing, ended))
        return ended

    async def _settle_part(self, part: Coroutine[Waiter, Any, R], nothing: R, ended: Waiter) -> None:
        loop = self._connection.loop
        try:
            loop.settle(ended, await part)
        except RequestError as error:
            loop.fail(ended, error)
        finally:
            loop.settle(ended, nothing)  # unless one of the above came

    async def _happened(self, cache: Cache, after: object, due_s: float) -> str:
        """Wait for the event. Returns why the job cannot begin; empty if the event is done or there is none."""
        if after is None:
            return ""
        where = cache.device or cache.portable
        assert where is not None
        try:
            await where.happened(after, due_s)
        except Trouble as trouble:
            return trouble.why
        return ""

    def _note(self, session: Session, kind: str, asked_s: float, trouble: Trouble) -> None:
        if isinstance(trouble, Overdue) and session.lost is None:
            self._connection.job_overdue(session, asked_s, trouble.why)
        log.debug("%s failed why=%s", kind, trouble)

    def _complete(self, answer: "Future[T]", result: T, problem: RequestError | None, *, slots: int) -> None:
        """Complete the future, after the slots were given back: whoever waits for it may start the next job at once."""
        self._slots.give(slots)
        if problem is not None:
            answer.set_exception(problem)
        else:
            answer.set_result(result)


def _stored_by_all(shards: Sequence[StoreResult]) -> StoreResult:
    """The result of a part. A chunk counts if each of its shards is held."""
    least = min(shards, key=lambda result: result.chunks)
    written = max(result.chunks_written for result in shards)
    return StoreResult(least.chunks, written, sum(result.bytes for result in shards), least.why)


def _retrieved_by_all(shards: Sequence[RetrieveResult]) -> RetrieveResult:
    """The result of a part. A block holds its bytes if it has those of every shard."""
    failed = [result for result in shards if not result.ok]
    least = min(failed, key=lambda result: result.right_chunks) if failed else shards[0]
    return least._replace(bytes=sum(result.bytes for result in shards))


def _patience_ms(due_s: float) -> int:
    return max(1, int((due_s - time.monotonic()) * 1000))


def _first_chunk(cache: Cache, groups: list[GroupBlocks]) -> int:
    """The first chunk of the prefix that a part brings something of."""
    spec = cache.spec
    return min(item.first_block * spec.groups[item.group].block_tokens // spec.chunk_tokens for item in groups)


def _bytes_of(cache: Cache, groups: list[GroupBlocks]) -> int:
    """Bytes of the blocks by the layout. A retrieve that ended while the server was silent has no other count."""
    total = 0
    for item in groups:
        block_bytes = sum(run.regions * run.page_bytes for run in cache.spec.groups[item.group].regions)
        total += len(item.block_ids) // 4 * block_bytes
    return total
