"""Which chunks of a remote store count: the epochs of namespaces, and what a Clear does to them.

Each namespace that is used has a note in each store, with a random epoch. It is read again and again, and believed for
five seconds (remote/epoch_lease.py). Another epoch than before means that a server has cleared the namespace: then our
own chunks of it go first. A Clear of ours writes a new epoch, and its caller is answered when the store has it.
"""

import logging
from typing import Literal

from kvserver.index.space import Space
from kvserver.remote.epoch_lease import Step
from kvserver.remote.namespace_note import NamespaceNote
from kvserver.service.base.effects import PutNamespace
from kvserver.service.holdings.namespace_documents import document_of
from kvserver.service.operators import clear_namespaces
from kvserver.service.state.core import MILLISECOND_NS, Core
from kvserver.service.state.remote_tier import NamespaceEpoch, NoteJob, RemoteTier
from kvserver.tiers.records import encode_document
from kvserver.wire.orders import ReadRemoteNote, RemoteNoteRead, RemoteNoteWritten, WriteRemoteNote

TRY_AGAIN_MS = 500
"""Pause after a clear that the store did not take."""
CONTRADICTION = "contradiction"
"""Fault of a note whose store contradicts itself about it, again and again (remote/epoch_lease.py)."""


def tick(core: Core, tier: RemoteTier, now_ns: int) -> None:
    """Reads notes whose time has come, and tells the store of clears."""
    for digest, space in core.chunks.spaces.items():
        if digest not in tier.epochs and _is_known(core):
            tier.uses(digest, space.epochs, core.fresh_epoch)
    for digest, known in list(tier.epochs.items()):
        if known.has_job:
            continue
        if known.owes_clear:
            if tier.usable and now_ns >= known.try_again_ns:
                _order_write(core, tier, digest, "clear", epoch=known.tell(), now_ns=now_ns)
        elif digest not in core.chunks.spaces:
            tier.forget(digest)
        elif tier.usable and known.lease.wants_read(now_ns / 1e9):
            job = NoteJob(number=core.number("job"), digest=digest, kind="read", epoch=0, began_ns=now_ns)
            _begin(core, tier, job, ReadRemoteNote(job.number, digest))


def _is_known(core: Core) -> bool:
    """The disks have told to which epochs their chunks belong."""
    return core.disk is None or core.disk.recovery.listed


def note_read(core: Core, tier: RemoteTier, job: NoteJob, report: RemoteNoteRead, now_ns: int) -> None:
    known = tier.epochs[job.digest]
    if report.fault:
        tier.failed("note", report.fault)
    if report.fault or known.owes_clear:
        return
    note = NamespaceNote(report.epoch, report.document) if report.state == "here" else None
    before = known.lease.contradictions
    step = known.lease.was_read(note, is_damaged=report.state == "damaged", began_s=job.began_ns / 1e9)
    _tell_contradiction(core, tier, known, job.digest, before)
    if step in ("make", "replace"):
        _order_write(core, tier, job.digest, step, epoch=known.lease.fresh_epoch(), now_ns=now_ns)
    else:
        _heed(core, tier, known, job.digest, step)


def note_written(core: Core, tier: RemoteTier, job: NoteJob, report: RemoteNoteWritten, now_ns: int) -> None:
    known = tier.epochs[job.digest]
    if report.fault:
        tier.failed("note", report.fault)
    if job.kind == "clear":
        clear_ended(core, tier, job, now_ns, is_done=not report.fault)
    elif not report.fault and not known.owes_clear:
        before = known.lease.contradictions
        step = known.lease.was_made(job.epoch, is_first=report.is_first, began_s=job.began_ns / 1e9)
        _tell_contradiction(core, tier, known, job.digest, before)
        _heed(core, tier, known, job.digest, step)


def _tell_contradiction(core: Core, tier: RemoteTier, known: NamespaceEpoch, digest: bytes, before: int) -> None:
    """before: how many there were before the last answer. One alone is no fault."""
    if known.lease.contradictions > max(before, 1):
        tier.failed("note", CONTRADICTION)
        if before == 1:
            name = ("namespace", digest[:6].hex())
            core.log("remote note contradictory", name, *tier.named, level=logging.WARNING)


def clear_ended(core: Core, tier: RemoteTier, job: NoteJob, now_ns: int, *, is_done: bool) -> None:
    """Ends the order of a clear. It may have happened also if it failed, so it is tried again."""
    known = tier.epochs[job.digest]
    began_s, now_s = job.began_ns / 1e9, now_ns / 1e9
    known.lease.clear_ended(job.epoch, began_s=began_s, now_s=now_s, is_done=is_done)
    if not is_done:
        known.not_taken(now_ns + TRY_AGAIN_MS * MILLISECOND_NS)
        return
    space = core.chunks.spaces.get(job.digest)
    if space is not None:
        _settle(core, tier, space, job.epoch)
    core.log("remote namespace cleared", ("namespace", job.digest[:6].hex()), *tier.named)
    for clear in known.taken():
        if clear.store_knows(tier.name, job.digest):
            core.timers.cancel("remote-clear", clear.number)


def _heed(core: Core, tier: RemoteTier, known: NamespaceEpoch, digest: bytes, step: Step) -> None:
    """Does what the lease wants after it has learnt an epoch."""
    if step == "drop-local":
        name = ("namespace", digest[:6].hex())
        core.log("namespace cleared elsewhere", name, *tier.named, level=logging.WARNING)
        clear_namespaces.forget(core, [digest])
        if core.disk is not None:
            core.disk.void(digest)
        known.lease.dropped_local()
    space = core.chunks.spaces.get(digest)
    seen = known.lease.seen
    if space is not None and seen is not None and space.epochs.get(tier.name) != seen:
        _settle(core, tier, space, seen)


def _settle(core: Core, tier: RemoteTier, space: Space, epoch: int) -> None:
    """The namespace's chunks belong to this epoch of the store, also for the next brain and the next server. Stores
    that are not named any more are forgotten."""
    others = {other.name: space.epochs[other.name] for other in core.remotes if other.name in space.epochs}
    space.belongs_to_epochs({**others, tier.name: epoch})
    core.emit(PutNamespace(space.number, encode_document(document_of(space))))
    if core.disk is not None:
        core.disk.notes.describe_anew(space.digest)


def _order_write(
    core: Core, tier: RemoteTier, digest: bytes, kind: Literal["make", "replace", "clear"], *, epoch: int, now_ns: int
) -> None:
    job = NoteJob(number=core.number("job"), digest=digest, kind=kind, epoch=epoch, began_ns=now_ns)
    space = core.chunks.spaces.get(digest)
    document = encode_document(document_of(space)) if space is not None else b""
    _begin(core, tier, job, WriteRemoteNote(job.number, digest, epoch, document, kind != "make"))


def _begin(core: Core, tier: RemoteTier, job: NoteJob, order: ReadRemoteNote | WriteRemoteNote) -> None:
    tier.begin(job, order)
    core.timers.set(job.began_ns + core.bounds.remote_job_ms * MILLISECOND_NS, "remote", job.number)
