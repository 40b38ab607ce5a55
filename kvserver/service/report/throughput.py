"""The speed of each job, counted when its mover reports the end and before the job is forgotten."""

from kvserver.service.state.core import Core
from kvserver.wire.orders import Done, Moved, Report

DISK_DIRECTIONS = {"write": "demote", "read": "promote"}


def count(core: Core, report: Report) -> None:
    """Counts jobs that ended well. Others moved part of their bytes, and say nothing about a device's speed."""
    match report:
        case Done(job=number, status="done") if number in core.jobs:
            kind = core.jobs[number].kind
            core.counters.took(kind, report.bytes, report.copy_ns)
            if kind == "retrieve" and report.mode != "engine-driven":  # of that the mover's half would count alone
                core.loads.ended(report.bytes, report.copy_ns)
        case Moved(job=number, faults=[]) if core.disk is not None and number in core.disk.chunks.jobs:
            job = core.disk.chunks.jobs[number]
            if job.kind in DISK_DIRECTIONS:
                core.counters.took(DISK_DIRECTIONS[job.kind], job.bytes, report.io_ns)
