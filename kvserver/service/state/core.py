"""The service's tables and its outbox. Data and small helpers; decisions are elsewhere."""

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
    """Every bound and time limit of the service, filled from the configuration."""

    arena_bytes: int
    slab_bytes: int
    sessions_max: int = 1024
    caches_max: int = 1024
    movers_max: int = 64
    """Clients say which devices there are, so the number of mover processes needs a bound."""
    namespaces_max: int = 256
    notes_max: int = 1024
    """Namespaces outside the index that may have notes on the devices."""
    prefix_notes_kept: int = 512
    """Above this many notes of cleared prefixes, redundant ones are removed (clear_prefix.py)."""
    chunks_max: int = 4_000_000
    forget_chunks: int = 128
    """Chunks of cleared namespaces that are forgotten at once. Each takes about 8 us, 12 us with quotas or arc."""
    leases_max: int = 4096
    jobs_max: int = 64
    """Jobs in flight for one session."""
    descriptors_max: int = 64
    """Descriptors that one session has offered and not yet registered."""
    lease_ttl_ms: int = 30_000
    lease_extended_ms: int = 10_000
    """How long a lease lives after its first retrieve, so that the other ranks can use it."""
    reserve_ttl_ms: int = 10_000
    """A chunk that still lacks shards after this time is discarded."""
    attach_ttl_ms: int = 10_000
    job_ttl_ms: int = 60_000
    """Upper limit for a job's deadline, whatever its client asked for."""
    mover_grace_ms: int = 2_000
    """A mover that takes longer to end a cancelled job, or to let a cache go, is killed."""
    mover_start_ms: int = 30_000
    disk_devices: int = 0
    """Number of disk devices; 0: no disk tier."""
    disk_directories: tuple[str, ...] = ()
    """The directory of each device, for logs and /status."""
    disk_device_bytes: int = 0
    """Bytes of each device, a whole number of segments."""
    disk_segment_bytes: int = 64 << 20
    disk_write_through: bool = False
    """Write chunks as soon as allowed, not only those next to leave DRAM."""
    disk_second_touch: bool = False
    disk_daily_write_bytes: int = 0
    """Bytes that may be written to each device a day; 0: no limit."""
    disk_write_queue_ms: int = 1_000
    disk_clean_percent: int = 25
    """Share of the arena that is free or also on disk, so that it can be taken at once."""
    disk_jobs_max: int = 32
    """Reads in flight, and likewise writes in flight."""
    disk_job_ms: int = 10_000
    """The disk mover is killed when a read or write takes longer."""
    disk_restart_ms: int = 1_000
    """Pause between two starts of the disk mover."""
    recompute_tokens_per_s: int = 0
    """Prefill speed of the engines. A prefix that is slower to read from disk than to compute is not offered. 0: every
    prefix is offered."""
    eviction_policy: Literal["lru", "arc"] = "lru"
    """The order in which chunks leave DRAM. arc excludes disks and quotas (config.py says why)."""
    tenants: tuple[Quota, ...] = ()
    """Quotas in DRAM and on disk. Empty: no tenant has one, and nothing is counted by tenant."""
    holds_max: int = 64
    """Prefixes that operators hold at the same time (holds.py)."""
    held_percent_max: int = 50
    """Share of the arena that holds may keep."""
    kv_events: bool = False
    """Whether subscribers are told which chunks are held (kv_events.py)."""
    log_level: LogLevel = "info"
    """The least severe level that this process logs."""
    request_lines: Wanted = "none"
    """Which lookups, stores and retrieves are logged (log_sampling.py)."""


@dataclass(slots=True, eq=False)
class Engine:
    """An engine: all sessions with the same (engine, epoch)."""

    name: str
    epoch: int
    ranks: int
    sessions: int = 0
    leases: set[int] = field(default_factory=set)
    accounts: set[Account] = field(default_factory=set)
    """Accounts of the caches that the engine has registered; empty without quotas. Lookups find chunks of these
    accounts only."""


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
    """Group -> part of the namespace that this cache reads and writes."""
    state: Literal["mapping", "mapped", "unmapping"] = "mapping"
    waiting: tuple[int, int] | None = None
    """(peer, request id) that is answered when mapping or unmapping has ended."""
    jobs: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Mover:
    """One mover process."""

    number: int
    device: MoverKind
    device_id: str
    """The GPU's id; empty for host and disk."""
    state: Literal["starting", "ready", "killed"] = "starting"
    pid: int = 0
    backend: str = ""
    facts: dict[str, str] = field(default_factory=dict)
    queue: list[Instruct] = field(default_factory=list)
    """Orders that wait until the mover is ready."""
    caches: dict[int, Cache] = field(default_factory=dict)
    boards: set[int] = field(default_factory=set)
    """Sessions whose board the mover has mapped."""
    jobs: set[int] = field(default_factory=set)

    @property
    def name(self) -> str:
        """The mover's device, for logs and /status."""
        return f"{self.device}:{self.device_id}" if self.device_id else self.device


@dataclass(slots=True, eq=False)
class Lease:
    """A promise to an engine that the prefix ending in `tail` stays until `expires_ns`."""

    number: int
    engine: Engine
    space: Space
    tail: Node
    keys: bytes
    """The keys that were found. A retrieve compares them with the chain before a byte moves."""
    expires_ns: int
    ranks_used: set[int] = field(default_factory=set)
    fetch: "Fetch | None" = None
    """The read from disk that still fills the prefix; None: nothing is left to read."""

    @property
    def chunks(self) -> int:
        return self.tail.depth


@dataclass(slots=True, eq=False)
class GroupRun:
    """One group's chunks that a store writes: chunks [first, first + len(slots)) of the job's walk."""

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
    """Store: nodes of the request's chunks that could be reserved."""
    runs: list[GroupRun] = field(default_factory=list)
    why: Why = ""
    """Store: why the walk is shorter than the request."""
    tail: Node | None = None
    """Retrieve: the pinned node."""
    cancelled: bool = False
    held: "Held | None" = None
    """Retrieve: not ordered from the mover yet, because some chunks are still on disk alone."""


@dataclass(slots=True, eq=False)
class Fetch:
    """The chunks that a lease, a held retrieve or an operator's hold still needs from disk. Exactly one of lease, job
    and hold is set."""

    lease: Lease | None
    job: Job | None
    hold: Hold | None
    needs: dict[Node, int]
    """Node -> groups (bits) to read, head first."""


@dataclass(slots=True, eq=False)
class Held:
    """A retrieve that waits for its chunks to be read from disk."""

    request: Retrieve
    fetch: Fetch


@dataclass(slots=True, eq=False)
class Clearing:
    """A clear whose caller is answered when its notes are durable."""

    peer: int
    done: Cleared | TenantCleared
    """The answer for the caller."""
    number: int
    """Number of the clear's timer."""
    left: dict[bytes, int] = field(default_factory=dict)
    """Note -> the generation up to which records must become void. These notes are not durable yet. 0 until it is known
    what is on disk."""
    why: str = ""
    """Why some of the notes are not durable; empty: all are."""
    spaces: list[Space] = field(default_factory=list)
    """Cleared namespaces whose chunks may still be leaving the index."""


@dataclass(slots=True, eq=False)
class Drain:
    """A device that is being drained, or has been drained and takes nothing any more."""

    device: int
    state: DrainState = "draining"
    segment: int = 0
    """Next segment whose chunks are looked at."""
    queue: list[Node] = field(default_factory=list)
    """Chunks of the previous segment that are still to be looked at."""
    moving: dict[Node, Space] = field(default_factory=dict)
    """Chunks that are being moved to another place, or wait for it."""
    used_before: int = -1
    """Bytes taken on the device when the last walk over all segments began; -1 before the first."""
    stuck: bool = False
    """The last walk freed nothing."""
    wait_until_ns: int = 0
    erasing: bool = False
    waits: str = ""
    """Why the drain waits; empty while it makes progress."""


class DiskTier:
    """The disk tier: its chunks, the queues of writes and reads, the notes, and the mover process."""

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
        """Why each device takes no writes; empty: it takes them."""
        self.failures = [0] * bounds.disk_devices
        """Jobs that failed in a row on each device."""
        self.opened, self.told = [True] * bounds.disk_devices, [False] * bounds.disk_devices
        """opened: whether the device's store is open, as last reported by the mover. told: whether the mover has listed
        the store's records. It never lists a store that it could open only after the others."""
        self.drains: dict[int, Drain] = {}
        """Device -> its drain, also after the drain has ended."""
        self.touched = Touched(bounds.chunks_max if bounds.disk_second_touch else 0)
        self.mover: Mover | None = None
        self.start_at_ns = now_ns
        self.recovered = False
        """Recovery is complete: every record found on disk is in the index, so all other places are free."""
        self.found: Found | None = None
        """Records that recovery is taking into the index."""
        self.writes: dict[Node, tuple[Space, int]] = {}
        """Chunks to write, in this order. The second value is the last use of the leaf for which the chunk is
        written."""
        self.reads: dict[Node, tuple[Space, int]] = {}
        """Chunks and groups (bits) to read, in this order."""
        self.waiters: dict[Node, list[Fetch]] = {}
        self.parked: dict[int, dict[Node, Space]] = {}
        """Device -> leaves whose chains cannot be written until the device has emptied a segment."""
        self.hurry_until_ns = 0
        """Until this time every chunk that may be written is: records that move to empty a segment need DRAM that can
        be taken without loss."""
        self.told_stalled: set[int] = set()
        """Devices that the log has reported as stalled."""
        self.wait_until_ns = 0
        """No new writes are chosen before this time."""
        self.starved: set[str] = set()
        """Accounts ("" without quotas) that lacked a slot for a read. The read is tried again at the next tick."""
        self.starved_since: dict[str, int] = {}
        """Account -> since when (ns) none of its reads could be ordered."""
        self.noted: dict[bytes, int] = {}
        """Note -> the generation up to which it makes records void. The devices have these notes, or will have them."""
        self.generation_max = 0
        """Highest record generation that may be written. Every device has noted it (clear_notes.GENERATIONS)."""
        self.unnoted, self.owed = set[bytes](), set[bytes]()
        """unnoted: notes in `noted` that may not be durable yet. owed: those whose clear was answered with the error
        `disk-clear`."""
        self.notes_sent = 0
        """Notes sent to the mover and not answered yet."""
        self.silent_from_ns = 0
        """Since when the mover has answered no note; 0: it answered one lately, or nobody has looked yet."""
        self.described: set[bytes] = set()
        """Namespaces whose document was sent to the mover."""
        self.void_later: set[bytes] = set()
        """Namespaces that were cleared before the mover had listed what is on disk."""
        self.left_out: dict[bytes, Tags] = {}
        """Namespace -> tags of its tenants, for namespaces that may be on disk and are not in the index. There was no
        room for them, or they were forgotten."""
        self.clearing: dict[bytes, list[Clearing]] = {}
        """Note -> clears that wait until it is durable."""
        self.cleared: dict[bytes, ClearedPrefix] = {}
        """Note -> the prefix that it clears (clear_prefix.py)."""
        self.hold_fetches: dict[int, Fetch] = {}
        """Hold -> the read from disk that still fills it."""

    def set_problem(self, device: int, problem: str) -> None:
        """Records why the device takes no writes. An empty problem lets it take writes, unless it is drained."""
        self.problems[device] = problem
        self.chunks.extents.takes_writes[device] = not problem and device not in self.drains

    def stalled(self, device: int, now_ns: int) -> tuple[int, str]:
        """How long (ns) the device has taken no write although writes wait for it, and why."""
        if not self.chunks.extents.takes_writes[device]:
            return 0, ""
        return self.placements[device].stalled(now_ns, waits=bool(self.parked.get(device)))

    def asked_for(self, tail: Node) -> None:
        """Notes that the prefix ending in `tail` was asked for. An earlier refusal to write it may no longer hold."""
        self.touched.add(tail.key)
        tail.unmark(REFUSED | NO_ROOM)

    @property
    def readable(self) -> bool:
        return self.mover is not None and self.mover.state == "ready"

    def is_at_hand(self, device: int) -> bool:
        """The device is open, and its records are known or will be."""
        return self.opened[device] and (self.told[device] or not self.listed)

    @property
    def all_known(self) -> bool:
        """Every device is open with known records, or drained."""
        drained = {device for device, drain in self.drains.items() if drain.state == "drained"}
        return all(self.is_at_hand(device) or device in drained for device in range(len(self.opened)))

    @property
    def listed(self) -> bool:
        """The mover has listed the namespaces on disk and the newest generation of their records."""
        return self.recovered or (self.found is not None and self.found.listed)

    @property
    def in_flight(self) -> Counter[str]:
        return Counter(job.kind for job in self.chunks.jobs.values())


class Found:
    """Records of earlier brains, as the disk mover lists them, and the outcome of recovery."""

    def __init__(self) -> None:
        self.documents: dict[bytes, bytes] = {}
        """Namespace -> its document, as noted on the device."""
        self.newest: dict[bytes, int] = {}
        """Namespace -> newest generation of its records."""
        self.listed = False
        """Documents and generations are complete; the records themselves now go into the index."""
        self.records = 0
        self.not_taken = 0
        """Chunks that are whole and not void, and still could not be taken into the index."""
        self.floors: dict[Node, int] = {}
        """Chunk -> generation up to which everything below it is void, because its prefix was cleared."""


class Core:
    """All tables of the service."""

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
        """A GoOn event is under way."""
        self.clears_going: list[Clearing] = []
        """Clears that wait only until their chunks have left the index."""
        self.untold: list[tuple[Space, list[Node]]] = []
        """Chunks of an earlier brain that subscribers have not been told of. The last one in each list is told next."""
        self.effects: list[Effect] = []
        self.arena_problem = self.arena_placement = ""
        self.lines = RequestLines(bounds.request_lines)
        first_lease = int.from_bytes(random_bytes(6), "big") << 8  # no lease of an earlier brain names one of ours
        self._last = {"session": 0, "cache": 0, "mover": 0, "lease": first_lease, "job": 0, "disk": 0, "hold": 0}

    def number(self, kind: Literal["session", "cache", "mover", "lease", "job", "disk", "hold"]) -> int:
        """A number that this brain gives only once; never 0."""
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
        """Log fields that name a disk device."""
        directories = self.bounds.disk_directories
        return ("device", device), *((("directory", directories[device]),) if directories else ())

    # ---------------------------------------------------------------- outbox

    def answer(self, peer: int, reply: Reply | Outcome) -> None:
        self.effects.append(Answer(peer, reply))

    def refuse(self, peer: int, request_id: int, error: KvError) -> None:
        """Answers with a typed error, counted by family."""
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
    """Refuses a name that cannot be logged: empty, too long or not printable."""
    if not 1 <= len(text.encode()) <= NAME_BYTES_MAX or not text.isprintable():
        raise RequestError("name", f"{what}={text[:NAME_BYTES_MAX]!r} must be 1 to {NAME_BYTES_MAX} printable bytes")
