"""Every bound and time limit of the service."""

from dataclasses import dataclass
from typing import Literal

from kvserver.config.remotes import Remote
from kvserver.service.holdings.accounts import Quota
from kvserver.service.telling.log_sampling import Wanted
from kvserver.wire.admin import LogLevel


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Every bound and time limit of the service. Those with a default have no key in the configuration."""

    arena_bytes: int
    slab_bytes: int
    sessions_max: int
    caches_max: int
    movers_max: int = 64
    """Clients say which devices there are, so the number of mover processes needs a bound."""
    namespaces_max: int
    notes_max: int = 1024
    """Namespaces outside the index that may have notes on the devices."""
    prefix_notes_kept: int = 512
    """Above this many notes of cleared prefixes, redundant ones are removed (clear_prefix.py)."""
    chunks_max: int
    forget_chunks: int = 128
    """Chunks that one event forgets after a clear or a cut. Each takes about 8 us, 12 us with quotas or arc."""
    leases_max: int
    jobs_max: int
    """Jobs in flight for one session."""
    descriptors_max: int = 64
    """Descriptors that one session has offered and not yet registered."""
    lease_ttl_ms: int
    lease_extended_ms: int
    """How long a lease lives after its first retrieve, so that the other ranks can use it."""
    pledges_max: int = 256
    """Pledges of one session."""
    pledges_total_max: int = 4096
    pledged_chunks_max: int = 65_536
    """Pledged chunks that are still to come, in all. The brain remembers each, and the end of a session forgets its."""
    pledged_percent_max: int = 33
    """Share of the arena that pledged chunks may fill, so that those who await them leave room for stores. One engine
    fills three quarters of it at most (state/pledges.py)."""
    pledge_waits_max: int = 256
    """Leases and retrieves that await one pledge. Each chunk that comes moves the pins of all of them."""
    pledge_ttl_ms: int
    """How long a pledge lives at most, whatever its engine asked for."""
    pledge_patience_ms: int
    """A pledge ends when no chunk of it has come for so long."""
    reserve_ttl_ms: int
    """A chunk that still lacks shards after this time is discarded."""
    attach_ttl_ms: int
    job_ttl_ms: int
    """Upper limit for a job's deadline, whatever its client asked for."""
    mover_grace_ms: int
    """A mover that takes longer to end a cancelled job, or to let a cache go, is killed."""
    mover_start_ms: int
    disk_devices: int
    """Number of disk devices; 0: no disk tier."""
    disk_directories: tuple[str, ...]
    """The directory of each device, for logs and /status."""
    disk_device_bytes: int
    """Bytes of each device, a whole number of segments."""
    disk_segment_bytes: int
    disk_run_tokens: int
    """Tokens of a prompt that lie on one device in a row (service/disk/runs.py)."""
    disk_write_through: bool
    """Write chunks as soon as allowed, not only those next to leave DRAM."""
    disk_second_touch: bool
    verifies: bool = True
    """Movers compare what is loaded with what was stored."""
    scrub_bytes_per_s: int = 0
    """Bytes of DRAM, and as many of the disks, that are read each second to find chunks that changed. 0: none."""
    disk_daily_write_bytes: int
    """Bytes that may be written to each device a day; 0: no limit."""
    disk_write_queue_ms: int
    disk_clean_percent: int
    """Share of the arena that is free or also on disk, so that it can be taken at once."""
    disk_jobs_max: int = 32
    """Reads in flight, and likewise writes in flight."""
    read_room_ms: int = 100
    """How long reads wait for slots that ending copies give back, before chunks that leases keep leave DRAM
    (read_room.py)."""
    disk_job_ms: int
    """The disk mover is killed when a read or write takes longer."""
    disk_restart_ms: int = 1_000
    """Pause between two starts of the disk mover."""
    remotes: tuple[Remote, ...] = ()
    """The remote stores."""
    remote_patience_ms: int = 300
    """Chunks of a prompt that have made no progress for so long are not waited for any more."""
    remote_job_ms: int = 60_000
    """The remote mover is killed when an order takes longer. Calls to a store end before, by their own deadlines."""
    remote_tell_ms: int = 250
    """Between two batches of announcements of a namespace, if the one before took all that waited."""
    remote_listen_ms: int = 500
    """Between two times that the announcements of a namespace are read."""
    remote_foretold_ms: int = 15_000
    """How long a server is believed that a chunk comes to the store. It tells so three times as often."""
    recompute_tokens_per_s: int
    """Prefill speed of the engines. A prefix that is slower to read from disk than to compute is not offered. 0: every
    prefix is offered."""
    eviction_policy: Literal["lru", "arc"]
    """The order in which chunks leave DRAM. arc excludes disks and quotas (config.py says why)."""
    tenants: tuple[Quota, ...]
    """Quotas in DRAM and on disk. Empty: no tenant has one, and nothing is counted by tenant."""
    holds_max: int = 64
    """Prefixes that operators hold at the same time (holds.py)."""
    held_percent_max: int = 50
    """Share of the arena that holds may keep."""
    kv_events: bool
    """Whether subscribers are told which chunks are held (kv_events.py)."""
    log_level: LogLevel
    """The least severe level that this process logs."""
    request_lines: Wanted
    """Which lookups, stores and retrieves are logged (log_sampling.py)."""
