"""Every bound and time limit of the service."""

from dataclasses import dataclass
from typing import Literal

from kvserver.service.holdings.accounts import Quota
from kvserver.service.telling.log_sampling import Wanted
from kvserver.wire.admin import LogLevel


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
