"""The end of a seed: no new work begins, all work must settle, then all clients leave.

Afterwards only sealed chunks may remain, and a final death of the brain must not lose them.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvserver.tiers.extents import place_of

from . import service_view
from .disk_promises import Shard
from .engines import SimEngine
from .faults import any_planted
from .ledger import Both, servable, survivors
from .memory import Wrong
from .processes import Process, Transfer
from .remote import SimRemoteMover

if TYPE_CHECKING:
    from .world import World

ROUNDS = 400
DRAIN_ROUNDS = 4000
"""Rounds while a device or a segment is emptied: with an arena of four slabs, chunks are given up one by one.

ROUNDS is the limit for all other work in flight once no new work begins.
"""
MOVER_STEPS = 200
LONG_WAIT_MS = 60_000
LONG_WAITS = 2 * 24 * 60
"""A warm may wait for 10 minutes. A segment may be as large as the daily budget, which comes back in 25 hours at most.
"""


def drain(world: "World") -> None:
    """Checks the quiet end. All requests are answered and all transfers settled; without clients only sealed chunks are
    left. These survive a restart of the brain, and Clear removes them.
    """
    world.be_calm()
    world.grow(world.swarm.bounds.arena_bytes // world.swarm.bounds.slab_bytes)
    for process in _processes(world):
        process.stalled = False
    _until(world, lambda: _all_settled(world), "requests are answered and transfers settled")
    for process in _processes(world):
        process.die()
    _until_idle(world)
    service_view.check_idle(world.shell.service, world.ledger)
    for mover in world.supervisor.movers.values():
        if isinstance(mover, SimRemoteMover):
            mover.stopped = False  # nobody notices it while its store is down
    _until(world, lambda: service_view.has_told(world.shell.service), "other servers were told")
    world.shell.promises.our_word.check_end(world.stores)
    _until(world, lambda: not _may_give_up(world), "no tenant has more on disk than its maximum, and may give it up")
    drained = "what is drained is empty, or waits for its day"
    _until(world, lambda: service_view.drains_are_over(world.shell.service), drained, DRAIN_ROUNDS)
    for mover in world.supervisor.movers.values():
        mover.stopped = False  # nobody notices one that owes no answer, and its devices may be well again
    if world.shell.descriptors:
        raise Wrong(f"descriptors {list(world.shell.descriptors)} were never closed")
    _restart(world)
    if world.rng.random() < 0.5:
        _bring_devices_back(world)
    _clear_everything(world)
    if world.devices.away:
        _bring_devices_back(world)
        service_view.check_empty(world.shell.service, world.ledger)
    world.count_what_the_brain_counted()
    if world.counts["shards with other bytes"] and not any_planted(world):
        raise Wrong("shards were found with other bytes, and no fault has changed any")


def _until_noted(world: "World") -> None:
    """Otherwise the next brain may see an epoch that it did not know, and drop what it has."""

    def are_settled() -> bool:
        stores = world.stores.items()
        service = world.shell.service
        return all(service_view.remote_is_settled(service, name, s.epochs, s.damaged) for name, s in stores)

    _until(world, are_settled, "the epochs of remote stores are known, and nothing is under way there")
    _until(world, lambda: service_view.notes_are_durable(world.shell.service), "every note is durable")


def _until_idle(world: "World") -> None:
    """Sessions, jobs and leases must be gone soon. Only waits that may be long get more time, and they must end too."""
    gone = "sessions, caches, jobs, leases and pins are gone"
    rounds = DRAIN_ROUNDS if service_view.moves_records(world.shell.service) else ROUNDS
    for _ in range(LONG_WAITS):
        _until(world, lambda: service_view.is_idle(world.shell.service) or _may_wait_long(world), gone, rounds)
        if service_view.is_idle(world.shell.service):
            return
        world.counts["long waits in the end"] += 1
        world.tick_after(LONG_WAIT_MS)
    raise Wrong(
        f"after {LONG_WAITS} minutes a warm or a segment still waits: {service_view.leftovers(world.shell.service)}"
    )


def _may_wait_long(world: "World") -> bool:
    return service_view.may_wait_long(world.shell.service, world.now_ns)


def _may_give_up(world: "World") -> set[str]:
    """Accounts above their disk maximum that own something evictable: a chunk that no chunk held only in DRAM depends
    on.
    """
    quotas, service = world.shell.promises.quotas, world.shell.service
    over = quotas.over_maximum(service_view.on_disk(service))
    return over & {quotas.account_of(digest) for digest in service_view.may_leave_disk(service)} if over else over


def _restart(world: "World") -> None:
    """kill -9 of an idle brain, then of the whole server. Every prefix must be served again as far as the remaining
    state allows: first ledger and devices, then devices alone.
    """
    for wiped in (False, True):
        _until_noted(world)
        service, ledger = world.shell.service, world.ledger
        kept = Both(ledger, _lasting(world))
        kept.keep_only(survivors(ledger, world.shapes) if not wiped else set())
        prefixes = service_view.servable_prefixes(service)
        world.brain_died(wiped=wiped)
        _until(world, lambda: service_view.disk_recovered(world.shell.service), "what is on disk is in the index")
        for digest, keys in prefixes:
            after = service_view.servable_chunks_of(world.shell.service, digest, keys)
            split = [keys[at : at + 32] for at in range(0, len(keys), 32)]
            wanted = servable(kept, world.shapes[digest], digest, split)
            counters = (
                world.shell.service.counters
            )  # a drain goes on, and may evict to read chunks that are only on disk
            gave_way = counters.evictions or counters.disk_evictions or service_view.index_is_full(world.shell.service)
            left_out = service_view.is_left_out(world.shell.service, digest, world.shell.namespaces_most)
            if after < wanted and not (gave_way or left_out):
                raise Wrong(f"after a restart {after} chunks of a prefix of {len(split)} are servable, not {wanted}")
            world.counts["prefixes served again from disk" if wiped else "prefixes served again"] += after > 0


def _lasting(world: "World") -> set[Shard]:
    """The shards on devices that are there, except in namespaces made void for one of their prefixes."""
    on_disk, given_up = service_view.on_disk(world.shell.service), world.devices.given_up
    return {
        name
        for name, (extent, generation) in on_disk.items()
        if generation > given_up.get(name[0], 0) and place_of(extent).device not in world.devices.away
    }


def _bring_devices_back(world: "World") -> None:
    """Nothing that was cleared while a device was away is served again from it."""
    if not world.devices.away:
        return
    world.devices.away.clear()
    world.brain_died(wiped=True)
    _until(world, lambda: service_view.disk_recovered(world.shell.service), "what is on disk is in the index")
    world.voided.check(service_view.on_disk(world.shell.service), are_owed=False)
    world.counts["devices brought back in the end"] += 1


def _clear_everything(world: "World") -> None:
    engine = SimEngine(world, "last", *next(iter(world.shapes.items())))
    world.engines = [engine]
    last = engine.scheduler
    last.registers = False
    world.calm = False
    last.act()
    world.calm = True
    _until(world, lambda: last.session != 0, "a last client is welcome")
    for digest in world.shapes:
        last.clear(digest)
    _until(world, lambda: _all_settled(world), "namespaces are cleared")
    service_view.check_empty(world.shell.service, world.ledger)
    world.brain_died(wiped=True)
    _until(world, lambda: service_view.disk_recovered(world.shell.service), "what is on disk is in the index")
    service_view.check_empty(world.shell.service, world.ledger)


def _until(world: "World", holds: Callable[[], bool], what: str, rounds: int = ROUNDS) -> None:
    """Calm rounds: messages arrive, processes settle, movers work, time passes. Stopped movers stay stopped."""
    for _ in range(rounds):
        if holds():
            return
        while world.deliver_something():
            pass
        for engine in world.engines:
            for process in engine.processes:
                process.act()
        while world.supervisor.busy:
            world.supervisor.step()
        for mover in list(world.supervisor.movers.values()):
            for _ in range(MOVER_STEPS):
                if mover.stopped or not mover.busy:
                    break
                mover.step()
        world.tick_after(world.swarm.ms(30))
    left = [transfer.request for transfer in _transfers(world)]
    service = world.shell.service
    raise Wrong(
        f"after {rounds} calm rounds it is not so that {what}: "
        f"{world.shell.promises.unanswered()} {left} {service_view.leftovers(service)}"
    )


def _processes(world: "World") -> list[Process]:
    return [process for engine in world.engines for process in engine.processes if process.alive]


def _transfers(world: "World") -> list[Transfer]:
    return [transfer for process in _processes(world) for transfer in process.transfers]


def _all_settled(world: "World") -> bool:
    return not (world.mail or world.gone or _transfers(world) or world.shell.promises.unanswered())
