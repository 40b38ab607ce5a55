"""A status document as the lines that `kvserver status` prints."""

from collections.abc import Iterator, Sequence

from kvserver.sizes import show_bytes
from kvserver.wire.status import SHOWN_MAX, Status


def overview(status: Status) -> list[str]:
    return [*_server(status), "", *_counts(status), *_movers(status), *_slots(status), *_caches(status)]


def _server(status: Status) -> Iterator[str]:
    arena = status.arena
    yield f"{status.server}, up {_duration(status.uptime_s)}, incarnation {status.incarnation}"
    yield (
        f"arena     {_size(arena.used_bytes)} used of {_size(arena.ready_bytes)} ready of {_size(arena.total_bytes)}, "
        f"slabs {arena.slabs_ready} of {arena.slabs_total} x {show_bytes(arena.slab_bytes)}"
    )
    if arena.problem:
        yield f"          stopped growing: {arena.problem}"
    yield from _disks(status)
    yield f"index     {status.chunks:,} chunks of {status.chunks_max:,} at most, {status.namespaces} namespaces"
    yield (
        f"now       {status.sessions} sessions, {status.caches} caches, {status.leases} leases, {status.pins} pins, "
        f"{status.stores} stores and {status.retrieves} retrieves running"
    )


def _disks(status: Status) -> Iterator[str]:
    """Nothing without a disk tier."""
    if status.disk_state:
        both = _size(status.clean_bytes)
        yield f"disk      {status.disk_state}, {status.chunks_on_disk:,} chunks; {both} of the arena are there as well"
    for disk in status.disks:
        yield (
            f"  device {disk.device}  {_size(disk.used_bytes)} used of {_size(disk.total_bytes)}, "
            f"writes {_size(int(disk.write_bytes_per_s))}/s, reads {_size(int(disk.read_bytes_per_s))}/s"
            f"  {disk.directory}"
        )
        if disk.daily_write_bytes:
            today = _size(disk.daily_write_bytes)
            yield f"            {_size(disk.budget_bytes)} may be written now, {today} a day"
        if disk.drain:
            waits = f"; waits for {disk.drain_waits}" if disk.drain_waits else ""
            yield f"            {disk.drain}{waits}"
        if disk.problem:
            yield f"            takes no writes: {disk.problem}"


def _counts(status: Status) -> Iterator[str]:
    """Every counter that is not zero: those by reason in one line each, the rest three to a line."""
    single = [f"{name} {count:,}" for name, count in status.counters.items() if isinstance(count, int) and count]
    for first in range(0, len(single), 3):
        yield "counted   " + "   ".join(single[first : first + 3])
    for name, counts in status.counters.items():
        if isinstance(counts, dict) and any(counts.values()):
            yield f"counted   {name}: " + ", ".join(f"{count:,} {reason}" for reason, count in counts.items() if count)


def _movers(status: Status) -> Iterator[str]:
    rows = [(str(m.mover), m.device, m.state, str(m.pid), str(m.caches), str(m.jobs), m.backend) for m in status.movers]
    yield from _table(("mover", "device", "state", "pid", "caches", "jobs", "backend"), rows)


def _slots(status: Status) -> Iterator[str]:
    rows = [
        (
            _size(s.slot_bytes),
            str(s.slabs),
            f"{s.slots:,}",
            f"{s.slots_used:,}",
            f"{100 * s.slots_used / s.slots:.0f} %",
        )
        for s in status.slot_sizes
        if s.slots
    ]
    yield from _table(("slot", "slabs", "slots", "used", ""), rows)


def _caches(status: Status) -> Iterator[str]:
    sessions = {session.session: session for session in status.shown_sessions}
    rows = []
    for cache in status.shown_caches:
        session = sessions.get(cache.session)
        engine = f"{session.engine} rank {session.rank}" if session else f"session {cache.session}"
        rows.append((cache.name, engine, cache.namespace[:12], cache.mode, cache.state, str(cache.jobs)))
    yield from _table(("cache", "engine", "namespace", "mode", "state", "jobs"), rows)
    if status.caches > SHOWN_MAX:
        yield f"and {status.caches - SHOWN_MAX} more caches"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """An empty line, the head and the rows in columns; nothing when there are no rows."""
    if not rows:
        return
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    yield ""
    for row in (head, *rows):
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _size(count: float) -> str:
    """Rounded to three digits or so: 1.50GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1000:
            return f"{count:.3g}{unit}"
        count = count / 1024
    return f"{count:.3g}TiB"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if days else f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
