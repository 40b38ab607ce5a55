"""The status document: what the server is doing now. One shape for messages.StatusIs, /status and `kvserver status`.

JSON objects with the names below; numbers are counts unless the name has a unit. It is meant for people and dashboards,
so fields may be added; readers ignore what they do not know. Lists are cut at SHOWN_MAX entries: whatever builds a
document must take microseconds, since it does so on the brain's thread.
"""

from typing import Literal

import msgspec

from kvserver.wire.orders import DrainState

SHOWN_MAX = 64


class ArenaStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The DRAM tier. used <= ready <= total: an arena is answered for from the first second and grows."""

    total_bytes: int
    ready_bytes: int
    """Touched, and usable."""
    used_bytes: int
    """In slots that are taken."""
    slab_bytes: int
    slabs_total: int
    slabs_ready: int
    problem: str = ""
    """Why the arena stopped growing; empty while all is well."""
    placement: str = ""
    """On which memory nodes (NUMA) it lies, and why."""


class SlotSize(msgspec.Struct, frozen=True, kw_only=True):
    """The slabs that serve slots of one size now."""

    slot_bytes: int
    slabs: int
    slots: int
    slots_used: int


class DiskStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One device of the disk tier."""

    device: int
    directory: str = ""
    total_bytes: int
    """Bytes of all segments. They are taken from the file system at the start."""
    used_bytes: int
    """In extents that are taken."""
    usable: bool = True
    """Its store is open. If not, nothing on it is read or written."""
    takes_writes: bool
    problem: str
    """Why it takes no writes; empty while all is well."""
    said: str = ""
    """Its state in words: the same on the page, in `kvserver status` and in `kvserver top`."""
    drain: DrainState = ""
    """draining: its chunks are moved to other places. drained: it holds nothing, and may be taken away."""
    drain_waits: str = ""
    """The reason why draining waits: budget or queue of another device, a segment that is emptied there, slots of
    the arena, or its own store, which is not open."""
    stalled_s: float = 0.0
    """For how long it has taken no write although writes wait for it; 0 while all is well."""
    stalled_why: str = ""
    """room: nothing there may go for them. segment: one is being emptied for them. queue: it does not write what it
    was told to."""
    queued_bytes: int
    """Ordered and not yet written."""
    written_bytes: int = 0
    """Since the brain started, as are the next two."""
    read_bytes: int = 0
    faults: int = 0
    """Reads and writes with a record that did not go well."""
    daily_write_bytes: int = 0
    """May be written in 24 hours; 0: no limit."""
    budget_bytes: int = 0
    """How many of `daily_write_bytes` may be written now; 0 without a limit."""
    write_bytes_per_s: float
    """As measured, as is the next; 0 until then."""
    read_bytes_per_s: float


class RemoteStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One remote store."""

    name: str
    url: str
    usable: bool
    """Its mover runs, and the store is open."""
    problem: str = ""
    """Why the store cannot be opened; empty if it is."""
    nodes_left_alone: list[str] = []
    """Nodes that do not answer. They are asked again by themselves."""
    namespaces: int
    """Namespaces in use, as is the next."""
    namespaces_known: int
    """Whose note is known, so that their chunks may be used."""
    namespaces_heard: int = 0
    """Whose announcements are read. In others the store is asked for every chunk that is missing."""
    looked_for: int
    """Prompts whose chunks are looked for or read now."""
    queued_chunks: int
    """Waiting to be written."""
    reading_bytes: int
    writing_bytes: int
    read_bytes_per_s: float
    """As measured; 0 until then."""
    clears_owed: int
    """Namespaces that were cleared here, and the store does not know yet."""
    counted: dict[str, int] = {}
    """This store's share of Status.counters under names that begin with "remote_". Empty if it is the only store."""
    failures: dict[str, int] = {}
    """The same for remote_failures."""


class TenantStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Slot bytes in the arena and extents on disk of one tenant with a quota; `default` is everybody else."""

    tenant: str
    held_bytes: int
    """Slots of complete chunks."""
    reserved_bytes: int
    """Slots of chunks that are being stored or read."""
    guaranteed_bytes: int
    max_bytes: int
    """0: as much as there is."""
    evicted_chunks: int
    """Since the brain started, as is the next: chunks that left DRAM to make room, for itself or for others."""
    refused_slots: int
    """Slots that it wanted and did not get."""
    disk_held_bytes: int = 0
    """Extents of all devices together, as are the next. 0 without a disk tier."""
    disk_reserved_bytes: int = 0
    """Extents that are being written."""
    disk_guaranteed_bytes: int = 0
    disk_max_bytes: int = 0
    """0: as much as there is."""
    disk_evicted_chunks: int = 0
    """Since the brain started, as is the next: chunks whose extents went to make room, for itself or for others."""
    disk_refused_extents: int = 0
    """Extents that it wanted and did not get."""


class ArcStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How ARC divides the arena, in slot bytes: chunks that were found again are frequent, all others recent."""

    recent_bytes: int
    frequent_bytes: int
    target_bytes: int
    """Recent chunks may hold so much before they are the ones to leave. It grows when they are stored again soon
    after they were evicted, and falls when frequent ones are."""
    recent_ghosts: int
    """Keys of evicted chunks that are remembered for that, as are the next."""
    frequent_ghosts: int
    recent_ghost_hits: int
    """Chunks that were stored again while their key was remembered, since the brain started; as is the next."""
    frequent_ghost_hits: int


class MoverStatus(msgspec.Struct, frozen=True, kw_only=True):
    mover: int
    device: str
    """"host", "disk", or kind and id, for example "cuda:UUID@PCI"."""
    state: Literal["starting", "ready", "killed"]
    pid: int
    backend: str
    """The copy engine's name, as the mover reported it. Empty until it is ready."""
    facts: dict[str, str]
    """Facts that the mover reported: library, driver, kernels, speeds. Empty for host."""
    caches: int
    jobs: int


class GroupStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One group of a cache, as it was registered: messages.GroupSpec says what the words mean."""

    kind: str
    block_tokens: int
    blocks: int
    window_tokens: int
    regions: int
    page_bytes: int
    """Bytes of one block in one region; the largest when regions differ."""
    shard: int
    shards: int
    shard_bytes: int
    """This rank's bytes of one chunk."""


class CacheStatus(msgspec.Struct, frozen=True, kw_only=True):
    cache: int
    name: str
    session: int
    owner: str = ""
    """The engine and the rank that registered it."""
    namespace: str
    """Hexadecimal."""
    mover: int
    mode: str
    state: Literal["mapping", "mapped", "unmapping"]
    jobs: int
    chunk_tokens: int = 0
    groups: list[GroupStatus] = []


class SessionStatus(msgspec.Struct, frozen=True, kw_only=True):
    session: int
    engine: str
    epoch: int
    rank: int
    software: str
    attached: bool
    caches: int
    jobs: int


class HoldStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A prefix that an operator keeps."""

    hold: int
    kind: Literal["pin", "warm"]
    namespace: str
    """Hexadecimal, as is the next."""
    key: str
    """The last chunk's."""
    chunks: int
    chunks_away: int
    """How many of `chunks` are being read from disk."""
    left_s: float


class Status(msgspec.Struct, frozen=True, kw_only=True):
    server: str
    """Name and version."""
    incarnation: int
    uptime_s: float
    """Seconds since the brain started."""
    arena: ArenaStatus
    disks: list[DiskStatus] = []
    """Empty without a disk tier."""
    chunks_on_disk: int = 0
    """Chunks that have something on disk, in DRAM as well or not."""
    clean_bytes: int = 0
    """Used bytes of the arena that may go without loss."""
    keys_touched: int = 0
    """Keys that are remembered beyond their chunks, for admission on second touch."""
    disk_state: str = ""
    """Empty without a disk tier; away: its mover does not run; recovering: what is on disk is being taken into the
    index, and nothing is written yet; ready."""
    remote: RemoteStatus | None = None
    """The remote store, or the first of several; None without one."""
    other_remotes: list[RemoteStatus] = []
    """The remote stores after the first."""
    disk_problem: str = ""
    """Why no disk can be used, while DRAM works as ever; empty while one can, and without a disk tier."""
    slot_sizes: list[SlotSize]
    tenants: list[TenantStatus] = []
    """Empty without quotas."""
    arc: ArcStatus | None = None
    """None under eviction_policy = "lru"."""
    digests: Literal["on", "off"] = "on"
    """Whether what is loaded is compared with what was stored."""
    scrub_round_s: dict[str, float] = {}
    """How long the last full round of the scrub took, by tier. 0: none has ended."""
    namespaces: int
    chunks: int
    """Chunks that the index holds, sealed or being stored."""
    chunks_max: int
    sessions: int
    caches: int
    caches_engine_driven: int = 0
    """Caches whose clients copy between a device and a host buffer themselves, which is slow."""
    leases: int
    pledges: int = 0
    """Prompts that engines compute now and have pledged to store."""
    pins: int
    """Pinned prefixes, counted where they are pinned: one for each lease, each retrieve that runs, and each chunk that
    is being stored. When there is none of these and a pin is left, a bug keeps memory."""
    stores: int
    """In flight."""
    retrieves: int
    """In flight."""
    movers: list[MoverStatus]
    shown_sessions: list[SessionStatus]
    """The first SHOWN_MAX of them."""
    shown_caches: list[CacheStatus]
    """The first SHOWN_MAX of them."""
    drain: DrainState = ""
    """draining: no store is taken, and what would be lost is written to disk. drained: the server may be stopped."""
    drain_waits: str = ""
    """The reason why draining waits: stores, writes, leases, disk-away, or why the disk takes nothing
    (tiers/placement.py)."""
    dirty_bytes: int = 0
    """Used bytes of the arena that would be lost with it. Without a disk: all of them."""
    drain_left: dict[str, int] = {}
    """Dirty bytes of a drained server, by the reason why they were not written (no-disk, other, and those of
    counters.disk_refused)."""
    holds: list[HoldStatus] = []
    held_bytes: int = 0
    """Bytes that holds keep, each chunk once."""
    infinite_cache_hit_ratio: dict[str, float] = {}
    """Estimated share of chunks that an infinite cache would have held, by window (service/telling/reuse.py)."""
    held_ratio: dict[str, float] = {}
    """Share of the same chunks, in the same windows, that this server held: never more than an infinite cache."""
    reuse: str = ""
    """Both ratios of the first window, in words; empty until enough was asked."""
    settings: dict[str, int | str] = {}
    """Keys of the configuration that can change while the server runs, with the values in force
    (wire/admin.RELOADABLE)."""
    warnings: list[str] = []
    """Problems that exist now, in words, worst first (service/report/problems.py)."""
    troubles: dict[str, int] = {}
    """Things that should not happen, in words, and how often they have since the brain started; worst first."""
    counters: dict[str, int | dict[str, int]]
    """service/telling/counters.py says what each means."""

    @property
    def remotes(self) -> list[RemoteStatus]:
        """All remote stores."""
        return [*([self.remote] if self.remote is not None else []), *self.other_remotes]


encode_status = msgspec.json.Encoder().encode
decode_status = msgspec.json.Decoder(Status).decode
