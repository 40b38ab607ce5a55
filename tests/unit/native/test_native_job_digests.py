"""Host jobs with digests: a store tells the sum of each shard, and a retrieve notices every byte that is not right."""

import random
import struct

import pytest

from kvserver.transfer.native import FAILED, NO_DIGEST, SLOT_ALIGN, digest_sum
from tests.rigs.native_rig import Memory, Rig, rig
from tests.rigs.oracle_plan import SKIP, CopyGroup, Group, Run, chunks_touched

PAGES = (1, 3, 66, 132, 576, 1000, 2048, 4100, 5000)
CACHE = 4
SEEDS = range(30)


class Scene:
    """A cache of random shape with one pool, and shards of it in the arena."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        at, self.groups = 7, []
        for _ in range(rng.randint(1, 3)):
            blocks, runs = rng.randint(5, 19), []
            for _ in range(rng.randint(1, 2)):
                page, regions, gap = rng.choice(PAGES), rng.randint(1, 4), rng.choice((0, 0, 5, 64))
                stride = page + gap
                outside = rng.random() < 0.5
                runs.append(
                    Run(0, at, regions, blocks * stride, stride, page)
                    if outside
                    else Run(0, at, regions, stride, regions * stride, page)
                )
                at += blocks * regions * stride
            self.groups.append(Group(rng.randint(1, 5), blocks, tuple(runs)))
        self.pool = Memory(at)
        self.pool.fill(seed)
        self.arena_bytes = 2 << 20

    def shards(self, copies: list[CopyGroup]) -> list[tuple[int, int]]:
        """(slot, bytes) of the shards with a slot, in their order."""
        return [(slot, self.groups[copy.group].shard_bytes) for copy in copies for slot in copy.slots if slot != SKIP]

    def whole(self, *, skips: bool) -> list[CopyGroup]:
        """Copies of whole chunks with ids in any order."""
        copies, slot = [], 0
        for index, group in enumerate(self.groups):
            chunks = group.blocks // group.blocks_per_chunk
            ids = self.rng.sample(range(group.blocks), chunks * group.blocks_per_chunk)
            slots = []
            for _ in range(chunks):
                slots.append(SKIP if skips and self.rng.random() < 0.3 else slot)
                slot += -(-group.shard_bytes // SLOT_ALIGN) * SLOT_ALIGN
            if chunks:
                copies.append(CopyGroup(index, 0, tuple(ids), tuple(slots)))
        assert slot <= self.arena_bytes
        return copies

    def part(self, stored: list[CopyGroup], sums: list[int]) -> list[CopyGroup]:
        """Retrieves of some consecutive blocks of what was stored, with the sums of their chunks."""
        copies, left = [], list(sums)
        for copy in stored:
            per_chunk, of_group = self.groups[copy.group].blocks_per_chunk, left[: len(copy.slots)]
            del left[: len(copy.slots)]
            first = self.rng.randrange(len(copy.block_ids))
            count = self.rng.randint(1, len(copy.block_ids) - first)
            chunk, touched = first // per_chunk, chunks_touched(first, count, per_chunk)
            ids = self.rng.sample(range(self.groups[copy.group].blocks), count)
            span = slice(chunk, chunk + touched)
            copies.append(CopyGroup(copy.group, first, tuple(ids), copy.slots[span], tuple(of_group[span])))
        return copies


def run(session: Rig, kind: str, copies: list[CopyGroup]) -> tuple[str, str, list[int], list[int]]:
    """(status, code, sums, wrong shards) of a job with digests."""
    generation = session.board.begin(0)
    session.jobs += 1
    assert kind in ("store", "retrieve")
    packed = [copy.packed() for copy in copies]
    session.engine.submit(session.jobs, kind, CACHE, 0, generation, packed, digests=True)  # type: ignore[arg-type]
    (end,) = session.wait()
    assert (session.board.state(0)[1] == FAILED) == (end.status != "done")
    return end.status, end.code, [sum for (sum,) in struct.iter_unpack("<Q", end.sums)], end.wrong


def arena_sums(session: Rig, shards: list[tuple[int, int]]) -> list[int]:
    held = session.arena.view[:]
    return [digest_sum(held, slot, slot + count, 0, "portable")[0] for slot, count in shards]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_store_tells_the_sum_of_each_shard_that_it_has_written(seed: int) -> None:
    scene = Scene(seed)
    with rig(arena_bytes=scene.arena_bytes) as session:
        session.map(CACHE, scene.groups, [scene.pool])
        copies = scene.whole(skips=True)
        assert run(session, "store", copies) == ("done", "", arena_sums(session, scene.shards(copies)), [])


@pytest.mark.parametrize("seed", SEEDS)
def test_a_retrieve_of_any_part_takes_what_was_stored_and_names_each_wrong_shard(seed: int) -> None:
    scene = Scene(seed)
    with rig(arena_bytes=scene.arena_bytes) as session:
        session.map(CACHE, scene.groups, [scene.pool])
        stored = scene.whole(skips=False)
        _, _, sums, _ = run(session, "store", stored)
        for _ in range(20):
            part = scene.part(stored, sums)
            assert run(session, "retrieve", part)[:2] == ("done", "")
            shards = scene.shards(part)
            wrong = sorted(scene.rng.sample(range(len(shards)), scene.rng.randint(1, len(shards))))
            before = session.arena.view[:]
            for index in wrong:
                slot, count = shards[index]
                session.arena.view[slot + scene.rng.randrange(count)] ^= 1 << scene.rng.randrange(8)
            assert run(session, "retrieve", part) == ("failed", "digest", [], wrong)
            session.arena.view[:] = before


@pytest.mark.parametrize("fault", ["swap", "zero", "other"])
def test_pages_that_moved_or_vanished_are_noticed(fault: str) -> None:
    group = Group(3, 6, (Run(0, 0, 2, 6 * 4100, 4100, 4100),))
    pool = Memory(2 * 6 * 4100)
    pool.fill(3)
    slot = 2 * 3 * 4100
    copy = CopyGroup(0, 0, (4, 1, 0, 2, 5, 3), (0, 8 * SLOT_ALIGN))
    with rig() as session:
        session.map(CACHE, [group], [pool])
        _, _, sums, _ = run(session, "store", [copy])
        view = session.arena.view
        if fault == "swap":
            view[:4100], view[4100:8200] = view[4100:8200], view[:4100]
        elif fault == "zero":
            view[slot - 100 : slot] = bytes(100)
        else:
            view[:slot] = view[8 * SLOT_ALIGN : 8 * SLOT_ALIGN + slot]
        expected = CopyGroup(0, 0, copy.block_ids, copy.slots, tuple(sums))
        assert run(session, "retrieve", [expected]) == ("failed", "digest", [], [0])


def test_a_shard_whose_sum_is_not_known_is_not_compared() -> None:
    group = Group(1, 3, (Run(0, 0, 1, 0, 66, 66),))
    pool = Memory(3 * 66)
    pool.fill(5)
    with rig() as session:
        session.map(CACHE, [group], [pool])
        _, _, sums, _ = run(session, "store", [CopyGroup(0, 0, (2, 0, 1), (0, SLOT_ALIGN, 2 * SLOT_ALIGN))])
        session.arena.view[SLOT_ALIGN] ^= 1
        known = CopyGroup(0, 0, (0, 1), (SLOT_ALIGN, 2 * SLOT_ALIGN), (sums[1], sums[2]))
        unknown = CopyGroup(0, 0, (0, 1), (SLOT_ALIGN, 2 * SLOT_ALIGN), (NO_DIGEST, sums[2]))
        assert run(session, "retrieve", [known]) == ("failed", "digest", [], [0])
        assert run(session, "retrieve", [unknown]) == ("done", "", [], [])


def test_a_retrieve_without_a_sum_for_each_slot_is_refused() -> None:
    group = Group(1, 3, (Run(0, 0, 1, 0, 66, 66),))
    with rig() as session:
        session.map(CACHE, [group], [Memory(3 * 66)])
        status, code, _, _ = run(session, "retrieve", [CopyGroup(0, 0, (0, 1), (0, SLOT_ALIGN), (5,))])
        assert (status, code) == ("invalid", "sums")


def test_long_stretches_that_a_retrieve_leaves_out_are_summed_as_well() -> None:
    """They are cut into several shares, each with its own place in the payload."""
    page = 150_001
    group = Group(3, 3, (Run(0, 0, 1, 0, page, page),))
    pool = Memory(3 * page)
    pool.fill(7)
    with rig() as session:
        session.map(CACHE, [group], [pool])
        _, _, sums, _ = run(session, "store", [CopyGroup(0, 0, (2, 0, 1), (SLOT_ALIGN,))])
        middle = CopyGroup(0, 1, (2,), (SLOT_ALIGN,), tuple(sums))
        assert run(session, "retrieve", [middle]) == ("done", "", [], [])
        for at in (0, page - 1, 2 * page, 3 * page - 1):
            session.arena.view[SLOT_ALIGN + at] ^= 1
            assert run(session, "retrieve", [middle]) == ("failed", "digest", [], [0])
            session.arena.view[SLOT_ALIGN + at] ^= 1


@pytest.mark.parametrize("inset", [0, 16, 7])
def test_jobs_that_are_too_long_for_the_cache_bring_the_same_bytes_and_sums(inset: int) -> None:
    """They are stored past it, where the place of their pages allows that."""
    page, blocks = 70_016, 66
    group = Group(3, blocks, (Run(0, inset, 1, 0, page, page),))
    pool = Memory(inset + blocks * page)
    pool.fill(9)
    content = pool.view[:]
    slots = [chunk * -(-3 * page // SLOT_ALIGN) * SLOT_ALIGN for chunk in range(blocks // 3)]
    assert blocks * page > 4 << 20
    with rig(arena_bytes=8 << 20) as session:
        session.map(CACHE, [group], [pool])
        copy = CopyGroup(0, 0, tuple(range(blocks)), tuple(slots))
        status, _, sums, _ = run(session, "store", [copy])
        assert (status, sums) == ("done", arena_sums(session, [(slot, 3 * page) for slot in slots]))
        pool.view[inset:] = bytes(blocks * page)
        known = CopyGroup(0, 0, copy.block_ids, copy.slots, tuple(sums))
        assert run(session, "retrieve", [known]) == ("done", "", [], [])
        assert pool.view[:] == content
