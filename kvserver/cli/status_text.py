"""The lines that `kvserver status` and `kvserver describe` print for a status document."""

from collections.abc import Iterator
from functools import partial

from kvserver.cli.rates import Between
from kvserver.units import duration, percent, rate, show_bytes, size, table
from kvserver.wire.status import SHOWN_MAX, CacheStatus, RemoteStatus, Status


def overview(status: Status) -> list[str]:
    return [
        *_server(status),
        *_on_call(status),
        "",
        *_counts(status),
        *movers(status, "backend"),
        *_slots(status),
        *_tenants(status),
        *_caches(status),
    ]


def described(status: Status) -> list[str]:
    """The caches that engines have registered, with their groups."""
    if not status.shown_caches:
        return ["no engine has registered a cache"]
    return [line for cache in status.shown_caches for line in _description(cache)] + list(_not_shown(status))


def _description(cache: CacheStatus) -> Iterator[str]:
    token_bytes = sum(group.shard_bytes for group in cache.groups) / (cache.chunk_tokens or 1)
    yield (
        f"cache {cache.name} of {cache.owner}: {cache.mode}, {cache.state}, chunks of {cache.chunk_tokens} "
        f"tokens, {size(token_bytes)} a token"
    )
    yield f"namespace {cache.namespace}"
    rows = [
        (
            str(number),
            group.kind + (f" of {group.window_tokens:,} tokens" if group.window_tokens else ""),
            f"{group.blocks:,} of {group.block_tokens} tokens",
            f"{group.regions:,} of {size(group.page_bytes)}",
            f"{group.shard} of {group.shards}",
            size(group.shard_bytes),
        )
        for number, group in enumerate(cache.groups)
    ]
    yield from list(table(("group", "kind", "blocks", "pages a block", "shard", "bytes a chunk"), rows))[1:]
    yield ""


def headline(status: Status) -> str:
    return f"{status.server}, up {duration(status.uptime_s)}, incarnation {status.incarnation}"


def movers(status: Status, backend: str) -> Iterator[str]:
    """The table of movers. backend: the head of its last column."""
    rows = [(str(m.mover), m.device, m.state, str(m.pid), str(m.caches), str(m.jobs), m.backend) for m in status.movers]
    yield from table(("mover", "device", "state", "pid", "caches", "jobs", backend), rows)


def _server(status: Status) -> Iterator[str]:
    arena, start = status.arena, Between(None, status)
    yield headline(status)
    yield (
        f"arena     {size(arena.used_bytes)} used of {size(arena.ready_bytes)} ready of {size(arena.total_bytes)}, "
        f"slabs {arena.slabs_ready} of {arena.slabs_total} x {show_bytes(arena.slab_bytes)}"
    )
    if arena.placement:
        yield f"          memory: {arena.placement}"
    if arena.problem:
        yield f"          stopped growing: {arena.problem}"
    yield from _disks(status)
    yield from _remote(status)
    yield f"index     {status.chunks:,} chunks of {status.chunks_max:,} at most, {status.namespaces} namespaces"
    yield f"hits      {start.tokens_of()} of the tokens asked for since the start"
    if status.reuse:
        yield f"          {status.reuse}"
    yield (
        f"now       {status.sessions} sessions, {status.caches} caches, {status.leases} leases, {status.pins} pins, "
        f"{status.stores} stores and {status.retrieves} retrieves running"
    )


def _disks(status: Status) -> Iterator[str]:
    """The lines about the disk tier; none without one."""
    if status.disk_state:
        both = size(status.clean_bytes)
        yield f"disk      {status.disk_state}, {status.chunks_on_disk:,} chunks; {both} of the arena are there as well"
    for disk in status.disks:
        yield (
            f"  device {disk.device}  {size(disk.used_bytes)} used of {size(disk.total_bytes)}, "
            f"writes {rate(disk.write_bytes_per_s)}, reads {rate(disk.read_bytes_per_s)} at best"
            f"  {disk.directory}"
        )
        if disk.daily_write_bytes:
            today = size(disk.daily_write_bytes)
            yield f"            {size(disk.budget_bytes)} may be written now, {today} a day"
        yield f"            {disk.said}"


def remote_said(remote: RemoteStatus) -> str:
    """Whether the remote store can be used, and what it owes, in words."""
    if not remote.usable:
        return f"not usable: {remote.problem or 'its mover does not run'}"
    parts = ["usable"]
    if remote.nodes_left_alone:
        parts.append(f"left alone: {', '.join(remote.nodes_left_alone)}")
    if remote.namespaces_known < remote.namespaces:
        parts.append(f"{remote.namespaces_known} of {remote.namespaces} namespaces known")
    if remote.clears_owed:
        parts.append(f"{remote.clears_owed} clears not confirmed")
    return ", ".join(parts)


def _remote(status: Status) -> Iterator[str]:
    """The lines about remote stores; none without one."""
    start = Between(None, status)
    for remote in status.remotes:
        grown = partial(start.grown_in, remote.name)
        yield f"remote    {remote.name}, {remote.url}: {remote_said(remote)}"
        yield (
            f"          {grown('reads'):,} chunks read ({size(grown('read_bytes'))}), "
            f"{grown('writes'):,} written ({size(grown('written_bytes'))}) since the start; "
            f"{remote.looked_for:,} prompts are looked for, {remote.queued_chunks:,} chunks wait to be written"
        )


def _on_call(status: Status) -> Iterator[str]:
    for warning in status.warnings:
        yield f"WARNING   {warning}"
    for words, count in status.troubles.items():
        yield f"trouble   {count:,} {words}"


def _counts(status: Status) -> Iterator[str]:
    """Every counter that is not zero: counters by reason on one line each, the others three to a line."""
    single = [f"{name} {count:,}" for name, count in status.counters.items() if isinstance(count, int) and count]
    for first in range(0, len(single), 3):
        yield "counted   " + "   ".join(single[first : first + 3])
    for name, counts in status.counters.items():
        if isinstance(counts, dict) and any(counts.values()):
            yield f"counted   {name}: " + ", ".join(f"{count:,} {reason}" for reason, count in counts.items() if count)


def _slots(status: Status) -> Iterator[str]:
    rows = [
        (
            size(s.slot_bytes),
            str(s.slabs),
            f"{s.slots:,}",
            f"{s.slots_used:,}",
            percent(s.slots_used, s.slots),
        )
        for s in status.slot_sizes
        if s.slots
    ]
    yield from table(("slot", "slabs", "slots", "used", ""), rows)


def _tenants(status: Status) -> Iterator[str]:
    yield from _tenants_in(status, "tenant", "", "slots")
    if status.disks:
        yield from _tenants_in(status, "tenant on disk", "disk_", "extents")


def _tenants_in(status: Status, title: str, tier: str, units: str) -> Iterator[str]:
    """The table of tenants in one tier. tier: prefix of its fields. units: slots or extents."""
    rows = []
    for tenant in status.tenants:
        of = partial(getattr, tenant)
        taken_bytes = of(f"{tier}held_bytes") + of(f"{tier}reserved_bytes")
        most = of(f"{tier}max_bytes")
        rows.append(
            (
                tenant.tenant,
                size(taken_bytes),
                size(of(f"{tier}guaranteed_bytes")),
                size(most) if most else "-",
                f"{of(f'{tier}evicted_chunks'):,}",
                f"{of(f'{tier}refused_{units}'):,}",
            )
        )
    yield from table((title, "taken", "guaranteed", "maximum", "evicted", "refused"), rows)


def _caches(status: Status) -> Iterator[str]:
    rows = [
        (cache.name, cache.owner, cache.namespace[:12], cache.mode, cache.state, str(cache.jobs))
        for cache in status.shown_caches
    ]
    yield from table(("cache", "engine", "namespace", "mode", "state", "jobs"), rows)
    yield from _not_shown(status)


def _not_shown(status: Status) -> Iterator[str]:
    if status.caches > SHOWN_MAX:
        yield f"and {status.caches - SHOWN_MAX} more caches"
