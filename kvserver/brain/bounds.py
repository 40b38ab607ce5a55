"""The bounds that the service keeps, from the configuration."""

import dataclasses

from kvserver.config import quotas
from kvserver.config.config import Config
from kvserver.service.holdings.accounts import Quota
from kvserver.service.state.bounds import Bounds
from kvserver.service.telling.log_sampling import REQUEST_LINES


def bounds_from(config: Config) -> Bounds:
    """Takes every field of Bounds from the key of the same name; fields without such a key are computed here."""
    names = (field.name for field in dataclasses.fields(Bounds))
    shared = {name: getattr(config, name) for name in names if hasattr(config, name)}
    shared["disk_device_bytes"] = config.disk_segments * config.disk_segment_bytes
    ranges = quotas.together(config.tenants, config.disk_tenants)
    shared["tenants"] = tuple(Quota(name, *arena, *disks) for name, (arena, disks) in ranges.items())
    return Bounds(
        **shared,
        disk_devices=len(config.disk_directories),
        kv_events=bool(config.events_endpoint),
        disk_write_through=config.disk_write_policy == "through",
        disk_second_touch=config.disk_admission == "second-touch",
        request_lines=REQUEST_LINES[config.log_level],
    )
