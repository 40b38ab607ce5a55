"""Mover processes: started when a cache needs one, killed when they do not answer, forgotten when they are reaped.

Rule 1: while a mover's process may exist, its jobs keep everything that they hold. Only MoverGone ends them all. Rule
2: a mover that does not end a cancelled job or let a cache go within mover_grace_ms is killed, never waited for.
"""

import logging

from kvserver.errors import DeviceError, RequestError, ResourceError
from kvserver.service.base.effects import Ask, Instruct
from kvserver.service.holdings.capacity import chunks_that_fit
from kvserver.service.requests import awaits, kv_events, mismatches, namespaces, scrub, transfers
from kvserver.service.requests.lookup import end as end_lease
from kvserver.service.state.caches import Cache
from kvserver.service.state.core import MILLISECOND_NS, Core
from kvserver.service.state.movers import Mover
from kvserver.service.state.sessions import Session
from kvserver.wire.messages import Registered, Unregistered
from kvserver.wire.orders import (
    ArenaReady,
    DropBoard,
    KillMover,
    MapCache,
    MapFailed,
    Mapped,
    MoverKind,
    Ready,
    StartMover,
    Unmapped,
)


def ensure(core: Core, device: MoverKind, device_id: str, now_ns: int) -> Mover:
    """The mover of a device, started if there is none."""
    found = core.movers.of_device(device, device_id)
    if found is not None:
        return found
    mover = Mover(core.number("mover"), device, device_id)
    core.movers.start(mover)
    core.emit(Ask(StartMover(mover.number, device, device_id)))
    core.timers.set(now_ns + core.bounds.mover_start_ms * MILLISECOND_NS, "mover-start", mover.number)
    return mover


def check_room(core: Core, device: MoverKind, device_id: str) -> None:
    """Raises ResourceError when a registration would need one mover too many."""
    if len(core.movers) >= core.bounds.movers_max and core.movers.of_device(device, device_id) is None:
        raise ResourceError("movers", f"{len(core.movers)} movers are running, at most {core.bounds.movers_max} may be")


def ready(core: Core, mover: Mover, report: Ready) -> None:
    if mover.state == "ready":
        mover.tells(report)
    if mover.state != "starting":
        return
    waited = mover.become_ready(report)
    mismatches.expect(core, mover)
    core.timers.cancel("mover-start", mover.number)
    _tell_arena(core, mover)
    core.emit(*waited)
    core.log("mover ready", *_name(mover), ("pid", mover.pid), ("backend", mover.backend))


def arena_grew(core: Core) -> None:
    for mover in core.movers.values():
        if mover.state == "ready":
            _tell_arena(core, mover)


def _tell_arena(core: Core, mover: Mover) -> None:
    """Tells a mover how much of the arena is ready. A GPU's or disks' mover may register it; the host's need not
    know."""
    if mover.device != "host":
        core.instruct(mover, ArenaReady(core.chunks.pool.slabs_ready))


def start_overdue(core: Core, number: int) -> None:
    kill(core, core.movers[number], "did not become ready")


def kill(core: Core, mover: Mover, why: str) -> None:
    """Kills a mover with SIGKILL. Its jobs end when it has been reaped."""
    if mover.state == "killed":
        return
    _forget_orders(core, mover.become_killed())
    core.timers.cancel("mover-start", mover.number)
    core.emit(Ask(KillMover(mover.number)))
    core.log("mover killed", *_name(mover), ("why", why), level=logging.ERROR)


def gone(core: Core, mover: Mover, how: str, now_ns: int) -> None:
    """Handles a mover's end. Its process has been reaped, so its mappings are gone and none of its copies can still
    run."""
    _forget_orders(core, mover.become_killed())
    core.movers.reaped(mover)
    core.timers.cancel("mover-start", mover.number)
    core.counters.add("mover_restarts")
    core.log("mover gone", *_name(mover), ("how", how), ("jobs", len(mover.jobs)), level=logging.WARNING)
    for cache in mover.caches.values():
        awaits.cache_goes(core, cache)  # before its stores fail: the engine has not broken its word
    for number in sorted(mover.jobs):
        transfers.lost(core, core.jobs[number], f"mover {mover.number} is gone: {how}", now_ns)
    scrub.gone(core, mover)
    for cache in list(mover.caches.values()):
        if cache.state == "mapping":
            if waiting := cache.take_waiting():
                core.refuse(*waiting, DeviceError("mover-lost", f"mover {mover.number} is gone: {how}"))
        else:
            _answer_unregistered(core, cache)
        forget_cache(core, cache)


def _answer_unregistered(core: Core, cache: Cache) -> None:
    if waiting := cache.take_waiting():
        core.answer(waiting[0], Unregistered(waiting[1]))


def mapped(core: Core, mover: Mover, report: Mapped) -> None:
    cache = mover.caches.get(report.cache)
    if cache is None or cache.state != "mapping":
        return
    cache.become("mapped")
    core.timers.cancel("map", cache.number)
    if waiting := cache.take_waiting():
        core.answer(waiting[0], Registered(waiting[1], cache.number, mover.number))
    core.log(
        "cache registered",
        ("cache", cache.number),
        ("session", cache.session.number),
        ("namespace", cache.digest[:6].hex()),
        ("blocks", cache.layout.groups[0].blocks),
        ("shard_bytes", sum(group.shard_bytes for group in cache.layout.groups)),
        ("arena_tokens", _capacity_tokens(core, cache)),
        ("mover", mover.number),
    )


def _capacity_tokens(core: Core, cache: Cache) -> int:
    """Tokens that the arena could hold if this namespace had it alone. A single long prompt must need less."""
    space, bounds = core.chunks.spaces[cache.digest], core.bounds
    slot_bytes = [part.slot_bytes for part in space.parts]
    chunks = chunks_that_fit(slot_bytes, slab_bytes=bounds.slab_bytes, slabs=bounds.arena_bytes // bounds.slab_bytes)
    return chunks * space.geometry.chunk_tokens


def map_failed(core: Core, mover: Mover, report: MapFailed) -> None:
    cache = mover.caches.get(report.cache)
    if cache is None:
        return
    if waiting := cache.take_waiting():
        core.refuse(*waiting, RequestError(report.code, report.message))
    forget_cache(core, cache)


def unmapped(core: Core, mover: Mover, report: Unmapped) -> None:
    cache = mover.caches.get(report.cache)
    if cache is None or cache.state != "unmapping":
        return
    assert not cache.jobs
    _answer_unregistered(core, cache)
    core.log("cache unregistered", ("cache", cache.number), ("session", cache.session.number))
    forget_cache(core, cache)


def map_overdue(core: Core, number: int) -> None:
    """Kills a mover that had the time to start and to map. The registering client is answered when it has been
    reaped."""
    kill(core, core.caches[number].mover, f"did not map cache {number}")


def unmap_overdue(core: Core, number: int, now_ns: int) -> None:
    """Kills a mover that did not unmap a cache in time. While the cache has jobs, the deadline is set anew: jobs end by
    their own deadlines or were cancelled, and a mover that does not end them is killed for that."""
    cache = core.caches[number]
    assert cache.state == "unmapping"
    if cache.jobs:
        transfers.await_unmapped(core, cache, now_ns)
    else:
        kill(core, cache.mover, f"did not let cache {number} go")


def forget_cache(core: Core, cache: Cache) -> None:
    """Forgets a cache that its mover no longer maps."""
    core.caches.remove(cache)
    awaits.cache_goes(core, cache)
    core.timers.cancel("map", cache.number)
    core.timers.cancel("unmap", cache.number)
    space = core.chunks.spaces.get(cache.digest)
    if space is not None:
        space.cache_left()
        if not space.caches and not space.nodes:  # a namespace without chunks or caches fixes no shape
            for lease in [lease for lease in core.leases.values() if lease.space is space]:
                end_lease(core, lease)  # it awaited a prompt of which nothing has come
            core.chunks.clear(space, "cleared")
            kv_events.cleared(core, space)  # its last chunk may have gone in this event
            namespaces.left(core, space)
    drop_board(core, cache.mover, cache.session)


def forget_queued(core: Core, cache: Cache) -> bool:
    """Forgets a cache that the mover has not been told of yet, and takes its orders back. False when the mover knows
    it."""
    mover = cache.mover
    mine = [item for item in mover.queue if isinstance(item.order, MapCache) and item.order.cache == cache.number]
    if not mine:
        return False
    mover.take_back(mine)
    _forget_orders(core, mine)
    forget_cache(core, cache)
    return True


def drop_board(core: Core, mover: Mover, session: Session) -> None:
    """Drops an ended session's board with its last cache."""
    if not session.ended or session.number not in mover.boards:
        return
    if any(other.session is session for other in mover.caches.values()):
        return
    mover.boards.discard(session.number)
    queued = [item for item in mover.queue if item.board == session.number]
    mover.take_back(queued)
    if not queued:
        core.instruct(mover, DropBoard(session.number))


def _forget_orders(core: Core, orders: list[Instruct]) -> None:
    """Closes the descriptors of orders that no mover will get."""
    core.close(tuple(number for order in orders for number in order.descriptors))


def _name(mover: Mover) -> tuple[tuple[str, object], tuple[str, object]]:
    return ("mover", mover.number), ("device", mover.name)
