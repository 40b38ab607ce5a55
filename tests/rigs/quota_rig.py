"""Tenants with quotas in DRAM, and what they hold there."""

import msgspec

from kvserver.service.holdings.accounts import Account, Quota
from kvserver.tiers.slots import SLOT_ALIGN
from kvserver.wire.messages import KEY_BYTES, GroupBlocks, RegionRun
from tests.rigs.brain_rig import ARENA_BYTES, FULL, Client, Rig, chain, ids

SLOTS = ARENA_BYTES // SLOT_ALIGN
AGENTS, CHAT, GUESTS = (bytes([number]) * 32 for number in (3, 5, 7))
WIDE = msgspec.structs.replace(FULL, regions=[RegionRun(0, 3, 1, 0, 1601, 1601)], blocks=3)
"""Two units per chunk."""


def quota(tenant: str, guaranteed: int = 0, most: int = 0) -> Quota:
    """A quota in chunks of FULL."""
    return Quota(tenant, guaranteed * SLOT_ALIGN, most * SLOT_ALIGN)


def rig_with(*quotas: Quota, **bounds: int) -> Rig:
    return Rig(tenants=quotas, **bounds)


def client_of(rig: Rig, tenant: str, namespace: bytes, groups: tuple = (FULL,)) -> Client:
    client = Client(rig, engine=f"engine of {tenant or 'nobody'}")
    return client.register(groups, namespace=namespace, tenant=tenant)


def account(rig: Rig, name: str) -> Account:
    accounts = rig.core.chunks.accounts
    assert accounts is not None
    return next(account for account in accounts.all() if account.name == name)


def chunks_of(rig: Rig, name: str) -> int:
    assert account(rig, name).reserved_bytes == 0
    return account(rig, name).held_bytes // SLOT_ALIGN


def fill(client: Client, chunks: int, seed: int = 1) -> list[bytes]:
    """Stores prompts of three chunks, so that there are chains; the last one is shorter."""
    prompts = []
    while chunks:
        prompts.append(chain(seed * 1000 + chunks, min(3, chunks)))
        client.store(prompts[-1])
        client.rig.now_ns += 1_000_000
        chunks -= min(3, chunks)
    return prompts


def stored(client: Client, keys: bytes) -> tuple[int, str]:
    chunks = len(keys) // KEY_BYTES
    reply = client.ask(client.storing(keys, GroupBlocks(0, 0, ids(*range(3 * chunks)))))
    return reply.chunks, reply.why
