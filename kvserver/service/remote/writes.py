"""Writes from DRAM to a remote store: which chunks, in which order, and when not.

With `reuse` a chunk is written when it is found again, or stored where any server had stored it before; with `through`
when it is stored. Parents go first, because a chunk without those before it is of no use to anybody. Nothing waits for
a write: a chunk that could not be written is offered again when it is used again. What came from one store goes to
no other: it may have been cleared there meanwhile (decision 0022).
"""

from array import array

from kvserver.index.eviction import STORED
from kvserver.index.space import Node, Space
from kvserver.remote.chunk_value import SHARDS_MAX, Head, Shard, encode, fragment_bytes_for
from kvserver.service.remote import announcements
from kvserver.service.requests import mismatches
from kvserver.service.state.core import MILLISECOND_NS, Core
from kvserver.service.state.remote_tier import QUEUE_MAX, PutJob, RemoteTier
from kvserver.tiers.records import NO_PARENT
from kvserver.wire.orders import PutRemote, RemoteEnded

STEPS_MAX = 512
"""Chunks that are looked at in one event."""
PUTS_MAX = 64
"""Writes under way, however small they are."""
LEFT_OUT_MS = 10_000
"""A prefix whose end came from another store is not looked at again before."""


def turn(core: Core, tier: RemoteTier, now_ns: int) -> None:
    """Orders as many writes as may be in flight."""
    if not tier.usable:
        return
    if tier.used:
        _queue_used(core, tier, now_ns)
    puts = sum(isinstance(job, PutJob) for job in tier.jobs.values()) if tier.queue else 0
    for _ in range(min(STEPS_MAX, len(tier.queue))):
        if puts >= PUTS_MAX:
            return
        node, space = next(iter(tier.queue.items()))
        epoch = tier.epoch_of(space, now_ns)
        if _must_wait(core, space, epoch):
            tier.queue.move_to_end(node)
            continue
        count = sum(space.parts[part].payload_bytes for part in _parts(space, node))
        if puts and tier.putting_bytes + count > tier.remote.write_bytes_in_flight:
            return
        del tier.queue[node]
        if epoch is not None and announcements.is_written(tier, space, epoch, node):
            tier.count("remote_existed")
        elif epoch is not None and _is_wanted(core, tier, space, node, now_ns):
            _order(core, tier, space, node, epoch=epoch, count=count, now_ns=now_ns)
            puts += 1
        else:
            _offer_again(tier, node)


def _queue_used(core: Core, tier: RemoteTier, now_ns: int) -> None:
    """Queues chunks of used prefixes, those in front first."""
    steps = STEPS_MAX
    tier.look_again(now_ns)
    while tier.used and steps > 0:
        space, tail = tier.used.popleft()
        chain: list[Node] = []
        node: Node | None = tail
        while node is not None and node.depth and not node.queued & tier.mark_bit and node not in tier.left_out:
            chain.append(node)
            node = node.parent
        steps -= 1 + len(chain)
        if node in tier.left_out or not core.chunks.serves(space, tail):
            continue
        for node in reversed(chain):
            if len(tier.queue) >= QUEUE_MAX:
                tier.count("remote_dropped")
                if _must_wait(core, space, tier.epoch_of(space, now_ns)) or not _makes_room(core, tier, now_ns):
                    break
            if _is_left_out(core, tier, space, node, now_ns) and not tier.is_announced(space, node.key, now_ns):
                tier.leave_out(tail, now_ns + LEFT_OUT_MS * MILLISECOND_NS)
                break
            node.mark(tier.mark_bit)
            tier.queue[node] = space


def _must_wait(core: Core, space: Space, epoch: int | None) -> bool:
    """The namespace's note is being read, or cannot be read, or the store is away. Other namespaces go on."""
    return epoch is None and core.chunks.spaces.get(space.digest) is space


def _makes_room(core: Core, tier: RemoteTier, now_ns: int) -> bool:
    """Takes out the first chunk if it has to wait: a namespace whose note is never read must not fill the queue."""
    node, space = next(iter(tier.queue.items()))
    if not _must_wait(core, space, tier.epoch_of(space, now_ns)):
        return False
    del tier.queue[node]
    _offer_again(tier, node)
    return True


def _parts(space: Space, node: Node) -> list[int]:
    """The parts that the node has in DRAM, group after group."""
    groups = range(len(space.geometry.groups))
    return [part for group in groups if node.in_dram >> group & 1 for part in space.group_parts(group)]


def _is_wanted(core: Core, tier: RemoteTier, space: Space, node: Node, now_ns: int) -> bool:
    """It is served, all that a prefix needs of it is in DRAM, a head has room for it, and the chunk before is there or
    goes there."""
    parent = node.parent
    above = parent is not None and (parent.depth == 0 or parent.queued & tier.mark_bit)
    is_here = core.chunks.serves(space, node) and space.is_whole(node) and len(_parts(space, node)) <= SHARDS_MAX
    return bool(is_here and above and not _is_left_out(core, tier, space, node, now_ns))


def _is_left_out(core: Core, tier: RemoteTier, space: Space, node: Node, now_ns: int) -> bool:
    """The chunk came from another store, or may have: nobody knows of what an earlier brain had. Then those are asked
    that tell what they have."""
    others = [other for other in core.remotes if other is not tier]
    if not others or node.queued & tier.came_bit:
        return False
    if any(node.queued & other.came_bit for other in others):
        return True
    return not node.queued & STORED and any(other.may_have(space, node.key, now_ns) for other in others)


def _order(core: Core, tier: RemoteTier, space: Space, node: Node, *, epoch: int, count: int, now_ns: int) -> None:
    assert node.parent is not None
    parts = _parts(space, node)
    rows = [space.parts[part] for part in parts]
    shards = tuple(Shard(row.group, row.shard, row.payload_bytes, 0) for row in rows)
    head = Head(
        namespace=space.digest,
        key=node.key,
        parent=node.parent.key or NO_PARENT,
        epoch=epoch,
        write=core.fresh_epoch(),
        written_s=0,
        shards=shards,
        fragment_bytes=fragment_bytes_for(shards),
    )
    job = PutJob(
        number=core.number("job"),
        space=space,
        epoch=epoch,
        node=node,
        group=rows[0].group,
        bytes=count,
        began_ns=now_ns,
    )
    core.chunks.pin(node)
    slots = array("q", [node.slots[part] for part in parts])
    tier.begin(job, PutRemote(job.number, encode(head), slots.tobytes()))
    core.timers.set(now_ns + core.bounds.remote_job_ms * MILLISECOND_NS, "remote", job.number)


def _offer_again(tier: RemoteTier, node: Node) -> None:
    """The store lacks the chunk, so those below it are of no use there, and all are offered with their next use. A use
    offers only what lies below the last chunk that is marked. What is marked here was queued later, so it is little."""
    below = [node]
    while below:
        at = below.pop()
        at.unmark(tier.mark_bit)
        below += (child for child in at.child_nodes() if child.queued & tier.mark_bit)


def ended(core: Core, tier: RemoteTier, job: PutJob, report: RemoteEnded, now_ns: int) -> None:
    """Ends a write. A chunk that was there already needs none."""
    node, digest = job.node, job.space.digest
    match report.fault:
        case "":
            tier.count("remote_writes")
            tier.count("remote_written_bytes", job.bytes)
        case "existed":
            tier.count("remote_existed")
        case fault:
            _offer_again(tier, node)
            tier.failed("write", fault)
    if report.fault in ("", "existed"):
        announcements.written(tier, job.space, job.epoch, node)
    if report.fault == "digest":
        mismatches.tell(core, job.space, node, job.group, tier="dram", device=tier.device, mode="put")
    core.chunks.unpin(job.space, node)
    if report.fault == "digest":
        mismatches.drop(core, digest, node, now_ns)
