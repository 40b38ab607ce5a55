"""The simulator's only view into the service: compares it with the ledger, and checks that it is idle."""

from collections import Counter
from dataclasses import replace
from random import Random

from kvserver.config.remotes import Remote
from kvserver.index.coverage import servable_chunks
from kvserver.index.eviction import droppable
from kvserver.index.space import ABSENT, READY, Node
from kvserver.service.holdings.disk_eviction import DiskRoom, Emptying
from kvserver.service.holdings.place_owners import SEALED
from kvserver.service.requests import kv_events
from kvserver.service.service import Service
from kvserver.service.state.core import Core
from kvserver.service.state.disk_tier import DiskTier
from kvserver.service.state.operator_state import Hold
from kvserver.service.state.remote_tier import FetchJob, PutJob
from kvserver.tiers.extents import place_of
from kvserver.tiers.records import NO_GROUP
from kvserver.tiers.slots import SLOT_ALIGN, SlotPool
from kvserver.wire.orders import Moved

from .content import block_of, path_of
from .disk import Devices
from .ledger import Ledger
from .memory import Arena, Wrong
from .shapes import Shape


def _core(service: Service) -> Core:
    return service._core


def session_number(service: Service, token: bytes) -> int:
    return _core(service).sessions.by_token[token].number


def knows_peer(service: Service, peer: int) -> bool:
    return peer in _core(service).sessions.by_peer


def namespaces(service: Service) -> list[bytes]:
    return list(_core(service).chunks.spaces)


def namespaces_with_chunks(service: Service) -> set[bytes]:
    return {space.digest for space in _core(service).chunks.spaces.values() if space.nodes}


def leases(service: Service) -> set[int]:
    return set(_core(service).leases)


def awaiting(service: Service) -> set[int]:
    """Retrieves that wait for pledged chunks."""
    return {number for number, job in _core(service).jobs.items() if job.awaiting is not None}


def pledges(service: Service) -> set[int]:
    return set(_core(service).pledges)


def sessions(service: Service) -> set[int]:
    return set(_core(service).sessions)


def has_cache(service: Service, number: int, peer: int) -> bool:
    """True if the peer's session has this cache registered."""
    core = _core(service)
    cache = core.caches.get(number)
    return cache is not None and cache.state == "mapped" and core.sessions.by_peer.get(peer) is cache.session


def takes_jobs(service: Service, number: int) -> bool:
    """True if neither this cache nor its session forbids another job."""
    core = _core(service)
    cache = core.caches.get(number)
    return (
        cache is not None
        and cache.state == "mapped"
        and cache.mover.state == "ready"
        and len(cache.session.jobs) < core.bounds.jobs_max
    )


def slots_being_written(service: Service, job: int) -> list[int]:
    """Slots that are sealed if this job succeeds: those that have not been taken from it."""
    pendings = _core(service).chunks.pendings.values()
    return [pending.slots[part] for pending in pendings for part, state in pending.parts.items() if state == job]


def remote_slots(service: Service, job: int, now_ns: int) -> list[int]:
    """Slots that the end of a read from a remote store will seal: none if its epoch does not count any more."""
    tier = next((tier for tier in _core(service).remotes if job in tier.jobs), None)
    fetch = tier.jobs[job] if tier is not None else None
    if tier is None or not isinstance(fetch, FetchJob):
        return []
    known = tier.epochs.get(fetch.pursuit.space.digest)
    if known is None or known.owes_clear or known.lease.epoch(now_ns / 1e9) != fetch.pursuit.epoch:
        return []
    return slots_being_written(service, job)


def remote_of(service: Service, mover: int) -> Remote:
    """The remote store that a mover serves."""
    (tier,) = (tier for tier in _core(service).remotes if tier.mover is not None and tier.mover.number == mover)
    return tier.remote


def remote_is_settled(service: Service, name: str, epochs: dict[bytes, int], damaged: set[bytes]) -> bool:
    """Nothing is under way to or from a remote store, and the brain knows the epochs that it has. damaged: namespaces
    whose note has to be replaced first."""
    (tier,) = (tier for tier in _core(service).remotes if tier.name == name)
    ours = {digest: space.epochs.get(name) for digest, space in _core(service).chunks.spaces.items()}
    at_rest = not any(isinstance(job, FetchJob | PutJob) for job in tier.jobs.values()) and not tier.clears_owed
    return at_rest and not tier.queue and ours.items() <= epochs.items() and damaged.isdisjoint(ours)


def has_told(service: Service) -> bool:
    """Nothing of namespaces that are held waits to be told to other servers."""
    core = _core(service)
    return not any(
        known.announcements.untold
        for tier in core.remotes
        for digest, known in tier.epochs.items()
        if digest in core.chunks.spaces
    )


def slots_being_read(service: Service, moved: Moved) -> list[int]:
    """Slots that the end of a read will seal: those of complete groups, if their chunk is still held."""
    tier = _core(service).disk
    job = tier.chunks.jobs.get(moved.job) if tier is not None else None
    if job is None or job.kind != "read":
        return []
    if _core(service).chunks.spaces.get(job.space.digest) is not job.space or job.node.state != READY:
        return []
    bad = {job.space.parts[job.parts[fault.item]].group for fault in moved.faults}
    return [slot for part, slot in zip(job.parts, job.slots, strict=True) if job.space.parts[part].group not in bad]


def on_disk(service: Service) -> dict[tuple[bytes, bytes, int, int], tuple[int, int]]:
    """(namespace, key, group, shard) -> (extent, generation) of every shard the service lists on disk."""
    found: dict[tuple[bytes, bytes, int, int], tuple[int, int]] = {}
    for space in _core(service).chunks.spaces.values():
        for node in space.nodes.values():
            if node.disk is not None and not space.is_cut(node):
                for part, extent in zip(space.parts, node.disk.extents, strict=False):
                    if extent != ABSENT:
                        name = (space.digest, node.key, part.group, part.shard)
                        found[name] = (extent, node.disk.generation)
    return found


def parked_writes(service: Service) -> set[bytes]:
    """Namespaces with a chunk whose write waits until a segment is empty. Room for it was made already."""
    tier = _core(service).disk
    return {space.digest for leaves in tier.writes.parked.values() for space in leaves.values()} if tier else set()


def looked_for(service: Service) -> set[bytes]:
    """Namespaces whose chunks are looked for in remote stores. Room is made when one of them is read."""
    return {pursuit.space.digest for tier in _core(service).remotes for pursuit in tier.pursuits}


def disk_shortages(service: Service) -> dict[str, int]:
    """Account -> number of extents refused to it."""
    tier = _core(service).disk
    accounts = tier.chunks.accounts if tier is not None else None
    return {account.name: account.refused_slots for account in accounts.all()} if accounts is not None else {}


def may_leave_disk(service: Service) -> set[bytes]:
    """Namespaces with at least one evictable chunk on disk."""
    return {
        space.digest
        for space in _core(service).chunks.spaces.values()
        if any(droppable(node) and not space.is_cut(node) for node in space.nodes.values())
    }


def clears_are_owed(service: Service) -> bool:
    """A clear is not yet noted on any disk, and its caller was told so."""
    tier = _core(service).disk
    return tier is not None and bool(tier.notes.owed)


def notes_are_durable(service: Service) -> bool:
    """Every clear and every namespace is noted on a disk. Records of other namespaces are void for the next brain."""
    tier = _core(service).disk
    return tier is None or not (tier.notes.owed or tier.notes.unnoted)


def is_draining(service: Service) -> bool:
    """True while a device is being emptied."""
    tier = _core(service).disk
    return tier is not None and any(drain.state == "draining" for drain in tier.drains())


def moves_records(service: Service) -> bool:
    """A device or a segment is being emptied. Each chunk may take the segment's patience."""
    tier = _core(service).disk
    return is_draining(service) or (tier is not None and bool(tier.chunks.room.emptying))


def disk_is_recovered(service: Service) -> bool:
    tier = _core(service).disk
    return tier is not None and tier.recovered


def disk_room(service: Service) -> DiskRoom | None:
    tier = _core(service).disk
    return tier.chunks.room if tier is not None else None


def told(service: Service) -> set[tuple[bytes, bytes, str]]:
    """(namespace, key, tier) of all chunks that subscribers should know."""
    return {
        (space.digest, node.key, tier)
        for space in _core(service).chunks.spaces.values()
        for node in space.nodes.values()
        for tier, groups in (("dram", node.in_dram), ("disk", node.on_disk))
        if kv_events.holds(space, groups)
    }


def untold(service: Service) -> set[tuple[bytes, bytes]]:
    """(namespace, key) of chunks whose events are still to be sent."""
    return {(space.digest, node.key) for space, nodes in _core(service).untold for node in nodes}


def disk_readable(service: Service) -> bool:
    tier = _core(service).disk
    return tier is not None and tier.readable


def disk_recovered(service: Service) -> bool:
    tier = _core(service).disk
    return tier is None or tier.recovered


def fullest_device(service: Service) -> int:
    """The device with most bytes in use: its drain has most to do."""
    tier = _core(service).disk
    used = [pool.bytes_used for pool in tier.chunks.extents.pools] if tier is not None else [0]
    return used.index(max(used))


def index_is_full(service: Service) -> bool:
    """The index is full, so recovery may have left chunks out."""
    core = _core(service)
    return core.chunks.chunks >= core.bounds.chunks_max


def is_left_out(service: Service, digest: bytes, most: int) -> bool:
    """Other namespaces had taken all places in the index. One of them may have left since, because another server has
    cleared it. most: the most namespaces that the index has had."""
    core = _core(service)
    return digest not in core.chunks.spaces and most == core.bounds.namespaces_max


def drains_are_over(service: Service) -> bool:
    """Every draining device is empty or waits for the next day's budget, and the service is idle."""
    tier = _core(service).disk
    drains = tier.drains() if tier is not None else ()
    return all(drain.state == "drained" or drain.waits == "budget" for drain in drains) and is_idle(service)


def is_disk_mover(service: Service, number: int) -> bool:
    tier = _core(service).disk
    return tier is not None and tier.mover is not None and tier.mover.number == number


def digest_counts(service: Service) -> tuple[Counter[str], int]:
    """(tier -> shards with other bytes than were stored, shards that were retrieved without a comparison)."""
    mismatches: Counter[str] = Counter()
    for (tier, _, _), count in service.counters.digest_mismatches.items():
        mismatches[tier] += count
    return mismatches, service.counters.shards_unverified


def holds_back(service: Service, peer: int, request_id: int) -> bool:
    """True if this retrieve waits for its chunks."""
    return any(
        job.is_waiting and (job.peer, job.request_id) == (peer, request_id) for job in _core(service).jobs.values()
    )


def compare_with_devices(service: Service, devices: Devices, shapes: dict[bytes, Shape]) -> None:
    """Every chunk that the service lists on disk is there, with right bytes unless a fault damaged them."""
    for (digest, key, group, shard), (extent, generation) in on_disk(service).items():
        place = place_of(extent)
        stored = devices.records.get((place.device, place.offset))
        if stored is None:
            raise Wrong(f"chunk {path_of(key)} is said to be at {place}, where nothing is")
        record = stored.record
        if (record.namespace, record.key, record.group, record.shard) != (digest, key, group, shard):
            raise Wrong(f"chunk {path_of(key)} is said to be at {place}, where {record} is")
        if record.generation != generation:
            raise Wrong(f"chunk {path_of(key)} at {place} has generation {record.generation}, not {generation}")
        places = range(shapes[digest].blocks_per_chunk(group))
        if not stored.fault and stored.blocks != [block_of(digest, key, group, shard, place) for place in places]:
            raise Wrong(f"chunk {path_of(key)} was written to disk with other bytes than its own")


def sealed_slots(service: Service) -> dict[int, tuple[bytes, bytes, int, int]]:
    """Offset -> (namespace, key, group, shard) of every sealed shard and every mark in the service."""
    chunks = _core(service).chunks
    sealed: dict[int, tuple[bytes, bytes, int, int]] = {}
    for space in chunks.spaces.values():
        for node in space.nodes.values():
            for part, offset in zip(space.parts, node.slots, strict=False):
                if offset != ABSENT and not space.is_cut(node):
                    sealed[offset] = (space.digest, node.key, part.group, part.shard)
    for node, pending in chunks.pendings.items():
        for part, state in pending.parts.items():
            if state == SEALED:
                shape = pending.space.parts[part]
                sealed[pending.slots[part]] = (pending.space.digest, node.key, shape.group, shape.shard)
    for space in chunks.spaces.values():
        for node in space.nodes.values():
            if node in chunks.marks and not space.is_cut(node):
                sealed[chunks.marks.places[node]] = (space.digest, node.key, NO_GROUP, 0)
    return sealed


def going(service: Service) -> list[int]:
    """Offsets of chunks that were cleared or cut off, and of their marks, that are not withdrawn yet."""
    cleared = [node for space in _core(service).chunks.forgetting for node in space.doomed.values()]
    return _offsets(service, cleared) + going_of_cuts(service)


def going_of_cuts(service: Service) -> list[int]:
    """The same for chunks of namespaces that live."""
    spaces = _core(service).chunks.spaces.values()
    return _offsets(service, [node for space in spaces for node in space.nodes.values() if space.is_cut(node)])


def _offsets(service: Service, nodes: list[Node]) -> list[int]:
    marks = _core(service).chunks.marks
    slots = [offset for node in nodes for offset in node.slots if offset != ABSENT]
    return slots + [marks.places[node] for node in nodes if node in marks]


def servable_chunks_of(service: Service, digest: bytes, keys: bytes) -> int:
    space = _core(service).chunks.spaces.get(digest)
    return servable_chunks(space, keys) if space is not None else 0


def servable_prefixes(service: Service) -> dict[tuple[bytes, bytes], int]:
    """(namespace, packed keys) of each chunk's prefix -> number of chunks a lookup would find."""
    found: dict[tuple[bytes, bytes], int] = {}
    for digest, space in _core(service).chunks.spaces.items():
        for node in space.nodes.values():
            if space.is_cut(node):
                continue
            keys = b"".join(before.key for before in space.chain(node))
            found[digest, keys] = servable_chunks(space, keys)
    return found


def compare_with_ledger(
    service: Service, ledger: Ledger, rng: Random, arena: Arena, shapes: dict[bytes, Shape]
) -> None:
    """The ledger matches the service's state exactly. A few sealed slots are read to check their bytes."""
    sealed = sealed_slots(service)
    if len(sealed) + len(going(service)) != len(ledger.records) or any(
        ledger.held.get(name) != offset for offset, name in sealed.items()
    ):
        raise Wrong(f"the service holds {sealed}, the ledger {ledger.held}")
    slots = [(offset, name) for offset, name in sealed.items() if name[2] != NO_GROUP]
    if slots:
        for _ in range(3):
            offset, (digest, key, group, shard) = rng.choice(slots)
            places = range(shapes[digest].blocks_per_chunk(group))
            if arena.meant(offset) != [block_of(digest, key, group, shard, place) for place in places]:
                raise Wrong(f"slot {offset} of a sealed chunk holds {arena.slot(offset)}")


def forge_rival(service: Service, ledger: Ledger) -> None:
    """Adds what a lost withdrawal would leave: an older entry for a shard that is now held elsewhere."""
    chunks = _core(service).chunks
    for record in list(ledger.records.values()):
        if record.generation:
            if record.group == NO_GROUP:
                offset = (
                    chunks.marks.take(Node(b"", None, 0, 0)) if len(chunks.marks.places) < chunks.chunks_max else None
                )
            else:
                offset = SlotPool.allocate(chunks.pool, record.slot_bytes, None)  # nobody's, so no account is charged
            units = (
                range(offset // SLOT_ALIGN, (offset + record.slot_bytes) // SLOT_ALIGN) if offset is not None else ()
            )
            if offset is not None and not any(unit in ledger.units for unit in units):
                ledger.put(record._replace(offset=offset, generation=record.generation - 1))
            return


def leftovers(service: Service) -> str:
    core = _core(service)
    return (
        f"sessions={len(core.sessions)} caches={len(core.caches)} jobs={len(core.jobs)} leases={len(core.leases)} "
        f"engines={len(core.sessions.engines)} pendings={len(core.chunks.pendings)} orphans={len(core.chunks.orphans)} "
        f"retired={len(core.chunks.retired)} peers={len(core.sessions.by_peer)} "
        f"movers={[(m.number, m.state, len(m.caches), len(m.boards), len(m.queue)) for m in core.movers.values()]}"
    )


def is_idle(service: Service) -> bool:
    core = _core(service)
    empties = core.disk is not None and (core.disk.writes.parked or core.disk.chunks.room.emptying)
    return _is_at_rest(core) and not core.operators.holds and not empties


def may_wait_long(service: Service, now_ns: int) -> bool:
    """The service is idle except for waits that may be long: a warm waits for room in DRAM that others keep, or a
    segment that is emptied waits for the day's budget.
    """
    core, tier = _core(service), _core(service).disk
    if tier is None or not _is_at_rest(core):
        return False
    warms = all(hold.kind == "warm" and _is_starved(core, tier, hold) for hold in core.operators.holds.values())
    emptying = tier.chunks.room.emptying
    over_budget = all(_is_over_budget(tier, going, now_ns) for going in emptying.values())
    return warms and over_budget and tier.writes.parked.keys() <= emptying.keys()


def _is_at_rest(core: Core) -> bool:
    """No client is there, and nothing is under way between DRAM and disk."""
    tables = (
        core.sessions,
        core.caches,
        core.jobs,
        core.leases,
        core.sessions.engines,
        core.sessions.by_token,
        core.pledges,
    )
    tier = core.disk
    disk_busy = tier is not None and (tier.chunks.jobs or tier.writes.chain or not tier.recovered)
    moves = (job for tier in core.remotes for job in tier.jobs.values())
    remote_busy = any(isinstance(job, FetchJob | PutJob) for job in moves)
    movers_ready = all(mover.state == "ready" for mover in core.movers.values())
    dram_busy = core.chunks.pendings or core.chunks.forgetting or core.scrub.job is not None
    foretelling = any(tier.foretellings.rows for tier in core.remotes)
    return not (any(tables) or foretelling or dram_busy or disk_busy or remote_busy) and movers_ready


def _is_starved(core: Core, tier: DiskTier, hold: Hold) -> bool:
    """The hold still needs reads, and its account found no slot for one."""
    accounts = core.chunks.accounts
    account = accounts.of_space(hold.space).name if accounts is not None else ""
    return hold.fetch is not None and account in tier.waits.starved


def _is_over_budget(tier: DiskTier, going: Emptying, now_ns: int) -> bool:
    """The device's budget of the day refuses the move of a chunk out of the segment."""
    placement = tier.devices[going.device].placement
    moves = (space.group_bytes(node.on_disk) for node, space in going.moving.items())
    return any(placement.refusal(count, now_ns) == "budget" for count in moves)


def end_scrubs(service: Service) -> None:
    """No further scrub begins: it would keep the service from coming to rest."""
    _core(service).reload(replace(_core(service).bounds, scrub_bytes_per_s=0))


def check_idle(service: Service, ledger: Ledger) -> None:
    core, chunks = _core(service), _core(service).chunks
    if service.counters.sessions_opened != service.counters.sessions_closed:
        raise Wrong("all clients are gone, and not every session that was opened was closed")
    if (
        chunks.orphans
        or core.pledges.by_key
        or core.pledges.taken
        or chunks.retired
        or core.sessions.by_peer
        or any(m.boards or m.caches or m.jobs or m.queue for m in core.movers.values())
    ):
        raise Wrong(f"all clients are gone, and something is left: {leftovers(service)}")
    if any(node.pins for space in chunks.spaces.values() for node in space.nodes.values()):
        raise Wrong("all clients are gone, and something is pinned")
    if any(node.state != READY for space in chunks.spaces.values() for node in space.nodes.values()):
        raise Wrong("all clients are gone, and a chunk still waits to become servable")
    if {offset for offset, _, _ in chunks.pool.taken()} != ledger.slots:
        raise Wrong("all clients are gone, and a slot is taken that no sealed chunk holds")


def check_empty(service: Service, ledger: Ledger) -> None:
    chunks = _core(service).chunks
    if chunks.pool.bytes_used or chunks.chunks or ledger.records:
        raise Wrong(f"everything is cleared, and {chunks.chunks} chunks, {chunks.pool.bytes_used} bytes are left")
    tier = _core(service).disk
    if tier is not None and (tier.chunks.extents.bytes_used or tier.chunks.held):
        raise Wrong(f"everything is cleared, and {tier.chunks.extents.bytes_used} bytes of extents are left")
