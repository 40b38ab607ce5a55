"""Resident memory of a pool that an engine maps."""

import os
from pathlib import Path

from tests.rigs.native_rig import Memory, rig
from tests.rigs.oracle_plan import Group, Run

CACHE = 3
PAGE, BLOCKS, REGIONS, PER_CHUNK = 1000, 31, 3, 4
GROUP = Group(PER_CHUNK, BLOCKS, (Run(0, 0, REGIONS, BLOCKS * PAGE, PAGE, PAGE),))
ARENA = 1 << 20


def resident_bytes(address: str) -> int:
    """Resident bytes of the mapping that begins there."""
    smaps = Path("/proc/self/smaps").read_text()
    return int(smaps.split(f"{address}-")[1].split("Rss:")[1].split()[0]) * 1024


def test_untouched_pool_pages_stay_untouched() -> None:
    """Page tables are filled for the two pages that exist, and for none of the 64 MiB between them."""
    pool = Memory(64 << 20)
    pool.view[5000] = pool.view[-1] = 1
    before = {line.split("-")[0] for line in Path("/proc/self/maps").read_text().splitlines()}
    with rig(ARENA) as session:
        session.map(CACHE, [GROUP], [pool])
        lines = Path("/proc/self/maps").read_text().splitlines()
        inode = f" {os.fstat(pool.fd).st_ino} "
        (engines,) = {line.split("-")[0] for line in lines if inode in line} - before
        while resident_bytes(engines) < 2 * 4096:
            pass  # the housekeeper is on its way; the test's time limit bounds this
        assert os.fstat(pool.fd).st_blocks * 512 == 2 * 4096
    pool.close()
