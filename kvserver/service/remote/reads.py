"""Reads from a remote store into DRAM.

A chunk that is read is reserved as one that an engine stores, and sealed when its bytes were compared. So nothing is
served that has not arrived. A chunk that cannot be read ends its pursuit there; what was read before stays.
"""

from array import array
from collections.abc import Sequence

from kvserver.index.space import ABSENT, Space
from kvserver.remote.chunk_value import Head, WrongValue, decode, encode
from kvserver.service.remote import announcements
from kvserver.service.state.core import MILLISECOND_NS, Core
from kvserver.service.state.remote_tier import FetchJob, ProbeJob, Pursuit, RemoteTier
from kvserver.tiers.records import NO_PARENT
from kvserver.wire.orders import FetchRemote, RemoteEnded, RemoteProbed

ABSENT_MS = 2_000
"""A chunk that was not there, was not wanted, or whose node did not answer, is not asked for again before."""
FAILED_MS = 60_000
"""The same for a chunk that was there and could not be used."""
NODE_FAULTS = ("remote-slow", "remote-down", "remote-denied", "left-alone", "cancelled", "mover-lost", "stale")
"""Faults that say nothing about the chunk. stale: what counts in its namespace is not known any more."""
LOST = ("gone", "digest")
"""Faults after which the store does not have the chunk: it was gone, or the mover has removed it."""
DECLINED = "declined"
"""Not wanted although the store has it: too few tokens, slower than computing, or no room. An engine that asks again
must not wait for it."""
FETCHES_MAX = 256
"""Reads under way, however small they are."""


def probed(core: Core, tier: RemoteTier, job: ProbeJob, report: RemoteProbed, now_ns: int) -> None:
    """The store has told which chunks it has: the leading ones are to be read."""
    pursuit = job.pursuit
    if pursuit not in tier.pursuits:
        return
    if not _is_alive(core, tier, pursuit, now_ns):
        tier.drop(pursuit)
        return
    pursuit.makes_progress(now_ns)
    heads: list[Head] = []
    absent = [not head and not (report.faults and report.faults[at]) for at, head in enumerate(report.heads)]
    for position in range(len(pursuit.keys)):
        head, fault = _usable(pursuit, position, report)
        if head is None:
            set_aside(tier, pursuit, position, fault, now_ns)
            if fault != "absent":
                tier.failed("probe", fault)
            break
        heads.append(head)
    tier.count("remote_found", len(heads))
    announcements.probed(core, tier, pursuit, found=len(heads), absent=absent, now_ns=now_ns)
    pursuit.has_heads(heads)
    tier.shorten(pursuit, len(heads))
    each = pursuit.space.geometry.chunk_tokens
    tokens = len(heads) * each
    is_small = tokens < tier.remote.tokens_min or _too_slow(core, tier, pursuit.space, heads, tokens)
    if not heads or (is_small and not pursuit.is_awaited):
        if heads:
            set_aside(tier, pursuit, 0, DECLINED, now_ns)
        tier.drop(pursuit)


def _usable(pursuit: Pursuit, position: int, report: RemoteProbed) -> tuple[Head | None, str]:
    """The head of a chunk that can be read, or why there is none; "absent" if it is not there."""
    fault = report.faults[position] if report.faults else ""
    if fault or not report.heads[position]:
        return None, fault or "absent"
    try:
        head = decode(report.heads[position])
    except WrongValue as wrong:
        return None, wrong.code
    name = pursuit.space.digest, pursuit.keys[position], pursuit.key_before(position) or NO_PARENT, pursuit.epoch
    if (head.namespace, head.key, head.parent, head.epoch) != name or groups_of(pursuit.space, head) is None:
        return None, "other"
    return head, ""


def groups_of(space: Space, head: Head) -> int | None:
    """The groups (bits) of a head whose shards are those of the namespace; None if they are not, or if it lacks some
    that a prefix needs."""
    told: dict[int, int] = {}
    for shard in head.shards:
        if shard.group >= len(space.geometry.groups) or shard.shard >= space.geometry.groups[shard.group].shards:
            return None
        part = space.part_of[shard.group] + shard.shard
        if part in told or space.parts[part].payload_bytes != shard.payload_bytes:
            return None
        told[part] = shard.group
    groups = 0
    for group in set(told.values()):
        if any(part not in told for part in space.group_parts(group)):
            return None
        groups |= 1 << group
    return groups if groups & space.needed == space.needed else None


def _too_slow(core: Core, tier: RemoteTier, space: Space, heads: Sequence[Head], tokens: int) -> bool:
    """Reading and loading would take longer than computing the tokens that it saves."""
    count = sum(head.payload_bytes for head in heads)
    reads = [(tier.reads, tier.fetching_bytes + count)]
    return core.computes_faster(tokens, reads, len(heads) * space.rank_bytes(space.needed))


def turn(core: Core, tier: RemoteTier, now_ns: int) -> None:
    """Orders as many reads as may be in flight, for the oldest pursuit first."""
    for pursuit in list(tier.pursuits):
        if not _is_alive(core, tier, pursuit, now_ns):
            tier.drop(pursuit)
    for pursuit in list(tier.pursuits):
        while pursuit.heads is not None and pursuit.begun < len(pursuit.heads):
            if not _has_room(tier, pursuit):
                return
            if not _order_next(core, tier, pursuit, now_ns):
                set_aside(tier, pursuit, pursuit.begun, DECLINED, now_ns)
                tier.shorten(pursuit, pursuit.begun)
        if pursuit.heads is not None and not pursuit.fetching:
            tier.drop(pursuit)


def _is_alive(core: Core, tier: RemoteTier, pursuit: Pursuit, now_ns: int) -> bool:
    """Its chunks may still be used: the namespace was not cleared, here or elsewhere."""
    space = pursuit.space
    return core.chunks.spaces.get(space.digest) is space and tier.epoch_of(space, now_ns) == pursuit.epoch


def _has_room(tier: RemoteTier, pursuit: Pursuit) -> bool:
    assert pursuit.heads is not None
    after = tier.fetching_bytes + pursuit.heads[pursuit.begun].payload_bytes
    fetches = sum(isinstance(job, FetchJob) for job in tier.jobs.values())
    return not fetches or (fetches < FETCHES_MAX and after <= tier.remote.read_bytes_in_flight)


def _order_next(core: Core, tier: RemoteTier, pursuit: Pursuit, now_ns: int) -> bool:
    """Orders the next read of a pursuit. False when it cannot go on: there is no room, or the chunk before is gone."""
    assert pursuit.heads is not None
    chunks, space, position = core.chunks, pursuit.space, pursuit.begun
    head, before = pursuit.heads[position], pursuit.key_before(position)
    parent = space.find(before) if before else space.root
    if parent is None:
        return False
    chunks.pin(parent)
    node = chunks.node_for(space, head.key, parent, now_ns, pursuit.tenant)
    if node is None:
        chunks.unpin(space, parent)
        return False
    chunks.move_pin(space, parent, node)
    groups = sorted({shard.group for shard in head.shards})
    is_reserved = chunks.reserve(space, node, groups, now_ns + core.bounds.reserve_ttl_ms * MILLISECOND_NS)
    number = core.number("job")
    slots, parts = array("q"), []
    for shard in head.shards if is_reserved else ():
        part = space.part_of[shard.group] + shard.shard
        slots.append(chunks.assign(node, part, number))
        if slots[-1] != ABSENT:
            parts.append(part)
    node.touch(now_ns)
    chunks.unpin(space, node)
    if not is_reserved:
        chunks.drop_if_bare(space, node)
        return False
    pursuit.begins_next()
    if parts:
        count = sum(space.parts[part].payload_bytes for part in parts)
        job = FetchJob(
            number=number, pursuit=pursuit, position=position, node=node, parts=parts, bytes=count, began_ns=now_ns
        )
        tier.begin(job, FetchRemote(number, encode(head), slots.tobytes()))
        core.timers.set(now_ns + core.bounds.remote_job_ms * MILLISECOND_NS, "remote", job.number)
    return True


def ended(core: Core, tier: RemoteTier, job: FetchJob, report: RemoteEnded, now_ns: int) -> None:
    """Ends a read: its bytes are right, or the chunk is given up."""
    pursuit, node = job.pursuit, job.node
    fault = report.fault or ("" if _is_current(core, tier, pursuit, now_ns) else "stale")
    if fault:
        for part in job.parts:
            core.chunks.give_up(node, part, job.number, "died" if fault == "mover-lost" else "failed")
        tier.failed("read", fault)
        if fault in LOST:
            announcements.lost(tier, pursuit.space, pursuit.epoch, node)
        if job.position < len(pursuit.keys):
            set_aside(tier, pursuit, job.position, fault, now_ns)
            tier.shorten(pursuit, job.position)
    else:
        sums = zip(job.parts, array("Q", report.sums), strict=True)
        sealed = [core.chunks.seal(node, part, job.number, total) for part, total in sums]
        if any(sealed):  # otherwise the store was left, or the chunk has gone
            tier.count("remote_reads")
            tier.count("remote_read_bytes", job.bytes)
            pursuit.makes_progress(now_ns)
            node.mark(tier.mark_bit | tier.came_bit)
    core.chunks.job_ended(job.number)


def _is_current(core: Core, tier: RemoteTier, pursuit: Pursuit, now_ns: int) -> bool:
    """The epoch from which the chunk was read counts now."""
    return tier.epoch_of(pursuit.space, now_ns) == pursuit.epoch


def set_aside(tier: RemoteTier, pursuit: Pursuit, position: int, fault: str, now_ns: int) -> None:
    """The chunk is not asked for again for a while; one that was absent, until a server tells that it is there."""
    pause_ms = ABSENT_MS if fault in ("absent", DECLINED, *NODE_FAULTS) else FAILED_MS
    until_ns = now_ns + pause_ms * MILLISECOND_NS
    tier.set_aside(pursuit.space.digest, pursuit.keys[position], until_ns, was_absent=fault == "absent")
