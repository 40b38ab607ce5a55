"""The brain's counters: plain numbers, written by the one thread that decides and copied for all readers.

Counters only grow while a brain lives; a new brain starts at zero. Values that can be counted in tables (chunks held,
sessions, jobs in flight) are gauges instead, see wire/status.py. Names and formulas for Prometheus: metrics.py.
"""

from bisect import bisect_left
from collections.abc import Mapping
from itertools import pairwise
from typing import Literal, get_args

from kvserver.tiers.placement import REFUSALS
from kvserver.wire.messages import Mode, Why
from kvserver.wire.orders import Fault

MODELS_MAX, OTHER_MODELS = 64, "other"
"""Models whose tokens are counted separately, and the name for all others. Engines choose the names, so their number
needs a bound."""
DISCARD_REASONS = ("died", "failed", "abandoned", "deadline", "cleared")
ERROR_FAMILIES = ("request", "resource", "device")
DISK_FAULTS = (*get_args(Fault), "lost")
DRAIN_ENDS = ("moved", "kept", "given-up")
PLEDGE_ENDS = ("stored", "withdrawn", "died", "late", "not-stored", "cleared", "silent")
JOB_ENDS = ("done", "abandoned", "failed", "invalid")
JOB_KINDS = ("store", "retrieve")
DIRECTIONS = (*JOB_KINDS, "demote", "promote")
EVICTED_FOR = ("store", "promote", "index")
SCRUB_TIERS = ("dram", "disk")
LOOKUP_RESULTS = ("dram", "disk", "declined", "unwanted", "miss")
HIT_RESULTS = ("dram", "disk")
"""Results that count as hits: the server serves these, the engine had or computes all others."""
LOOKUP_ENDS = ("whole", "absent", "gone", "writing", "partial", "declined", "disk-away", "namespace", "recovering")
SHORT_WHYS = tuple(why for why in get_args(Why) if why)
MODES: tuple[str, ...] = get_args(Mode)
IN_PARTS = (
    *("digest_mismatches", "job_bytes_per_s", "job_seconds", "lookup_tokens_by_model", "remote_failures"),
    "worker_bytes",
)
"""Counters that are tables of tables, shown in /metrics only."""

RemoteCount = Literal[
    "remote_dropped",
    "remote_existed",
    "remote_foretold",
    "remote_found",
    "remote_heard",
    "remote_probed",
    "remote_read_bytes",
    "remote_reads",
    "remote_told",
    "remote_unannounced",
    "remote_writes",
    "remote_written_bytes",
]
"""Plain counts of Counters that each remote store has as well."""
Count = (
    RemoteCount
    | Literal[
        "bytes_retrieved",
        "bytes_stored",
        "chunks_awaited",
        "chunks_pledged",
        "chunks_stored",
        "disk_damaged",
        "disk_evictions",
        "disk_lost",
        "disk_read_bytes",
        "disk_reads",
        "disk_recovered",
        "disk_rewritten_bytes",
        "disk_writes",
        "disk_written_bytes",
        "evicted_bytes",
        "evicted_to_disk",
        "leases_expired",
        "leases_granted",
        "leases_released",
        "ledger_damaged",
        "lookups",
        "mover_restarts",
        "replies_dropped",
        "retrieves",
        "sessions_closed",
        "sessions_opened",
        "shards_unverified",
        "stores",
        "stores_failed",
    ]
)
"""The plain counts of Counters, to which add() adds."""

RemoteWanted = Literal["probe", "read", "write", "announce", "listen", "note"]
"""The kinds of calls to a remote store."""
LOOKUP_SECONDS = (10e-6, 20e-6, 40e-6, 80e-6, 160e-6, 320e-6, 640e-6, 1.28e-3, 2.56e-3, 5.12e-3, 20e-3, 100e-3)
JOB_SECONDS = (0.5e-3, 1e-3, 2e-3, 4e-3, 8e-3, 16e-3, 32e-3, 64e-3, 128e-3, 256e-3, 0.5, 1.0, 2.0, 5.0, 20.0, 60.0)
JOB_BYTES_PER_S = (1e6, 1e7, 3e7, 1e8, 2e8, 5e8, 1e9, 2e9, 4e9, 8e9, 16e9, 32e9, 64e9, 128e9, 256e9)


class Histogram:
    """Counts of values by bucket: counts[i] counts those in (bounds[i-1], bounds[i]], the last one those above all
    bounds."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        assert all(low < high for low, high in pairwise(bounds))
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        return sum(self.counts)

    def copy(self) -> "Histogram":
        twin = Histogram(self.bounds)
        twin.counts = self.counts.copy()
        twin.sum = self.sum
        return twin


class RemoteCounts:
    """The counts of Counters of all remote stores, for one of them."""

    def __init__(self) -> None:
        self.plain: dict[str, int] = {what.removeprefix("remote_"): 0 for what in get_args(RemoteCount)}
        """Their names are those in Counters, without the "remote_" before them."""
        self.failures: dict[tuple[str, str], int] = {}
        """As Counters.remote_failures."""

    def add(self, what: RemoteCount, number: int) -> None:
        self.plain[what.removeprefix("remote_")] += number

    def failed(self, wanted: RemoteWanted, fault: str) -> None:
        self.failures[wanted, fault] = self.failures.get((wanted, fault), 0) + 1


class Counters:
    """All counters. Other threads read a copy()."""

    __slots__ = (
        "bytes_retrieved",
        "bytes_stored",
        "chunks_awaited",
        "chunks_pledged",
        "chunks_stored",
        "digest_mismatches",
        "discarded",
        "disk_damaged",
        "disk_drained",
        "disk_evictions",
        "disk_faults",
        "disk_lost",
        "disk_read_bytes",
        "disk_reads",
        "disk_recovered",
        "disk_refused",
        "disk_rewritten_bytes",
        "disk_writes",
        "disk_written_bytes",
        "errors",
        "evicted_bytes",
        "evicted_for",
        "evicted_to_disk",
        "job_bytes_per_s",
        "job_seconds",
        "jobs",
        "leases_expired",
        "leases_granted",
        "leases_released",
        "ledger_damaged",
        "lookup_chunks",
        "lookup_ends",
        "lookup_handle_seconds",
        "lookup_tokens_by_model",
        "lookups",
        "mode_bytes",
        "mode_ns",
        "mover_restarts",
        "pledges_ended",
        "remote_dropped",
        "remote_existed",
        "remote_failures",
        "remote_foretold",
        "remote_found",
        "remote_heard",
        "remote_probed",
        "remote_read_bytes",
        "remote_reads",
        "remote_told",
        "remote_unannounced",
        "remote_writes",
        "remote_written_bytes",
        "replies_dropped",
        "retrieves",
        "scrubbed_bytes",
        "sessions_closed",
        "sessions_opened",
        "shards_unverified",
        "short_stores",
        "stores",
        "stores_failed",
        "worker_bytes",
    )

    def __init__(self) -> None:  # noqa: PLR0915 - one statement for each
        self.lookups = 0
        """Lookups that were accepted."""
        self.lookup_chunks = dict.fromkeys(LOOKUP_RESULTS, 0)
        """Chunks that lookups asked for, each counted once. dram, disk: under a lease that was granted; disk: to be
        read first. declined: held on disk and not offered, because reading was slower than computing or not possible.
        unwanted: held, but fewer than the client wanted, so it got no lease. miss: all others."""
        self.lookup_tokens_by_model = {"": dict.fromkeys(LOOKUP_RESULTS, 0)}
        """Tokens in lookup_chunks, by the model name that the engines gave; "": no engine has given one yet. Lookups in
        unknown namespaces are left out, because the tokens of their chunks are unknown."""
        self.lookup_ends = dict.fromkeys(LOOKUP_ENDS, 0)
        """Lookups by the reason why the found prefix ends where it does (service/requests/miss_reason.py)."""
        self.leases_granted = 0
        self.leases_released = 0
        """Leases given back by the client, or taken back because the reply that granted them could not be sent."""
        self.leases_expired = 0
        """Leases that ran out before every rank had used them. The others were used up, are still out, or ended with
        their engine or their chunks."""
        self.stores = 0
        """Accepted stores that have been answered."""
        self.stores_failed = 0
        """Answered stores that ended with an error: the copy failed, or its block ids were wrong."""
        self.short_stores = dict.fromkeys(SHORT_WHYS, 0)
        """Stores answered with fewer chunks than asked, by reason (messages.Stored.why)."""
        self.chunks_stored = 0
        """Groups of chunks that became complete (all shards sealed). A chunk of a hybrid model has several groups."""
        self.chunks_pledged = 0
        """Chunks that engines have pledged to compute and store."""
        self.chunks_awaited = 0
        """Chunks that leases of an Await were granted on before they were stored."""
        self.pledges_ended = dict.fromkeys(PLEDGE_ENDS, 0)
        """Pledges by how they ended (state/pledges.py)."""
        self.bytes_stored = 0
        """Bytes that movers copied into the arena and that were sealed."""
        self.retrieves = 0
        """Accepted retrieves; each is answered."""
        self.bytes_retrieved = 0
        """Bytes that movers copied out of the arena."""
        self.shards_unverified = 0
        """Shards that movers copied out of the arena without comparing a digest: nobody had made one."""
        self.digest_mismatches: dict[tuple[str, str, str], int] = {}
        """Shards with other bytes than were stored, by (tier, device, mode). tier: where the bytes lay, dram or disk.
        mode: how they moved, or promote or demote; scrub: they were only compared."""
        self.scrubbed_bytes = dict.fromkeys(SCRUB_TIERS, 0)
        """Bytes that were read and compared before anybody asked for them, by tier."""
        self.evicted_for = dict.fromkeys(EVICTED_FOR, 0)
        """Chunks that left DRAM to make room, by what needed it: a store, a read from disk, or the index."""
        self.evicted_to_disk = 0
        """Evicted chunks that were also on disk, so that nothing was lost."""
        self.evicted_bytes = 0
        """Slot bytes that evicted chunks held."""
        self.disk_writes = 0
        """Chunks written to disk. disk_written_bytes are their bytes."""
        self.disk_written_bytes = 0
        self.disk_rewritten_bytes = 0
        """Bytes of records that moved within their device so that a segment could change its size. They are part of
        disk_written_bytes, or still to be written."""
        self.disk_reads = 0
        """Chunks read from disk into DRAM. disk_read_bytes are their bytes."""
        self.disk_read_bytes = 0
        self.disk_evictions = 0
        """Chunks whose extents went to make room on a device."""
        self.disk_lost = 0
        """Chunks whose extents went because they could not be read."""
        self.disk_recovered = 0
        """Chunks that this brain found on disk when it began."""
        self.ledger_damaged = 0
        """Damaged entries and documents of the ledger when this brain began, and entries whose bytes in the arena had
        changed. What they described is gone."""
        self.disk_damaged = 0
        """Headers, labels and notes on disk that were damaged or unreadable when this brain began. What they described
        is not found."""
        self.disk_drained = dict.fromkeys(DRAIN_ENDS, 0)
        """Chunks that left a drained device: moved to another one, kept in DRAM alone, or given up."""
        self.disk_refused = dict.fromkeys(REFUSALS, 0)
        """Chunks that left DRAM and are not on disk, by reason (tiers/placement.py). All are 0 without a disk."""
        self.disk_faults = dict.fromkeys(DISK_FAULTS, 0)
        """Records that could not be written or read, by fault (orders.Fault). lost: their mover died."""
        self.discarded = dict.fromkeys(DISCARD_REASONS, 0)
        """Chunks that were given up, by reason. died: a worker or mover is gone. failed: the copy failed. abandoned:
        the client gave up the job. deadline: shards were missing at the deadline. cleared: Clear forgot them."""
        self.errors = dict.fromkeys(ERROR_FAMILIES, 0)
        """Requests answered with Error, by family."""
        self.replies_dropped = 0
        """Replies that could not be sent: the peer was gone or did not read."""
        self.mover_restarts = 0
        """Movers that were reaped; the next registration starts another."""
        self.remote_probed = self.remote_found = 0
        """Chunks that the remote store was asked for. Found: it had them and all before them."""
        self.remote_reads = self.remote_read_bytes = 0
        """Chunks read from the remote store into DRAM, and bytes of their payloads."""
        self.remote_writes = self.remote_written_bytes = 0
        """The same for chunks written there."""
        self.remote_existed = 0
        """Writes that were not needed: another server had written the chunk."""
        self.remote_unannounced = 0
        """Lookups for which a remote store was not asked, because nobody had told of their next chunk."""
        self.remote_told = self.remote_heard = 0
        """Announcements of this server, and all that it has read, its own among them."""
        self.remote_foretold = 0
        """Announcements of chunks that engines of this server compute. Each chunk may be announced several times."""
        self.remote_dropped = 0
        """Times that a prefix was not written whole, because too many chunks waited."""
        self.remote_failures: dict[tuple[str, str], int] = {}
        """Chunks that could not be asked for, read or written, and calls for announcements, by (probe, read, write,
        announce or listen; fault)."""
        self.sessions_opened = 0
        self.sessions_closed = 0
        self.jobs = dict.fromkeys(JOB_ENDS, 0)
        """Jobs by how they ended (orders.Done.status). Jobs whose mover was lost count as failed."""
        self.mode_bytes = dict.fromkeys(MODES, 0)
        """Bytes that movers moved for jobs, successful or not, by mode (the path that they took)."""
        self.mode_ns = dict.fromkeys(MODES, 0)
        """Time (ns) that moving mode_bytes took, each job from its first byte to its last. Jobs overlap, so this is not
        wall-clock time."""
        self.worker_bytes = {kind: dict[int, int]() for kind in JOB_KINDS}
        """Bytes of mode_bytes by kind of job and rank of the worker, all engines together."""
        self.lookup_handle_seconds = Histogram(LOOKUP_SECONDS)
        """Time that Service.handle took for one lookup, measured by the shell."""
        self.job_seconds = {direction: Histogram(JOB_SECONDS) for direction in DIRECTIONS}
        """Seconds from the request's arrival, or from the order to the disk mover, to the job's end."""
        self.job_bytes_per_s = {direction: Histogram(JOB_BYTES_PER_S) for direction in DIRECTIONS}
        """Bytes of a job that ended well, over the time from its first byte to its last. Time in queues is left out."""

    @property
    def evictions(self) -> int:
        """Chunks that left DRAM to make room."""
        return sum(self.evicted_for.values())

    @property
    def lookups_hit(self) -> int:
        """Accepted lookups that got a lease."""
        return self.leases_granted

    @property
    def stores_whole(self) -> int:
        return self.stores - self.stores_short - self.stores_failed

    @property
    def stores_short(self) -> int:
        return sum(self.short_stores.values())

    @property
    def moved_bytes(self) -> dict[str, int]:
        """Bytes that arrived, by direction."""
        arrived = self.bytes_stored, self.bytes_retrieved, self.disk_written_bytes, self.disk_read_bytes
        return dict(zip(DIRECTIONS, arrived, strict=True))

    @property
    def lookup_tokens(self) -> dict[str, int]:
        """Tokens that lookups asked for, by result, all models together."""
        models = self.lookup_tokens_by_model.values()
        return {result: sum(tokens[result] for tokens in models) for result in LOOKUP_RESULTS}

    def lookup_tokens_of(self, model: str) -> dict[str, int]:
        """The row in which the model's tokens are counted, by result. Models beyond MODELS_MAX share one row."""
        rows = self.lookup_tokens_by_model
        if model not in rows and len(rows) >= MODELS_MAX:
            model = OTHER_MODELS
        return rows.setdefault(model, dict.fromkeys(LOOKUP_RESULTS, 0))

    def lookup_came(self) -> None:
        """Counts an accepted lookup. By itself, because an engine's step waits for it."""
        self.lookups += 1

    def add(self, name: Count, number: int = 1) -> None:
        """Adds to one of the plain counts."""
        setattr(self, name, getattr(self, name) + number)

    def moved(self, kind: str, rank: int, count: int) -> None:
        """Counts bytes of a job by kind and worker."""
        of_each = self.worker_bytes[kind]
        of_each[rank] = of_each.get(rank, 0) + count

    def mismatched(self, number: int, *, tier: str, device: str, mode: str) -> None:
        """Counts shards with other bytes than were stored."""
        where = tier, device, mode
        self.digest_mismatches[where] = self.digest_mismatches.get(where, 0) + number

    def remote_failed(self, what: RemoteWanted, fault: str) -> None:
        """Counts a chunk that the remote store did not give or take, or a call for announcements or a note."""
        self.remote_failures[what, fault] = self.remote_failures.get((what, fault), 0) + 1

    def scrubbed(self, tier: Literal["dram", "disk"], count: int) -> None:
        self.scrubbed_bytes[tier] += count

    def took(self, direction: str, moved_bytes: int, moved_ns: int) -> None:
        """Counts the speed of a job that ended well. moved_ns: from its first byte to its last."""
        if moved_bytes and moved_ns:
            self.job_bytes_per_s[direction].observe(1e9 * moved_bytes / moved_ns)

    def copy(self) -> "Counters":
        """A snapshot that nobody writes to."""
        twin = Counters.__new__(Counters)
        for name in Counters.__slots__:
            setattr(twin, name, _copy(getattr(self, name)))
        return twin

    def totals(self) -> dict[str, int | dict[str, int]]:
        """Plain counts by name, for the status document. Histograms are left to /metrics."""
        tokens = self.lookup_tokens
        found: dict[str, int | dict[str, int]] = {
            "digest_mismatches": sum(self.digest_mismatches.values()),
            "evictions": self.evictions,
            "lookup_tokens": tokens,
            "lookup_tokens_asked": sum(tokens.values()),
            "lookup_tokens_hit": sum(tokens[result] for result in HIT_RESULTS),
            "lookups_hit": self.lookups_hit,
            "moved_bytes": self.moved_bytes,
            "remote_failures": {" ".join(where): count for where, count in self.remote_failures.items()},
            "stores_short": self.stores_short,
        }
        for name in Counters.__slots__:
            value = getattr(self, name)
            if isinstance(value, int):
                found[name] = value
            elif name not in IN_PARTS and isinstance(value, dict):
                found[name] = dict(value)
        return found


def _copy(value: object) -> object:
    match value:
        case Histogram():
            return value.copy()
        case Mapping():
            return {key: _copy(inner) for key, inner in value.items()}
        case _:
            return value
