"""Invariants of the whole service. The simulator checks them after every event."""

from collections import Counter

from kvserver.index.arc import entry_mark
from kvserver.index.eviction import evictable
from kvserver.index.space import ABSENT, GONE, READY, WAITING, Node, Space
from kvserver.service.check.arc import check_arc
from kvserver.service.check.disk import check_disk
from kvserver.service.check.pledges import check_pledges
from kvserver.service.check.remote import check_remote, fetches
from kvserver.service.holdings.place_owners import SEALED, UNASSIGNED, DiskJob, Orphan, Pending
from kvserver.service.state.core import Core
from kvserver.service.state.remote_tier import PutJob


def check(core: Core) -> None:
    """Raises AssertionError at the first violated invariant."""
    _check_tree(core)
    _check_slots(core)
    _check_accounts(core)
    _check_marks(core)
    _check_pins(core)
    _check_holds(core)
    _check_tables(core)
    _check_timers(core)
    check_pledges(core)
    if core.disk is not None:
        check_disk(core, core.disk)
    for store in core.remotes:
        check_remote(store)
    if core.chunks.arc is not None:
        check_arc(core.chunks, core.chunks.arc)


def _spaces(core: Core) -> list[Space]:
    return [*core.chunks.spaces.values(), *core.chunks.retired]


def _check_tree(core: Core) -> None:
    """Parents and children agree; ready nodes are closed under prefixes and hold what a prefix needs."""
    total = 0
    hang_in = {node: space for space in _spaces(core) for node in space.subtree(space.root)[1:]}
    assert len(hang_in) == sum(len(space.nodes) + len(space.doomed) for space in _spaces(core))
    for space in _spaces(core):
        own = list(space.all_nodes())
        total += len(own)
        assert not space.doomed or space in core.chunks.forgetting, "what was cleared goes"
        assert space.dram_bytes == sum(space.group_bytes(node.in_dram) for node in own), "what it holds is counted"
        assert space.disk_bytes == sum(space.group_bytes(node.on_disk) for node in own)
        for node in own:
            assert (space.doomed if space.doomed.get(node.key) is node else space.nodes)[node.key] is node
            assert node.parent is not None
            assert node.depth == node.parent.depth + 1
            assert node.state in (WAITING, READY)
            tree = hang_in[node]
            assert tree is space or tree in space.cuts, "every node hangs in its tree, or is cut off from it"
            if core.chunks.spaces.get(space.digest) is space:
                assert space.is_cut(node) == (tree is not space), "the way up of a node tells whether it was cut off"
                assert tree is space or space.cut_of(node) is tree
            if tree is not space:
                assert not node.pins, "whoever pins what was cut off was moved with it"
                continue
            if node.state == READY:
                assert node.parent.state == READY, "a chunk is never servable before its parent"
                assert node.present & space.needed == space.needed, "a servable chunk has every group that it needs"
            elif node.present & space.needed == space.needed:
                assert node.parent.state == WAITING or not space.has(node.parent), (
                    "what is whole under a ready parent is ready"
                )
            for group in range(len(space.geometry.groups)):
                present = bool(node.in_dram >> group & 1)
                slots = [node.slots[part] if node.slots else ABSENT for part in space.group_parts(group)]
                assert all((slot != ABSENT) == present for slot in slots), "a group is present with all its shards"
            known = node.queued & entry_mark(node) or space in core.chunks.forgetting
            assert known or not evictable(node), "the eviction order knows all that may go"
    assert total == core.chunks.chunks
    _check_cuts(core)
    assert core.chunks.chunks <= core.bounds.chunks_max


def _check_cuts(core: Core) -> None:
    """Chunks that were cut off are being forgotten until none is left where it was."""
    for space in _spaces(core):
        rest = core.chunks.forgetting.get(space)
        is_cut = rest is not None and rest.cut is not None
        assert is_cut == (space.origin is not None), "a cut goes on until all of it was taken over"
        assert space.origin is None or space.origin.cuts.count(space) == 1
        assert all(cut.origin is space and cut in core.chunks.retired for cut in space.cuts)
        if rest is None or rest.cut is None:
            continue
        hanging = space.subtree(space.root)[1:]
        waiting = {node for node in rest.cut.todo if node.state != GONE}
        ahead = {at for node in waiting for at in space.subtree(node)}
        assert {node for node in hanging if not space.has(node)} <= ahead, "the walk comes to all that was cut off"
        assert all(node.state == WAITING and not node.present for node in space.all_nodes()), "none of it is served"


def _check_slots(core: Core) -> None:
    """Every taken slot belongs to exactly one chunk or job. A slot under a copy is never free."""
    chunks = core.chunks
    chunks.pool.check()
    held: Counter[int] = Counter()
    for space in _spaces(core):
        for node in space.all_nodes():
            held.update(slot for slot in node.slots if slot != ABSENT)
    for pending in chunks.pendings.values():
        assert pending.slots.keys() == pending.parts.keys()
        held.update(pending.slots.values())
    for slots in chunks.orphans.values():
        held.update(slots)
    reads = [job for job in core.disk.chunks.jobs.values() if job.kind != "write"] if core.disk is not None else []
    for read in reads:
        held.update(read.slots)
    taken = {offset: owner for offset, _, owner in chunks.pool.taken()}
    assert held == Counter(dict.fromkeys(taken, 1)), "each taken slot is held once"
    for offset, owner in taken.items():
        match owner:
            case Node():
                assert owner.state != GONE
                assert offset in owner.slots
            case Pending():
                assert chunks.pendings[owner.node] is owner
                assert offset in owner.slots.values()
            case Orphan():
                assert offset in chunks.orphans[owner.job]
            case DiskJob():
                assert owner in reads
    assert chunks.pool.bytes_used <= core.bounds.arena_bytes


def _check_accounts(core: Core) -> None:
    """Each taken slot is charged to one account, that of its namespace."""
    accounts = core.chunks.accounts
    if accounts is None:
        return
    held: Counter[str] = Counter()
    reserved: Counter[str] = Counter()
    for _, slot_bytes, owner in core.chunks.pool.taken():
        if isinstance(owner, DiskJob) and owner.kind == "scrub":
            continue
        (held if isinstance(owner, Node) else reserved)[accounts.of_owner(owner).name] += slot_bytes
    for account in accounts.all():
        assert account.held_bytes == held[account.name], "an account holds its slots of complete chunks"
        assert account.reserved_bytes == reserved[account.name], "an account has reserved its other slots"
    for space in _spaces(core):
        for node in space.all_nodes():
            assert accounts.of(node.tenant) is accounts.of_space(space), "a namespace has one account"


def _check_marks(core: Core) -> None:
    """The ledger leads from the root to every sealed chunk: each chunk on the way holds something or is marked."""
    chunks = core.chunks
    chunks.marks.check()
    for space in _spaces(core):
        assert space.slot_sizes == {part.slot_bytes for part in space.parts if part.pages is not None}
        for node in space.all_nodes():
            pending = chunks.pendings.get(node)
            if node.present or node in chunks.marks or (pending and SEALED in pending.parts.values()):
                parent = node.parent
                assert parent is not None
                if space.is_cut(node):
                    continue
                found = space.needed or not parent.depth or parent.present or parent in chunks.marks
                assert found, "a restart would not find what is sealed behind this chunk"
                assert node not in chunks.marks or not space.needed, "a full group makes marks needless"
    assert all(node.state != GONE for node in chunks.marks.places)


def _check_pins(core: Core) -> None:
    """Pins are exactly those of leases, running retrieves, holds, incomplete chunks, disk jobs, a scrub, and chunks
    above a cut."""
    pins: Counter[Node] = Counter()
    pins.update(lease.tail for lease in core.leases.values())
    pins.update(hold.tail for hold in core.operators.holds.values())
    pins.update(job.tail for job in core.jobs.values() if job.tail is not None)
    pins.update(core.chunks.pendings.keys())
    for rest, (space, above) in core.chunks.cut_from.items():
        assert rest in core.chunks.retired
        assert space.has(above)
        pins[above] += 1
    if core.disk is not None:
        pins.update(job.node for job in core.disk.chunks.jobs.values())
    if core.scrub.job is not None:
        pins.update(item.node for item in core.scrub.job.items)
    for store in core.remotes:
        pins.update(job.node for job in store.jobs.values() if isinstance(job, PutJob))
    nodes = (node for space in _spaces(core) for node in (space.root, *space.all_nodes()))
    counted = {node: node.pins for node in nodes if node.pins}
    assert counted == dict(pins), "pins = leases + holds + retrieves + incomplete chunks + disk jobs + scrub + cuts"
    for space in core.chunks.retired - core.chunks.forgetting.keys():
        leaves = (node for node in space.all_nodes() if node.children is None and not space.is_cut(node))
        assert all(node.pins for node in leaves), "a leaf of a cleared namespace goes with its last pin"
    assert core.chunks.pins == pins.total(), "no pin that was set is forgotten"
    for lease in core.leases.values():
        assert lease.tail.state == READY
        assert core.chunks.spaces.get(lease.space.digest) is lease.space, "no lease on a cleared namespace"
        assert lease.tail in (lease.space.root, lease.space.nodes.get(lease.tail.key))
        assert not lease.space.is_cut(lease.tail), "no lease on what was cut off"
        keys = b"".join(node.key for node in lease.space.chain(lease.tail))
        assert not lease.is_chain or keys == lease.keys_here
        assert len(lease.ranks_used) < lease.engine.ranks


def _check_holds(core: Core) -> None:
    """Held chunks are in the index, counted once, and within their bounds."""
    operators, bounds = core.operators, core.bounds
    held: Counter[Node] = Counter()
    for number, hold in operators.holds.items():
        assert hold.number == number
        assert core.chunks.spaces.get(hold.space.digest) is hold.space, "no hold on a cleared namespace"
        assert hold.tail.state == READY
        assert not hold.space.is_cut(hold.tail), "no hold on what was cut off"
        assert hold.chain == hold.space.chain(hold.tail)
        assert core.timers.deadlines()["hold", number] == hold.expires_ns
        held.update(hold.chain)
    assert {node: count for node, (count, _) in operators.held.items()} == dict(held)
    assert operators.held_bytes == sum(node_bytes for _, node_bytes in operators.held.values())
    assert operators.held_bytes <= bounds.arena_bytes * bounds.held_percent_max // 100
    assert len(operators.holds) <= bounds.holds_max


def _check_tables(core: Core) -> None:
    """Sessions, caches, movers and jobs refer to each other both ways. Whatever waits for a job has one."""
    reads = fetches(core)
    for node, pending in core.chunks.pendings.items():
        assert pending.node is node
        assert not pending.space.is_cut(node), "nothing is stored below a cut"
        assert node.state != GONE
        assert pending.parts
        for state in pending.parts.values():
            assert state in (UNASSIGNED, SEALED) or state in reads or core.jobs[state].kind == "store"
    running = core.jobs.keys() | reads
    assert running >= core.chunks.orphans.keys(), "an orphan waits for a job that still runs"
    for number, job in core.jobs.items():
        assert job.number == number
        assert core.movers[job.cache.mover.number] is job.cache.mover, "a job lives as long as its mover"
        assert number in job.cache.mover.jobs
        assert number in job.cache.jobs
        assert core.caches[job.cache.number] is job.cache
        assert job.session.ended or number in job.session.jobs
    for mover in core.movers.values():
        assert mover.jobs == {number for number, job in core.jobs.items() if job.cache.mover is mover}
        assert all(core.caches[number] is cache for number, cache in mover.caches.items())
    for number, cache in core.caches.items():
        assert cache.mover.caches[number] is cache
        assert cache.state == "unmapping" or cache.session.caches[cache.name] is cache
    if (scrub := core.scrub.job) is not None:
        assert core.movers[scrub.mover.number] is scrub.mover, "a scrub lives as long as its mover"
        assert all(item.slot == item.node.slots[item.part] for item in scrub.items), "what it reads stays there"
        assert all(item.node in item.space.all_nodes() for item in scrub.items)
    for peer, session in core.sessions.by_peer.items():
        assert peer in session.peers
        assert core.sessions[session.number] is session
    assert len(core.sessions.by_token) == len(core.sessions)
    assert sum(len(engine.sessions) for engine in core.sessions.engines.values()) == len(core.sessions)
    assert all(lease in core.leases for engine in core.sessions.engines.values() for lease in engine.leases)
    if not core.sessions:
        assert not core.leases, "no lease outlives its engine"
    for space in core.chunks.spaces.values():
        assert space.caches == sum(cache.digest == space.digest for cache in core.caches.values())


def _check_timers(core: Core) -> None:
    """Everything with a deadline has one timer, and nothing else has. Anything that waits for its mover to be reaped
    may have none."""
    core.timers.check()
    waiting = {
        **{("job", job.number): job.cache.mover for job in core.jobs.values()},
        **{("mover-start", mover.number): mover for mover in core.movers.values() if mover.state == "starting"},
        **{("map", cache.number): cache.mover for cache in core.caches.values() if cache.state == "mapping"},
        **{("unmap", cache.number): cache.mover for cache in core.caches.values() if cache.state == "unmapping"},
    }
    if core.scrub.job is not None:
        waiting["scrub", core.scrub.job.number] = core.scrub.job.mover
    if core.disk is not None and core.disk.mover is not None:
        waiting.update({("disk", number): core.disk.mover for number in core.disk.chunks.jobs})
        erasing = [drain.device for drain in core.disk.drains() if drain.erasing and drain.state == "draining"]
        waiting.update({("erase", device): core.disk.mover for device in erasing})
        if core.disk.mover.state != "starting":
            waiting.update({("recover", core.disk.mover.number): core.disk.mover} if not core.disk.recovered else {})
    for store in core.remotes:
        if store.mover is not None:
            waiting.update({("remote", number): store.mover for number in store.jobs})
    sure = {timer for timer, mover in waiting.items() if mover.state != "killed"}
    sure.update(("lease", number) for number in core.leases)
    sure.update(("hold", number) for number in core.operators.holds)
    sure.update(("pledge", number) for number in core.pledges)
    if core.disk is not None:
        sure.update(("clear", clear.number) for waits in core.disk.notes.awaited.values() for clear in waits)
    for store in core.remotes:
        sure.update(("remote-clear", clear.number) for epoch in store.epochs.values() for clear in epoch.clears)
    sure.update(("attach", session.number) for session in core.sessions.values() if not session.attached_peer)
    deadlines = core.timers.deadlines()
    assert sure <= deadlines.keys(), "nothing waits without a bound"
    assert deadlines.keys() <= sure | waiting.keys(), "nothing that is over has a timer"
    for lease in core.leases.values():
        assert deadlines["lease", lease.number] == lease.expires_ns
    deadlines_ns = [pending.deadline_ns for pending in core.chunks.pendings.values()]
    assert deadlines_ns == sorted(deadlines_ns), "the first reservation is the first to be overdue"
