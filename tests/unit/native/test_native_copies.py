"""Every byte of pool and arena after a store and after a retrieve, for the layouts that engines use."""

import random
from dataclasses import dataclass

import pytest

from kvserver.transfer.native import SLOT_ALIGN
from tests.rigs.native_rig import Kind, Memory, carried_out, rig
from tests.rigs.oracle_plan import SKIP, CopyGroup, Group, Run, chunks_touched

CACHE = 11


@dataclass(frozen=True)
class Case:
    name: str
    groups: list[Group]
    buffer_bytes: list[int]


def kv_first(page: int, blocks: int, regions: int, per_chunk: int) -> Case:
    run = Run(0, 64, regions, blocks * page + 100, page, page)
    return Case(f"kv-first-{page}", [Group(per_chunk, blocks, (run,))], [64 + regions * (blocks * page + 100)])


def block_first(page: int, blocks: int, regions: int, per_chunk: int) -> Case:
    run = Run(0, 3, regions, page, regions * page, page)
    return Case(f"block-first-{page}-{per_chunk}", [Group(per_chunk, blocks, (run,))], [3 + regions * page * blocks])


def layer_tensors(page: int, blocks: int, layers: int, per_chunk: int) -> Case:
    """K and V of a layer in one tensor per layer, K/V-first."""
    runs = tuple(Run(layer, 0, 2, blocks * page, page, page) for layer in range(layers))
    return Case(f"layer-tensors-{page}", [Group(per_chunk, blocks, runs)], [2 * blocks * page] * layers)


def hybrid() -> Case:
    """A full group, a window group after it in the same buffer, and a state group of large pages."""
    full = Group(3, 29, (Run(0, 0, 4, 29 * 576, 576, 576),))
    window = Group(6, 17, (Run(0, 4 * 29 * 576, 2, 17 * 132, 132, 132),))
    state = Group(1, 5, (Run(1, 7, 1, 0, 70_001, 70_001),))
    return Case("hybrid", [full, window, state], [4 * 29 * 576 + 2 * 17 * 132, 7 + 5 * 70_001])


CASES = [
    kv_first(132, 41, 6, 3),
    kv_first(2048, 53, 5, 4),
    kv_first(18432, 31, 3, 2),
    kv_first(66, 3011, 7, 5),  # several pieces, cut inside of pages
    block_first(512, 37, 6, 1),
    block_first(132, 37, 6, 4),
    layer_tensors(1000, 23, 4, 5),
    kv_first(576 * 16, 47, 1, 3),  # MLA: one region
    Case("cross-layer", [Group(2, 11, (Run(0, 0, 1, 0, 300_004, 300_004),))], [11 * 300_004]),
    hybrid(),
]


def random_copies(case: Case, rng: random.Random, arena_bytes: int, *, skips: bool) -> list[CopyGroup]:
    """Some blocks of every group, from the middle of a chunk to the middle of a chunk, in slots that do not touch."""
    copies, unit = [], 1
    for index, group in enumerate(case.groups):
        count = rng.randint(max(1, group.blocks // 2), group.blocks - 1)
        first = rng.randint(0, 2 * group.blocks_per_chunk)
        chunks = chunks_touched(first, count, group.blocks_per_chunk)
        units = -(-group.shard_bytes // SLOT_ALIGN)
        slots = [(unit + chunk * units) * SLOT_ALIGN for chunk in range(chunks)]
        unit += chunks * units
        assert unit * SLOT_ALIGN <= arena_bytes
        rng.shuffle(slots)
        if skips:
            slots = [SKIP if rng.random() < 0.3 else slot for slot in slots]
        copies.append(CopyGroup(index, first, tuple(rng.sample(range(group.blocks), count)), tuple(slots)))
    return copies


def arena_for(case: Case) -> int:
    units = sum(-(-group.shard_bytes // SLOT_ALIGN) * (group.blocks + 2) for group in case.groups)
    return (units + 1) * SLOT_ALIGN


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_job_writes_its_bytes_and_no_other(case: Case, threads: int) -> None:
    rng = random.Random(case.name)
    arena_bytes = arena_for(case)
    pools = [Memory(size) for size in case.buffer_bytes]
    with rig(arena_bytes, threads) as session:
        session.map(CACHE, case.groups, pools)
        session.arena.fill(1)
        for seed, pool in enumerate(pools):
            pool.fill(seed + 2)
        kinds: list[Kind] = ["store", "retrieve", "store", "retrieve"]
        for kind in kinds:
            copies = random_copies(case, rng, arena_bytes, skips=rng.random() < 0.5)
            arena, pages = carried_out(
                case.groups, copies, kind, session.arena.view[:], [pool.view[:] for pool in pools]
            )
            status = session.run(kind, CACHE, copies)[1]
            assert status == "done"
            assert session.arena.view[:] == arena
            assert [pool.view[:] for pool in pools] == pages
    for pool in pools:
        pool.close()


@pytest.mark.parametrize("page", [2048 + 4, 132, 6000])
def test_jobs_past_the_cache_write_their_bytes_and_no_other(page: int) -> None:
    """Large enough that copies bypass the CPU cache, with targets at every alignment."""
    blocks, regions, per_chunk = (15 << 20) // page // 3, 3, 7
    case = kv_first(page, blocks, regions, per_chunk)
    arena_bytes = arena_for(case)
    pool = Memory(case.buffer_bytes[0])
    with rig(arena_bytes, 2) as session:
        session.map(CACHE, case.groups, [pool])
        pool.fill(3)
        kinds: list[Kind] = ["store", "retrieve"]
        for kind in kinds:
            copies = random_copies(case, random.Random(page), arena_bytes, skips=False)
            arena, pages = carried_out(case.groups, copies, kind, session.arena.view[:], [pool.view[:]])
            assert session.run(kind, CACHE, copies)[1] == "done"
            assert session.arena.view[:] == arena
            assert pool.view[:] == pages[0]
    pool.close()


def test_completion_counts_bytes_and_time() -> None:
    case = kv_first(2048, 53, 5, 4)
    pool = Memory(case.buffer_bytes[0])
    with rig(arena_for(case)) as session:
        session.map(CACHE, case.groups, [pool])
        job, generation = session.submit("store", CACHE, [CopyGroup(0, 3, (9, 4, 11), (0, 45056))])
        assert session.wait()[0][:3] == (job, "done", 3 * 5 * 2048)
        assert generation == 1
        assert session.run("store", CACHE, [CopyGroup(0, 3, (9,), (SKIP,))])[1:3] == ("done", 0)
        assert session.run("store", CACHE, [])[1:3] == ("done", 0)
    pool.close()
