"""The disk tier as a whole: its mover's life, what it reports, and what is done next. Without a disk nothing here is.

The mover of the disks is one process for all devices. It is started with the brain, and again when it is gone; while it
is away, lookups answer what DRAM can serve, and nothing waits for it. What is on disk stays in the index meanwhile.
"""

import logging
from collections.abc import Iterable
from hashlib import sha256
from itertools import islice

from kvserver.errors import DeviceError, ResourceError
from kvserver.service import disk_drain, disk_reads, disk_segments, disk_writes, movers, recovery
from kvserver.service.documents import document_of
from kvserver.service.owners import DiskJob
from kvserver.service.state import MILLISECOND_NS, Clearing, Core, DiskTier, Mover
from kvserver.tiers.placement import STALLED_NS
from kvserver.tiers.prefix_notes import prefix_document
from kvserver.tiers.records import encode_document
from kvserver.wire.orders import DeviceIs, ForgetNotes, FoundNote, FoundRecords, Listed, Moved, Note, Noted, Recover

GENERATIONS = sha256(b"kvserver generations").digest()
"""In place of a namespace, in a note: no record on any device has a generation beyond this note's `void`. So they grow
also while a device is away: what it holds is older than whatever the others heard meanwhile, a Clear above all."""
GENERATIONS_AHEAD = 1 << 20
"""That are noted at once. A restart skips what is left of them."""
FORGOTTEN_AT_ONCE = 64
"""Notes: few enough to hold up no read, and enough to be seldom."""
OVER_MAXIMUM_AT_ONCE = 256
"""Chunks that a tenant gives up at a tick when its maximum is less than what was found of it."""
CLEARS_MAX = 1024
"""Clears that wait for the disks to note them, or that no disk could note yet; each is an order to their mover."""

DiskReport = Moved | Noted | DeviceIs | FoundNote | Listed | FoundRecords


def turn(core: Core, now_ns: int) -> None:
    """After every event: what may be read and written now is ordered."""
    tier = core.disk
    if tier is None or not tier.readable:
        return
    if tier.reads:
        disk_reads.start(core, tier, now_ns)
    if tier.listed and core.chunks.generation + GENERATIONS_AHEAD // 2 > tier.noted.get(GENERATIONS, 0):
        tier.noted[GENERATIONS] = core.chunks.generation + GENERATIONS_AHEAD
        _note(core, tier, GENERATIONS)
    if tier.recovered:
        disk_writes.turn(core, tier, now_ns)


def tick(core: Core, now_ns: int) -> None:
    tier = core.disk
    if tier is None:
        return
    if tier.starved:
        disk_reads.try_again(core, tier, now_ns)
    if tier.mover is None and now_ns >= tier.start_at_ns:
        tier.mover = movers.ensure(core, "disk", "", now_ns)
    if tier.recovered:
        tier.chunks.room.keep_maxima(OVER_MAXIMUM_AT_ONCE)
    if tier.readable and tier.recovered:
        _forget_notes(core, tier)
        _heed_silence(core, tier, now_ns)
    disk_segments.tick(core, tier, now_ns)
    disk_drain.turn(core, tier, now_ns)
    for device in range(core.bounds.disk_devices):
        _tell_of_stall(core, tier, device, now_ns)


def _tell_of_stall(core: Core, tier: DiskTier, device: int, now_ns: int) -> None:
    """One line when a device takes nothing although writes wait for it, and one when that is over."""
    stalled_ns, why = tier.stalled(device, now_ns)
    if stalled_ns >= STALLED_NS and device not in tier.told_stalled:
        tier.told_stalled.add(device)
        core.log("disk takes nothing", *core.named(device), ("why", why), level=logging.WARNING)
    elif stalled_ns < STALLED_NS and device in tier.told_stalled:
        tier.told_stalled.discard(device)
        core.log("disk takes writes again", *core.named(device))


def _heed_silence(core: Core, tier: DiskTier, now_ns: int) -> None:
    """A mover that hangs while nothing is read, and no write may begin before a note is durable, has no other
    deadline."""
    if not tier.notes_sent:
        tier.silent_from_ns = 0
    elif not tier.silent_from_ns:
        tier.silent_from_ns = now_ns
    elif now_ns - tier.silent_from_ns >= core.bounds.disk_job_ms * MILLISECOND_NS:
        assert tier.mover is not None
        movers.kill(core, tier.mover, "did not note what it was told")


def ready(core: Core, tier: DiskTier, now_ns: int) -> None:
    """The mover has opened its devices. What another one was told and has not said to be durable is sent again."""
    assert tier.mover is not None
    for device in range(len(tier.problems)):
        tier.set_problem(device, "")
    tier.failures = [0] * len(tier.failures)
    disk_drain.ready(core, tier)
    for digest in sorted(tier.unnoted):
        _note(core, tier, digest)
    if not tier.recovered:
        tier.found = None
        core.instruct(tier.mover, Recover())
        _await_found(core, tier.mover, now_ns)


def gone(core: Core, tier: DiskTier, now_ns: int) -> None:
    """The mover has been reaped: no I/O of it can still touch the arena."""
    assert tier.mover is not None
    core.timers.cancel("recover", tier.mover.number)
    disk_drain.gone(core, tier)
    disk_segments.gone(core, tier)
    tier.mover = None
    tier.notes_sent = tier.silent_from_ns = 0
    tier.start_at_ns = now_ns + core.bounds.disk_restart_ms * MILLISECOND_NS
    if not tier.recovered:
        tier.found = None
    for job in list(tier.chunks.jobs.values()):
        core.timers.cancel("disk", job.number)
        core.counters.disk_faults["lost"] += len(job.parts)
        if job.kind == "write":
            disk_writes.ended(core, tier, job, kept=False, now_ns=now_ns)
        else:
            disk_reads.ended(core, tier, job, set(job.parts), now_ns, lost=False)
    stop_waiting(core, tier, now_ns)


def stop_waiting(core: Core, tier: DiskTier, now_ns: int) -> None:
    """The mover reads nothing any more: whoever waits is told."""
    disk_reads.fail_all(core, tier, tier.waiters, disk_reads.mover_lost(), now_ns)


def overdue(core: Core, tier: DiskTier, number: int, now_ns: int) -> None:
    """A read or write takes too long. Its slot stays taken until the mover is reaped, however long that is."""
    assert tier.mover is not None
    movers.kill(core, tier.mover, f"did not end disk job {number}")
    stop_waiting(core, tier, now_ns)


def recover_overdue(core: Core, tier: DiskTier) -> None:
    assert tier.mover is not None
    movers.kill(core, tier.mover, "did not tell what is on disk")


def reported(core: Core, tier: DiskTier, report: DiskReport, now_ns: int) -> None:
    match report:
        case Moved():
            job = tier.chunks.jobs.get(report.job)
            if job is not None:
                _moved(core, tier, job, report, now_ns)
                disk_segments.turn(core, tier, now_ns)
                disk_drain.turn(core, tier, now_ns)
        case Noted():
            _noted(core, tier, report)
        case DeviceIs():
            if report.device < len(tier.problems):
                _device_is(core, tier, report)
        case FoundNote() | Listed() | FoundRecords():
            if not tier.recovered:
                _found(core, tier, report, now_ns)


def _found(core: Core, tier: DiskTier, report: FoundNote | Listed | FoundRecords, now_ns: int) -> None:
    assert tier.mover is not None
    recovery.found(core, tier, tier.mover, report)
    if tier.recovered:
        core.timers.cancel("recover", tier.mover.number)
    else:
        _await_found(core, tier.mover, now_ns)
    if isinstance(report, Listed):
        for digest in sorted(tier.void_later):
            _make_void(core, tier, digest)
        tier.void_later.clear()


def _await_found(core: Core, mover: Mover, now_ns: int) -> None:
    core.timers.set(now_ns + core.bounds.mover_start_ms * MILLISECOND_NS, "recover", mover.number)


def _moved(core: Core, tier: DiskTier, job: DiskJob, moved: Moved, now_ns: int) -> None:
    core.timers.cancel("disk", job.number)
    for fault in moved.faults:
        core.counters.disk_faults[fault.fault] += 1
    tier.placements[job.device].faults += bool(moved.faults)
    disk_writes.judge(core, tier, job.device, moved)
    if job.kind == "write":
        disk_writes.ended(core, tier, job, kept=not moved.faults, now_ns=now_ns)
    else:
        wrong = {job.parts[fault.item] for fault in moved.faults}
        disk_reads.ended(core, tier, job, wrong, now_ns, lost=True)


def _device_is(core: Core, tier: DiskTier, report: DeviceIs) -> None:
    """A device that is well again is told what it may have missed."""
    disk_drain.said(core, tier, report)
    is_mended = tier.problems[report.device] != "" and not report.problem
    tier.set_problem(report.device, report.problem)
    for digest in sorted(tier.unnoted) if is_mended else ():
        _note(core, tier, digest)
    core.log(
        "disk device",
        *core.named(report.device),
        ("bytes", report.bytes),
        ("problem", report.problem or "none"),
        level=logging.WARNING if report.problem else logging.INFO,
    )


# ---------------------------------------------------------------- cleared namespaces


def check_clears(core: Core, notes: int) -> None:
    """ResourceError when too many notes are waited for, with these. Nothing was cleared then."""
    tier = core.disk
    if tier is not None and sum(map(len, tier.clearing.values())) + len(tier.owed) + notes > CLEARS_MAX:
        raise ResourceError("clears", f"more than {CLEARS_MAX} clears would wait for the disks")


def void(core: Core, digest: bytes) -> None:
    """A namespace was cleared: its records are void, where the devices know anything of it."""
    tier = core.disk
    if tier is None or not _is_known(tier, digest):
        return
    if tier.listed:
        _make_void(core, tier, digest)
    else:
        tier.void_later.add(digest)


def answer_when_void(core: Core, clearing: Clearing, digests: Iterable[bytes], now_ns: int) -> None:
    """The same of all these, and whoever cleared them is answered when the devices have noted it; at once where they
    know nothing of them."""
    tier = core.disk
    known = [digest for digest in digests if tier is not None and _is_known(tier, digest)]
    if tier is None or not known:
        end(core, clearing)
        return
    clearing.left = dict.fromkeys(known, 0)
    core.timers.set(now_ns + core.bounds.job_ttl_ms * MILLISECOND_NS, "clear", clearing.number)
    for digest in known:
        tier.clearing.setdefault(digest, []).append(clearing)
        void(core, digest)


def _is_known(tier: DiskTier, digest: bytes) -> bool:
    """A device knows something of it, or may."""
    return not tier.listed or digest in tier.noted or not tier.all_known


def _make_void(core: Core, tier: DiskTier, digest: bytes) -> None:
    """Whatever was written until now. The next write has a higher generation."""
    tier.noted[digest] = core.chunks.generation = core.chunks.generation + 1
    for clearing in tier.clearing.get(digest, ()):
        clearing.left[digest] = clearing.left[digest] or tier.noted[digest]
    if digest not in core.chunks.spaces:
        tier.described.discard(digest)
    _note(core, tier, digest)


def _note(core: Core, tier: DiskTier, digest: bytes) -> None:
    """Now, and again by whichever mover comes, until one has said that it is durable."""
    tier.unnoted.add(digest)
    if tier.mover is None:
        return
    tier.notes_sent += 1
    core.instruct(tier.mover, Note(digest, _document(core, tier, digest), tier.noted[digest]))


def _document(core: Core, tier: DiskTier, digest: bytes) -> bytes:
    """What the note is of; empty: the devices keep what they know."""
    if (prefix := tier.cleared.get(digest)) is not None:
        return prefix_document(prefix)
    space = core.chunks.spaces.get(digest)
    whole = space is not None and tier.chunks.writable(space)  # some rank's shape may be missing
    return encode_document(document_of(space)) if space is not None and whole else b""


def _forget_notes(core: Core, tier: DiskTier) -> None:
    """The oldest ones of namespaces that are not in the index, when they are too many. Whatever devices hold of them,
    here or where they are away, is void. Not those of cleared prefixes: their namespaces may live (prefixes.py)."""
    if len(tier.noted) - len(tier.cleared) <= core.bounds.namespaces_max + core.bounds.notes_max:
        return
    needed = core.chunks.spaces.keys() | tier.cleared.keys() | {GENERATIONS}
    forget(core, tier, (digest for digest in tier.noted if digest not in needed))


def forget(core: Core, tier: DiskTier, digests: Iterable[bytes]) -> None:
    """Removes some of these notes, those that are durable and for which nobody waits. Nothing may be lost with them but
    records up to now of namespaces without a note."""
    assert tier.mover is not None
    over = (digest for digest in digests if digest not in tier.clearing and digest not in tier.unnoted)
    old = list(islice(over, FORGOTTEN_AT_ONCE))
    for digest in old:
        del tier.noted[digest]
        tier.described.discard(digest)
        tier.left_out.pop(digest, None)
        tier.cleared.pop(digest, None)
    if old:
        core.instruct(tier.mover, ForgetNotes(old, core.chunks.generation))
        core.log("notes forgotten", ("notes", len(old)))


def _noted(core: Core, tier: DiskTier, noted: Noted) -> None:
    tier.notes_sent -= 1
    tier.silent_from_ns = 0
    if noted.kept and noted.void == tier.noted.get(noted.namespace):
        tier.unnoted.discard(noted.namespace)
        if noted.namespace in tier.owed:
            tier.owed.discard(noted.namespace)
            core.log("clear durable", ("namespace", noted.namespace[:6].hex()), ("left", len(tier.owed)))
    if noted.namespace == GENERATIONS and noted.kept:
        tier.generation_max = max(noted.void, tier.generation_max)
    waiting = tier.clearing.pop(noted.namespace, [])
    later = [clearing for clearing in waiting if not 0 < clearing.left[noted.namespace] <= noted.void]
    if later:
        tier.clearing[noted.namespace] = later
    for clearing in waiting:
        if clearing not in later:
            del clearing.left[noted.namespace]
            if not noted.kept:
                tier.owed.add(noted.namespace)
                clearing.why = _why_not_noted(core, tier)
            if not clearing.left:
                end(core, clearing)


def _why_not_noted(core: Core, tier: DiskTier) -> str:
    """With each device that has a problem: its directory, else its number."""
    said = [f"{core.named(device)[-1][1]} ({problem})" for device, problem in enumerate(tier.problems) if problem]
    return f"not durable yet on {' and '.join(said) or 'any device'}; it is tried again until it is"


def end(core: Core, clearing: Clearing) -> None:
    """All is noted, or nothing more is waited for. What is not durable is gone from memory, but after a restart of the
    whole server it may be back, if that comes before the devices could be told."""
    core.timers.cancel("clear", clearing.number)
    if any(space in core.chunks.emptying for space in clearing.spaces):
        core.clears_going.append(clearing)
        return
    done, why = clearing.done, clearing.why
    if not why:
        core.answer(clearing.peer, done)
        return
    core.log("clear not durable", ("chunks", done.chunks), ("why", why), level=logging.WARNING)
    core.refuse(clearing.peer, done.id, DeviceError("disk-clear", f"cleared in memory; {why}"))


def clear_overdue(core: Core, tier: DiskTier, number: int) -> None:
    """Nobody waits longer for the devices than for a job."""
    clearing = next(each for waiting in tier.clearing.values() for each in waiting if each.number == number)
    for digest in clearing.left:
        tier.owed.add(digest)
        tier.clearing[digest].remove(clearing)
        if not tier.clearing[digest]:
            del tier.clearing[digest]
    clearing.why = "the disks have not confirmed it in time"
    end(core, clearing)
