"""Announcements between servers: they are told and heard here, and what follows from them is done.

A chunk of which nobody has told is not looked for, so that a miss costs no call. It is told to the others when it is
stored, written to the store, or found gone there. With `reuse` a chunk that is stored here is written if it was stored
anywhere before. Decision 0018 has the reasons.
"""

from collections.abc import Sequence

from kvserver.index.space import Node, Space
from kvserver.remote.announcement import COMES, GONE, KIND_BITS, WRITTEN, pack, unpack
from kvserver.service.state.core import MILLISECOND_NS, Core
from kvserver.service.state.remote_tier import AnnounceJob, ListenJob, Pursuit, RemoteTier
from kvserver.wire.orders import AnnounceRemote, ListenRemote, RemoteEnded, RemoteHeard

SOON_MS = 50
"""Instead of remote_tell_ms and remote_listen_ms, while chunks of a namespace are foretold or awaited."""
CATCHING_UP_MAX = 2
"""Namespaces whose announcements are read on at once: taking them in keeps the brain from others."""
AWAY_MS = 2_000
REFUSED_MS = 60_000
"""Pauses after a call that failed."""


def tick(core: Core, tier: RemoteTier, now_ns: int) -> None:
    """Tells what has to be told, and reads what was told, of each namespace whose time has come."""
    if not tier.usable:
        return
    foretelling = {row.space.digest for row in tier.foretellings.rows.values()}
    awaiting = {pledge.space.digest for pledge in tier.awaited.values()}
    catching_up = sum(isinstance(job, ListenJob) and job.is_behind for job in tier.jobs.values())
    for digest, known in tier.epochs.items():
        announcements, space = known.announcements, core.chunks.spaces.get(digest)
        epoch = tier.epoch_of(space, now_ns) if space is not None else None
        if epoch is None:
            continue
        if announcements.wants_to_tell(now_ns):
            pause_ms = core.bounds.remote_tell_ms
            pause_ms = min(pause_ms, SOON_MS) if digest in foretelling else pause_ms
            marks = announcements.tell_begins(now_ns + pause_ms * MILLISECOND_NS)
            job = AnnounceJob(number=core.number("job"), digest=digest, chunks=len(marks), began_ns=now_ns)
            _begin(core, tier, job, AnnounceRemote(job.number, digest, epoch, pack(marks)))
        is_behind = announcements.is_behind(epoch)
        if announcements.wants_to_listen(now_ns) and not (is_behind and catching_up >= CATCHING_UP_MAX):
            catching_up += is_behind
            # Those who use a bucket replace their objects no more often than we listen.
            is_soon = digest in awaiting and not tier.remote.bucket
            pause_ms = core.bounds.remote_listen_ms
            pause_ms = min(pause_ms, SOON_MS) if is_soon else pause_ms
            announcements.listen_begins(epoch, now_ns + pause_ms * MILLISECOND_NS)
            listen = ListenJob(
                number=core.number("job"), digest=digest, epoch=epoch, is_behind=is_behind, began_ns=now_ns
            )
            _begin(core, tier, listen, ListenRemote(listen.number, digest, epoch))


def told(core: Core, tier: RemoteTier, job: AnnounceJob, report: RemoteEnded, now_ns: int) -> None:
    """Ends a batch. One that was not taken is lost: it costs hits."""
    if report.fault:
        tier.failed("announce", report.fault)
        if (known := tier.epochs.get(job.digest)) is not None:
            known.announcements.not_told(now_ns + _pause_ns(report.fault))
    else:
        tier.count("remote_told", job.chunks)


def heard(core: Core, tier: RemoteTier, job: ListenJob, report: RemoteHeard, now_ns: int) -> None:
    """Takes in what was told."""
    known = tier.epochs.get(job.digest)
    marks = unpack(report.marks)
    since_ns = known.announcements.heard_since_ns(job.epoch) if known is not None else None
    for mark in marks:
        if mark & KIND_BITS:
            tier.known.note(mark & ~KIND_BITS, mark & KIND_BITS)
        else:
            _foretold(core, tier, mark, since_ns, now_ns)
    tier.count("remote_heard", len(marks))
    if report.fault:
        tier.failed("listen", report.fault)
    if known is not None and report.fault:
        known.announcements.not_heard(now_ns + _pause_ns(report.fault))
    elif known is not None:
        known.announcements.heard(job.epoch, job.began_ns, is_all=report.is_all)


def _foretold(core: Core, tier: RemoteTier, mark: int, since_ns: int | None, now_ns: int) -> None:
    """Takes in that a chunk comes, or comes no more. since_ns: it was told after this; None: nobody knows when, so it
    may be long ago."""
    if not mark & COMES:
        tier.foretold.comes_no_more(mark)
    elif since_ns is not None and not tier.foretellings.is_mine(mark, now_ns):
        tier.foretold.heard(mark, since_ns + core.bounds.remote_foretold_ms * MILLISECOND_NS)


def _pause_ns(fault: str) -> int:
    """How long a log is left alone after a fault: calls to a dead node take their whole deadline, and a permission that
    is missing stays so."""
    return (REFUSED_MS if fault in ("remote-denied", "remote-refused") else AWAY_MS) * MILLISECOND_NS


def probed(core: Core, tier: RemoteTier, pursuit: Pursuit, *, found: int, absent: Sequence[bool], now_ns: int) -> None:
    """The store has the leading `found` chunks of a pursuit, and lacks those that are absent."""
    for position, key in enumerate(pursuit.keys):
        mark = tier.mark(pursuit.space, pursuit.epoch, key)
        is_told = tier.known.kind(mark) == WRITTEN
        if position < found and not is_told:
            tier.tell(pursuit.space, mark, WRITTEN)
        elif position < len(absent) and absent[position] and is_told:
            tier.tell(pursuit.space, mark, GONE)
    if found and pursuit.is_try:
        tier.epochs[pursuit.space.digest].is_doubtful(now_ns)
        core.log("remote announcements incomplete", ("namespace", pursuit.space.digest[:6].hex()), *tier.named)


def lost(tier: RemoteTier, space: Space, epoch: int, node: Node) -> None:
    """The store was found not to have the chunk any more."""
    tier.tell(space, tier.mark(space, epoch, node.key), GONE)


def is_written(tier: RemoteTier, space: Space, epoch: int, node: Node) -> bool:
    """The chunk is in the store, as far as is known."""
    return tier.known.kind(tier.mark(space, epoch, node.key)) == WRITTEN


def written(tier: RemoteTier, space: Space, epoch: int, node: Node) -> None:
    """The chunk is in the store: it was written now, or was there."""
    mark = tier.mark(space, epoch, node.key)
    tier.tell(space, mark, WRITTEN)
    tier.foretellings.wrote(mark)


def _begin(core: Core, tier: RemoteTier, job: AnnounceJob | ListenJob, order: AnnounceRemote | ListenRemote) -> None:
    tier.begin(job, order)
    core.timers.set(job.began_ns + core.bounds.remote_job_ms * MILLISECOND_NS, "remote", job.number)
