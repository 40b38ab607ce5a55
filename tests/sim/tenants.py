"""The owner of each simulated namespace, and the quotas of a seed."""

from collections.abc import Iterable
from random import Random

from kvserver.service.holdings.accounts import Quota
from kvserver.service.state.bounds import Bounds
from kvserver.tiers.slots import SLOT_ALIGN

TENANTS = ("agents", "chat", "guests", "")
"""Owners of the namespaces, in turn; the last two have no quota and share the default account."""
OTHERS = "default"


def tenant_of(digest: bytes) -> str:
    return TENANTS[(digest[0] - 1) % len(TENANTS)]


def namespaces_of(tenant: str, digests: Iterable[bytes]) -> list[bytes]:
    return [digest for digest in digests if tenant_of(digest) == tenant]


def draw_quotas(rng: Random, arena_bytes: int, chunk_bytes: int) -> tuple[Quota, ...]:
    """DRAM quotas: guarantees that fit the arena together, and maxima with room for at least one chunk."""
    left = arena_bytes
    quotas = []
    for name in (*TENANTS[:2], *((OTHERS,) if rng.random() < 0.5 else ())):
        guaranteed = _units(min(left, int(arena_bytes * rng.choice((0.0, 0.3, 0.5, 0.8)))))
        most = rng.choice((0, 0, arena_bytes // 3, arena_bytes // 2))
        left -= guaranteed
        quotas.append(Quota(name, guaranteed, max(guaranteed, _units(most), chunk_bytes) if most else 0))
    return tuple(quotas)


def draw_disk_quotas(rng: Random, bounds: Bounds, chunk_bytes: int) -> tuple[Quota, ...]:
    """Disk quotas of the same tenants: guarantees fit the devices; maxima are a few chunks, or less than one."""
    segments = bounds.disk_device_bytes // bounds.disk_segment_bytes
    room_bytes = bounds.disk_devices * segments * (bounds.disk_segment_bytes - SLOT_ALIGN)
    left = room_bytes
    quotas = []
    for quota in bounds.tenants:
        wanted = rng.choice((0, chunk_bytes, 3 * chunk_bytes, room_bytes // 2))
        guaranteed = _units(min(left, wanted))
        most = rng.choice((0, 0, SLOT_ALIGN, chunk_bytes, 2 * chunk_bytes, 5 * chunk_bytes, room_bytes // 3))
        left -= guaranteed
        maximum = max(guaranteed, _units(most), SLOT_ALIGN) if most else 0
        quotas.append(quota._replace(disk_guaranteed_bytes=guaranteed, disk_max_bytes=maximum))
    return tuple(quotas)


def _units(count: int) -> int:
    return count // SLOT_ALIGN * SLOT_ALIGN
