"""The life of the disk mover: its start and end, its reports, and the next steps of the tier. Without a disk nothing
here does anything.

One process serves all devices. It is started with the brain, and again when it has died. While it is away, lookups
answer what DRAM can serve, and nothing waits for it. Chunks on disk stay in the index meanwhile.
"""

import logging
from array import array

from kvserver.service.disk import drain, read_room, reads, recovery, scrub, segments, writes
from kvserver.service.holdings.place_owners import DiskJob
from kvserver.service.requests import mismatches, movers
from kvserver.service.state.chunk_waits import mover_lost
from kvserver.service.state.core import MILLISECOND_NS, Core
from kvserver.service.state.devices import Device
from kvserver.service.state.disk_tier import DiskTier
from kvserver.service.state.movers import Mover
from kvserver.tiers.placement import STALLED_NS
from kvserver.wire.orders import DeviceIs, FoundNote, FoundRecords, Listed, Moved, Noted, NotesForgotten, Recover

OVER_MAXIMUM_AT_ONCE = 256
"""Chunks that a tenant gives up in one tick when recovery has found more than its maximum."""

DiskReport = Moved | Noted | NotesForgotten | DeviceIs | FoundNote | Listed | FoundRecords


def turn(core: Core, now_ns: int) -> None:
    """Orders the reads and writes that may begin now. Called after every event."""
    tier = core.disk
    if tier is None or not tier.readable:
        return
    if tier.waits.reads:
        reads.start(core, tier, now_ns)
    if tier.recovery.listed:
        tier.notes.reserve_generations()
    if tier.recovered:
        writes.turn(core, tier, now_ns)


def tick(core: Core, now_ns: int) -> None:
    tier = core.disk
    if tier is None:
        return
    if tier.waits.starved:
        read_room.tick(core, tier, now_ns)
    if tier.mover is None and now_ns >= tier.start_at_ns:
        tier.mover_started(movers.ensure(core, "disk", "", now_ns))
    if tier.recovered:
        tier.chunks.room.keep_maxima(OVER_MAXIMUM_AT_ONCE)
    if tier.readable and tier.recovered:
        tier.notes.forget_oldest(core.bounds.namespaces_max + core.bounds.notes_max)
        _heed_silence(core, tier, now_ns)
    segments.tick(core, tier, now_ns)
    drain.turn(core, tier, now_ns)
    scrub.turn(core, tier, now_ns)
    for device in tier.devices:
        device.placement.reads.tick(now_ns)
        _tell_of_stall(core, tier, device, now_ns)


def _tell_of_stall(core: Core, tier: DiskTier, device: Device, now_ns: int) -> None:
    """Logs one line when a device takes nothing although writes wait for it, and one when that is over."""
    stalled_ns, why = tier.stalled(device, now_ns)
    stalled = stalled_ns >= STALLED_NS
    if not device.tell_of_stall(stalled=stalled):
        return
    if stalled:
        core.log("disk takes nothing", *device.fields, ("why", why), level=logging.WARNING)
    else:
        core.log("disk takes writes again", *device.fields)


def _heed_silence(core: Core, tier: DiskTier, now_ns: int) -> None:
    """Kills a mover that has not answered a note for too long. While nothing is read, and no write may begin before a
    note is durable, no other deadline would find that it hangs."""
    if tier.notes.silent_ns(now_ns) >= core.bounds.disk_job_ms * MILLISECOND_NS:
        assert tier.mover is not None
        movers.kill(core, tier.mover, "did not note what it was told")


def ready(core: Core, tier: DiskTier, now_ns: int) -> None:
    """Handles Ready: the mover has opened its devices. Notes that no mover has confirmed as durable are sent again."""
    assert tier.mover is not None
    for device in tier.devices:
        device.begin_anew()
    drain.ready(tier)
    tier.notes.write_again()
    if not tier.recovered:
        tier.tell(Recover())
        _await_found(core, tier.mover, now_ns)


def gone(core: Core, tier: DiskTier, now_ns: int) -> None:
    """Handles the mover's end: it has been reaped, so none of its I/O can still touch the arena."""
    assert tier.mover is not None
    core.timers.cancel("recover", tier.mover.number)
    drain.gone(core, tier)
    segments.gone(core, tier)
    tier.mover_ended(now_ns + core.bounds.disk_restart_ms * MILLISECOND_NS)
    for job in list(tier.chunks.jobs.values()):
        core.timers.cancel("disk", job.number)
        core.counters.disk_faults["lost"] += len(job.parts)
        if job.kind == "write":
            writes.ended(core, tier, job, kept=False, now_ns=now_ns)
        elif job.kind == "scrub":
            scrub.ended(core, tier, job, set(), now_ns, compared=False)
        else:
            reads.ended(core, tier, job, set(job.parts), now_ns, lost=False)
    stop_waiting(tier, now_ns)


def stop_waiting(tier: DiskTier, now_ns: int) -> None:
    """Fails all fetches, because the mover reads nothing any more."""
    tier.waits.fail_all(tier.waits.waiters, mover_lost(), now_ns)


def overdue(core: Core, tier: DiskTier, number: int, now_ns: int) -> None:
    """Kills the mover when a read or write takes too long. Its slots stay taken until the mover is reaped, however long
    that takes."""
    assert tier.mover is not None
    movers.kill(core, tier.mover, f"did not end disk job {number}")
    stop_waiting(tier, now_ns)


def recover_overdue(core: Core, tier: DiskTier) -> None:
    assert tier.mover is not None
    movers.kill(core, tier.mover, "did not tell what is on disk")


def reported(core: Core, tier: DiskTier, report: DiskReport, now_ns: int) -> None:
    match report:
        case Moved():
            job = tier.chunks.jobs.get(report.job)
            if job is not None:
                _moved(core, tier, job, report, now_ns)
                segments.turn(core, tier, now_ns)
                drain.turn(core, tier, now_ns)
                scrub.turn(core, tier, now_ns)
        case Noted():
            tier.notes.heed(report, tier.why_not_noted)
        case NotesForgotten():
            tier.notes.forgotten(report)
        case DeviceIs():
            if report.device < len(tier.devices):
                _device_is(core, tier, report)
        case FoundNote() | Listed() | FoundRecords():
            if not tier.recovered:
                _found(core, tier, report, now_ns)


def _found(core: Core, tier: DiskTier, report: FoundNote | Listed | FoundRecords, now_ns: int) -> None:
    assert tier.mover is not None
    recovery.found(core, tier, report)
    if tier.recovered:
        core.timers.cancel("recover", tier.mover.number)
    else:
        _await_found(core, tier.mover, now_ns)
    if isinstance(report, Listed):
        tier.notes.void_waiting()


def _await_found(core: Core, mover: Mover, now_ns: int) -> None:
    core.timers.set(now_ns + core.bounds.mover_start_ms * MILLISECOND_NS, "recover", mover.number)


def _moved(core: Core, tier: DiskTier, job: DiskJob, moved: Moved, now_ns: int) -> None:
    core.timers.cancel("disk", job.number)
    for fault in moved.faults:
        core.counters.disk_faults[fault.fault] += 1
    device = tier.devices[job.device]
    if moved.faults:
        device.placement.faulted()
    if device.job_ended(failed=any(fault.fault in ("io", "short") for fault in moved.faults)):
        core.log("disk fails", *device.fields, ("why", device.problem), level=logging.ERROR)
    bad = [job.parts[fault.item] for fault in moved.faults if fault.fault == "checksum"]
    for part in bad:
        mismatches.on_device(core, job, job.space.parts[part].group)
    if job.kind == "write":
        writes.ended(core, tier, job, kept=not moved.faults, now_ns=now_ns)
        if bad:
            mismatches.drop(core, job.space.digest, job.node, now_ns)
        return
    wrong = {job.parts[fault.item] for fault in moved.faults}
    if job.kind == "scrub":
        scrub.ended(core, tier, job, wrong, now_ns, compared=True)
    else:
        reads.ended(core, tier, job, wrong, now_ns, lost=True, sums=array("Q", moved.sums))


def _device_is(core: Core, tier: DiskTier, report: DeviceIs) -> None:
    """Handles the state of a device. A device that works again gets the notes that it may have missed. After a device
    was drained, notes that no device took are sent again: a Clear is durable if nothing is left on any device."""
    drain.said(core, tier, report)
    device = tier.devices[report.device]
    is_mended = device.problem != "" and not report.problem
    device.set_problem(report.problem)
    if is_mended or report.drain == "drained":
        tier.notes.write_again()
    core.log(
        "disk device",
        *device.fields,
        ("bytes", report.bytes),
        ("problem", report.problem or "none"),
        level=logging.WARNING if report.problem else logging.INFO,
    )
