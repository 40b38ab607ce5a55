"""The tables that the service decides over, and the outbox that it fills. Data and small helpers, no decisions."""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from kvserver.errors import DeviceError, KvError, RequestError, ResourceError
from kvserver.index.eviction import NO_ROOM, REFUSED
from kvserver.index.space import Node, Space
from kvserver.index.tags import Tags
from kvserver.service.base.effects import Answer, Effect, Instruct, Log
from kvserver.service.base.operator_state import Hold, Wishes
from kvserver.service.base.timers import Timers
from kvserver.service.holdings.accounts import Account, Accounts, Quota
from kvserver.service.holdings.chunks import Chunks
from kvserver.service.holdings.disk_chunks import disk_chunks
from kvserver.service.telling.counters import Counters
from kvserver.service.telling.evicted_keys import Departed
from kvserver.service.telling.log_sampling import RequestLines, Wanted
from kvserver.service.telling.lookup_counts import Asked
from kvserver.service.telling.reuse import Reuse
from kvserver.tiers.placement import Placement, Touched
from kvserver.tiers.prefix_notes import ClearedPrefix
from kvserver.transfer.layout import Layout
from kvserver.wire.admin import LogLevel, Outcome, TenantCleared
from kvserver.wire.codec import error_reply
from kvserver.wire.messages import NAME_BYTES_MAX, Cleared, Mode, Reply, Retrieve, Why
from kvserver.wire.orders import DrainState, MoverKind, Order

MILLISECOND_NS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Every bound and time that the service keeps. Filled from the configuration."""

    arena_bytes: int
    slab_bytes: int
    sessions_max: int = 1024
    caches_max: int = 1024
    movers_max: int = 64
    """Which devices there are is the clients' word, so processes for them are bounded here."""
    namespaces_max: int = 256
    notes_max: int = 1024
    """Namespaces that are not in the index, of which the devices have notes all the same."""
    prefix_notes_kept: int = 512
    """Of notes of cleared prefixes beyond these, those go that say nothing any more (prefixes.py)."""
    chunks_max: int = 4_000_000
    forget_chunks: int = 128
    """Chunks of cleared namespaces that are forgotten in one go; each takes some 8 us, 12 with quotas or arc."""
    leases_max: int = 4096
    jobs_max: int = 64
    """In flight for one session."""
    descriptors_max: int = 64
    """Offered and not yet registered, for one session."""
    lease_ttl_ms: int = 30_000
    lease_extended_ms: int = 10_000
    """How long a lease lives on after its first retrieve, for the other ranks."""
    reserve_ttl_ms: int = 10_000
    """A chunk with shards missing after this is discarded."""
    attach_ttl_ms: int = 10_000
    job_ttl_ms: int = 60_000
    """No job runs longer than this, whatever its client said."""
    mover_grace_ms: int = 2_000
    """A mover that does not end a cancelled job, or let a cache go, within this is killed."""
    mover_start_ms: int = 30_000
    disk_devices: int = 0
    """0: no disk tier."""
    disk_directories: tuple[str, ...] = ()
    """Of each device, for logs and /status."""
    disk_device_bytes: int = 0
    """Of each device, whole segments."""
    disk_segment_bytes: int = 64 << 20
    disk_write_through: bool = False
    """Write what is stored as soon as it may, not only what is next to leave DRAM."""
    disk_second_touch: bool = False
    disk_daily_write_bytes: int = 0
    """Of each device; 0: no limit."""
    disk_write_queue_ms: int = 1_000
    disk_clean_percent: int = 25
    """Of the arena: kept free, or on disk as well, so that it can be taken at once."""
    disk_jobs_max: int = 32
    """Reads, and writes, in flight."""
    disk_job_ms: int = 10_000
    """A read or write that takes longer has the disk mover killed."""
    disk_restart_ms: int = 1_000
    """Between two starts of the disk mover."""
    recompute_tokens_per_s: int = 0
    """How fast engines prefill; a prefix whose bytes would come from disk more slowly is not offered. 0: always is."""
    eviction_policy: Literal["lru", "arc"] = "lru"
    """What leaves DRAM first. arc: neither with disks nor with quotas (config.py says why)."""
    tenants: tuple[Quota, ...] = ()
    """Quotas in DRAM and on disk. None: no tenant has any, and nothing is counted by tenant."""
    holds_max: int = 64
    """Prefixes that operators keep at the same time (holds.py)."""
    held_percent_max: int = 50
    """Of the arena, that they may keep."""
    kv_events: bool = False
    """Whether somebody is told what is held (kv_events.py)."""
    log_level: LogLevel = "info"
    """The least that this process logs."""
    request_lines: Wanted = "none"
    """Lines about lookups, stores and retrieves (log_sampling.py)."""


@dataclass(slots=True, eq=False)
class Engine:
    """All sessions that said the same (engine, epoch)."""

    name: str
    epoch: int
    ranks: int
    sessions: int = 0
    leases: set[int] = field(default_factory=set)
    accounts: set[Account] = field(default_factory=set)
    """Where there are quotas: those of the caches that it has registered. It finds nothing of others."""


@dataclass(slots=True, eq=False)
class Session:
    """One client process."""

    number: int
    token: bytes
    engine: Engine
    rank: int
    software: str
    attached_peer: int = 0
    peers: set[int] = field(default_factory=set)
    offered: set[int] = field(default_factory=set)
    caches: dict[str, "Cache"] = field(default_factory=dict)
    jobs: set[int] = field(default_factory=set)
    ended: bool = False


@dataclass(slots=True, eq=False)
class Cache:
    """One registered cache."""

    number: int
    name: str
    session: Session
    digest: bytes
    layout: Layout
    mover: "Mover"
    mode: Mode
    tenant: int
    parts: tuple[int, ...]
    """Group -> the part of the namespace that this cache reads and writes."""
    state: Literal["mapping", "mapped", "unmapping"] = "mapping"
    waiting: tuple[int, int] | None = None
    """(peer, request id) to answer when mapping or unmapping has ended."""
    jobs: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Mover:
    """One mover process."""

    number: int
    device: MoverKind
    device_id: str
    """Empty for host and disk."""
    state: Literal["starting", "ready", "killed"] = "starting"
    pid: int = 0
    backend: str = ""
    facts: dict[str, str] = field(default_factory=dict)
    queue: list[Instruct] = field(default_factory=list)
    """Orders that wait until it is ready."""
    caches: dict[int, Cache] = field(default_factory=dict)
    boards: set[int] = field(default_factory=set)
    """Sessions whose board it has."""
    jobs: set[int] = field(default_factory=set)

    @property
    def name(self) -> str:
        """Of its device, for logs and /status."""
        return f"{self.device}:{self.device_id}" if self.device_id else self.device


@dataclass(slots=True, eq=False)
class Lease:
    """A promise to an engine: the prefix that ends in `tail` stays until `expires_ns`."""

    number: int
    engine: Engine
    space: Space
    tail: Node
    keys: bytes
    """The keys that were asked for and found; the chain is held against them before a byte moves."""
    expires_ns: int
    ranks_used: set[int] = field(default_factory=set)
    fetch: "Fetch | None" = None
    """What of it is still to be read from disk."""

    @property
    def chunks(self) -> int:
        return self.tail.depth


@dataclass(slots=True, eq=False)
class GroupRun:
    """The part of one group that a store writes: chunks [first, first + len(slots)) of the job's walk."""

    group: int
    first: int
    slots: list[int]


@dataclass(slots=True, eq=False)
class Job:
    """A store or retrieve in flight on a mover."""

    number: int
    kind: Literal["store", "retrieve"]
    session: Session
    cache: Cache
    space: Space
    peer: int
    request_id: int
    began_ns: int
    walk: list[Node] = field(default_factory=list)
    """Store: the nodes of the request's chunks, as far as they were reserved."""
    runs: list[GroupRun] = field(default_factory=list)
    why: Why = ""
    """Store: why the walk is shorter than what was asked."""
    tail: Node | None = None
    """Retrieve: the pinned node."""
    cancelled: bool = False
    held: "Held | None" = None
    """Retrieve: not with the mover yet, since something of it is still on disk."""


@dataclass(slots=True, eq=False)
class Fetch:
    """What a lease, a held retrieve or an operator's hold still needs from disk. One of the three."""

    lease: Lease | None
    job: Job | None
    hold: Hold | None
    needs: dict[Node, int]
    """Node -> groups (bits), head first."""


@dataclass(slots=True, eq=False)
class Held:
    """A retrieve that waits for its chunks."""

    request: Retrieve
    fetch: Fetch


@dataclass(slots=True, eq=False)
class Clearing:
    """What was cleared at somebody's request, who is answered when the notes of it are durable."""

    peer: int
    done: Cleared | TenantCleared
    """The answer then."""
    number: int
    """Of its timer."""
    left: dict[bytes, int] = field(default_factory=dict)
    """Notes that are not durable yet: the generation up to which what they are of is void; 0 until it is known what
    there is on disk."""
    why: str = ""
    """Why it is not durable, or not all of it."""
    spaces: list[Space] = field(default_factory=list)
    """What was cleared; its chunks may still be going."""


@dataclass(slots=True, eq=False)
class Drain:
    """A device that is being emptied, or is empty and takes nothing any more."""

    device: int
    state: DrainState = "draining"
    segment: int = 0
    """The next one whose chunks are looked at."""
    queue: list[Node] = field(default_factory=list)
    """Chunks of the segment before, still to be looked at."""
    moving: dict[Node, Space] = field(default_factory=dict)
    """What is on its way to another place, or waits for that."""
    used_before: int = -1
    """Bytes that were taken when the last walk over all segments began; -1 before the first."""
    stuck: bool = False
    """That walk freed nothing."""
    wait_until_ns: int = 0
    erasing: bool = False
    waits: str = ""
    """What it waits for now; empty while it goes on."""


class DiskTier:
    """What is on disk, what is to be written and read, and the process that does it."""

    def __init__(self, bounds: Bounds, chunks: Chunks, counters: Counters, now_ns: int) -> None:  # noqa: PLR0915 - one statement for each
        self.chunks = disk_chunks(
            chunks,
            counters,
            devices=bounds.disk_devices,
            device_bytes=bounds.disk_device_bytes,
            segment_bytes=bounds.disk_segment_bytes,
            quotas=bounds.tenants,
        )
        self.placements = [
            Placement(daily_bytes=bounds.disk_daily_write_bytes, queue_ms=bounds.disk_write_queue_ms, now_ns=now_ns)
            for _ in range(bounds.disk_devices)
        ]
        self.problems = [""] * bounds.disk_devices
        """Why a device takes no writes."""
        self.failures = [0] * bounds.disk_devices
        """Jobs in a row that the device failed."""
        self.opened, self.told = [True] * bounds.disk_devices, [False] * bounds.disk_devices
        """Whether a device's store is open, as far as the mover has said; whether that told what is in it, as none does
        of one that it could open later than the others."""
        self.drains: dict[int, Drain] = {}
        """Devices that are being emptied, or are empty."""
        self.touched = Touched(bounds.chunks_max if bounds.disk_second_touch else 0)
        self.mover: Mover | None = None
        self.start_at_ns = now_ns
        self.recovered = False
        """Everything that was found on disk is in the index, so places that nothing holds are free."""
        self.found: Found | None = None
        """What is being taken into the index."""
        self.writes: dict[Node, tuple[Space, int]] = {}
        """To be written, in this order, and when the leaf was used for which they are."""
        self.reads: dict[Node, tuple[Space, int]] = {}
        """To be read, in this order: groups (bits)."""
        self.waiters: dict[Node, list[Fetch]] = {}
        self.parked: dict[int, dict[Node, Space]] = {}
        """Device -> leaves of chains whose writes wait until it has emptied a segment."""
        self.hurry_until_ns = 0
        """Until then everything is written that may be: what moves to empty a segment needs DRAM without loss."""
        self.told_stalled: set[int] = set()
        """Devices of which the log says so."""
        self.wait_until_ns = 0
        """Nothing new is chosen to be written before."""
        self.starved: set[str] = set()
        """Accounts ("" without quotas) for a read of which no slot could be had; tried again at the next tick."""
        self.starved_since: dict[str, int] = {}
        """Account -> when that began (ns), while no read of it could be ordered since."""
        self.noted: dict[bytes, int] = {}
        """Namespaces of which the devices have a note, or will: the generation up to which their records are void."""
        self.generation_max = 0
        """Of records that may be written: each device has noted it (clear_notes.GENERATIONS)."""
        self.unnoted, self.owed = set[bytes](), set[bytes]()
        """Of those, the ones whose note may not be durable yet; of these, the ones whose clear was answered so."""
        self.notes_sent = 0
        """To the mover, and not answered."""
        self.silent_from_ns = 0
        """Since when it has answered none of them; 0: it has, or that was not looked at yet."""
        self.described: set[bytes] = set()
        """Namespaces whose document was sent."""
        self.void_later: set[bytes] = set()
        """Namespaces that were cleared before it was known what there is on disk."""
        self.left_out: dict[bytes, Tags] = {}
        """Whose the namespaces are that may be on disk and are not in the index: no place was left, or they went."""
        self.clearing: dict[bytes, list[Clearing]] = {}
        """By the note that is to be durable."""
        self.cleared: dict[bytes, ClearedPrefix] = {}
        """Note -> the prefix that was cleared (prefixes.py)."""
        self.hold_fetches: dict[int, Fetch] = {}
        """Hold -> what of it is still to be read."""

    def set_problem(self, device: int, problem: str) -> None:
        """Why the device takes no writes; empty: it takes them, unless it is drained."""
        self.problems[device] = problem
        self.chunks.extents.takes_writes[device] = not problem and device not in self.drains

    def stalled(self, device: int, now_ns: int) -> tuple[int, str]:
        """For how long (ns) the device has taken no write although writes wait for it, and why."""
        if not self.chunks.extents.takes_writes[device]:
            return 0, ""
        return self.placements[device].stalled(now_ns, waits=bool(self.parked.get(device)))

    def asked_for(self, tail: Node) -> None:
        """Somebody wants the prefix that ends there: what kept it from being written may be otherwise now."""
        self.touched.add(tail.key)
        tail.queued &= ~(REFUSED | NO_ROOM)

    @property
    def readable(self) -> bool:
        return self.mover is not None and self.mover.state == "ready"

    def is_at_hand(self, device: int) -> bool:
        """The device is open, and what it holds is known, or will be."""
        return self.opened[device] and (self.told[device] or not self.listed)

    @property
    def all_known(self) -> bool:
        """No device holds anything that has not been told."""
        drained = {device for device, drain in self.drains.items() if drain.state == "drained"}
        return all(self.is_at_hand(device) or device in drained for device in range(len(self.opened)))

    @property
    def listed(self) -> bool:
        """It is known which namespaces are on disk, and the newest generation of their records."""
        return self.recovered or (self.found is not None and self.found.listed)

    @property
    def in_flight(self) -> Counter[str]:
        return Counter(job.kind for job in self.chunks.jobs.values())


class Found:
    """What the disk mover tells of what earlier brains have written, and what came of it."""

    def __init__(self) -> None:
        self.documents: dict[bytes, bytes] = {}
        """Namespace -> its document, as it was noted."""
        self.newest: dict[bytes, int] = {}
        """Namespace -> the newest generation of its records."""
        self.listed = False
        """All of that is known; records are on their way into the index."""
        self.records = 0
        self.not_taken = 0
        """Chunks that are whole, not void, and in vain."""
        self.floors: dict[Node, int] = {}
        """Chunk -> generation up to which what hangs on it is void, where prefixes were cleared."""


class Core:
    """Everything that the service knows."""

    def __init__(
        self, bounds: Bounds, random_bytes: Callable[[int], bytes], server: str, incarnation: int, started_ns: int
    ) -> None:
        self.bounds = bounds
        self.random_bytes = random_bytes
        self.server = server
        self.incarnation = incarnation
        self.started_ns = started_ns
        self.counters = Counters()
        self.reuse = Reuse(started_ns)
        self.asked = Asked(self.counters, self.reuse)
        self.departed = Departed(bounds.chunks_max)
        self.chunks = Chunks(
            arena_bytes=bounds.arena_bytes,
            slab_bytes=bounds.slab_bytes,
            chunks_max=bounds.chunks_max,
            forget_chunks=bounds.forget_chunks,
            counters=self.counters,
            accounts=Accounts(bounds.tenants) if bounds.tenants else None,
            eviction_policy=bounds.eviction_policy,
        )
        self.disk: DiskTier | None = None
        if bounds.disk_devices:
            self.disk = DiskTier(bounds, self.chunks, self.counters, started_ns)
            self.chunks.disk = self.disk.chunks
        self.timers = Timers()
        self.engines: dict[tuple[str, int], Engine] = {}
        self.sessions: dict[int, Session] = {}
        self.tokens: dict[bytes, Session] = {}
        self.peers: dict[int, Session] = {}
        self.caches: dict[int, Cache] = {}
        self.movers: dict[int, Mover] = {}
        self.leases: dict[int, Lease] = {}
        self.jobs: dict[int, Job] = {}
        self.wishes = Wishes()
        self.going = False
        """GoOn is under way."""
        self.clears_going: list[Clearing] = []
        """Those whose chunks are still going, and which wait for nothing else."""
        self.untold: list[tuple[Space, list[Node]]] = []
        """Chunks that an earlier brain left, the next one last, of which subscribers were not told yet."""
        self.effects: list[Effect] = []
        self.arena_problem = self.arena_placement = ""
        self.lines = RequestLines(bounds.request_lines)
        first_lease = int.from_bytes(random_bytes(6), "big") << 8  # no lease of an earlier brain names one of ours
        self._last = {"session": 0, "cache": 0, "mover": 0, "lease": first_lease, "job": 0, "disk": 0, "hold": 0}

    def number(self, kind: Literal["session", "cache", "mover", "lease", "job", "disk", "hold"]) -> int:
        """A number that this brain never gives twice; never 0."""
        self._last[kind] += 1
        return self._last[kind]

    def own_cache(self, session: Session, number: int) -> Cache:
        cache = self.caches.get(number)
        if cache is None or cache.session is not session:
            raise RequestError(
                "cache-unknown", f"this session has no cache {number}: never registered, or its mover died"
            )
        return cache

    def named(self, device: int) -> tuple[tuple[str, object], ...]:
        """The fields of a log line that say which disk it is about."""
        directories = self.bounds.disk_directories
        return ("device", device), *((("directory", directories[device]),) if directories else ())

    # ---------------------------------------------------------------- outbox

    def answer(self, peer: int, reply: Reply | Outcome) -> None:
        self.effects.append(Answer(peer, reply))

    def refuse(self, peer: int, request_id: int, error: KvError) -> None:
        """Answers with a typed error and counts it by family."""
        self.counters.errors[error.family] += 1
        match error:
            case RequestError() | ResourceError() | DeviceError():
                self.answer(peer, error_reply(request_id, error))
            case _:
                raise error

    def instruct(self, mover: Mover, order: Order, descriptors: tuple[int, ...] = (), board: int = 0) -> None:
        """Sends an order, or keeps it until the mover is ready. A killed mover gets none."""
        instruct = Instruct(mover.number, order, descriptors, board)
        if mover.state == "ready":
            self.effects.append(instruct)
        elif mover.state == "starting":
            mover.queue.append(instruct)

    def log(self, event: str, *fields: tuple[str, object], level: int = logging.INFO) -> None:
        self.effects.append(Log(level, event, fields))


def check_name(what: str, text: str) -> None:
    """Names end up in logs: short, printable, not empty."""
    if not 1 <= len(text.encode()) <= NAME_BYTES_MAX or not text.isprintable():
        raise RequestError("name", f"{what}={text[:NAME_BYTES_MAX]!r} must be 1 to {NAME_BYTES_MAX} printable bytes")
