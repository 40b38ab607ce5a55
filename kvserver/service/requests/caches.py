"""Registered caches and the namespaces that they use.

A namespace fixes a geometry and, shard by shard, the shapes of the pages. Later registrations must agree with them.
Nothing is mapped here: the device's mover does that, and the reply to Register waits for it.
"""

from collections.abc import Mapping

from kvserver.errors import RequestError, ResourceError
from kvserver.index.space import Space
from kvserver.service.base.effects import AnswerWithMover, PutNamespace
from kvserver.service.holdings.accounts import Account, Accounts
from kvserver.service.holdings.capacity import prompt_slots, slabs_for
from kvserver.service.holdings.namespace_documents import document_of
from kvserver.service.requests import awaits, device_check, kv_events, movers, namespaces, transfers
from kvserver.service.requests.lookup import check_namespace
from kvserver.service.state.caches import Cache
from kvserver.service.state.core import MILLISECOND_NS, Core, check_name
from kvserver.service.state.sessions import Session
from kvserver.tiers.records import SHAPES_BYTES_MAX, NamespaceDocument, encode_document
from kvserver.tiers.slots import slot_bytes_for
from kvserver.transfer.layout import Layout
from kvserver.wire.messages import Register, Unregister, Watch, Watched
from kvserver.wire.orders import MapBoard, MapCache, UnmapCache
from kvserver.wire.tenants import tag_of

TOKENS_MAX = 1 << 40
"""Tokens of a prompt: more than any has, and small enough to calculate with."""


def register(core: Core, session: Session, peer: int, request: Register, now_ns: int) -> None:
    """Checks a cache against its namespace and has the device's mover map it. The reply comes when that is done."""
    _check_request(core, session, request)
    descriptors = device_check.descriptors(session, request)  # before the layout, which can take 4 ms
    layout = Layout.parse(request)
    _check_fit(core, request, layout)
    tenant = tag_of(request.tenant)
    space = _space_for(core, request.namespace, layout, tenant)

    mover = movers.ensure(core, request.device, request.device_id, now_ns)
    cache = Cache(
        number=core.number("cache"),
        name=request.name,
        session=session,
        digest=space.digest,
        layout=layout,
        mover=mover,
        mode=request.mode,
        tenant=tenant,
        parts=tuple(space.part_of[index] + group.shard for index, group in enumerate(layout.groups)),
        waiting=(peer, request.id),
    )
    _adopt_shards(core, space, layout)
    space.touch(now_ns)
    space.tags.add(tenant)
    if request.model:
        space.count_tokens_in(core.counters.lookup_tokens_of(request.model))
    if core.chunks.accounts is not None:
        space.belongs_to(tenant)
        session.engine.accounts.add(core.chunks.accounts.of(tenant))
    space.cache_came()
    core.caches.add(cache)
    session.offered.difference_update(descriptors)
    if session.number not in mover.boards:
        mover.boards.add(session.number)
        core.instruct(mover, MapBoard(session.number), board=session.number)
    order = MapCache(
        cache.number,
        session.number,
        request.chunk_tokens,
        request.buffers,
        request.groups,
        request.mode,
        request.ipc_mode,
        request.staging,
    )
    core.instruct(mover, order, descriptors)
    patience_ms = core.bounds.mover_start_ms + core.bounds.mover_grace_ms
    core.timers.set(now_ns + patience_ms * MILLISECOND_NS, "map", cache.number)


def unregister(core: Core, session: Session, peer: int, request: Unregister, now_ns: int) -> None:
    cache = core.own_cache(session, request.cache)
    if cache.state == "unmapping":
        raise RequestError("unregistered-twice", f"cache {request.cache} is being unregistered already")
    if cache.waiting is not None:
        raise RequestError("cache-not-mapped", f"cache {request.cache} is still being registered")
    cache.await_answer(peer, request.id)
    begin_unmap(core, cache, now_ns)


def watch(core: Core, session: Session, peer: int, request: Watch) -> None:
    if peer != session.attached_peer:
        raise RequestError("watch", "a watch comes on the attached connection")
    mover = core.own_cache(session, request.cache).mover
    core.emit(AnswerWithMover(peer, Watched(request.id, mover.number), mover.number))


def begin_unmap(core: Core, cache: Cache, now_ns: int) -> None:
    """Begins to unmap a cache. The mover lets the memory go after the cache's jobs. A mover that has not been told of
    the cache yet never will be."""
    core.caches.rename_free(cache)
    core.chunks.spaces[cache.digest].touch(now_ns)
    cache.become("unmapping")
    awaits.cache_goes(core, cache)
    core.timers.cancel("map", cache.number)
    for job in [core.jobs[number] for number in sorted(cache.jobs) if core.jobs[number].is_waiting]:
        transfers.cancel(core, job, now_ns)  # the mover was never told of it and would not wait for it
    if not movers.forget_queued(core, cache):
        core.instruct(cache.mover, UnmapCache(cache.number))
        transfers.await_unmapped(core, cache, now_ns)


def _check_request(core: Core, session: Session, request: Register) -> None:
    """Checks the parts of a registration that do not depend on its layout."""
    if not session.attached_peer:
        raise RequestError(
            "not-attached", "attach first: without a held connection nobody would notice this worker's end"
        )
    check_name("name", request.name)
    if request.tenant:
        check_name("tenant", request.tenant)
    if request.model:
        check_name("model", request.model)
    check_namespace(request.namespace)
    if request.name in session.caches:
        raise RequestError("registered-twice", f"this session has a cache named {request.name!r} already")
    if len(core.caches) >= core.bounds.caches_max:
        raise ResourceError(
            "caches", f"{len(core.caches)} caches are registered, at most {core.bounds.caches_max} may be"
        )
    if not 0 <= request.tokens_max <= TOKENS_MAX:
        raise RequestError("tokens-max", f"tokens_max={request.tokens_max} must be in [0, {TOKENS_MAX}]; 0: not said")
    device_check.check(request)
    movers.check_room(core, request.device, request.device_id)


# ---------------------------------------------------------------- namespaces


def _space_for(core: Core, digest: bytes, layout: Layout, tenant: int) -> Space:
    """The namespace of a registration: the one that its layout was checked against, or a new one."""
    space = core.chunks.spaces.get(digest)
    if space is not None:
        return space
    if len(core.chunks.spaces) >= core.bounds.namespaces_max and not _forget_a_namespace(core, tenant):
        raise ResourceError("namespaces", f"{len(core.chunks.spaces)} namespaces are in use, no more can be")
    taken = {other.number for other in core.chunks.spaces.values()}
    number = next(number for number in range(core.bounds.namespaces_max) if number not in taken)
    return namespaces.came(core, digest, number, layout.geometry)


def _forget_a_namespace(core: Core, tenant: int) -> bool:
    """Drops the coldest namespace that no cache, lease, hold or job uses, to make room for one of that tenant. Its root
    records the last use: a registration, or a lookup that found something."""
    held = {lease.space for lease in core.leases.values()} | {job.space for job in core.jobs.values()}
    held |= {hold.space for hold in core.operators.holds.values()}
    idle = [space for space in core.chunks.spaces.values() if space.caches == 0 and space not in held]
    if core.chunks.accounts is not None:
        idle = [space for space in idle if _may_forget(core, core.chunks.accounts, space, tenant)]
    if not idle:
        return False
    coldest = min(idle, key=lambda space: space.root.used)
    core.chunks.clear(coldest, "cleared")
    kv_events.cleared(core, coldest)
    if core.disk is not None:
        core.disk.void(coldest.digest)
    namespaces.left(core, coldest)
    return True


def _may_forget(core: Core, accounts: Accounts, space: Space, tenant: int) -> bool:
    """Forgetting the namespace for that tenant takes nothing that another tenant was guaranteed, whole or still being
    stored."""
    disk_accounts = accounts.beside
    if disk_accounts is not None and core.disk is not None and not core.disk.recovered and disk_accounts.guarantee:
        return False  # its chunks on disk are not all known yet, nor whose guarantee they count for
    if not space.nodes:
        return True
    account = accounts.of_space(space)
    if account is accounts.of(tenant):
        return True
    if account.guaranteed_bytes and any(pending.space is space for pending in core.chunks.pendings.values()):
        return False  # it may still be completed, until its deadline
    tiers = (accounts, disk_accounts) if disk_accounts is not None else (accounts,)
    return all(tier.spares(space, core.chunks.retired) for tier in tiers)


def _check_fit(core: Core, request: Register, layout: Layout) -> None:
    """Compares a layout with the namespace and with the space available. It changes nothing."""
    digest = request.namespace
    space = core.chunks.spaces.get(digest) or Space(digest, 0, layout.geometry)
    if space.geometry != layout.geometry:
        raise RequestError(
            "geometry", f"namespace {digest[:6].hex()} has {space.geometry}, this registration says {layout.geometry}"
        )
    accounts = core.chunks.accounts
    if accounts is not None and not accounts.admits(space, tag_of(request.tenant)):
        raise RequestError(
            "tenant",
            f"namespace {digest[:6].hex()} belongs to another tenant than {request.tenant!r}; what tenants must not "
            "share has to differ in its namespace",
        )
    slot_bytes = [part.slot_bytes for part in space.parts]
    for index, group in enumerate(layout.groups):
        part = space.part_of[index] + group.shard
        pages = space.parts[part].pages
        if pages is not None and pages != group.pages:
            raise RequestError(
                "geometry",
                f"shard {group.shard} of group {index} has pages (regions, bytes) {pages} in this namespace, "
                f"this registration says {group.pages}",
            )
        slot_bytes[part] = slot_bytes_for(group.shard_bytes)
        if slot_bytes[part] > core.bounds.slab_bytes:
            raise ResourceError(
                "slot-size",
                f"a shard of {group.shard_bytes} bytes does not fit a slab of {core.bounds.slab_bytes} bytes",
            )
    _check_arena(core, request, space, slot_bytes)
    document_bytes = len(encode_document(_document(space, layout)))
    if document_bytes > SHAPES_BYTES_MAX:
        raise ResourceError(
            "namespace-size",
            f"the shapes of all shards take {document_bytes} bytes, at most {SHAPES_BYTES_MAX} can be kept; "
            "describe equally spaced regions by one run",
        )


def _check_arena(core: Core, request: Register, space: Space, slot_bytes: list[int]) -> None:
    """Checks that the arena can hold a chunk and the longest prompt. Otherwise neither, or not that prompt, would ever
    be served."""
    accounts = core.chunks.accounts
    if accounts is not None:
        _check_maximum(accounts.of(tag_of(request.tenant)), prompt_slots(space, slot_bytes, 1))
    slab_bytes, slabs = core.bounds.slab_bytes, core.chunks.pool.slabs_total
    longest = max(1, request.tokens_max // space.geometry.chunk_tokens)
    for chunks, code in ((1, "slot-size"), (longest, "prompt-size")):
        needed = slabs_for(prompt_slots(space, slot_bytes, chunks), slab_bytes)
        if needed > slabs:
            what = "a chunk" if chunks == 1 else f"a prompt of tokens_max={request.tokens_max}"
            raise ResourceError(
                code,
                f"{what} needs {needed} slabs of {slab_bytes} bytes, one size of slots in each; "
                f"the arena of {core.bounds.arena_bytes} bytes has {slabs}",
            )


def _check_maximum(account: Account, slots: Mapping[int, int]) -> None:
    """Checks that a chunk is within the tenant's maximum. slots: slot size -> slots of a chunk."""
    chunk_bytes = sum(size * count for size, count in slots.items())
    if account.max_bytes and chunk_bytes > account.max_bytes:
        raise ResourceError(
            "tenant-size",
            f"a chunk takes {chunk_bytes} bytes, and tenant {account.name!r} may hold {account.max_bytes} (tenants)",
        )


def _adopt_shards(core: Core, space: Space, layout: Layout) -> None:
    document = encode_document(_document(space, layout))
    news = False
    for index, group in enumerate(layout.groups):
        part = space.part_of[index] + group.shard
        if space.parts[part].pages is None:
            space.fix_part(part, group.pages, group.shard_bytes, slot_bytes_for(group.shard_bytes))
            news = True
    if news:
        core.emit(PutNamespace(space.number, document))


def _document(space: Space, layout: Layout) -> NamespaceDocument:
    """The namespace's document, including the layout's shards."""
    pages = [part.pages for part in space.parts]
    for index, group in enumerate(layout.groups):
        pages[space.part_of[index] + group.shard] = group.pages
    return document_of(space, pages)
