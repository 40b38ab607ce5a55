"""The life of remote movers: their start and end, their reports, and the next steps of their stores. Each store has a
mover of its own. Without a remote store nothing here does anything.

A process is started with the brain, and again when it has died. While it is away, or its store is not open, lookups
answer what is here or in other stores, and nothing waits.
"""

from kvserver.service.remote import announcements, epochs, reads, writes
from kvserver.service.requests import computed_elsewhere, foretold, mismatches, movers
from kvserver.service.state.core import MILLISECOND_NS, Core
from kvserver.service.state.remote_tier import (
    AnnounceJob,
    FetchJob,
    ListenJob,
    NoteJob,
    ProbeJob,
    PutJob,
    RemoteJob,
    RemoteTier,
)
from kvserver.wire.orders import RemoteEnded, RemoteHeard, RemoteIs, RemoteNoteRead, RemoteNoteWritten, RemoteProbed

LOST = "mover-lost"
Ending = RemoteProbed | RemoteEnded | RemoteNoteRead | RemoteNoteWritten | RemoteHeard
RemoteReport = Ending | RemoteIs


def _turn(core: Core, tier: RemoteTier, now_ns: int) -> None:
    """Orders the reads and writes that may begin now. Called at each tick and after each report of the mover, not after
    lookups: they do not wait for what other prompts look for."""
    if not tier.ready:
        return
    if tier.pursuits:
        reads.turn(core, tier, now_ns)
    if tier.queue or tier.used:
        writes.turn(core, tier, now_ns)


def tick(core: Core, now_ns: int) -> None:
    for tier in core.remotes:
        if tier.mover is None and now_ns >= tier.start_at_ns:
            tier.mover_started(movers.ensure(core, "remote", tier.name, now_ns))
        tier.reads.tick(now_ns)
        epochs.tick(core, tier, now_ns)
        announcements.tick(core, tier, now_ns)
        _turn(core, tier, now_ns)
        foretold.tick(core, tier, now_ns)
        computed_elsewhere.turn(core, tier, now_ns)


def gone(core: Core, tier: RemoteTier, now_ns: int) -> None:
    """Handles the mover's end: it has been reaped, so none of its reads can still touch the arena."""
    tier.mover_ended(now_ns + core.bounds.disk_restart_ms * MILLISECOND_NS)
    for job in list(tier.jobs.values()):
        core.timers.cancel("remote", job.number)
        tier.end(job, now_ns)
        match job:
            case ProbeJob():
                tier.drop(job.pursuit)
            case FetchJob():
                reads.ended(core, tier, job, RemoteEnded(job.number, LOST, 0), now_ns)
            case PutJob():
                writes.ended(core, tier, job, RemoteEnded(job.number, LOST, 0), now_ns)
            case NoteJob(kind="clear"):
                epochs.clear_ended(core, tier, job, now_ns, is_done=False)
    for pursuit in list(tier.pursuits):
        tier.drop(pursuit)


def overdue(core: Core, number: int) -> None:
    """Kills a mover when an order takes too long. Its slots stay taken until it is reaped."""
    tier = next(tier for tier in core.remotes if number in tier.jobs)
    assert tier.mover is not None
    movers.kill(core, tier.mover, f"did not end remote job {number}")


def reported(core: Core, tier: RemoteTier, report: RemoteReport, now_ns: int) -> None:
    if isinstance(report, RemoteIs):
        tier.says(report)
        return
    job = tier.jobs.get(report.job)
    if job is not None:
        _ended(core, tier, job, report, now_ns)
        _turn(core, tier, now_ns)
        computed_elsewhere.turn(core, tier, now_ns)


def _ended(core: Core, tier: RemoteTier, job: RemoteJob, report: Ending, now_ns: int) -> None:
    """Ends a job as the mover reports."""
    core.timers.cancel("remote", job.number)
    fault = "" if isinstance(report, RemoteProbed) else report.fault
    tier.end(job, now_ns, moved=not fault)
    match job, report:
        case ProbeJob(), RemoteProbed():
            reads.probed(core, tier, job, report, now_ns)
        case FetchJob(), RemoteEnded():
            if fault == "digest":
                space, group = job.pursuit.space, job.pursuit.space.parts[job.parts[0]].group
                mismatches.tell(core, space, job.node, group, tier="remote", device=tier.device, mode="fetch")
            reads.ended(core, tier, job, report, now_ns)
        case PutJob(), RemoteEnded():
            writes.ended(core, tier, job, report, now_ns)
        case AnnounceJob(), RemoteEnded():
            announcements.told(core, tier, job, report, now_ns)
        case ListenJob(), RemoteHeard():
            announcements.heard(core, tier, job, report, now_ns)
        case NoteJob(), RemoteNoteRead():
            epochs.note_read(core, tier, job, report, now_ns)
        case NoteJob(), RemoteNoteWritten():
            epochs.note_written(core, tier, job, report, now_ns)
