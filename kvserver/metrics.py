"""Every metric that /metrics shows, made from one snapshot of the brain's status and counters.

Names end in their unit, help texts state the formula. Labels have few values: movers by device and state, slots by
size, never sessions, caches or namespaces. Counters start at zero with every brain; `kvserver_incarnation` tells when.
"""

from collections import Counter as Tally
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvserver.service.counters import Counters, Histogram
from kvserver.wire.status import DiskStatus, Status

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
MOVER_STATES = ("starting", "ready", "killed")
EXACT_BELOW = 1 << 53
"""A sample is a float. Incarnations are nanoseconds plus a count, and a restart often changes only the last digit."""


def render(status: Status, counters: Counters, age_s: float) -> bytes:
    """The text that a scrape gets."""
    return generate_latest(SnapshotCollector(status, counters, age_s))


class SnapshotCollector(Collector):
    """The metrics of one snapshot; `age_s` is how old it is now."""

    def __init__(self, status: Status, counters: Counters, age_s: float) -> None:
        self._status = status
        self._counters = counters
        self._age_s = age_s

    def collect(self) -> Iterator[Metric]:
        yield from self._server()
        yield from self._held()
        yield from self._movers()
        yield from self._lookups()
        yield from self._transfers()
        yield from self._losses()
        yield from self._disk()

    def _server(self) -> Iterator[Metric]:
        status = self._status
        yield _gauge("server_info", "Always 1; the label names the server's version.", "server", {status.server: 1})
        start = status.incarnation % EXACT_BELOW
        yield _gauge("incarnation", "Which start of the brain this is, modulo 2^53.", value=start)
        yield _gauge("uptime_seconds", "Seconds since the brain started.", value=status.uptime_s)
        yield _gauge("snapshot_age_seconds", "Age of these figures; the brain is stuck if it grows.", value=self._age_s)

    def _held(self) -> Iterator[Metric]:
        status, arena = self._status, self._status.arena
        yield _gauge(
            "arena_bytes",
            "DRAM tier by state: used (in taken slots) <= ready (touched) <= total (configured).",
            "state",
            {"used": arena.used_bytes, "ready": arena.ready_bytes, "total": arena.total_bytes},
        )
        yield _gauge(
            "arena_slabs",
            "Slabs of the arena: ready <= total.",
            "state",
            {"ready": arena.slabs_ready, "total": arena.slabs_total},
        )
        yield _gauge(
            "arena_problem",
            "1 when the arena stopped growing early, see /status; else 0.",
            value=int(arena.problem != ""),
        )
        sizes = status.slot_sizes
        yield _gauge(
            "slots",
            "Slots in the slabs that serve a slot size now.",
            "slot_bytes",
            {str(size.slot_bytes): size.slots for size in sizes},
        )
        yield _gauge(
            "slots_used",
            "Of those, taken by a chunk or by a running job.",
            "slot_bytes",
            {str(size.slot_bytes): size.slots_used for size in sizes},
        )
        yield _gauge("chunks", "Chunks in the index, sealed or being stored.", value=status.chunks)
        yield _gauge("chunks_max", "Most chunks that the index takes (chunks_max).", value=status.chunks_max)
        yield _gauge("namespaces", "Namespaces that hold something.", value=status.namespaces)
        yield _gauge("sessions", "Client processes that are connected.", value=status.sessions)
        yield _gauge("caches", "Registered caches.", value=status.caches)
        yield _gauge("leases", "Leases that are out.", value=status.leases)
        yield _gauge("pins", "Pinned prefixes: leases + running retrieves + chunks being stored.", value=status.pins)
        yield _gauge("jobs_running", "Jobs in flight.", "kind", {"store": status.stores, "retrieve": status.retrieves})

    def _movers(self) -> Iterator[Metric]:
        movers = self._status.movers
        states: Mapping[str, int] = Tally(mover.state for mover in movers)
        yield _gauge("movers", "Movers by state.", "state", {state: states.get(state, 0) for state in MOVER_STATES})
        backends = GaugeMetricFamily(
            "kvserver_mover_backend_info",
            "Always 1; the labels name what moves a device's bytes.",
            labels=("device", "backend"),
        )
        for device, backend in sorted({(mover.device, mover.backend) for mover in movers if mover.backend}):
            backends.add_metric((device, backend), 1)
        yield backends

    def _lookups(self) -> Iterator[Metric]:
        seen = self._counters
        yield _counter(
            "lookups",
            "Lookups by result: hit = a lease was granted.",
            "result",
            {"hit": seen.lookups_hit, "miss": seen.lookups - seen.lookups_hit},
        )
        yield _counter(
            "lookup_chunks",
            "Chunks asked for in lookups: hit = under a granted lease. Hit rate = hit / (hit + miss).",
            "result",
            {"hit": seen.chunks_hit, "miss": seen.chunks_asked - seen.chunks_hit},
        )
        yield _counter("lookup_hit_tokens", "Tokens of the chunks that were hit.", value=seen.tokens_hit)
        yield _counter(
            "lease_events",
            "Leases by event. granted = released + expired + used by every rank + out now.",
            "event",
            {"granted": seen.leases_granted, "released": seen.leases_released, "expired": seen.leases_expired},
        )
        yield _histogram(
            "lookup_handle_seconds", "Time inside the brain for one lookup.", "", {"": seen.lookup_handle_seconds}
        )

    def _transfers(self) -> Iterator[Metric]:
        seen = self._counters
        yield _counter(
            "stores",
            "Stores by result: short = fewer chunks were kept than asked.",
            "result",
            {"whole": seen.stores - seen.stores_short, "short": seen.stores_short},
        )
        yield _counter("retrieves", "Retrieves that were accepted.", value=seen.retrieves)
        yield _counter(
            "copy_bytes",
            "Bytes that movers copied: store = into the arena and sealed, retrieve = out of it.",
            "direction",
            {"store": seen.bytes_stored, "retrieve": seen.bytes_retrieved},
        )
        yield _counter(
            "mode_bytes",
            "Bytes that movers moved, sealed or not, by how: staged, direct, server-gather.",
            "mode",
            seen.mode_bytes,
        )
        yield _counter("stored_chunks", "Groups of chunks that became complete.", value=seen.chunks_stored)
        yield _counter("jobs", "Jobs by how they ended.", "end", seen.jobs)
        yield _histogram("job_seconds", "From a request's arrival to the end of its job.", "kind", seen.job_seconds)

    def _losses(self) -> Iterator[Metric]:
        seen = self._counters
        yield _counter("evicted_chunks", "Chunks that went to make room.", value=seen.evictions)
        yield _counter("evicted_bytes", "Slot bytes of the chunks that went to make room.", value=seen.evicted_bytes)
        yield _counter("discarded_chunks", "Chunks that were given up, by reason.", "reason", seen.discarded)
        yield _counter("errors", "Requests answered with an error, by family.", "family", seen.errors)
        yield _counter("replies_dropped", "Replies whose peer was gone or did not read.", value=seen.replies_dropped)
        yield _counter("mover_restarts", "Movers that were reaped.", value=seen.mover_restarts)
        yield _counter(
            "session_events",
            "Sessions by event.",
            "event",
            {"opened": seen.sessions_opened, "closed": seen.sessions_closed},
        )

    def _disk(self) -> Iterator[Metric]:
        """All of it 0 without a disk tier."""
        status, seen = self._status, self._counters
        yield from self._devices()
        yield _gauge("disk_chunks", "Chunks that have something on disk.", value=status.chunks_on_disk)
        yield _gauge("arena_clean_bytes", "Bytes of the arena that are on disk as well.", value=status.clean_bytes)
        yield _gauge(
            "keys_touched", "Keys remembered beyond their chunks, for second touch.", value=status.keys_touched
        )
        yield _counter("lookup_disk_chunks", "Of the chunks hit, those read from disk.", value=seen.chunks_hit_on_disk)
        yield _counter(
            "lookups_declined",
            "Lookups answered with less: reading was slower than computing.",
            value=seen.lookups_declined,
        )
        moved = {"write": seen.disk_writes, "read": seen.disk_reads}
        yield _counter("disk_moved_chunks", "Chunks written to and read from disk.", "direction", moved)
        moved = {"write": seen.disk_written_bytes, "read": seen.disk_read_bytes}
        yield _counter("disk_moved_bytes", "Bytes written to and read from disk.", "direction", moved)
        ends = {"evicted": seen.disk_evictions, "lost": seen.disk_lost, "recovered": seen.disk_recovered}
        yield _counter(
            "disk_chunk_events",
            "Chunks on disk: evicted to make room, lost because they could not be read, recovered at the start.",
            "event",
            ends,
        )
        yield _counter(
            "disk_refused_chunks", "Chunks that left DRAM unwritten, by reason.", "reason", seen.disk_refused
        )
        yield _counter("disk_faults", "Records that were not written or read, by fault.", "fault", seen.disk_faults)
        text = "Headers, labels and notes that were damaged at the start, or could not be read."
        yield _counter("disk_damaged_headers", text, value=seen.disk_damaged)
        yield _counter(
            "disk_drained_chunks", "Chunks that left a drained device, by where they are now.", "end", seen.disk_drained
        )

    def _devices(self) -> Iterator[Metric]:
        """Of each device by its number, which is its place in disk_paths."""

        def each(value: Callable[[DiskStatus], float]) -> dict[str, float]:
            return {str(disk.device): value(disk) for disk in self._status.disks}

        def gauge(name: str, text: str, value: Callable[[DiskStatus], float]) -> Metric:
            return _gauge(f"disk_{name}", text, "device", each(value))

        yield gauge("used_bytes", "Bytes in extents that are taken.", lambda disk: disk.used_bytes)
        yield gauge("total_bytes", "Bytes of all segments of a device.", lambda disk: disk.total_bytes)
        text = "1 while a device takes writes, else 0; /status says why."
        yield gauge("takes_writes", text, lambda disk: disk.takes_writes)
        yield gauge("draining", "1 while a device is drained or has been, else 0.", lambda disk: disk.drain != "")
        yield gauge("queued_bytes", "Bytes ordered to be written and not written yet.", lambda disk: disk.queued_bytes)
        text = "Bytes that may be written in 24 hours (disk_daily_write_bytes); 0: no limit."
        yield gauge("daily_write_bytes", text, lambda disk: disk.daily_write_bytes)
        text = "Of those, the bytes that may be written now; 0 without a limit."
        yield gauge("budget_bytes", text, lambda disk: disk.budget_bytes)
        text = "Bytes per second that a device wrote while it had something to write."
        yield gauge("write_bytes_per_second", text, lambda disk: disk.write_bytes_per_s)
        text = "Bytes per second that a device read while it had something to read."
        yield gauge("read_bytes_per_second", text, lambda disk: disk.read_bytes_per_s)
        written, read = each(lambda disk: disk.written_bytes), each(lambda disk: disk.read_bytes)
        yield _counter("disk_device_written_bytes", "Bytes written to a device.", "device", written)
        yield _counter("disk_device_read_bytes", "Bytes read from a device.", "device", read)
        faults = each(lambda disk: disk.faults)
        yield _counter("disk_device_faults", "Reads and writes of a device with a bad record.", "device", faults)


def _gauge(
    name: str, text: str, label: str = "", values: Mapping[str, float] | None = None, *, value: float = 0
) -> Metric:
    if values is None:
        return GaugeMetricFamily(f"kvserver_{name}", text, value=value)
    family = GaugeMetricFamily(f"kvserver_{name}", text, labels=(label,))
    for which, count in values.items():
        family.add_metric((which,), count)
    return family


def _counter(
    name: str, text: str, label: str = "", values: Mapping[str, float] | None = None, *, value: int = 0
) -> Metric:
    if values is None:
        return CounterMetricFamily(f"kvserver_{name}", text, value=value)
    family = CounterMetricFamily(f"kvserver_{name}", text, labels=(label,))
    for which, count in values.items():
        family.add_metric((which,), count)
    return family


def _histogram(name: str, text: str, label: str, histograms: Mapping[str, Histogram]) -> Metric:
    """label "" for a histogram without labels, whose only key is "" as well."""
    family = HistogramMetricFamily(f"kvserver_{name}", text, labels=(label,) if label else ())
    for which, histogram in histograms.items():
        edges = [*(f"{bound:g}" for bound in histogram.bounds), "+Inf"]
        buckets = list(zip(edges, accumulate(histogram.counts), strict=True))
        family.add_metric((which,) if label else (), buckets, histogram.sum)
    return family
