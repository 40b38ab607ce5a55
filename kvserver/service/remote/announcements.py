"""What servers tell one another of chunks in the remote store, and what follows from it.

A chunk of which nobody has told is not looked for, so that a miss costs no call. It is told to the others when it is
stored, written to the store, or found gone there. With `reuse` a chunk that is stored here is written if it was stored
anywhere before. Decision 0018 has the reasons.
"""

from kvserver.index.space import Node, Space
from kvserver.remote.announcement import GONE, KIND_BITS, WRITTEN, pack, unpack
from kvserver.service.state.core import MILLISECOND_NS, Core
from kvserver.service.state.remote_tier import AnnounceJob, ListenJob, Pursuit, RemoteTier
from kvserver.wire.orders import AnnounceRemote, ListenRemote, RemoteEnded, RemoteHeard


def tick(core: Core, tier: RemoteTier, now_ns: int) -> None:
    """Tells what has to be told, and reads what was told, of each namespace whose time has come."""
    if not tier.usable:
        return
    for digest, known in tier.epochs.items():
        announcements, space = known.announcements, core.chunks.spaces.get(digest)
        epoch = tier.epoch_of(space, now_ns) if space is not None else None
        if epoch is None:
            continue
        if announcements.wants_to_tell(now_ns):
            marks = announcements.tell_begins(now_ns + core.bounds.remote_tell_ms * MILLISECOND_NS)
            job = AnnounceJob(number=core.number("job"), digest=digest, chunks=len(marks), began_ns=now_ns)
            _begin(core, tier, job, AnnounceRemote(job.number, digest, epoch, pack(marks)))
        if announcements.wants_to_listen(now_ns):
            announcements.listen_begins(epoch, now_ns + core.bounds.remote_listen_ms * MILLISECOND_NS)
            listen = ListenJob(number=core.number("job"), digest=digest, epoch=epoch, began_ns=now_ns)
            _begin(core, tier, listen, ListenRemote(listen.number, digest, epoch))


def told(core: Core, job: AnnounceJob, report: RemoteEnded) -> None:
    """Ends a batch. One that was not taken is lost: it costs hits."""
    if report.fault:
        core.counters.remote_failed("announce", report.fault)
    else:
        core.counters.add("remote_told", job.chunks)


def heard(core: Core, tier: RemoteTier, job: ListenJob, report: RemoteHeard) -> None:
    """Takes in what was told."""
    known = tier.epochs.get(job.digest)
    if report.fault:
        core.counters.remote_failed("listen", report.fault)
    elif known is not None:
        marks = unpack(report.marks)
        for mark in marks:
            tier.known.note(mark & ~KIND_BITS, mark & KIND_BITS)
        core.counters.add("remote_heard", len(marks))
        known.announcements.heard(job.epoch, job.began_ns, is_all=report.is_all)


def probed(core: Core, tier: RemoteTier, pursuit: Pursuit, *, found: int, is_absent: bool, now_ns: int) -> None:
    """The store has the leading `found` chunks of a pursuit, and lacks the next one if that is_absent."""
    announcements = tier.epochs[pursuit.space.digest].announcements
    for position, key in enumerate(pursuit.keys[: found + is_absent]):
        mark = tier.mark(pursuit.space, pursuit.epoch, key)
        kind = tier.known.kind(mark)
        if position == found:
            if kind == WRITTEN:
                tier.tell(pursuit.space, mark, GONE)
        elif kind != WRITTEN:
            if announcements.state(pursuit.epoch, now_ns) == "heard":
                announcements.are_incomplete(now_ns)
                core.log("remote announcements incomplete", ("namespace", pursuit.space.digest[:6].hex()))
            tier.tell(pursuit.space, mark, WRITTEN)


def is_written(tier: RemoteTier, space: Space, epoch: int, node: Node) -> bool:
    """The chunk is in the store, as far as is known."""
    return tier.known.kind(tier.mark(space, epoch, node.key)) == WRITTEN


def written(tier: RemoteTier, space: Space, epoch: int, node: Node) -> None:
    """The chunk is in the store."""
    tier.tell(space, tier.mark(space, epoch, node.key), WRITTEN)


def _begin(core: Core, tier: RemoteTier, job: AnnounceJob | ListenJob, order: AnnounceRemote | ListenRemote) -> None:
    tier.begin(job, order)
    core.timers.set(job.began_ns + core.bounds.remote_job_ms * MILLISECOND_NS, "remote", job.number)
