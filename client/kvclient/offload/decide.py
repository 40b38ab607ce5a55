"""The decisions of an engine's connector: what to look up, what to retrieve into which blocks, what to store and when.

This file knows no engine, socket, clock or tensor. The scheduler half of a connector reports events and asks what to
do. Time is an argument. The path of a request:

    begin ─► match ─► allocated ─► (all ranks: retrieve_ended) ─► computed, store ─► … ─► finish
              │  ▲        └─► admitted, when nothing is retrieved ─┘        │
              │  └──────────────────────── preempted ◄──────────────────────┘
              └─ asks the server: take_lookups, found; take_releases. Before that, perhaps: next_to_ask, ask

Rule 1: every lease ends. Either the ranks of a retrieve use it up, or take_releases() returns it.

Rule 2: a job ends when all ranks have reported, and not before. A deadline never hands blocks back. Job numbers are
never reused, so a preempted or aborted request, or one with an old name, is never confused with another.

Rule 3: no block of the engine's own prefix is ever written.

Rule 4: chunks that the server holds are not stored again. Stores begin at the frontier. It goes back only after a
failed retrieve, after a lookup that found less, or if a store met a gap while the server read its disks.

Rule 5: a request whose retrieve failed is computed. It does not ask again, so it cannot loop forever.

Rule 6: a retrieve that waits for another engine holds blocks meanwhile. So few do that engines cannot starve each
other. Each ends with what came when the other engine ends, or at its time.
"""

import itertools
from collections.abc import Hashable

from kvclient.offload.lookups import Lookups
from kvclient.offload.pledging import Pledging
from kvclient.offload.ranges import (
    is_aligned,
    next_aligned,
    retrieve_blocks,
    store_blocks,
    tokens_within,
    usable_tokens,
)
from kvclient.offload.request import Answer, Jobs, Phase, Request
from kvclient.offload.values import (
    LookupOrder,
    Options,
    PledgeOrder,
    RetrieveEnd,
    RetrieveOrder,
    Side,
    Statistics,
    StoreEnd,
    StoreOrder,
    Summary,
    Tables,
)
from kvclient.values import Found, Lease, PledgeResult, RetrieveResult, StoreResult
from kvserver.wire.messages import CHUNKS_MAX

CHAIN_GOES_ON = ("busy", "late")
"""Reasons of a short store that leave no gap: somebody else stores the rest, or only its count was lost."""


class Offload:
    """The decisions for one engine's scheduler. Belongs to one thread.

    Requests have any hashable name that is unique among the requests that have begun and not finished.
    """

    def __init__(self, options: Options) -> None:
        self.statistics = Statistics()
        self._options = options
        self._requests: dict[Hashable, Request] = {}
        self._numbers = itertools.count(1)
        """Numbers of jobs and lookups."""
        self._lookups = Lookups(options, self.statistics, self._numbers)
        self._unasked: dict[Hashable, Request] = {}
        """Requests that nobody has asked for or matched yet, oldest first."""
        self._ahead: set[Hashable] = set()
        """Requests with a lookup in flight or a lease, which are not matched yet."""
        self._pledging = Pledging(options)
        self._retrieves: Jobs[RetrieveOrder] = Jobs(options.ranks)
        self._stores: Jobs[StoreOrder] = Jobs(options.ranks)
        self._chunks_storing = 0
        self._awaiting: dict[int, RetrieveOrder] = {}
        """Retrieves that wait for another engine, by job."""
        self._summaries: list[Summary] = []
        self._unavailable = ""

    def set_unavailable(self, why: str) -> None:
        """Ask the server for nothing from now on, because of `why`. Empty: it may be asked."""
        self._unavailable = why

    # ---------------------------------------------------------------- requests

    def begin(
        self,
        request: Hashable,
        *,
        tokens: int,
        keys: bytes,
        reads: bool = True,
        side: Side = "",
        handed_tokens: int | None = None,
    ) -> None:
        """Begin a request of `tokens` prompt tokens. keys: the packed keys of its whole chunks.

        reads: False if the request must compute all its tokens itself. It is stored and takes no lease.

        handed_tokens: leading tokens that a consumer's producer says it has stored; no more are expected of it.
        """
        reads = reads and self._options.retrieves
        self._begin(Request(request, tokens, keys, reads=reads, side=side, handed_tokens=handed_tokens))

    def begin_unkeyed(self, request: Hashable, *, tokens: int, why: str) -> None:
        """Begin a request that has no safe keys. It is neither looked up nor stored, and is counted under `why`."""
        self._begin(Request(request, tokens, b"", reads=False, is_keyed=False, why=why))
        self.statistics.requests_unkeyed += 1
        self.statistics.skip(why, tokens)

    def extend(self, request: Hashable, keys: bytes) -> None:
        """Add the keys of further whole chunks, so that output is stored and can be found after a preemption."""
        it = self._requests[request]
        if it.is_keyed:
            it.keys += keys

    def next_to_ask(self) -> Hashable | None:
        """The request to ask() for next: the oldest that nobody has asked for. None if too many are ahead already, or
        the server cannot be asked."""
        may_ask = not self._unavailable and len(self._ahead) < self._options.ahead_max
        return next(iter(self._unasked), None) if may_ask else None

    def ask(self, request: Hashable, now_s: float, *, hbm_tokens: int = 0) -> None:
        """Send the lookup before match() needs the answer. Optional.

        hbm_tokens: the engine's own tokens, as far as known. Too low, and a lease may be granted and go back unused.
        Too high, and match() has to ask again.
        """
        it = self._unasked.pop(request, None)
        if it is not None:
            self._lookups.ask(it, hbm_tokens=hbm_tokens if it.reads else it.tokens, now_s=now_s, is_ahead=True)
            if it.lookup is not None:
                self._ahead.add(request)

    def match(self, request: Hashable, *, tokens: int, hbm_tokens: int, now_s: float) -> int | None:
        """Tokens after the engine's own prefix that the server can bring. None: the answer is not here yet, ask again.

        tokens: length of the sequence, output included. hbm_tokens: 0 if it is known only after allocation.

        May be called any number of times, and promises what allocated() then does. Each reason for None has a bound:
        lookup_deadline_s for an answer (at most two are waited for), coming_wait_s, await_producer_s or await_wait_s
        for what is coming, and retrieve_wait_s for a turn.
        """
        it = self._requests[request]
        self._forget_ahead(request)
        if it.phase is not Phase.WAITING and not it.is_barred:
            self.preempted(request)
        it.tokens = tokens
        if it.is_barred or not it.keys:
            return 0
        if self._unavailable:
            it.why = self._unavailable
            return 0
        may_read = it.reads and (self._options.resumes_output or tokens <= it.prompt_tokens)
        if not may_read or usable_tokens(self._options, tokens) - hbm_tokens < self._options.gain_min:
            return self._ask_what_is_held(it, now_s)
        return self._offer(it, hbm_tokens, now_s)

    def allocated(
        self, request: Hashable, *, hbm_tokens: int, tables: Tables, tokens: int | None = None
    ) -> RetrieveOrder | None:
        """The request has its blocks, after match() returned more than 0. Returns the retrieve that it waits for.

        tokens: how many of the offered tokens the engine takes, if not all. No block after them is written.

        Never None if hbm_tokens is what match() was told. If it was unknown then, None means that a retrieve is not
        worthwhile: the request is admitted and computes.
        """
        it = self._requests[request]
        gain = self._gain(it, hbm_tokens) if it.phase is Phase.WAITING else 0
        if not gain or it.answer is None or it.answer.lease is None:
            self.admitted(request, hbm_tokens=hbm_tokens)
            return None
        taken = gain if tokens is None else tokens
        end_tokens = hbm_tokens + taken
        blocks, refused = retrieve_blocks(self._options, tables, hbm_tokens=hbm_tokens, end_tokens=end_tokens)
        if not 0 < taken <= gain or (taken < gain and not self._options.is_plain):
            blocks, refused = (), "tokens"  # more tokens than were found, or a boundary that the lookup did not ask for
        number = next(self._numbers)
        disk_tokens = tokens_within(
            it.disk_chunks, chunk_tokens=self._options.chunk_tokens, begin=hbm_tokens, end=end_tokens
        )
        waits = end_tokens > it.answer.chunks * self._options.chunk_tokens
        order = RetrieveOrder(
            number,
            request,
            it.answer.lease,
            blocks,
            hbm_tokens,
            end_tokens,
            refused,
            disk_tokens,
            wait_s=it.answer.wait_s if waits else 0.0,
        )
        if waits:
            self._awaiting[number] = order
            it.found_tokens = end_tokens
        self._count_admission(it, hbm_tokens)
        it.answer = None  # its lease is the job's now
        it.phase, it.retrieve = Phase.RETRIEVING, number
        self._retrieves.begin(order, it, chunks=CHUNKS_MAX)
        self.statistics.retrieves += 1
        self.statistics.retrieves_in_flight = len(self._retrieves)
        return order

    def handoff(self, request: Hashable, *, hbm_tokens: int) -> int | None:
        """Token up to which the engine should compute first, if its own prefix ends inside a block. Call after match()
        > 0.

        None if a retrieve from there is not worthwhile. The answer is kept but promises nothing: match() and
        allocated() decide again when the engine has reached the token.
        """
        it = self._requests[request]
        boundary = next_aligned(self._options, hbm_tokens)
        waits = it.phase is Phase.WAITING and it.answer is not None and it.answer.lease is not None
        return boundary if boundary > hbm_tokens and waits and self._gain(it, boundary) else None

    def admitted(self, request: Hashable, *, hbm_tokens: int) -> None:
        """The engine computes the request after its own prefix, because nothing was found or it changed its mind.

        No effect during or after a retrieve, so it may be called after every allocation.
        """
        it = self._requests[request]
        if it.phase is not Phase.WAITING:
            return
        self._forget_ahead(request)
        self._count_admission(it, hbm_tokens)
        if it.is_keyed and it.why:
            reach = usable_tokens(self._options, it.tokens)
            known = it.answer is not None and it.answer.why != it.why
            self.statistics.skip(it.why, max(0, (min(it.found_tokens, reach) if known else reach) - hbm_tokens))
        self._lookups.set_answer(it, None)
        it.phase = Phase.RUNNING

    def computed(self, request: Hashable, tokens: int, now_s: float) -> bool:
        """The step's forward pass completes `tokens` leading tokens. Called in every step. True: chunks are due, call
        store()."""
        it = self._requests[request]
        if it.phase is not Phase.RUNNING:
            if it.phase is Phase.RETRIEVING:
                return False
            self.admitted(request, hbm_tokens=0)
        if self._options.pledges(it.side) and not it.is_pledged and not self._unavailable:
            self._pledging.computed(it)
        it.due = min(tokens // self._options.chunk_tokens, it.chunks)
        if it.due <= it.frontier or it.stopped or self._unavailable or not self._options.stores:
            return False
        if it.lookup is not None and not self._lookups.gave_up(it, now_s):
            return False  # the server may hold the due chunks
        return len(self._stores) < self._options.stores_max and self._chunks_storing < self._options.store_chunks_max

    def store(self, request: Hashable, tables: Tables) -> StoreOrder | None:
        """The store of the chunks that computed() found due, or of some of them. None if the tables hold none
        of them."""
        it = self._requests[request]
        first = it.frontier
        room = self._options.store_chunks_max - self._chunks_storing
        end, blocks = store_blocks(self._options, tables, first_chunk=first, end_chunk=min(it.due, first + room))
        if end <= first or not blocks:
            return None
        number = next(self._numbers)
        order = StoreOrder(number, request, first, it.parent_of(first), it.key_range(first, end), blocks)
        it.frontier = it.storing[number] = end
        it.is_asked = True
        self._stores.begin(order, it, chunks=end - first)
        self._chunks_storing += end - first
        self.statistics.stores += 1
        self.statistics.stores_in_flight = len(self._stores)
        return order

    def stored_whole(self, request: Hashable) -> bool:
        """Whether computed() will find nothing more until the request is matched again or a retrieve of it fails.

        False while an answer is awaited, because it may show less than was stored once. The same holds for a store
        while the server reads its disks.
        """
        it = self._requests[request]
        is_open = it.lookup is not None or (it.held_for_sure is not None and it.storing)
        return not self._options.stores or (not is_open and (bool(it.stopped) or it.frontier >= it.chunks))

    def held_tokens(self, request: Hashable) -> int:
        """Leading tokens that the server holds, or receives now, as far as known."""
        return self._requests[request].frontier * self._options.chunk_tokens

    def hands_over(self, request: Hashable) -> bool:
        """Whether the server holds all whole chunks of the prompt, or receives the rest now, as far as known."""
        it = self._requests[request]
        return not it.stopped and it.frontier >= it.prompt_tokens // self._options.chunk_tokens

    def preempted(self, request: Hashable) -> None:
        """The request lost its blocks and waits to be matched again. Stores in flight keep theirs. Idempotent."""
        it = self._requests[request]
        if it.phase is Phase.WAITING:
            return
        it.phase, it.lookup, it.queued_s = Phase.WAITING, None, None
        self._pledging.stops(it)
        it.retrieve = it.due = it.found_tokens = 0
        it.preemptions += 1
        self.statistics.preemptions += 1

    def finish(self, request: Hashable) -> None:
        """The request has finished or was aborted. Jobs in flight go on to their ends. Unknown requests are ignored."""
        it = self._requests.pop(request, None)
        if it is None:
            return
        self._forget_ahead(request)
        if self._options.stores and it.due > it.frontier:
            it.stopped = it.stopped or self._unavailable or ("unanswered" if it.lookup is not None else "busy")
            self.statistics.skip(it.stopped, (it.due - it.frontier) * self._options.chunk_tokens)
        self._lookups.set_answer(it, None)
        self._pledging.stops(it)
        if it.retrieve in self._awaiting:
            self._lookups.release(self._awaiting[it.retrieve].lease)  # its parts that wait end, and free its blocks
        it.phase, it.retrieve = Phase.FINISHED, 0
        self._sum_up(it)

    def holds(self, request: Hashable) -> bool:
        """Whether a job in flight still needs the request's blocks, even if the request has finished."""
        return self._stores.are_of(request) or self._retrieves.are_of(request)

    # ---------------------------------------------------------------- the server

    def take_lookups(self) -> list[LookupOrder]:
        """New lookups since the last call. Call it after match() if the answer can be had at once."""
        taken, self._lookups.orders = self._lookups.orders, []
        return taken

    def found(self, lookup: int, found: Found) -> None:
        """Take the answer to a lookup, late or not."""
        it = self._lookups.answered(lookup, found)
        if self._requests.get(it.name) is it and (it.answer is None or it.answer.lease is None):
            self._ahead.discard(it.name)

    def take_pledges(self) -> tuple[list[PledgeOrder], list[PledgeResult]]:
        """New pledges, and those to take back, since the last call. Call it after every step, and when idle."""
        return self._pledging.take()

    def pledged(self, request: Hashable, result: PledgeResult) -> None:
        """Take the answer to a pledge."""
        self._pledging.pledged(self._requests.get(request), result)

    def lost_blocks(self, request: Hashable) -> None:
        """The engine has preempted the request: others need not wait for it. match() does the rest."""
        it = self._requests.get(request)
        if it is not None:
            self._pledging.stops(it)

    def take_releases(self) -> list[Lease]:
        """Leases to give back since the last call. Call it after every step, and when idle."""
        taken, self._lookups.releases = self._lookups.releases, []
        return taken

    def leases_lost(self) -> None:
        """The server is away, has restarted or was cleared: nothing relies on its leases any more.

        They are released all the same, because a server that was only late still keeps them.
        """
        self._lookups.leases_lost(self._requests.values())

    # ---------------------------------------------------------------- the ranks

    def retrieve_ended(
        self, job: int, rank: int, result: RetrieveResult, *, seconds: float = 0.0
    ) -> RetrieveEnd | None:
        """Take one rank's report: the result, and how long the job took there. A repeated report has no effect.

        Returns the end of the job after the last rank's report.
        """
        chunks = CHUNKS_MAX if result.ok else result.right_chunks
        why = "" if result.ok else result.why or "failed"
        ended = self._retrieves.reported(job, rank, chunks=chunks, why=why, seconds=seconds)
        if ended is None:
            return None
        order, it = ended.order, ended.owner
        until = order.end_tokens if not ended.why else order.hbm_tokens
        if self._awaiting.pop(job, None) is not None and ended.why:
            until = max(until, min(ended.chunks * self._options.chunk_tokens, order.end_tokens))
        it.retrieve_s = (it.retrieve_s or 0.0) + ended.seconds
        self.statistics.retrieves_in_flight = len(self._retrieves)
        self.statistics.tokens_retrieved += until - order.hbm_tokens
        if ended.why:
            self.statistics.retrieves_failed += 1
            self.statistics.skip("retrieve-failed", order.end_tokens - until)
            self._lookups.release(order.lease)  # some rank may not have used it
        else:
            self.statistics.tokens_from_disk += order.disk_tokens
        if it.retrieve == job:
            it.retrieve = 0
            self._resume(it, order, ended.why, until)
        self._sum_up(it)
        return RetrieveEnd(order, not ended.why, ended.why, until)

    def store_ended(self, job: int, rank: int, result: StoreResult, *, seconds: float = 0.0) -> StoreEnd | None:
        """Take one rank's report: the result, and how long the job took there. A repeated report has no effect.

        Returns the end of the job after the last rank's report.
        """
        ended = self._stores.reported(job, rank, chunks=result.chunks, why=result.why, seconds=seconds)
        if ended is None:
            return None
        order, it, asked = ended.order, ended.owner, ended.order.chunks
        it.store_s = (it.store_s or 0.0) + ended.seconds
        self._chunks_storing -= asked
        self.statistics.stores_in_flight = len(self._stores)
        self.statistics.tokens_stored += ended.chunks * self._options.chunk_tokens
        it.stored_tokens += ended.chunks * self._options.chunk_tokens
        del it.storing[job]
        held_until = order.first_chunk + ended.chunks
        it.stored_until = max(it.stored_until, held_until)
        if ended.chunks < asked:
            self.statistics.stores_short += 1
            if ended.why == "parent-absent" and it.held_for_sure is not None:
                it.frontier, it.held_for_sure = it.held_for_sure, None
            elif ended.why not in CHAIN_GOES_ON and held_until < it.frontier:
                it.stopped = ended.why or "short"
                self._pledging.stops(it)
        self._sum_up(it)
        return StoreEnd(order, ended.chunks)

    def is_asking(self, request: Hashable) -> bool:
        """Whether a lookup is in flight that match() may wait for."""
        return self._requests[request].lookup is not None

    def awaits_more(self, request: Hashable, now_s: float) -> bool:
        """Whether the request waits for chunks that are coming: match() is to be called again after a pause."""
        it = self._requests[request]
        return it.answer is not None and self._lookups.is_in_time(it, it.answer, now_s)

    def busy(self) -> bool:
        """Whether something is in flight whose end must be delivered. Then an idle engine must keep polling."""
        return bool(len(self._retrieves) or len(self._stores) or self._lookups.releases)

    def take_summaries(self) -> list[Summary]:
        """Requests that have ended since the last call, with no job in flight."""
        taken, self._summaries = self._summaries, []
        return taken

    # ---------------------------------------------------------------- helpers

    def _begin(self, it: Request) -> None:
        assert it.name not in self._requests, f"request {it.name!r} has begun and not finished"
        self._requests[it.name] = it
        if it.keys:
            self._unasked[it.name] = it
        self.statistics.requests += 1

    def _forget_ahead(self, request: Hashable) -> None:
        self._unasked.pop(request, None)
        self._ahead.discard(request)

    def _ask_what_is_held(self, it: Request, now_s: float) -> int | None:
        """As match(), for a request that retrieves nothing. It asks only to avoid storing what the server holds.

        A request that may end with its first step waits for each answer. Otherwise its chunks would not be stored.
        """
        if not self._options.stores:
            return 0
        if it.lookup is None:
            if it.answer is None or not it.answer.still_good(self._options, now_s):
                self._lookups.ask(it, hbm_tokens=it.tokens, now_s=now_s)
        elif it.may_end_at_once:
            self._lookups.gave_up(it, now_s)
        return None if it.may_end_at_once and it.lookup is not None else 0

    def _offer(self, it: Request, hbm_tokens: int, now_s: float) -> int | None:
        """As match(), for a request that may read and has something to gain."""
        if it.answer is None or not it.answer.still_good(self._options, now_s):
            if it.lookup is None:
                self._lookups.ask(it, hbm_tokens=hbm_tokens, now_s=now_s)
            elif self._lookups.gave_up(it, now_s):
                self._lookups.miss(it, "late")
            if it.lookup is not None and it.lookup.is_ahead:
                it.lookup = it.lookup._replace(is_ahead=False)
            if it.answer is None or (it.lookup is not None and (it.may_end_at_once or not it.answer.is_told)):
                return None
        it.answer.wait_s = self._may_wait_s(it, it.answer, hbm_tokens, now_s)
        if not it.answer.wait_s and self._lookups.awaits_more(it, hbm_tokens=hbm_tokens, now_s=now_s):
            return None
        tokens = self._say(it, hbm_tokens, now_s)
        if tokens and it.lookup is not None:
            return None  # an answer that arrives between this and allocated() would change the promise
        if tokens == 0 and it.answer is not None:
            # The answer stays valid while it is asked for again: an engine without room would admit other requests
            # first.
            it.answer.is_told = True
        return tokens

    def _may_wait_s(self, it: Request, answer: Answer, hbm_tokens: int, now_s: float) -> float:
        """How long a retrieve that begins now may wait for the awaited chunks. 0: the request is to wait without
        blocks, or there are none.

        In the second half of await_wait_s no retrieve begins so: its time may be too short for what is there already.
        """
        if not answer.awaited or answer.is_told or it.lookup is not None or it.asked_first_s is None:
            return 0.0
        if not answer.has_lease(self._options, now_s) or len(self._retrieves) >= self._options.retrieves_max:
            return 0.0
        usable = usable_tokens(self._options, it.tokens)
        end_tokens = min((answer.chunks + answer.awaited) * self._options.chunk_tokens, usable)
        if end_tokens - hbm_tokens < self._options.gain_min or self._lookups.expects_beyond(it, answer):
            return 0.0
        held = self._block_tokens_up_to(end_tokens)
        held += sum(self._block_tokens_up_to(order.end_tokens) for order in self._awaiting.values())
        is_much = held > self._options.await_tokens_max or len(self._awaiting) >= self._options.awaiting_max
        left_s = it.asked_first_s + self._options.await_wait_s - now_s
        return 0.0 if is_much or left_s < self._options.await_wait_s / 2 else left_s

    def _block_tokens_up_to(self, tokens: int) -> int:
        """Tokens of the blocks that hold so many."""
        block_tokens = max(group.block_tokens for group in self._options.groups)
        return -(-tokens // block_tokens) * block_tokens

    def _say(self, it: Request, hbm_tokens: int, now_s: float) -> int | None:
        """The return value of match() that follows from the answer."""
        assert it.answer is not None
        gain = self._gain(it, hbm_tokens)
        if not gain:
            return 0
        if it.answer.lease is None and it.answer.chunks < it.answer.chunks_wanted_min:
            # The lookup took no lease because the engine held most of it. The engine may lose the rest as well.
            if it.lookup is not None:
                return None
            self._lookups.set_answer(it, None)
            self._lookups.ask(it, hbm_tokens=0, now_s=now_s)
            return None
        if not it.answer.has_lease(self._options, now_s):
            it.why = "no-lease"
            return 0
        if len(self._retrieves) < self._options.retrieves_max:
            it.queued_s = None
            return gain
        if it.queued_s is None:
            it.queued_s = now_s
        if now_s - it.queued_s < self._options.retrieve_wait_s:
            return None
        self._lookups.miss(it, "busy")
        return 0

    def _gain(self, it: Request, hbm_tokens: int) -> int:
        """Tokens that a retrieve would bring. 0 if they are too few, and then `it.why` says why."""
        if it.answer is None:
            return 0
        found_tokens = (it.answer.chunks + (it.answer.awaited if it.answer.wait_s else 0)) * self._options.chunk_tokens
        gain = min(found_tokens, usable_tokens(self._options, it.tokens)) - hbm_tokens
        it.why = it.answer.why
        if gain >= self._options.gain_min and is_aligned(self._options, hbm_tokens):
            return gain
        if gain > 0:
            it.why = "below-min" if gain < self._options.gain_min else "unaligned"
        return 0

    def _count_admission(self, it: Request, hbm_tokens: int) -> None:
        it.hbm_tokens, it.disk_chunks, it.is_admitted = hbm_tokens, 0, True
        self.statistics.tokens_asked += it.tokens
        self.statistics.tokens_hbm += hbm_tokens
        self.statistics.tokens_found += min(it.found_tokens, it.tokens)

    def _resume(self, it: Request, order: RetrieveOrder, why: str, until: int) -> None:
        """The engine goes on behind token `until` with a request that waited for a retrieve."""
        it.phase = Phase.RUNNING
        it.retrieved_tokens += until - order.hbm_tokens
        chunks = until // self._options.chunk_tokens
        if not why:
            it.disk_tokens += order.disk_tokens
            it.frontier = max(it.frontier, chunks)
            return
        it.is_barred, it.why = True, why
        it.frontier, it.stopped, it.held_for_sure = chunks, "", None

    def _sum_up(self, it: Request) -> None:
        if it.phase is not Phase.FINISHED or it.jobs:
            return
        summary = Summary(
            request=it.name,
            prompt_tokens=it.prompt_tokens,
            hbm_tokens=it.hbm_tokens,
            found_tokens=it.found_tokens,
            retrieved_tokens=it.retrieved_tokens,
            stored_tokens=it.stored_tokens,
            preemptions=it.preemptions,
            why=it.why or it.stopped or ("" if it.is_asked else self._why_not_asked(it)),
            disk_tokens=it.disk_tokens,
            retrieve_s=it.retrieve_s,
            store_s=it.store_s,
        )
        self._summaries.append(summary)

    def _why_not_asked(self, it: Request) -> str:
        """Why a request has ended without a lookup and without a store, if nothing went wrong."""
        if not it.keys:
            return "below-chunk"
        if not it.is_admitted:
            return "not-admitted"
        if not it.reads:
            return "no-reads"
        return "in-hbm" if usable_tokens(self._options, it.tokens) >= self._options.gain_min else "below-min"
