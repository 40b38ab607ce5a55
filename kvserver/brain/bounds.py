"""The bounds that the service keeps, from the configuration."""

from kvserver.config import quotas
from kvserver.config.config import Config
from kvserver.service.holdings.accounts import Quota
from kvserver.service.state.bounds import Bounds
from kvserver.service.telling.log_sampling import REQUEST_LINES


def bounds_from(config: Config) -> Bounds:
    ranges = quotas.together(config.tenants, config.disk_tenants)
    return Bounds(
        arena_bytes=config.arena_bytes,
        slab_bytes=config.slab_bytes,
        sessions_max=config.sessions_max,
        caches_max=config.caches_max,
        namespaces_max=config.namespaces_max,
        chunks_max=config.chunks_max,
        leases_max=config.leases_max,
        jobs_max=config.jobs_max,
        lease_ttl_ms=config.lease_ttl_ms,
        lease_extended_ms=config.lease_extended_ms,
        pledge_ttl_ms=config.pledge_ttl_ms,
        pledge_patience_ms=config.pledge_patience_ms,
        reserve_ttl_ms=config.reserve_ttl_ms,
        attach_ttl_ms=config.attach_ttl_ms,
        job_ttl_ms=config.job_ttl_ms,
        mover_grace_ms=config.mover_grace_ms,
        mover_start_ms=config.mover_start_ms,
        disk_devices=len(config.disk_directories),
        disk_directories=config.disk_directories,
        disk_device_bytes=config.disk_segments * config.disk_segment_bytes,
        disk_segment_bytes=config.disk_segment_bytes,
        disk_run_tokens=config.disk_run_tokens,
        disk_write_through=config.disk_write_policy == "through",
        verifies=config.digests == "on",
        scrub_bytes_per_s=config.scrub_bytes_per_s,
        disk_second_touch=config.disk_admission == "second-touch",
        disk_daily_write_bytes=config.disk_daily_write_bytes,
        disk_write_queue_ms=config.disk_write_queue_ms,
        disk_clean_percent=config.disk_clean_percent,
        disk_job_ms=config.disk_job_ms,
        remotes=config.remote_stores,
        recompute_tokens_per_s=config.recompute_tokens_per_s,
        eviction_policy=config.eviction_policy,
        tenants=tuple(Quota(name, *arena, *disks) for name, (arena, disks) in ranges.items()),
        kv_events=bool(config.events_endpoint),
        log_level=config.log_level,
        request_lines=REQUEST_LINES[config.log_level],
    )
