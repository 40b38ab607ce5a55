"""The server counters that a replay keeps, over all lives of a server that was restarted."""

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from benchmarks.replay.result import DiskUse
from kvserver.wire.status import Status

COUNTERS = ("evictions", "evicted_bytes", "chunks_stored", "stores_short", "leases_expired", "mover_restarts")
"""Counters that are shown for every server."""


@dataclass(frozen=True)
class Seen:
    server: dict[str, int] = field(default_factory=dict)
    disk: DiskUse | None = None


def seen_in(status: Status) -> Seen:
    server = {
        "chunks held": status.chunks,
        "arena used bytes": status.arena.used_bytes,
        "arena bytes": status.arena.total_bytes,
    }
    for name in COUNTERS:
        server[name.replace("_", " ")] = _count(status, name)
    return Seen(server, _disk_use(status) if status.disks else None)


def joined(before: Seen | None, last: Seen) -> Seen:
    """Joins two lives of a server: counters are added, present contents are those of the last one."""
    if before is None or not before.server:
        return last
    server = dict(last.server)
    for name in COUNTERS:
        shown = name.replace("_", " ")
        server[shown] = server.get(shown, 0) + before.server[shown]
    if before.disk is None or last.disk is None:
        return Seen(server, last.disk)
    one, other = before.disk, last.disk
    disk = msgspec.structs.replace(
        other,
        written_bytes=one.written_bytes + other.written_bytes,
        read_bytes=one.read_bytes + other.read_bytes,
        process_written_bytes=one.process_written_bytes + other.process_written_bytes,
        evictions=one.evictions + other.evictions,
        recovered=one.recovered + other.recovered,
        refused={why: count + one.refused.get(why, 0) for why, count in other.refused.items()},
        faults={why: count + one.faults.get(why, 0) for why, count in other.faults.items()},
    )
    return Seen(server, disk)


def _disk_use(status: Status) -> DiskUse:
    return DiskUse(
        total_bytes=sum(disk.total_bytes for disk in status.disks),
        used_bytes=sum(disk.used_bytes for disk in status.disks),
        written_bytes=_count(status, "disk_written_bytes"),
        read_bytes=_count(status, "disk_read_bytes"),
        process_written_bytes=sum(_written_by(mover.pid) for mover in status.movers if mover.device == "disk"),
        evictions=_count(status, "disk_evictions"),
        recovered=_count(status, "disk_recovered"),
        refused=_counts(status, "disk_refused"),
        faults=_counts(status, "disk_faults"),
    )


def _count(status: Status, name: str) -> int:
    count = status.counters[name]
    assert isinstance(count, int)
    return count


def _counts(status: Status, name: str) -> dict[str, int]:
    counts = status.counters[name]
    assert isinstance(counts, dict)
    return counts


def _written_by(pid: int) -> int:
    """Bytes that the kernel counts as sent to storage by a process; 0 if it does not tell us."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("write_bytes:")), 0)
