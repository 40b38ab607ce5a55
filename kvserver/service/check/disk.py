"""Invariants of the disk tier, in addition to those of check/memory.py."""

from collections import Counter

from kvserver.index.eviction import DIRTY, DISK, PARKED, dirty, droppable
from kvserver.index.space import ABSENT, GONE, READY, Node, Space
from kvserver.service.holdings.disk_eviction import device_of
from kvserver.service.holdings.place_owners import DiskJob
from kvserver.service.state.chunk_waits import Fetch
from kvserver.service.state.core import Core
from kvserver.service.state.disk_tier import DiskTier


def check_disk(core: Core, tier: DiskTier) -> None:
    """Raises AssertionError at the first violated invariant."""
    spaces = [*core.chunks.spaces.values(), *core.chunks.retired]
    for space in spaces:
        for node in [space.root, *space.all_nodes()]:
            _check_node(space, node)
            is_served = core.chunks.spaces.get(space.digest) is space and not (node.depth and space.is_cut(node))
            if is_served:  # others have no order: their chunks go with the last pin
                _check_orders(node)
        away = sum(node.away for node in space.all_nodes())
        assert away == space.away, "what is on disk alone is counted"
    _check_totals(core, tier, spaces)
    _check_extents(core, tier, spaces)
    _check_accounts(tier)
    _check_drains(tier)
    _check_emptying(tier)
    _check_jobs(core, tier)
    _check_fetches(core, tier)
    assert all(tier.notes.awaited.values()), "a note is waited for by somebody"
    untold = tier.notes.unnoted | tier.notes.void_later
    assert tier.notes.awaited.keys() <= untold, "no clear waits for a note that is durable"
    assert tier.notes.owed <= untold, "a clear that is not durable is told again"


def _check_node(space: Space, node: Node) -> None:
    disk = node.disk
    if disk is None:
        assert not any(child.disk is not None and (child.disk.claims or child.cold) for child in node.child_nodes())
        return
    children = list(node.child_nodes())
    assert disk.children == sum(child.disk is not None and child.disk.claims for child in children)
    assert disk.cold_children == sum(child.cold for child in children)
    bare = disk.groups != 0 and not node.in_dram and not node.pins and node.depth > 0
    assert disk.cold == (bare and disk.cold_children == len(children)), (
        "what is on disk alone, and all below it, is cold"
    )
    assert disk.keeps == (disk.groups != 0 and disk.groups & space.needed == space.needed)
    for group in range(len(space.geometry.groups)):
        extents = [disk.extents[part] if disk.extents else ABSENT for part in space.group_parts(group)]
        on_disk = bool(disk.groups >> group & 1)
        assert all((extent != ABSENT) == on_disk for extent in extents), "a group is on disk with all its shards"


def _check_orders(node: Node) -> None:
    if droppable(node):
        assert node.queued & DISK, "the order knows all extents that may go"
        assert node.disk is not None
        assert node.disk.ordered_at == device_of(node), "and it is the order of their device"
    assert node.queued & DIRTY or not dirty(node), "the order knows all that is dirty"


def _check_totals(core: Core, tier: DiskTier, spaces: list[Space]) -> None:
    """Present groups are in DRAM or on disk, clean bytes are counted, and chains are on disk from their heads on."""
    clean_bytes = held = 0
    for space in spaces:
        for node in space.all_nodes():
            lives = core.chunks.spaces.get(space.digest) is space and not space.is_cut(node)
            held += node.on_disk != 0
            clean_bytes += space.group_bytes(node.present & node.in_dram & node.on_disk)
            assert not lives or node.present == node.in_dram | node.on_disk, "what is present is somewhere"
            assert not (lives and node.on_disk) or node.state == READY
            if lives and node.on_disk and tier.chunks.chains_whole:
                parent = node.parent
                assert parent is not None
                assert parent.depth == 0 or (parent.disk and parent.disk.claims), "a chain is on disk from its head on"
    assert clean_bytes == core.chunks.clean_bytes
    assert held == tier.chunks.held


def _check_extents(core: Core, tier: DiskTier, spaces: list[Space]) -> None:
    """Every taken extent is held once, and no device holds more than its bytes."""
    tier.chunks.extents.check()
    held: Counter[int] = Counter()
    for space in spaces:
        for node in space.all_nodes():
            if node.disk is not None:
                held.update(extent for extent in node.disk.extents if extent != ABSENT)
    for job in tier.chunks.jobs.values():
        if job.kind == "write":
            held.update(job.extents)
    taken = {extent: owner for extent, _, owner in tier.chunks.extents.taken()}
    assert held == Counter(dict.fromkeys(taken, 1)), "each extent is held once"
    for extent, owner in taken.items():
        match owner:
            case Node():
                assert owner.state != GONE
                assert owner.disk is not None
                assert extent in owner.disk.extents
            case DiskJob():
                assert tier.chunks.jobs[owner.number] is owner
    for pool in tier.chunks.extents.pools:
        assert pool.slabs_total * pool.slab_bytes <= core.bounds.disk_device_bytes


def _check_accounts(tier: DiskTier) -> None:
    """Each taken extent is charged to one account. An account above its maximum, as recovery may find it, gets no
    more."""
    accounts = tier.chunks.accounts
    if accounts is None:
        return
    held: Counter[str] = Counter()
    reserved: Counter[str] = Counter()
    for extent, extent_bytes, owner in tier.chunks.extents.taken():
        assert extent_bytes > 0, extent
        if isinstance(owner, DiskJob) and owner.moves:
            continue
        (held if isinstance(owner, Node) else reserved)[accounts.of_owner(owner).name] += extent_bytes
    for account in accounts.all():
        assert account.held_bytes == held[account.name], "an account holds the extents of its chunks"
        assert account.reserved_bytes == reserved[account.name], "an account has reserved those that are written"
        assert not (account.reserved_bytes and account.lacks(0)), "nothing is written beyond a maximum"


def _check_drains(tier: DiskTier) -> None:
    """A draining device takes no writes, and a drained one holds nothing."""
    for drain in tier.drains():
        assert not tier.devices[drain.device].takes_writes
        if drain.erasing or drain.state == "drained":
            assert not tier.chunks.extents.pools[drain.device].bytes_used, "nothing is erased that somebody holds"
        assert not (drain.state == "drained" and drain.moving)


def _check_emptying(tier: DiskTier) -> None:
    """A segment that is being emptied gives no extents, unless the waiting size has taken it. Writes that were put
    aside wait for a segment that is being emptied, or for writes that are under way."""
    emptying = tier.chunks.room.emptying
    for device, pool in enumerate(tier.chunks.extents.pools):
        closed = [segment for segment in range(pool.slabs_total) if pool.is_closed(segment)]
        assert closed == [emptying[device].segment] if device in emptying and closed else not closed
    assert tier.writes.parked.keys() <= emptying.keys(), "nobody waits for a segment that nobody empties"
    writing = {job.device for job in tier.chunks.jobs.values() if job.kind == "write"}
    assert tier.writes.behind.keys() <= writing, "nobody waits for the end of writes that nobody ordered"
    for leaves in (*tier.writes.parked.values(), *tier.writes.behind.values()):
        assert all(leaf.queued & PARKED for leaf in leaves)


def _check_jobs(core: Core, tier: DiskTier) -> None:
    queued: Counter[int] = Counter()
    for number, job in tier.chunks.jobs.items():
        assert job.number == number
        assert tier.chunks.busy[job.node] is job
        assert job.node.state != GONE
        assert job.space.has(job.node)
        assert job.node.pins, "a chunk stays while it is written or read"
        if job.kind == "write":
            queued[job.device] += job.bytes
            assert job.node.disk is not None
            assert job.node.disk.written
    assert len(tier.chunks.busy) == len(tier.chunks.jobs)
    assert tier.mover is not None or not tier.chunks.jobs, "no job outlives its mover"
    for device in tier.devices:
        assert device.placement.queued_bytes == queued[device.number]


def _check_fetches(core: Core, tier: DiskTier) -> None:
    """Waiting fetches and their chunks refer to each other. Every queued read is waited for."""
    fetches: list[Fetch] = [lease.fetch for lease in core.leases.values() if lease.fetch is not None]
    fetches += [hold.fetch for hold in core.operators.holds.values() if hold.fetch is not None]
    fetches += [job.held.fetch for job in core.jobs.values() if job.held is not None]
    waiting: Counter[tuple[Node, Fetch]] = Counter()
    for fetch in fetches:
        for node, groups in fetch.needs.items():
            assert groups & ~node.in_dram, "nobody waits for what is there"
            assert groups & ~node.in_dram & ~node.on_disk == 0, "what is waited for can be read"
            assert node in tier.waits.reads or node in tier.chunks.busy, "what is waited for will be read"
            waiting[node, fetch] += 1
    known: Counter[tuple[Node, Fetch]] = Counter(
        (node, fetch) for node, all_ in tier.waits.waiters.items() for fetch in all_
    )
    assert known == waiting
    assert tier.waits.reads.keys() <= tier.waits.waiters.keys()
    assert all(tier.waits.lines.values()), "no line is empty"
    in_lines = [node for line in tier.waits.lines.values() for node in line]
    assert sorted(map(id, in_lines)) == sorted(map(id, tier.waits.reads)), "each read waits in one line"
    for job in core.jobs.values():
        assert (job.state == "held") == (job.held is not None), "a held retrieve has what it waits for"
        assert job.held is None or job.held.fetch.needs, "a retrieve whose chunks are there is ordered"
