"""The result as text for people, and as JSON for programs."""

from collections.abc import Callable, Sequence

import msgspec

from benchmarks.replay.progress import Progress
from benchmarks.replay.result import ArmResult, DiskUse, Latency, ReplayResult, Restart, Sources, Traffic

Cell = Callable[[ArmResult], str]


def render(result: ReplayResult) -> str:
    """The table (one column without the server, one per arm), notes on its numbers, and the verdict line."""
    head = (
        f"trace {result.trace}, seed {result.seed}, {result.users} users, {result.workers} workers, "
        f"{result.token_bytes} bytes a token"
    )
    notes = [
        "HBM only: the same requests against the same HBM contents, with everything else computed.",
        f"TTFT is estimated, not measured: {result.cost_model}.",
        "Queued: each worker prefills one request after the other, the disk serves one after the other, and whoever "
        "waits sends what follows later.",
        "GB/s: bytes over the time in which at least one such job was under way, call to reply.",
        "Workers and server share this machine's cores, which shows in every time that is measured.",
    ]
    problems = [f"problem: {problem}" for problem in result.problems]
    return "\n".join([head, "", *_table(result), "", *notes, *problems, verdict(result)])


def render_json(result: ReplayResult) -> str:
    document = {"ok": result.ok, **msgspec.to_builtins(result)}
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()


def verdict(result: ReplayResult) -> str:
    arm = result.arms[-1] if result.arms else None
    if arm is None:
        return f"{result.name}: FAILED, nothing ran"
    word = "ok" if result.ok else "FAILED"
    hits = _percent(arm.hbm_tokens + arm.retrieved_tokens, arm.prompt_tokens)
    sources = [f"HBM {_percent(arm.hbm_tokens, arm.prompt_tokens)}"]
    sources.append(f"DRAM {_percent(arm.dram_tokens, arm.prompt_tokens)}")
    if arm.disk is not None:
        sources.append(f"disk {_percent(arm.disk_tokens, arm.prompt_tokens)}")
    return (
        f"{result.name}: {word}, wrong bytes {sum(arm.wrong_bytes for arm in result.arms)}, {arm.requests} requests, "
        f"token hit rate {hits} ({' + '.join(sources)}), "
        f"{sum(arm.compared_bytes for arm in result.arms) / 1e9:.2f} GB retrieved and compared, "
        f"estimated TTFT p95 {arm.ttft_hbm_only.alone.p95:.3f} s -> {arm.ttft.alone.p95:.3f} s, "
        f"{sum(arm.wall_s for arm in result.arms):.0f} s"
    )


def progress_line(progress: Progress) -> str:
    """One line of progress."""
    if progress.phase == "starting":
        return f"{progress.arm}: starting"
    tokens = progress.hbm_tokens + progress.retrieved_tokens + progress.computed_tokens
    return (
        f"{progress.arm}: {progress.requests_ended}/{progress.requests} requests, "
        f"HBM {_percent(progress.hbm_tokens, tokens)}, server {_percent(progress.retrieved_tokens, tokens)}, "
        f"computed {_percent(progress.computed_tokens, tokens)}, retrieved {progress.retrieved_bytes / 1e9:.2f} GB, "
        f"stored {progress.stored_bytes / 1e9:.2f} GB, wrong bytes {progress.wrong_bytes}, {progress.elapsed_s:.0f} s"
    )


# ---------------------------------------------------------------- table


def _table(result: ReplayResult) -> list[str]:
    if not result.arms:
        return []
    first = result.arms[0]
    rows = [["", "HBM only", *(arm.name for arm in result.arms)]]
    shown = [*_ROWS]
    if any(arm.disk is not None for arm in result.arms):
        shown += _DISK_ROWS
    if any(arm.restart is not None for arm in result.arms):
        shown += _RESTART_ROWS
    rows += [[label, hbm_only(first), *(value(arm) for arm in result.arms)] for label, hbm_only, value in shown]
    names = sorted({name for arm in result.arms for name in arm.server})
    rows += [[f"server {name}", "", *(str(arm.server.get(name, "")) for arm in result.arms)] for name in names]
    return _aligned(rows)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells]).rstrip())
    lines.insert(1, "-" * max(len(line) for line in lines))
    return lines


def _nothing(_: ArmResult) -> str:
    return ""


def _zero(_: ArmResult) -> str:
    return "0"


def _tokens(tokens: int, of: int) -> str:
    return f"{tokens:,} ({_percent(tokens, of)})"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "0.0 %"


def _traffic(traffic: Traffic) -> str:
    return f"{traffic.jobs:,} jobs, {traffic.bytes / 1e9:.2f} GB, {traffic.gb_per_s:.2f} GB/s"


def _alone(latency: Latency) -> str:
    alone = latency.alone
    return f"{alone.mean:.3f} / {alone.p50:.3f} / {alone.p95:.3f}"


def _queued(latency: Latency) -> str:
    queued = latency.queued
    return f"{queued.mean:.2f} / {queued.p50:.2f} / {queued.p95:.2f} / {queued.largest:.1f}"


def _reasons(counts: dict[str, int]) -> str:
    counts = {reason: count for reason, count in counts.items() if count}
    total = sum(counts.values())
    if not total:
        return "0"
    return f"{total} (" + ", ".join(f"{count} {reason or 'unsaid'}" for reason, count in sorted(counts.items())) + ")"


def _of_disk(cell: Callable[[ArmResult, DiskUse], str]) -> Cell:
    return lambda arm: cell(arm, arm.disk) if arm.disk is not None else ""


def _ratio(part: int, whole: int) -> str:
    return f"{part / whole:.3f}" if whole else ""


def _of_restart(cell: Callable[[Restart], str]) -> Cell:
    return lambda arm: cell(arm.restart) if arm.restart is not None else ""


def _hits(sources: Sources) -> str:
    server = sources.dram_tokens + sources.disk_tokens
    missed = sources.prompt_tokens - sources.hbm_tokens
    return f"{_percent(sources.hit_tokens, sources.prompt_tokens)} ({_percent(server, missed)} of HBM's misses)"


# Label, cell of the column without a server, cell of an arm.
_ROWS: list[tuple[str, Cell, Cell]] = [
    ("requests", lambda a: f"{a.requests:,}", lambda a: f"{a.requests:,}"),
    ("input tokens", lambda a: f"{a.prompt_tokens:,}", lambda a: f"{a.prompt_tokens:,}"),
    (
        "  from HBM",
        lambda a: _tokens(a.hbm_tokens, a.prompt_tokens),
        lambda a: _tokens(a.hbm_tokens, a.prompt_tokens),
    ),
    ("  from DRAM", _zero, lambda a: _tokens(a.dram_tokens, a.prompt_tokens)),
    ("  from disk", _zero, lambda a: _tokens(a.disk_tokens, a.prompt_tokens)),
    (
        "  computed",
        lambda a: _tokens(a.prompt_tokens - a.hbm_tokens, a.prompt_tokens),
        lambda a: _tokens(a.computed_tokens, a.prompt_tokens),
    ),
    (
        "token hit rate",
        lambda a: _percent(a.hbm_tokens, a.prompt_tokens),
        lambda a: _percent(a.hbm_tokens + a.retrieved_tokens, a.prompt_tokens),
    ),
    ("TTFT mean / p50 / p95, s", lambda a: _alone(a.ttft_hbm_only), lambda a: _alone(a.ttft)),
    ("  queued mean / p50 / p95 / largest, s", lambda a: _queued(a.ttft_hbm_only), lambda a: _queued(a.ttft)),
    (
        "  requests an hour",
        lambda a: f"{a.ttft_hbm_only.requests_per_hour:,.0f}",
        lambda a: f"{a.ttft.requests_per_hour:,.0f}",
    ),
    (
        "stored by another worker",
        _nothing,
        lambda a: f"{_percent(a.foreign_tokens, a.retrieved_tokens)} of the server's",
    ),
    ("retrieve", _nothing, lambda a: _traffic(a.retrieve)),
    ("retrieve p50 / p95, ms", _nothing, lambda a: f"{a.retrieve.ms.p50:.1f} / {a.retrieve.ms.p95:.1f}"),
    ("store", _nothing, lambda a: _traffic(a.store)),
    ("store p50 / p95, ms", _nothing, lambda a: f"{a.store.ms.p50:.1f} / {a.store.ms.p95:.1f}"),
    ("lookup p50 / p99, us", _nothing, lambda a: f"{a.lookup_us.p50:.0f} / {a.lookup_us.p99:.0f}"),
    ("lookups unserved", _nothing, lambda a: _reasons(a.lookups_unserved)),
    ("retrieves failed", _nothing, lambda a: _reasons(a.retrieves_failed)),
    ("stores cut short", _nothing, lambda a: _reasons(a.stores_cut_short)),
    ("HBM blocks evicted", lambda a: f"{a.hbm_evictions:,}", lambda a: f"{a.hbm_evictions:,}"),
    ("bytes compared", _nothing, lambda a: f"{a.compared_bytes + a.spot_bytes:,}"),
    ("wrong bytes", _nothing, lambda a: f"{a.wrong_bytes:,}"),
    ("wall time, s", _nothing, lambda a: f"{a.wall_s:.1f}"),
]
_DISK_ROWS: list[tuple[str, Cell, Cell]] = [
    ("retrieves that waited for the disk", _nothing, _of_disk(lambda a, _: _traffic(a.from_disk))),
    ("disk read, GB", _nothing, _of_disk(lambda _, d: f"{d.read_bytes / 1e9:.2f}")),
    ("disk written, GB", _nothing, _of_disk(lambda _, d: f"{d.written_bytes / 1e9:.2f}")),
    ("  for each byte stored", _nothing, _of_disk(lambda a, d: _ratio(d.written_bytes, a.store.bytes))),
    (
        "  sent to the device for each byte of it",
        _nothing,
        _of_disk(lambda _, d: _ratio(d.process_written_bytes, d.written_bytes)),
    ),
    (
        "disk used",
        _nothing,
        _of_disk(lambda _, d: f"{_percent(d.used_bytes, d.total_bytes)} of {d.total_bytes / 1e9:.2f} GB"),
    ),
    ("chunks evicted from disk", _nothing, _of_disk(lambda _, d: f"{d.evictions:,}")),
    ("chunks that left DRAM unwritten", _nothing, _of_disk(lambda _, d: _reasons(d.refused))),
    ("disk faults", _nothing, _of_disk(lambda _, d: _reasons(d.faults))),
]
_RESTART_ROWS: list[tuple[str, Cell, Cell]] = [
    ("server killed after requests", _nothing, _of_restart(lambda r: f"{r.requests:,}")),
    ("  ready again, s", _nothing, _of_restart(lambda r: f"{r.ready_s:.1f}")),
    ("  chunks found on disk", _nothing, _of_disk(lambda a, d: f"{d.recovered:,}" if a.restart else "")),
    ("  hit rate before", _nothing, _of_restart(lambda r: f"{r.window} requests: {_hits(r.before)}")),
    ("  hit rate after", _nothing, _of_restart(lambda r: f"{r.window} requests: {_hits(r.after)}")),
]
