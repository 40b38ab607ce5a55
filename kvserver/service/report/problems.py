"""Problems that a person on call must see first: warnings about the present, and troubles since the brain started.

Both are worded here once, so that the page at /, `kvserver status` and `kvserver top` say the same. A warning is true
until its cause is gone. A trouble is a count of events; displays show how much it has grown lately. Problems that
depend on the amount of traffic are left to the alerts (deploy/prometheus), which have a memory of hours.
"""

from collections.abc import Iterable, Iterator, Sequence

from kvserver.service.telling.counters import Counters
from kvserver.tiers.placement import STALLED_NS
from kvserver.wire.orders import WARNING_FACT, DrainState
from kvserver.wire.status import ArenaStatus, DiskStatus, MoverStatus, RemoteStatus, TenantStatus

BAD_RECORDS = ("io", "checksum", "stale", "short", "lost")
"""Faults of a disk's records. `cancelled` is not one of them."""

PASSING = ("gone", "stale", "cancelled", "left-alone", "mover-lost")
"""Faults of the remote store that are no trouble, or are told elsewhere: it made room, a Clear came in between, a probe
was too long, a node is left alone, a mover ended."""

STALLS = {
    "room": "nothing that lies there may go for them",
    "segment": "a segment is being emptied for records of their size",
    "queue": "it does not write what is queued",
}
"""Words for DiskStatus.stalled_why."""


def warnings(
    arena: ArenaStatus,
    *,
    movers: Sequence[MoverStatus],
    disks: Sequence[DiskStatus],
    disk_problem: str,
    clears_owed: int,
    digests: bool,
    drain: DrainState,
    drain_waits: str,
    remotes: Sequence[RemoteStatus] = (),
) -> list[str]:
    """Warnings, worst first; empty when nobody needs to act. clears_owed: cleared namespaces and prefixes that no disk
    could note. drain, drain_waits: those of the whole server, as in Status."""
    return [
        *_of_digests(digests),
        *_of_movers(movers),
        *_of_clears(clears_owed),
        *_of_disks(disks, disk_problem),
        *of_remotes(remotes),
        *_of_arena(arena),
        *_of_drain(drain, drain_waits),
    ]


def _of_digests(digests: bool) -> Iterator[str]:
    if not digests:
        yield "digests are off: bytes that changed in memory are delivered as right"


def _of_movers(movers: Sequence[MoverStatus]) -> Iterator[str]:
    for mover in movers:
        if mover.state == "killed":
            yield f"mover {mover.mover} of {mover.device} was killed and has not ended yet: its jobs and caches wait"
        for name, why in mover.facts.items():
            if name.endswith(f" {WARNING_FACT}"):
                yield f"{name.removesuffix(f' {WARNING_FACT}')} of mover {mover.mover}: {why}"


def _of_clears(owed: int) -> Iterator[str]:
    if owed:
        yield f"{owed} clears are not durable yet, as no disk could note them: a restart may bring that back"


def disk_problem(disks: Sequence[DiskStatus], disk_state: str) -> str:
    """Why no disk can be used; empty while one can, and when all of them were drained on purpose."""
    wanted = [disk for disk in disks if disk.drain != "drained"]
    if not wanted:
        return ""
    if disk_state == "away":
        return "no disk can be used: the disk mover does not run"
    if not any(disk.usable for disk in wanted):
        return f"no disk can be used: none of {len(wanted)} could be opened"
    return ""


def _of_disks(disks: Sequence[DiskStatus], disk_problem: str) -> Iterator[str]:
    if disk_problem:
        yield disk_problem
    for disk in (disk for disk in disks if disk.drain != "drained"):
        if disk.problem and not disk.usable:
            yield f"disk {disk.device} cannot be used: {disk.problem}"
        elif disk.problem:
            yield f"disk {disk.device} takes no writes: {disk.problem}"
        elif disk.stalled_s * 1e9 >= STALLED_NS:
            why = STALLS.get(disk.stalled_why, disk.stalled_why)
            yield f"disk {disk.device} has taken nothing for {disk.stalled_s:.0f} s although writes wait: {why}"


def of_remotes(remotes: Sequence[RemoteStatus]) -> Iterator[str]:
    for remote in remotes:
        yield from _of_remote(remote, name=f" {remote.name}" if len(remotes) > 1 else "")


def _of_remote(remote: RemoteStatus, name: str) -> Iterator[str]:
    """name: of the store, where it has to be told from others."""
    if remote.problem:
        yield f"the remote store {remote.name} is not used: {remote.problem}"
    elif not remote.usable:
        yield f"the remote store {remote.name} is not used: its mover does not run"
    elif remote.nodes_left_alone:
        yield f"the remote store {remote.name} does not answer at {', '.join(remote.nodes_left_alone)}"
    elif remote.namespaces_known < remote.namespaces:
        yield f"the remote store {remote.name} has not told which chunks count, in some namespaces"
    elif remote.namespaces_heard < remote.namespaces_known:
        yield f"announcements in the remote store {remote.name} are not read, so it is asked for all that is missing"
    if remote.clears_owed:
        what = f"{remote.clears_owed} clears are not known to the remote store{name} yet"
        yield f"{what}: other servers may have those chunks"


def _of_arena(arena: ArenaStatus) -> Iterator[str]:
    if arena.problem:
        yield f"the arena stopped growing at slab {arena.slabs_ready} of {arena.slabs_total}: {arena.problem}"
    elif not arena.slabs_ready:
        yield "no slab of the arena is ready yet: nothing can be stored"


def _of_drain(drain: DrainState, waits: str) -> Iterator[str]:
    """Warnings about a drain. Others on call may not know of it, and it lasts until somebody resumes."""
    if drain == "draining":
        yield f"no store is taken: the server is being drained, waits for {waits}"
    elif drain == "drained":
        yield "no store is taken: the server is drained"


def troubles(counters: Counters, tenants: Iterable[TenantStatus]) -> dict[str, int]:
    """Counts of troubles that have happened, worst first."""
    seen = counters
    counts = {
        "chunks with other bytes than were stored": sum(seen.digest_mismatches.values()),
        "movers ended": seen.mover_restarts,
        "disk records not written or not read": sum(seen.disk_faults[fault] for fault in BAD_RECORDS),
        "damaged headers found on disk": seen.disk_damaged,
        "damaged entries of the ledger": seen.ledger_damaged,
        "chunks on disk lost": seen.disk_lost,
        "requests failed on their device": seen.errors["device"],
        "chunks given up: their copy failed": seen.discarded["failed"],
        "chunks given up: a worker or mover died": seen.discarded["died"],
        "chunks given up: a rank did not store its shard in time": seen.discarded["deadline"],
        "stores cut short: DRAM is pinned, or still growing": seen.short_stores["full"],
        "stores cut short: a rank has never registered": seen.short_stores["ranks-missing"],
        "requests refused: a limit was reached": seen.errors["resource"],
        "requests refused: the client was wrong": seen.errors["request"],
        "replies that nobody read": seen.replies_dropped,
        "chunks left DRAM unwritten: the disks were behind": seen.disk_refused["late"],
        "chunks left DRAM unwritten: the write budget was spent": seen.disk_refused["budget"],
    }
    counts["chunks that the remote store did not give or take"] = sum(
        count
        for (wanted, fault), count in seen.remote_failures.items()
        if fault not in PASSING and wanted not in ("announce", "listen", "note")
    )
    counts["prefixes not written whole to the remote store: too many chunks waited"] = seen.remote_dropped
    counts |= {f"slots that tenant {tenant.tenant} wanted and did not get": tenant.refused_slots for tenant in tenants}
    return {words: count for words, count in counts.items() if count}
