"""Every metric of /metrics, made from one snapshot of the brain's status and counters.

Names end in their unit, help texts state the formula. Labels have few values: movers by device and state, slots by
size, tenants with quotas, models up to a bound; never sessions, caches or namespaces. Counters start at zero with every
brain; `kvserver_incarnation` changes then.
"""

import platform
from collections import Counter as Tally
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvserver.service.telling.counters import Counters, Histogram
from kvserver.wire.messages import PROTOCOL
from kvserver.wire.status import DiskStatus, RemoteStatus, Status

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
TIERS = {"store": "dram", "retrieve": "dram", "demote": "disk", "promote": "disk"}
"""Direction -> tier: demote and promote go between DRAM and disk, the others between engines and DRAM."""
MOVER_STATES = ("starting", "ready", "killed")
EXACT_BELOW = 1 << 53
"""Integers below this are exact as a float, which a sample is. Incarnations are nanoseconds plus a count, and a restart
often changes only the last digit."""
REMOTE_EVENTS = {
    "probed": "probed",
    "found": "found",
    "reads": "read",
    "writes": "written",
    "existed": "existed",
    "dropped": "dropped",
    "told": "told",
    "foretold": "foretold",
    "heard": "heard",
    "unannounced": "unannounced",
}
"""Counter of remote stores -> the event that it counts."""
REMOTE_EVENTS_TEXT = (
    "Chunks that the remote store was asked for, had, gave or took. existed: another server wrote it first. "
    "dropped: prefixes that were not written whole, because too many chunks waited. told, heard: announcements. "
    "foretold: those of chunks that engines here compute. "
    "unannounced: lookups for which it was not asked, because nobody had announced the chunk."
)
REMOTE_MOVED_TEXT = "Bytes of payloads read from and written to it."
REMOTE_FAILURES_TEXT = (
    "Chunks that it did not give or take, by what was wanted and fault. wanted: probe, read or write; announce and "
    "listen are calls for announcements, note those for notes of namespaces."
)


def render(status: Status, counters: Counters, age_s: float) -> bytes:
    """The text for one scrape. age_s: age of the snapshot."""
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
        yield from self._tenants()
        yield from self._arc()
        yield from self._movers()
        yield from self._lookups()
        yield from self._transfers()
        yield from self._losses()
        yield from self._disk()
        yield from self._remote()

    def _server(self) -> Iterator[Metric]:
        status = self._status
        build = GaugeMetricFamily(
            "kvserver_build_info",
            "Always 1; the labels say what runs: version of server, Python and protocol with clients.",
            labels=("version", "python", "protocol"),
        )
        build.add_metric((status.server.removeprefix("kvserver "), platform.python_version(), str(PROTOCOL)), 1)
        yield build
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
        yield _gauge(
            "caches_engine_driven",
            "Of those, the ones whose clients copy by torch, through a buffer on the host: slow, and asked for.",
            value=status.caches_engine_driven,
        )
        yield _gauge("leases", "Leases that are out.", value=status.leases)
        yield _gauge(
            "pins", "Pinned prefixes: leases + holds + running retrieves + chunks being stored.", value=status.pins
        )
        yield _gauge("jobs_running", "Jobs in flight.", "kind", {"store": status.stores, "retrieve": status.retrieves})

    def _tenants(self) -> Iterator[Metric]:
        """Metrics of the tenants that the configuration names; nothing without quotas."""
        yield from self._tenants_in(
            "",
            "slots",
            bytes_text="DRAM by tenant: held = in complete chunks, reserved = being stored or read, ",
            evicted_text="Chunks of a tenant that left DRAM to make room, for itself or for others.",
        )
        if self._status.disks:
            yield from self._tenants_in(
                "disk_",
                "extents",
                bytes_text="Extents by tenant, all devices together: held = of chunks, reserved = being written, ",
                evicted_text="Chunks of a tenant whose extents went to make room, for itself or for others.",
            )

    def _tenants_in(self, tier: str, units: str, *, bytes_text: str, evicted_text: str) -> Iterator[Metric]:
        """tier: the prefix of the tier's names. units: the unit that the tier is divided into."""
        tenants = self._status.tenants

        def of_each(name: str) -> dict[str, int]:
            return {tenant.tenant: getattr(tenant, f"{tier}{name}") for tenant in tenants}

        family = GaugeMetricFamily(
            f"kvserver_tenant_{tier}bytes",
            f"{bytes_text}guaranteed and max as configured (max 0: no bound). held + reserved <= max; others evict "
            "only what is held above guaranteed.",
            labels=("tenant", "state"),
        )
        for state in ("held", "reserved", "guaranteed", "max"):
            for tenant, count in of_each(f"{state}_bytes").items():
                family.add_metric((tenant, state), count)
        yield family
        yield _counter(f"tenant_{tier}evicted_chunks", evicted_text, "tenant", of_each("evicted_chunks"))
        text = (
            f"{units.capitalize()} that a tenant wanted and did not get: its maximum was reached, or nothing could go."
        )
        yield _counter(f"tenant_{tier}refused_{units}", text, "tenant", of_each(f"refused_{units}"))

    def _arc(self) -> Iterator[Metric]:
        """Metrics of the ARC policy; families without samples under another policy."""
        arc = self._status.arc
        halves = ("recent", "frequent") if arc is not None else ()
        yield _gauge(
            "arc_bytes",
            "DRAM as ARC divides it: frequent = in chunks that were found again, recent = in all others, target = "
            "what recent may hold before it is the one to give.",
            "half",
            {half: getattr(arc, f"{half}_bytes") for half in (*halves, *["target"] * (arc is not None))},
        )
        text = "Keys of evicted chunks that are remembered, by the half that they left."
        yield _gauge("arc_ghosts", text, "half", {half: getattr(arc, f"{half}_ghosts") for half in halves})
        yield _counter(
            "arc_ghost_hits",
            "Chunks stored again while their key was remembered, by the half that they had left.",
            "half",
            {half: getattr(arc, f"{half}_ghost_hits") for half in halves},
        )

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
        text = (
            "dram and disk = under a granted lease, disk = to be read from there first; declined = on disk, and "
            "reading was slower than computing or not possible; unwanted = held, but fewer than the client wanted; "
            "miss = the rest. Hit rate = (dram + disk) / all."
        )
        yield _counter("lookup_chunks", f"Chunks asked for in lookups, each once: {text}", "result", seen.lookup_chunks)
        family = CounterMetricFamily(
            "kvserver_lookup_tokens",
            "The same in tokens, of lookups in namespaces that are known, by what engines call their model (empty: "
            f"before one said it): {text}",
            labels=("model", "result"),
        )
        for model, tokens in seen.lookup_tokens_by_model.items():
            for result, count in tokens.items():
                family.add_metric((model, result), count)
        yield family
        yield _counter(
            "lookup_ends",
            "Lookups by why the prefix ends where it does: whole = all is held; absent = the next chunk was never "
            "stored, or left long ago; gone = it left lately; writing = it is being stored; partial = a window or "
            "state group is missing; declined, disk-away = on disk, see lookup_chunks; namespace = nothing is known "
            "under it; recovering = it is not known yet what is on disk.",
            "why",
            seen.lookup_ends,
        )
        yield _gauge(
            "infinite_cache_hit_ratio",
            "Share of the chunks asked for in a window of time that an infinite cache would have held: 1 - distinct / "
            "asked, estimated, and at least kvserver_held_ratio. Of the last whole window; of the running one before "
            "the first is over.",
            "window",
            self._status.infinite_cache_hit_ratio,
        )
        yield _gauge(
            "held_ratio",
            "Share of the same chunks in the same window that this server held, those included that engines had too. "
            "More DRAM or disk can bring the difference to kvserver_infinite_cache_hit_ratio, and no more.",
            "window",
            self._status.held_ratio,
        )
        yield _counter(
            "lease_events",
            "Leases by event. The rest of those granted was used by every rank, is out now, or ended with its engine "
            "or with what it was on.",
            "event",
            {"granted": seen.leases_granted, "released": seen.leases_released, "expired": seen.leases_expired},
        )
        yield _counter("pledged_chunks", "Chunks that engines said they compute and store.", value=seen.chunks_pledged)
        yield _counter(
            "awaited_chunks", "Chunks that leases were granted on before they came.", value=seen.chunks_awaited
        )
        yield _counter("pledges_ended", "Pledges by how they ended.", "how", seen.pledges_ended)
        yield _histogram(
            "lookup_handle_seconds", "Time inside the brain for one lookup.", (), {(): seen.lookup_handle_seconds}
        )

    def _transfers(self) -> Iterator[Metric]:
        seen = self._counters
        yield _counter(
            "stores",
            "Stores that were answered, by result: whole; failed = with an error; else why fewer chunks are held than "
            "were asked (full: nothing more could be evicted; the others as in the protocol's Stored.why).",
            "result",
            {"whole": seen.stores_whole, **seen.short_stores, "failed": seen.stores_failed},
        )
        yield _counter("retrieves", "Retrieves that were accepted.", value=seen.retrieves)
        family = CounterMetricFamily(
            "kvserver_moved_bytes",
            "Bytes that arrived: store = in DRAM and sealed, retrieve = in an engine, demote = on disk, promote = from "
            "disk in DRAM.",
            labels=("tier", "direction"),
        )
        for direction, count in seen.moved_bytes.items():
            family.add_metric((TIERS[direction], direction), count)
        yield family
        yield _counter(
            "mode_bytes",
            "Bytes that movers moved between engines and DRAM, sealed or not, by how: staged, direct, server-gather, "
            "engine-driven.",
            "mode",
            seen.mode_bytes,
        )
        yield _counter(
            "mode_seconds",
            "The time that took, each job from its first byte to its last. mode_bytes / mode_seconds = bytes per "
            "second of one job.",
            "mode",
            {mode: count / 1e9 for mode, count in seen.mode_ns.items()},
        )
        family = CounterMetricFamily(
            "kvserver_worker_bytes",
            "Bytes of kvserver_mode_bytes by kind of job and by worker: its rank, of all engines together.",
            labels=("kind", "worker"),
        )
        for kind, of_each in seen.worker_bytes.items():
            for rank, count in of_each.items():
                family.add_metric((kind, str(rank)), count)
        yield family
        yield _counter("stored_chunks", "Groups of chunks that became complete.", value=seen.chunks_stored)
        yield _counter("jobs", "Stores and retrieves by how their job ended.", "end", seen.jobs)
        yield _histogram(
            "job_seconds",
            "From a request's arrival, or an order to the disk, to the end of its job.",
            ("tier", "direction"),
            _by_tier(seen.job_seconds),
        )
        yield _histogram(
            "job_bytes_per_second",
            "Bytes of a job that ended well, over the time from its first byte to its last (without time in queues).",
            ("tier", "direction"),
            _by_tier(seen.job_bytes_per_s),
        )

    def _losses(self) -> Iterator[Metric]:
        seen = self._counters
        yield _counter(
            "evicted_chunks",
            "Chunks that left DRAM to make room, by what needed it: store, promote (what was read from disk), index "
            "(chunks_max was reached).",
            "reason",
            seen.evicted_for,
        )
        text = "Of those, the chunks that were on disk, so that nothing was lost."
        yield _counter("evicted_to_disk_chunks", text, value=seen.evicted_to_disk)
        yield _counter("evicted_bytes", "Slot bytes of the chunks that left DRAM.", value=seen.evicted_bytes)
        yield _counter("discarded_chunks", "Chunks that were given up, by reason.", "reason", seen.discarded)
        yield from self._digests()
        yield _counter("errors", "Requests answered with an error, by family.", "family", seen.errors)
        yield _counter("replies_dropped", "Replies whose peer was gone or did not read.", value=seen.replies_dropped)
        text = (
            "Entries of the ledger that were damaged when the brain started, or whose bytes in the arena had changed: "
            "what they described is not found."
        )
        yield _counter("ledger_damaged_entries", text, value=seen.ledger_damaged)
        yield _counter("mover_restarts", "Movers that were reaped.", value=seen.mover_restarts)
        yield _counter(
            "session_events",
            "Sessions by event.",
            "event",
            {"opened": seen.sessions_opened, "closed": seen.sessions_closed},
        )

    def _digests(self) -> Iterator[Metric]:
        seen = self._counters
        family = CounterMetricFamily(
            "kvserver_digest_mismatches",
            "Shards with other bytes than an engine had stored: where they lay, and how they moved. Nobody got them.",
            labels=("tier", "device", "mode"),
        )
        for where, count in seen.digest_mismatches.items():
            family.add_metric(where, count)
        yield family
        text = "Shards that were loaded without a digest to compare: they were stored while digests were off."
        yield _counter("unverified_shards", text, value=seen.shards_unverified)
        text = "Bytes that were compared before anybody asked for them (scrub_bytes_per_s)."
        yield _counter("scrubbed_bytes", text, "tier", seen.scrubbed_bytes)
        text = "How long the last full round of the scrub took. 0: none has ended."
        yield _gauge("scrub_round_seconds", text, "tier", self._status.scrub_round_s)
        is_on = self._status.digests == "on"
        yield _gauge("digests", "1: what is loaded is compared with what was stored. 0: it is not.", value=is_on)

    def _remote(self) -> Iterator[Metric]:
        """Metrics of remote stores. Several have a label with their name. Without one the counters are 0, and there are
        no gauges: 0 would say that it is not usable."""
        yield from self._remote_state()
        if self._status.other_remotes:
            yield from self._remotes_moved()
            return
        seen = self._counters
        counts = {name: getattr(seen, f"remote_{name}") for name in (*REMOTE_EVENTS, "read_bytes", "written_bytes")}
        yield _counter("remote_chunk_events", REMOTE_EVENTS_TEXT, "event", _events(counts))
        yield _counter("remote_moved_bytes", REMOTE_MOVED_TEXT, "direction", _moved(counts))
        family = CounterMetricFamily("kvserver_remote_failures", REMOTE_FAILURES_TEXT, labels=("wanted", "fault"))
        for where, count in sorted(seen.remote_failures.items()):
            family.add_metric(where, count)
        yield family

    def _remotes_moved(self) -> Iterator[Metric]:
        """The same for several stores."""
        events = CounterMetricFamily("kvserver_remote_chunk_events", REMOTE_EVENTS_TEXT, labels=("remote", "event"))
        moved = CounterMetricFamily("kvserver_remote_moved_bytes", REMOTE_MOVED_TEXT, labels=("remote", "direction"))
        labels = ("remote", "wanted", "fault")
        failures = CounterMetricFamily("kvserver_remote_failures", REMOTE_FAILURES_TEXT, labels=labels)
        for remote in self._status.remotes:
            for event, count in _events(remote.counted).items():
                events.add_metric((remote.name, event), count)
            for direction, count in _moved(remote.counted).items():
                moved.add_metric((remote.name, direction), count)
            for where, count in sorted(remote.failures.items()):
                failures.add_metric((remote.name, *where.split()), count)
        yield from (events, moved, failures)

    def _remote_state(self) -> Iterator[Metric]:
        remotes = self._status.remotes
        if not remotes:
            return

        def gauge(name: str, text: str, value: Callable[[RemoteStatus], float]) -> Metric:
            if len(remotes) == 1:
                return _gauge(name, text, value=value(remotes[0]))
            return _gauge(name, text, "remote", {remote.name: value(remote) for remote in remotes})

        text = "1 while the remote store is open and its mover runs, else 0: nothing there is read or written."
        yield gauge("remote_usable", text, lambda remote: remote.usable)
        text = "Nodes of the remote store that failed again and again. They are asked again by themselves."
        yield gauge("remote_nodes_left_alone", text, lambda remote: len(remote.nodes_left_alone))
        text = "Namespaces that were cleared here, and the remote store has not confirmed it."
        yield gauge("remote_clears_owed", text, lambda remote: remote.clears_owed)
        text = "Namespaces by state: heard (their announcements are read) <= known (their notes were read, so their "
        text += "chunks count) <= used."
        labels = ("remote", "state") if len(remotes) > 1 else ("state",)
        family = GaugeMetricFamily("kvserver_remote_namespaces", text, labels=labels)
        for remote in remotes:
            notes = {"used": remote.namespaces, "known": remote.namespaces_known, "heard": remote.namespaces_heard}
            for state, count in notes.items():
                family.add_metric((remote.name, state) if len(remotes) > 1 else (state,), count)
        yield family
        text = "Chunks that wait to be written there."
        yield gauge("remote_queued_chunks", text, lambda remote: remote.queued_chunks)

    def _disk(self) -> Iterator[Metric]:
        """Metrics of the disk tier; all are 0 without one."""
        status, seen = self._status, self._counters
        yield from self._devices()
        yield _gauge("disk_chunks", "Chunks that have something on disk.", value=status.chunks_on_disk)
        yield _gauge("arena_clean_bytes", "Bytes of the arena that are on disk as well.", value=status.clean_bytes)
        yield _gauge(
            "keys_touched", "Keys remembered beyond their chunks, for second touch.", value=status.keys_touched
        )
        moved = {"demote": seen.disk_writes, "promote": seen.disk_reads}
        yield _counter("disk_moved_chunks", "Chunks written to and read from disk.", "direction", moved)
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
        text = "Of the bytes written to disk, those of records that moved so that a segment could change its size."
        yield _counter("disk_rewritten_bytes", text, value=seen.disk_rewritten_bytes)
        yield _counter("disk_faults", "Records that were not written or read, by fault.", "fault", seen.disk_faults)
        text = "Headers, labels and notes that were damaged at the start, or could not be read."
        yield _counter("disk_damaged_headers", text, value=seen.disk_damaged)
        yield _counter(
            "disk_drained_chunks", "Chunks that left a drained device, by where they are now.", "end", seen.disk_drained
        )

    def _devices(self) -> Iterator[Metric]:
        """Metrics of each device, labelled with its number, which is its place in disk_paths."""

        def each(value: Callable[[DiskStatus], float]) -> dict[str, float]:
            return {str(disk.device): value(disk) for disk in self._status.disks}

        def gauge(name: str, text: str, value: Callable[[DiskStatus], float]) -> Metric:
            return _gauge(f"disk_{name}", text, "device", each(value))

        yield gauge("used_bytes", "Bytes in extents that are taken.", lambda disk: disk.used_bytes)
        yield gauge("total_bytes", "Bytes of all segments of a device.", lambda disk: disk.total_bytes)
        text = "1 while a device's store is open, else 0: nothing there is read or written; /status says why."
        yield gauge("usable", text, lambda disk: disk.usable)
        text = "1 while a device takes writes, else 0; /status says why."
        yield gauge("takes_writes", text, lambda disk: disk.takes_writes)
        text = "Seconds for which a device has taken no write although writes wait for it, else 0; /status says why."
        yield gauge("stalled_seconds", text, lambda disk: disk.stalled_s)
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
    name: str, text: str, label: str = "", values: Mapping[str, float] | None = None, *, value: float = 0
) -> Metric:
    if values is None:
        return CounterMetricFamily(f"kvserver_{name}", text, value=value)
    family = CounterMetricFamily(f"kvserver_{name}", text, labels=(label,))
    for which, count in values.items():
        family.add_metric((which,), count)
    return family


def _events(counts: Mapping[str, int]) -> dict[str, int]:
    """Event -> its count, from counters of remote stores."""
    return {event: counts[name] for name, event in REMOTE_EVENTS.items()}


def _moved(counts: Mapping[str, int]) -> dict[str, int]:
    return {"fetch": counts["read_bytes"], "put": counts["written_bytes"]}


def _by_tier(histograms: Mapping[str, Histogram]) -> dict[tuple[str, ...], Histogram]:
    return {(TIERS[direction], direction): histogram for direction, histogram in histograms.items()}


def _histogram(
    name: str, text: str, labels: tuple[str, ...], histograms: Mapping[tuple[str, ...], Histogram]
) -> Metric:
    """A histogram for each combination of label values, which are the keys; () without labels."""
    family = HistogramMetricFamily(f"kvserver_{name}", text, labels=labels)
    for which, histogram in histograms.items():
        edges = [*(f"{bound:g}" for bound in histogram.bounds), "+Inf"]
        family.add_metric(which, list(zip(edges, accumulate(histogram.counts), strict=True)), histogram.sum)
    return family
