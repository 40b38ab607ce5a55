"""Stores and retrieves: from the request to the job, and from the job's end to the reply.

The brain forwards packed block ids and never looks into them. It adds the slot of each chunk. A store walks its keys
once and pins the last node that it reached, so that making room for the next chunk cannot evict the one before.
"""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from kvserver.errors import DeviceError, KvError, RequestError, ResourceError
from kvserver.index.space import ABSENT, GONE, READY, Node
from kvserver.service.requests import admission, awaits, lookup, mismatches, pursuits
from kvserver.service.state.caches import Cache
from kvserver.service.state.chunk_waits import Fetch
from kvserver.service.state.core import MILLISECOND_NS, Core
from kvserver.service.state.jobs import Awaiting, GroupRun, Held, Job, Walk
from kvserver.service.state.leases import Lease
from kvserver.service.state.pledges import Pledge, Wait
from kvserver.service.state.sessions import Session
from kvserver.service.telling.evicted_keys import Cause
from kvserver.tiers.records import NO_SUM, names_hash
from kvserver.wire.messages import (
    ALL_RIGHT,
    BLOCKS_MAX,
    BOARD_WORDS,
    KEY_BYTES,
    PLACES_MAX,
    GroupBlocks,
    Release,
    Retrieve,
    Retrieved,
    Store,
    Stored,
    Why,
)
from kvserver.wire.orders import Cancel, Copy, CopyGroup, Done

BLOCK_ID_BYTES = 4


class Span(NamedTuple):
    """The blocks of one group in a request: [first_block, last_block), which touch chunks [first, last)."""

    group: int
    blocks_per_chunk: int
    first_block: int
    last_block: int
    first: int
    last: int
    block_ids: bytes


# ---------------------------------------------------------------- store


def store(core: Core, session: Session, peer: int, request: Store, now_ns: int) -> None:
    """Reserves the chunks that are not held and has the mover copy them. It replies at once when there is nothing to
    copy."""
    try:
        cache, spans = _admit_store(core, session, request, now_ns)
    except KvError:
        awaits.store_refused(core, session, request)
        raise
    space = core.chunks.spaces[cache.digest]
    parent = space.find(request.parent) if request.first_chunk else space.root
    number = core.number("job")
    if not space.complete:
        walk = Walk([], [], "ranks-missing")
    elif parent is None or parent.depth != request.first_chunk:
        walk = Walk([], [], "parent-absent")
    else:
        walk = _walk(core, cache, parent, request, spans=spans, job=number, now_ns=now_ns)
    job = Job(
        number=number,
        kind="store",
        session=session,
        cache=cache,
        space=space,
        peer=peer,
        request_id=request.id,
        began_ns=now_ns,
        walk=walk.nodes,
        runs=walk.runs,
        why=walk.why,
    )
    if walk.why:
        awaits.not_stored(core, session, space, request.keys[len(walk.nodes) * KEY_BYTES :])
    if any(slot != ABSENT for run in job.runs for slot in run.slots):
        copies = [_copy_group(run, span) for run, span in zip(job.runs, spans, strict=True) if run.slots]
        _submit(core, job, request, copies, now_ns)
    else:
        _answer_store(core, job, job.why, bytes_written=0, chunks_written=0, asked=len(request.keys) // KEY_BYTES)


def _admit_store(core: Core, session: Session, request: Store, now_ns: int) -> tuple[Cache, list[Span]]:
    """The cache and the blocks of a store. Raises KvError if it cannot be taken."""
    cache = _usable_cache(core, session, request)
    count = lookup.check_keys(request.keys)
    if request.first_chunk < 0 or len(request.parent) != (KEY_BYTES if request.first_chunk else 0):
        raise RequestError(
            "parent", f"first_chunk={request.first_chunk} with a parent of {len(request.parent)} bytes; expected "
            f"{KEY_BYTES} bytes, or none for chunk 0"
        )  # fmt: skip
    spans = _store_spans(cache, request, count)
    admission.check_store(core, cache.digest, now_ns)
    return cache, spans


def _store_spans(cache: Cache, request: Store, count: int) -> list[Span]:
    """The blocks of a store by group. They must be whole chunks within the range of the keys, and cover it in full
    groups."""
    spans = _spans(cache, request.groups)
    end = request.first_chunk + count
    for span in spans:
        aligned = span.first_block % span.blocks_per_chunk == 0 and span.last_block % span.blocks_per_chunk == 0
        if not aligned or span.first < request.first_chunk or span.last > end:
            raise RequestError(
                "block-range",
                f"group {span.group}: blocks [{span.first_block}, {span.last_block}) must be whole chunks of "
                f"{span.blocks_per_chunk} blocks inside chunks [{request.first_chunk}, {end})",
            )
    covered = {span.group: (span.first, span.last) for span in spans}
    for index, shape in enumerate(cache.layout.geometry.groups):
        if shape.kind == "full" and covered.get(index) != (request.first_chunk, end):
            raise RequestError(
                "block-range", f"full group {index} must bring the blocks of all chunks [{request.first_chunk}, {end})"
            )
    return spans


def _walk(core: Core, cache: Cache, parent: Node, request: Store, *, spans: list[Span], job: int, now_ns: int) -> Walk:
    """Finds or makes the node of each key, reserves its groups, and takes this rank's parts for the job."""
    chunks, space = core.chunks, core.chunks.spaces[cache.digest]
    chunks.next_generation()
    deadline_ns = now_ns + core.bounds.reserve_ttl_ms * MILLISECOND_NS
    nodes: list[Node] = []
    runs = [GroupRun(span.group, max(0, span.first - request.first_chunk), []) for span in spans]
    why: Why = ""
    writes = [_writes(cache, span.group) for span in spans]
    anchor, refused = parent, None
    chunks.pin(anchor)
    for position in range(len(request.keys) // KEY_BYTES):
        chunk = request.first_chunk + position
        key = request.keys[position * KEY_BYTES : (position + 1) * KEY_BYTES]
        here = [index for index, span in enumerate(spans) if span.first <= chunk < span.last]
        node = chunks.node_for(space, key, anchor, now_ns, cache.tenant)
        if node is None:
            why = "full" if key not in space.nodes else "parent-absent"
            break
        chunks.move_pin(space, anchor, node)
        anchor = node
        if not chunks.reserve(space, node, [spans[index].group for index in here], deadline_ns):
            why, refused = "full", node
            break
        nodes.append(node)
        for index in here:
            writers, writer, part = writes[index]
            mine = chunk % writers == writer
            runs[index].slots.append(chunks.assign(node, part, job) if mine else ABSENT)
    anchor.touch(now_ns)
    chunks.unpin(space, anchor)
    if refused is not None:
        chunks.drop_if_bare(space, refused)
    return Walk(nodes, runs, why)


def _writes(cache: Cache, group: int) -> tuple[int, int, int]:
    """(writers, writer, part) of a group in this cache: it writes chunk i when i % writers == writer."""
    own = cache.layout.groups[group]
    return own.writers, own.writer, cache.parts[group]


def _copy_group(run: GroupRun, span: Span) -> CopyGroup:
    blocks = len(run.slots) * span.blocks_per_chunk
    return CopyGroup(
        span.group, span.first_block, span.block_ids[: blocks * BLOCK_ID_BYTES], array("q", run.slots).tobytes(), b""
    )


def _store_ended(core: Core, job: Job, done: Done, now_ns: int) -> None:
    """Seals or gives back every part that the job was to write."""
    kept = done.status == "done" and not job.session.ended
    died = job.session.ended or done.code == "mover-lost"
    reason: Cause = "died" if died else "abandoned" if done.status == "abandoned" else "failed"
    chunks_written: set[int] = set()
    completed: list[Node] = []
    mine = [
        (run.first + index, job.cache.parts[run.group])
        for run in job.runs
        for index, slot in enumerate(run.slots)
        if slot != ABSENT
    ]
    if kept:
        sums = array("Q", done.sums) if done.sums else [NO_SUM] * len(mine)
        for (position, part), payload_sum in sorted(zip(mine, sums, strict=True)):  # head of the chain first
            node = job.walk[position]
            was_whole = job.space.is_whole(node)
            if core.chunks.seal(node, part, job.number, payload_sum):
                chunks_written.add(position)
                if not was_whole and job.space.is_whole(node):
                    completed.append(node)
    else:
        for position, part in sorted(mine, reverse=True):
            core.chunks.give_up(job.walk[position], part, job.number, reason)
        awaits.not_stored(core, job.session, job.space, b"".join([node.key for node in job.walk]))
    core.chunks.job_ended(job.number)
    if core.remotes and kept and job.walk:
        pursuits.offer_stored(core, job.space, job.walk[-1], completed, now_ns)
    if done.status in ("failed", "invalid"):
        core.counters.add("stores")
        core.counters.add("stores_failed")
        family = DeviceError if done.status == "failed" else RequestError
        core.refuse(job.peer, job.request_id, family(done.code, done.message))
    else:
        core.counters.add("bytes_stored", done.bytes if kept else 0)
        _answer_store(
            core,
            job,
            "abandoned" if done.status == "abandoned" else job.why,
            bytes_written=done.bytes if kept else 0,
            chunks_written=len(chunks_written),
            asked=len(job.walk),
        )


def _answer_store(core: Core, job: Job, why: Why, *, bytes_written: int, chunks_written: int, asked: int) -> None:
    """Answers a store with the number of leading chunks whose shards of this rank are held now. why: why they are fewer
    than asked, if that is known."""
    held, missing = _chunks_held(core, job)
    why = why or missing
    assert why or held == asked, "a store that is cut short says why"
    core.counters.add("stores")
    if why:
        core.counters.short_stores[why] += 1
    core.answer(job.peer, Stored(job.request_id, held, chunks_written, bytes_written, why))


def _chunks_held(core: Core, job: Job) -> tuple[int, Why]:
    """The number of leading chunks of the walk that are held, and why the next one is not. A cleared namespace holds
    none."""
    if core.chunks.spaces.get(job.space.digest) is not job.space:
        return 0, "discarded"
    writes = [(run, *_writes(job.cache, run.group)) for run in job.runs]
    alive = job.space.live_chunks(job.walk)
    for position, node in enumerate(job.walk[:alive]):
        for run, writers, writer, part in writes:
            inside = run.first <= position < run.first + len(run.slots)
            mine = (node.depth - 1) % writers == writer
            if inside and mine and not core.chunks.part_held(node, part, run.group):
                was_ours = run.slots[position - run.first] != ABSENT
                return position, "discarded" if was_ours or node.state == GONE else "busy"
    return alive, "discarded" if alive < len(job.walk) else ""


def discard_overdue(core: Core, now_ns: int) -> None:
    """Discards chunks that are not complete by the deadline of their reservation, oldest first."""
    pendings = core.chunks.pendings
    while pendings and (oldest := next(iter(pendings.values()))).deadline_ns <= now_ns:
        core.chunks.discard(oldest.space, oldest.node, "deadline")


# ---------------------------------------------------------------- retrieve


def retrieve(core: Core, session: Session, peer: int, request: Retrieve, now_ns: int) -> None:
    """Has the mover copy leased blocks into the cache. A refused request does not use up the lease for this rank."""
    cache = _usable_cache(core, session, request)
    lease = lookup.usable(core, session, request.lease, now_ns)
    if lease.space.digest != cache.digest:
        raise RequestError(
            "lease-namespace",
            f"lease {lease.number} is on {lease.space.digest[:6].hex()}, the cache on {cache.digest[:6].hex()}",
        )
    spans = _spans(cache, request.groups)
    for span in spans:
        if span.last > lease.reach:
            raise RequestError(
                "beyond-lease",
                f"group {span.group}: blocks up to {span.last_block} reach chunk {span.last - 1}; "
                f"the lease is on {lease.reach} chunks",
            )
    until = max(span.last for span in spans)
    if until > lease.chunks and lease.wait is None:
        raise awaits.not_coming(f"the lease is on {lease.chunks} chunks, and no more come")
    if until > lease.chunks and lease.wait is not None:
        awaits.check_room(core, lease.wait.pledge)
    chain = _leased_chain(lease)
    needs = _needs(chain, spans) if until <= lease.chunks else {}
    if needs and (core.disk is None or not core.disk.readable):
        raise DeviceError("disk-away", "some of it is on disk, which cannot be read now")
    job = Job(
        number=core.number("job"),
        kind="retrieve",
        session=session,
        cache=cache,
        space=lease.space,
        peer=peer,
        request_id=request.id,
        began_ns=now_ns,
        tail=lease.tail,
    )
    core.counters.add("retrieves")
    core.chunks.pin(lease.tail)
    _register(core, job, request.deadline_ms, now_ns)
    if until > lease.chunks:
        assert lease.wait is not None
        _await(core, job, request, lease.wait.pledge, until)
    elif needs:
        _hold(core, job, request, needs)
    else:
        _order_retrieve(core, job, chain, request, spans)
    lookup.use(core, session, lease, now_ns, more=request.more)  # last: reads that the lease wants too keep their turn


def _hold(core: Core, job: Job, request: Retrieve, needs: dict[Node, int]) -> None:
    """Has the chunks of a retrieve read that are on disk alone."""
    assert core.disk is not None
    fetch = Fetch(
        space=job.space,
        needs=needs,
        on_ready=lambda: release_held(core, job),
        on_failed=lambda error, now_ns: give_up_waiting(core, job, error, now_ns),
    )
    job.hold(Held(request, core.disk.waits.begin(fetch)))


def _await(core: Core, job: Job, request: Retrieve, pledge: Pledge, until: int) -> None:
    """Has a retrieve wait until the engine that has pledged its chunks has stored them, up to that depth."""
    wait = Wait(
        holder=job,
        pledge=pledge,
        until=until,
        on_come=lambda now_ns: _came(core, job, now_ns),
        on_end=lambda error, now_ns: give_up_waiting(core, job, error, now_ns),
    )
    job.awaits(Awaiting(request, core.pledges.wait(wait)))


def _came(core: Core, job: Job, now_ns: int) -> None:
    """Orders a retrieve whose last chunk was stored. Some may have left for the disk since."""
    if job.awaiting is None:
        return  # it ended in the same event
    assert job.tail is not None
    request = job.awaiting.request
    chain, spans = job.space.chain(job.tail), _spans(job.cache, request.groups)
    needs = _needs(chain, spans)
    if needs and (core.disk is None or not core.disk.readable):
        give_up_waiting(core, job, DeviceError("disk-away", "some of it is on disk, which cannot be read now"), now_ns)
        return
    job.take_awaiting()
    if needs:
        _hold(core, job, request, needs)
    else:
        _order_retrieve(core, job, chain, request, spans)


def _needs(chain: list[Node], spans: list[Span]) -> dict[Node, int]:
    """Node -> groups (bits) that the blocks need and that are on disk alone, head first. Raises RequestError for groups
    that are not held at all."""
    needs: dict[int, int] = {}
    for span in spans:
        bit = 1 << span.group
        for position in range(span.first, span.last):
            node = chain[position]
            if not node.present & bit:
                raise RequestError(
                    "not-held",
                    f"group {span.group} holds nothing of chunk {position}: outside of what the lookup needed",
                )
            if not node.in_dram & bit:
                needs[position] = needs.get(position, 0) | bit
    return {chain[position]: needs[position] for position in sorted(needs)}


def _order_retrieve(core: Core, job: Job, chain: list[Node], request: Retrieve, spans: list[Span]) -> None:
    """Orders a retrieve whose chunks are all in DRAM."""
    job.copies(chain, [(span.group, span.first, span.last) for span in spans])
    copies = [
        CopyGroup(span.group, span.first_block, span.block_ids, _slots(job, chain, span), _names(job, chain, span))
        for span in spans
    ]
    _order(core, job, request, copies)


def release_held(core: Core, job: Job) -> None:
    """Orders a retrieve whose last chunk from disk has arrived in DRAM."""
    assert job.tail is not None
    request = job.take_held().request
    _order_retrieve(core, job, job.space.chain(job.tail), request, _spans(job.cache, request.groups))


def wait_again(core: Core, job: Job) -> None:
    """Has a waiting retrieve also wait for its chunks that have left DRAM since they were read."""
    assert job.held is not None
    assert job.tail is not None
    assert core.disk is not None
    needs = _needs(job.space.chain(job.tail), _spans(job.cache, job.held.request.groups))
    core.disk.waits.wait_for(job.held.fetch, needs)


def give_up_waiting(core: Core, job: Job, error: DeviceError, now_ns: int) -> None:
    """Ends a retrieve that its mover was never told of. The client finds its job word LIVE and gives it up."""
    _leave(core, job)
    ended(core, job, failed(job, error.code, error.message), now_ns)


def lease_released(core: Core, session: Session, request: Release, now_ns: int) -> None:
    """Ends an engine's retrieves under a lease that still await another engine. The lease itself may be over: it ends
    with the last request that is made under it."""
    for job in list(core.jobs.values()) if core.pledges else ():
        waits = job.awaiting is not None and job.awaiting.request.lease == request.lease
        if waits and job.session.engine is session.engine:
            give_up_waiting(core, job, awaits.not_coming("its lease was given back"), now_ns)


def _leave(core: Core, job: Job) -> None:
    """A retrieve waits for nothing any more."""
    if job.held is not None:
        assert core.disk is not None
        core.disk.waits.end(job.take_held().fetch)
    if job.awaiting is not None:
        core.pledges.leave(job.take_awaiting().wait)


def failed(job: Job, code: str, message: str) -> Done:
    """The end of a job that moved nothing."""
    return Done(job=job.number, status="failed", bytes=0, copy_ns=0, code=code, message=message, mode=job.cache.mode)


def _leased_chain(lease: Lease) -> list[Node]:
    """The leased nodes, head first. Raises RequestError for keys that never were a chain: bisection probed only some of
    them."""
    chain = lease.space.chain(lease.tail)
    if b"".join([node.key for node in chain]) != lease.keys_here:
        raise RequestError("keys-chain", f"the keys of lease {lease.number} are not one chain: their parents differ")
    lease.compared()
    return chain


def _slots(job: Job, chain: Sequence[Node], span: Span) -> bytes:
    part = job.cache.parts[span.group]
    slots = array("q")
    for node in chain[span.first : span.last]:
        assert node.state == READY
        assert node.in_dram >> span.group & 1
        slots.append(node.slots[part])
    return slots.tobytes()


def _names(job: Job, chain: Sequence[Node], span: Span) -> bytes:
    """The hash of the names of what the slots hold (_native.Ledger.sums), so that a mover finds it out if they hold
    other chunks."""
    part = job.space.parts[job.cache.parts[span.group]]
    keys = [node.key for node in chain[span.first : span.last]]
    return names_hash(job.space.digest, part.group, part.shard, keys)


def _wrong_chunks(job: Job, wrong: Sequence[int]) -> list[tuple[Node, int]]:
    """(chunk, group) of the shards of a retrieve whose bytes are not those that were stored."""
    if not wrong:
        return []
    shards = [(job.chain[position], group) for group, first, last in job.copied for position in range(first, last)]
    return [shards[index] for index in wrong]


def _retrieve_ended(core: Core, job: Job, done: Done, now_ns: int, *, was_cancelled: bool) -> None:
    assert job.tail is not None
    wrong = _wrong_chunks(job, done.wrong)
    core.chunks.unpin(job.space, job.tail)
    match done.status:
        case "done":
            core.counters.add("bytes_retrieved", done.bytes)
            core.counters.add("shards_unverified", done.unverified)
            core.answer(job.peer, Retrieved(job.request_id, done.bytes, ALL_RIGHT))
        case "failed" if wrong:
            first = min(node.depth for node, _ in wrong) - 1
            if not done.bytes:  # slots hold other chunks, so nothing was copied of those before either
                first = min(first for _, first, _ in job.copied)
            core.answer(job.peer, Retrieved(job.request_id, 0, first))
            mismatches.in_retrieve(core, job, wrong, done.mode, now_ns)
        case "invalid":
            core.refuse(job.peer, job.request_id, RequestError(done.code, done.message))
        case "failed" | "abandoned":
            code = done.code or "abandoned"
            why = "its time was over" if was_cancelled else "the client gave the job up"
            core.refuse(job.peer, job.request_id, DeviceError(code, done.message or why))


# ---------------------------------------------------------------- jobs


def ended(core: Core, job: Job, done: Done, now_ns: int) -> None:
    """Ends a job: none of its copies can run any more."""
    was_cancelled = job.state == "cancelled"
    core.jobs.end(job)
    core.timers.cancel("job", job.number)
    if job.cache.state == "unmapping" and not job.cache.jobs:
        await_unmapped(core, job.cache, now_ns)
    _leave(core, job)
    core.counters.jobs[done.status] += 1
    # The mover knows only its own half of engine-driven copies, and calls it direct. The client's half decides the
    # speed.
    mode = "engine-driven" if job.cache.mode == "engine-driven" else done.mode
    core.counters.mode_bytes[mode] += done.bytes
    core.counters.moved(job.kind, job.session.rank, done.bytes)
    core.counters.mode_ns[mode] += done.copy_ns
    core.counters.job_seconds[job.kind].observe((now_ns - job.began_ns) / 1e9)
    if level := core.lines.level(job.kind, now_ns):
        who = ("engine", job.session.engine.name), ("request", job.request_id)
        took = ("mode", mode), ("ms", (now_ns - job.began_ns) / 1e6), ("copy_ms", done.copy_ns / 1e6)
        core.log(job.kind, *who, ("status", done.status), ("bytes", done.bytes), *_tokens(job), *took, level=level)
    if job.kind == "store":
        _store_ended(core, job, done, now_ns)
    else:
        _retrieve_ended(core, job, done, now_ns, was_cancelled=was_cancelled)


def _tokens(job: Job) -> tuple[tuple[str, object], ...]:
    """Log fields of a job: for a store the tokens of the chunks that it could reserve, and why not more; for a retrieve
    those of its lease."""
    if job.kind == "retrieve":
        return (("lease_tokens", job.tail.depth * job.space.geometry.chunk_tokens),) if job.tail is not None else ()
    said = ("tokens", len(job.walk) * job.space.geometry.chunk_tokens)
    return (said, ("why", job.why)) if job.why else (said,)


def lost(core: Core, job: Job, why: str, now_ns: int) -> None:
    """Ends a job whose mover has been reaped."""
    ended(core, job, failed(job, "mover-lost", why), now_ns)


def overdue(core: Core, number: int, now_ns: int) -> Job | None:
    """Cancels a job whose time is over. Returns it if it was cancelled before and still has not ended."""
    job = core.jobs[number]
    if job.held is not None:
        give_up_waiting(core, job, DeviceError("disk-late", "its chunks did not come from disk in time"), now_ns)
        return None
    if job.awaiting is not None:
        give_up_waiting(core, job, awaits.not_coming("not before the retrieve's deadline"), now_ns)
        return None
    if job.state == "cancelled":
        return job
    _cancel(core, job, now_ns)
    return None


def cancel(core: Core, job: Job, now_ns: int) -> None:
    """Cancels a job whose client is gone or lets its cache go."""
    if job.is_waiting:
        give_up_waiting(core, job, DeviceError("abandoned", "its cache or session was closed"), now_ns)
    elif job.state != "cancelled":
        _cancel(core, job, now_ns)


def await_unmapped(core: Core, cache: Cache, now_ns: int) -> None:
    """Gives the mover mover_grace_ms to let the cache go."""
    core.timers.set(now_ns + core.bounds.mover_grace_ms * MILLISECOND_NS, "unmap", cache.number)


def _cancel(core: Core, job: Job, now_ns: int) -> None:
    """Cancels a job at its mover, which has mover_grace_ms from now to end it, whatever its own deadline was."""
    job.become("cancelled")
    core.instruct(job.cache.mover, Cancel(job.number))
    core.timers.set(now_ns + core.bounds.mover_grace_ms * MILLISECOND_NS, "job", job.number)


def _submit(core: Core, job: Job, request: Store | Retrieve, copies: list[CopyGroup], now_ns: int) -> None:
    _register(core, job, request.deadline_ms, now_ns)
    _order(core, job, request, copies)


def _register(core: Core, job: Job, deadline_ms: int, now_ns: int) -> None:
    core.jobs.begin(job)
    patience_ms = min(max(deadline_ms, 1), core.bounds.job_ttl_ms)
    core.timers.set(now_ns + patience_ms * MILLISECOND_NS, "job", job.number)


def _order(core: Core, job: Job, request: Store | Retrieve, copies: list[CopyGroup]) -> None:
    job.become("ordered")
    cache = job.cache
    order = Copy(job.number, job.kind, cache.number, request.word, request.generation, cache.mode, copies)
    core.instruct(cache.mover, order)


def _usable_cache(core: Core, session: Session, request: Store | Retrieve) -> Cache:
    """The cache of a transfer, after the checks that stores and retrieves share."""
    cache = core.own_cache(session, request.cache)
    if cache.state != "mapped" or cache.mover.state != "ready":
        raise RequestError(
            "cache-not-mapped", f"cache {request.cache} is {cache.state} on a mover that is {cache.mover.state}"
        )
    if not 0 <= request.word < BOARD_WORDS or not 0 <= request.generation < 1 << 55:
        raise RequestError("word", f"word={request.word} must be in [0, {BOARD_WORDS}), generation in [0, 2^55)")
    if len(session.jobs) >= core.bounds.jobs_max:
        raise ResourceError("jobs", f"{len(session.jobs)} jobs are in flight, at most {core.bounds.jobs_max} may be")
    return cache


def _spans(cache: Cache, groups: list[GroupBlocks]) -> list[Span]:
    """Checks the shape of a request's blocks. The mover checks the ids themselves, before any byte moves."""
    spans: list[Span] = []
    seen: set[int] = set()
    total = places = 0
    for item in groups:
        if not 0 <= item.group < len(cache.layout.groups) or item.group in seen:
            raise RequestError("group", f"group {item.group} must be in [0, {len(cache.layout.groups)}) and stand once")
        seen.add(item.group)
        blocks, rest = divmod(len(item.block_ids), BLOCK_ID_BYTES)
        total += blocks
        if rest or blocks == 0 or total > BLOCKS_MAX:
            raise RequestError(
                "block-ids",
                f"group {item.group}: {len(item.block_ids)} bytes of block ids; expected 1 to {BLOCKS_MAX} ids of "
                f"{BLOCK_ID_BYTES} bytes in all groups together",
            )
        if not 0 <= item.first_block < 1 << 40:
            raise RequestError(
                "block-range", f"group {item.group}: first_block={item.first_block} must be in [0, 2^40)"
            )
        per_chunk = cache.layout.groups[item.group].blocks_per_chunk
        last_block = item.first_block + blocks
        first, last = item.first_block // per_chunk, -(-last_block // per_chunk)
        places += blocks + 2 * (last - first)
        spans.append(Span(item.group, per_chunk, item.first_block, last_block, first, last, item.block_ids))
    if not spans:
        raise RequestError("block-ids", "no group brings any blocks")
    if places > PLACES_MAX:
        raise RequestError(
            "too-large",
            f"{total} block ids and twice the {(places - total) // 2} chunks that they touch exceed {PLACES_MAX}",
        )
    return spans
