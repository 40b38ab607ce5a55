"""The tables that the service decides over, and the outbox that it fills. Data and small helpers, no decisions."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from kvserver.errors import DeviceError, KvError, RequestError, ResourceError
from kvserver.index.space import Node, Space
from kvserver.service.chunks import Chunks
from kvserver.service.counters import Counters
from kvserver.service.effects import Answer, Effect, Instruct, Log
from kvserver.service.timers import Timers
from kvserver.transfer.layout import Layout
from kvserver.wire.codec import error_reply
from kvserver.wire.messages import NAME_BYTES_MAX, DeviceKind, Mode, Reply, Why
from kvserver.wire.orders import Order

MILLISECOND_NS = 1_000_000
SECOND_NS = 1_000_000_000
REQUEST_LINES_PER_S = 100


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
    chunks_max: int = 4_000_000
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
    log_requests: bool = False
    """A debug line for each lookup, store and retrieve, at most REQUEST_LINES_PER_S of them."""


@dataclass(slots=True, eq=False)
class Engine:
    """All sessions that said the same (engine, epoch)."""

    name: str
    epoch: int
    ranks: int
    sessions: int = 0
    leases: set[int] = field(default_factory=set)


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
    device: DeviceKind
    device_id: str
    """Empty for host."""
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
        self.chunks = Chunks(
            arena_bytes=bounds.arena_bytes,
            slab_bytes=bounds.slab_bytes,
            chunks_max=bounds.chunks_max,
            counters=self.counters,
        )
        self.timers = Timers()
        self.engines: dict[tuple[str, int], Engine] = {}
        self.sessions: dict[int, Session] = {}
        self.tokens: dict[bytes, Session] = {}
        self.peers: dict[int, Session] = {}
        self.caches: dict[int, Cache] = {}
        self.movers: dict[int, Mover] = {}
        self.leases: dict[int, Lease] = {}
        self.jobs: dict[int, Job] = {}
        self.effects: list[Effect] = []
        self.arena_problem = ""
        self._lines_until_ns = 0
        self._lines_left = 0
        first_lease = int.from_bytes(random_bytes(6), "big") << 8  # no lease of an earlier brain names one of ours
        self._last = {"session": 0, "cache": 0, "mover": 0, "lease": first_lease, "job": 0}

    def number(self, kind: Literal["session", "cache", "mover", "lease", "job"]) -> int:
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

    # ---------------------------------------------------------------- outbox

    def answer(self, peer: int, reply: Reply) -> None:
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

    def log_request(self, now_ns: int, event: str, *fields: tuple[str, object]) -> None:
        """One line about one request, rate limited. Ask `bounds.log_requests` before building the fields."""
        if now_ns >= self._lines_until_ns:
            self._lines_until_ns, self._lines_left = now_ns + SECOND_NS, REQUEST_LINES_PER_S
        if self._lines_left:
            self._lines_left -= 1
            self.log(event, *fields, level=logging.DEBUG)

    def log(self, event: str, *fields: tuple[str, object], level: int = logging.INFO) -> None:
        self.effects.append(Log(level, event, fields))


def check_name(what: str, text: str) -> None:
    """Names end up in logs: short, printable, not empty."""
    if not 1 <= len(text.encode()) <= NAME_BYTES_MAX or not text.isprintable():
        raise RequestError("name", f"{what}={text[:NAME_BYTES_MAX]!r} must be 1 to {NAME_BYTES_MAX} printable bytes")
