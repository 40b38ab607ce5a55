"""Two leases that cannot both be read back: DRAM has too few slots."""

from kvserver.wire.messages import (
    KEY_BYTES,
    Found,
    GroupSpec,
    RegionRun,
)
from tests.rigs.brain_rig import PAGE_BYTES, REGIONS, Client, chain
from tests.rigs.disk_rig import (
    DiskRig,
    fill,
)

WIDE = GroupSpec(2, 131, "full", 0, 1, 0, 1, 0, [RegionRun(0, 13, REGIONS, 131 * 130, 130, PAGE_BYTES)])
"""A group with blocks for more than half of the arena's chunks."""


def too_much_for_dram(rig: DiskRig) -> tuple[Client, list[bytes], list[Found]]:
    """Stores prompts of 35 and 37 chunks, together more than DRAM holds.

    Leases keep the heads of both in DRAM, 60 of its 64 slots; the last 8 and 4 chunks are on disk alone."""
    client = Client(rig).register((WIDE,), buffer_bytes=40_000)
    prompts, heads = [chain(1, 35), chain(2, 37)], []
    for keys, head in zip(prompts, (27, 33), strict=True):
        client.store(keys)
        heads.append(client.lookup(keys[: head * KEY_BYTES]))
    fill(client)
    return client, prompts, heads
