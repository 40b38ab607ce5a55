"""Tenants with disk quotas, in chunks, and counts of their chunks on disk."""

from typing import Any

import msgspec

from kvserver.service.holdings.accounts import Account, Quota
from kvserver.service.state.disk_tier import DiskTier
from kvserver.wire.messages import KEY_BYTES, RegionRun
from tests.rigs.brain_rig import FULL, Client, chain, key
from tests.rigs.disk_rig import CHUNKS, EXTENT_BYTES, SEGMENT_BYTES, DiskRig, fill

AGENTS, CHAT, GUESTS = (bytes([number]) * 32 for number in (3, 5, 7))
SEGMENTS, EXTENTS_A_SEGMENT = 11, 4
EXTENTS = SEGMENTS * EXTENTS_A_SEGMENT
WIDE = msgspec.structs.replace(FULL, regions=[RegionRun(0, 3, 1, 0, 1601, 1601)], blocks=3)
"""Two units per chunk."""
FOREVER_NS = 1 << 62


def quota(tenant: str, guaranteed: int = 0, most: int = 0) -> Quota:
    """A quota on disk, in chunks of FULL."""
    return Quota(tenant, 0, 0, guaranteed * EXTENT_BYTES, most * EXTENT_BYTES)


def rig_with(*quotas: Quota, **bounds: Any) -> DiskRig:
    return DiskRig(**{"tenants": quotas, "disk_device_bytes": SEGMENTS * SEGMENT_BYTES, **bounds})


def client_of(rig: DiskRig, tenant: str, namespace: bytes, groups: tuple = (FULL,)) -> Client:
    client = Client(rig, engine=f"engine of {tenant or 'nobody'} {namespace[0]}")
    return client.register(groups, namespace=namespace, tenant=tenant)


def tier_of(rig: DiskRig) -> DiskTier:
    tier = rig.core.disk
    assert tier is not None
    return tier


def account(rig: DiskRig, name: str) -> Account:
    accounts = tier_of(rig).chunks.accounts
    assert accounts is not None
    return next(account for account in accounts.all() if account.name == name)


def chunks_of(rig: DiskRig, name: str) -> int:
    """Number of the tenant's chunks on disk."""
    assert account(rig, name).reserved_bytes == 0
    return account(rig, name).held_bytes // EXTENT_BYTES


def stored(client: Client, prompts: int, seed: int, chunks: int = CHUNKS) -> list[bytes]:
    """Stores prompts and lets their chunks be written as soon as allowed."""
    made = []
    for number in range(prompts):
        client.rig.now_ns += 1_000_000
        made.append(chain(seed * 1000 + number, chunks))
        client.store(made[-1])
    return made


def kept(rig: DiskRig, namespace: bytes, prompts: list[bytes]) -> list[int]:
    """Chunks on disk, by prompt."""
    nodes = rig.core.chunks.spaces[namespace].nodes
    return [
        sum(1 for at in range(len(keys) // KEY_BYTES) if (node := nodes.get(key(keys, at))) and node.on_disk)
        for keys in prompts
    ]


def hold_writes(rig: DiskRig) -> None:
    tier_of(rig).writes.wait(FOREVER_NS)


def resume_writes(rig: DiskRig) -> None:
    tier_of(rig).writes.wait(0)
    rig.wait_ms(50)


def empty_dram(client: Client) -> None:
    """Makes all chunks leave DRAM; nothing more is written."""
    hold_writes(client.rig)  # type: ignore[arg-type]
    fill(client, first=90_000, prompts=30)
