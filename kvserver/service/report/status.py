"""The status document, made from the service's tables (wire/status.py explains each field)."""

from itertools import islice, zip_longest

from kvserver.index.arc import Arc
from kvserver.service.holdings.accounts import Account, Accounts
from kvserver.service.operators.server_drain import dirty_bytes
from kvserver.service.report import problems
from kvserver.service.state.core import Core
from kvserver.service.state.devices import Device
from kvserver.service.state.disk_tier import DiskTier
from kvserver.service.state.remote_tier import RemoteTier
from kvserver.service.telling.reuse import WINDOWS_HOURS, Ratios
from kvserver.transfer.layout import Layout
from kvserver.wire.admin import RELOADABLE
from kvserver.wire.status import (
    SHOWN_MAX,
    ArcStatus,
    ArenaStatus,
    CacheStatus,
    DiskStatus,
    GroupStatus,
    HoldStatus,
    MoverStatus,
    RemoteStatus,
    SessionStatus,
    SlotSize,
    Status,
    TenantStatus,
)


def status(core: Core, now_ns: int) -> Status:
    core.lookup_counts.settle()
    running = [job.kind for job in core.jobs.values()]
    arena, movers = _arena(core), _movers(core)
    disks = _disks(core.disk, now_ns) if core.disk is not None else []
    disk_state = _disk_state(core.disk) if core.disk is not None else ""
    tenants = _tenants(core.chunks.accounts) if core.chunks.accounts is not None else []
    drain, drain_waits = core.operators.drain, core.operators.drain_waits
    disk_problem = problems.disk_problem(disks, disk_state)
    uptime_s = (now_ns - core.started_ns) / 1e9
    ratios = core.reuse.ratios()
    remotes = [_remote(tier, now_ns) for tier in core.remotes]
    return Status(
        server=core.server,
        incarnation=core.incarnation,
        uptime_s=uptime_s,
        arena=arena,
        disks=disks,
        keys_touched=len(core.disk.writes.touched) if core.disk is not None else 0,
        chunks_on_disk=core.disk.chunks.held if core.disk is not None else 0,
        clean_bytes=core.chunks.clean_bytes,
        disk_state=disk_state,
        disk_problem=disk_problem,
        slot_sizes=_slot_sizes(core),
        tenants=tenants,
        arc=_arc(core.chunks.arc) if core.chunks.arc is not None else None,
        digests="on" if core.bounds.verifies else "off",
        scrub_round_s={tier: walk.round_ns / 1e9 for tier, walk in core.scrub.walks.items()},
        namespaces=len(core.chunks.spaces),
        chunks=core.chunks.chunks,
        chunks_max=core.bounds.chunks_max,
        sessions=len(core.sessions),
        caches=len(core.caches),
        caches_engine_driven=sum(cache.mode == "engine-driven" for cache in core.caches.values()),
        leases=len(core.leases),
        pledges=len(core.pledges),
        pins=core.chunks.pins,
        stores=running.count("store"),
        retrieves=running.count("retrieve"),
        movers=movers,
        shown_sessions=_sessions(core),
        shown_caches=_caches(core),
        drain=drain,
        drain_waits=drain_waits,
        dirty_bytes=dirty_bytes(core),
        drain_left=dict(core.operators.drain_left),
        holds=_holds(core, now_ns),
        held_bytes=core.operators.held_bytes,
        infinite_cache_hit_ratio={window: each.infinite for window, each in ratios.items()},
        held_ratio={window: each.held for window, each in ratios.items()},
        reuse=_reuse(ratios, uptime_s),
        settings=_settings(core),
        warnings=problems.warnings(
            arena,
            movers=movers,
            disks=disks,
            disk_problem=disk_problem,
            digests=core.bounds.verifies,
            clears_owed=len(core.disk.notes.owed) if core.disk is not None else 0,
            drain=drain,
            drain_waits=drain_waits,
            remotes=remotes,
        ),
        remote=remotes[0] if remotes else None,
        other_remotes=remotes[1:],
        troubles=problems.troubles(core.counters, tenants),
        counters=core.counters.totals(),
    )


def _arena(core: Core) -> ArenaStatus:
    pool = core.chunks.pool
    return ArenaStatus(
        total_bytes=core.bounds.arena_bytes,
        ready_bytes=pool.slabs_ready * pool.slab_bytes,
        used_bytes=pool.bytes_used,
        slab_bytes=pool.slab_bytes,
        slabs_total=pool.slabs_total,
        slabs_ready=pool.slabs_ready,
        problem=core.arena_problem,
        placement=core.arena_placement,
    )


def _remote(tier: RemoteTier, now_ns: int) -> RemoteStatus:
    epochs = [epoch.lease.epoch(now_ns / 1e9) for epoch in tier.epochs.values()]
    heard = [
        epoch is not None and known.announcements.state(epoch, now_ns) != "silent"
        for epoch, known in zip(epochs, tier.epochs.values(), strict=True)
    ]
    return RemoteStatus(
        name=tier.remote.name,
        url=tier.remote.url,
        usable=tier.usable,
        problem=tier.state.problem,
        nodes_left_alone=tier.state.nodes_left_alone,
        namespaces=len(epochs),
        namespaces_known=len(epochs) - epochs.count(None),
        namespaces_heard=sum(heard),
        looked_for=len(tier.pursuits),
        queued_chunks=len(tier.queue),
        reading_bytes=tier.fetching_bytes,
        writing_bytes=tier.putting_bytes,
        read_bytes_per_s=tier.reads.bytes_per_s if tier.reads.measured else 0.0,
        clears_owed=tier.clears_owed,
        counted=dict(tier.counts.plain) if tier.name else {},
        failures={" ".join(where): count for where, count in tier.counts.failures.items()} if tier.name else {},
    )


def _arc(arc: Arc) -> ArcStatus:
    return ArcStatus(
        recent_bytes=arc.recent.held_bytes,
        frequent_bytes=arc.frequent.held_bytes,
        target_bytes=arc.target_bytes,
        recent_ghosts=arc.recent.ghosts,
        frequent_ghosts=arc.frequent.ghosts,
        recent_ghost_hits=arc.recent.ghost_hits,
        frequent_ghost_hits=arc.frequent.ghost_hits,
    )


def _disks(tier: DiskTier, now_ns: int) -> list[DiskStatus]:
    return [_disk(tier, device, now_ns) for device in tier.devices]


def _disk(tier: DiskTier, device: Device, now_ns: int) -> DiskStatus:
    pool, placement, drain = tier.chunks.extents.pools[device.number], device.placement, device.drain
    stalled_ns, stalled_why = tier.stalled(device, now_ns)
    return DiskStatus(
        device=device.number,
        directory=device.directory,
        total_bytes=pool.slabs_total * pool.slab_bytes,
        used_bytes=pool.bytes_used,
        usable=device.is_open,
        takes_writes=device.takes_writes,
        problem=device.problem,
        said=_said(device),
        drain=drain.state if drain is not None else "",
        drain_waits=drain.waits if drain is not None else "",
        stalled_s=stalled_ns / 1e9,
        stalled_why=stalled_why,
        queued_bytes=placement.queued_bytes,
        written_bytes=placement.written_bytes,
        read_bytes=placement.read_bytes,
        faults=placement.faults,
        daily_write_bytes=placement.budget.daily_bytes,
        budget_bytes=placement.budget.left_bytes(now_ns),
        write_bytes_per_s=placement.writes.bytes_per_s if placement.writes.measured else 0.0,
        read_bytes_per_s=placement.reads.bytes_per_s if placement.reads.measured else 0.0,
    )


def _said(device: Device) -> str:
    """The state of a device in words."""
    drain = device.drain
    takes = "takes writes" if device.takes_writes else "takes no writes" if device.is_open else "cannot be used"
    if device.problem and not (drain is not None and drain.state == "drained"):
        return f"{takes}: {device.problem}"
    if drain is None:
        return takes
    return f"{drain.state}, waits for {drain.waits}" if drain.waits else drain.state


def _disk_state(tier: DiskTier) -> str:
    if not tier.readable:
        return "away"
    return "ready" if tier.recovered else "recovering"


def _reuse(ratios: dict[str, Ratios], uptime_s: float) -> str:
    """The ratios of the shortest window in words. Both count the same chunks, so they can be compared."""
    for window, (held, infinite) in ratios.items():
        hours = WINDOWS_HOURS[window]
        when = (
            "so far" if uptime_s < 3600 * hours else "in the last hour" if hours == 1 else f"in the last {hours} hours"
        )
        return f"{100 * held:.1f} % of all chunks asked for {when} were held, an infinite cache: {100 * infinite:.1f} %"
    return ""


def _settings(core: Core) -> dict[str, int | str]:
    bounds = core.bounds
    policy = {"disk_write_policy": "through" if bounds.disk_write_through else "evict"}
    return {name: policy[name] if name in policy else getattr(bounds, name) for name in RELOADABLE}


def _slot_sizes(core: Core) -> list[SlotSize]:
    pool = core.chunks.pool
    return [
        SlotSize(slot_bytes=size, slabs=slabs, slots=slabs * (pool.slab_bytes // size), slots_used=used)
        for size, (used, slabs) in islice(sorted(pool.usage().items()), SHOWN_MAX)
    ]


def _tenants(accounts: Accounts) -> list[TenantStatus]:
    on_disk = accounts.beside.all() if accounts.beside is not None else []
    return [
        TenantStatus(
            tenant=account.name,
            held_bytes=account.held_bytes,
            reserved_bytes=account.reserved_bytes,
            guaranteed_bytes=account.guaranteed_bytes,
            max_bytes=account.max_bytes,
            evicted_chunks=account.evicted_chunks,
            refused_slots=account.refused_slots,
            **(_tenant_on_disk(disk) if disk is not None else {}),
        )
        for account, disk in zip_longest(accounts.all(), on_disk)
    ]


def _tenant_on_disk(account: Account) -> dict[str, int]:
    return {
        "disk_held_bytes": account.held_bytes,
        "disk_reserved_bytes": account.reserved_bytes,
        "disk_guaranteed_bytes": account.guaranteed_bytes,
        "disk_max_bytes": account.max_bytes,
        "disk_evicted_chunks": account.evicted_chunks,
        "disk_refused_extents": account.refused_slots,
    }


def _movers(core: Core) -> list[MoverStatus]:
    return [
        MoverStatus(
            mover=mover.number,
            device=mover.name,
            state=mover.state,
            pid=mover.pid,
            backend=mover.backend,
            facts=mover.facts,
            caches=len(mover.caches),
            jobs=len(mover.jobs),
        )
        for mover in islice(core.movers.values(), SHOWN_MAX)
    ]


def _holds(core: Core, now_ns: int) -> list[HoldStatus]:
    return [
        HoldStatus(
            hold=hold.number,
            kind=hold.kind,
            namespace=hold.space.digest.hex(),
            key=hold.tail.key.hex(),
            chunks=len(hold.chain),
            chunks_away=len(hold.fetch.needs) if hold.fetch is not None else 0,
            left_s=max(0, hold.expires_ns - now_ns) / 1e9,
        )
        for hold in islice(core.operators.holds.values(), SHOWN_MAX)
    ]


def _sessions(core: Core) -> list[SessionStatus]:
    return [
        SessionStatus(
            session=session.number,
            engine=session.engine.name,
            epoch=session.engine.epoch,
            rank=session.rank,
            software=session.software,
            attached=session.attached_peer != 0,
            caches=len(session.caches),
            jobs=len(session.jobs),
        )
        for session in islice(core.sessions.values(), SHOWN_MAX)
    ]


def _caches(core: Core) -> list[CacheStatus]:
    return [
        CacheStatus(
            cache=cache.number,
            name=cache.name,
            session=cache.session.number,
            owner=f"{cache.session.engine.name} rank {cache.session.rank}",
            namespace=cache.digest.hex(),
            mover=cache.mover.number,
            mode=cache.mode,
            state=cache.state,
            jobs=len(cache.jobs),
            chunk_tokens=cache.layout.geometry.chunk_tokens,
            groups=_groups(cache.layout),
        )
        for cache in islice(core.caches.values(), SHOWN_MAX)
    ]


def _groups(layout: Layout) -> list[GroupStatus]:
    return [
        GroupStatus(
            kind=agreed.kind,
            block_tokens=agreed.block_tokens,
            blocks=own.blocks,
            window_tokens=agreed.window_tokens,
            regions=sum(regions for regions, _ in own.pages),
            page_bytes=max(page_bytes for _, page_bytes in own.pages),
            shard=own.shard,
            shards=agreed.shards,
            shard_bytes=own.shard_bytes,
        )
        for agreed, own in zip(layout.geometry.groups, layout.groups, strict=True)
    ]
