"""The native planner against the oracle, and everything that it must refuse."""

import random
import struct
from bisect import bisect_left, bisect_right
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvserver.transfer.native import SLOT_ALIGN, plan_pieces
from tests.rigs.oracle_plan import SKIP, CopyGroup, Group, Run, chunks_touched, merged, pages, plan

Kind = Literal["store", "retrieve"]
ARENA = 64 * SLOT_ALIGN
PAGES = (1, 2, 66, 132, 512, 576, 1000)


def native(groups: list[Group], copies: list[CopyGroup], kind: Kind, arena_bytes: int = ARENA) -> list[tuple[int, ...]]:
    packed = [copy.packed() for copy in copies]
    pieces = plan_pieces([group.packed() for group in groups], packed, arena_bytes, kind)
    assert len(pieces) <= 1
    return [tuple(copy) for piece in pieces for copy in piece]


@st.composite
def runs(draw: st.DrawFn, blocks: int) -> Run:
    """One run in one of the shapes that engines use, sometimes with gaps between pages."""
    page = draw(st.sampled_from(PAGES))
    regions = draw(st.integers(1, 5))
    gap = draw(st.sampled_from((0, 0, 0, 7, 64)))
    if draw(st.booleans()):  # regions outside: K/V-first, one tensor a layer
        block_stride = page + gap
        region_stride = blocks * block_stride + draw(st.sampled_from((0, 3)))
    else:  # blocks outside: block-first, cross-layer
        region_stride = page + gap
        block_stride = regions * region_stride + draw(st.sampled_from((0, 5)))
    return Run(
        draw(st.integers(0, 3)), draw(st.sampled_from((0, 11, 4096))), regions, region_stride, block_stride, page
    )


@st.composite
def group_shapes(draw: st.DrawFn) -> Group:
    blocks = draw(st.integers(1, 23))
    return Group(draw(st.integers(1, 5)), blocks, tuple(draw(st.lists(runs(blocks), min_size=1, max_size=3))))


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[Group], list[CopyGroup]]:
    groups = draw(st.lists(group_shapes(), min_size=1, max_size=3))
    copies = []
    for index, group in enumerate(groups):
        first = draw(st.integers(0, 3 * group.blocks_per_chunk))
        start = draw(st.integers(0, group.blocks - 1))
        ids = draw(
            st.one_of(  # shuffled, or neighbours that merge
                st.lists(st.integers(0, group.blocks - 1), unique=True),
                st.just(list(range(start, group.blocks))),
            )
        )
        units = -(-group.shard_bytes // SLOT_ALIGN)
        places = [unit * SLOT_ALIGN for unit in range(0, ARENA // SLOT_ALIGN - units + 1, units)]
        chunks = chunks_touched(first, len(ids), group.blocks_per_chunk)
        slots = draw(st.lists(st.sampled_from([SKIP, *places]), min_size=chunks, max_size=chunks))
        copies.append(CopyGroup(index, first, tuple(ids), tuple(slots)))
    return groups, draw(st.permutations(copies))


@given(jobs(), st.sampled_from(("store", "retrieve")), st.sampled_from((1, 65, 4096)))
def test_in_the_order_of_shards_their_bytes_come_as_they_lie_in_the_slots(
    job: tuple[list[Group], list[CopyGroup]], kind: Kind, bytes_max: int
) -> None:
    groups, copies = job
    packed = [group.packed() for group in groups], [copy.packed() for copy in copies]
    pieces = plan_pieces(*packed, ARENA, kind, bytes_max, order="shards")
    assert merged([copy for piece in pieces for copy in piece]) == plan(groups, copies, kind, "shards")


@given(jobs(), st.sampled_from(("store", "retrieve")))
def test_plan_is_what_the_oracle_says(job: tuple[list[Group], list[CopyGroup]], kind: Kind) -> None:
    groups, copies = job
    assert native(groups, copies, kind) == plan(groups, copies, kind)


@given(
    jobs(), st.sampled_from(("store", "retrieve")), st.sampled_from((1, 65, 1023, 4096)), st.sampled_from((1, 3, 50))
)
def test_pieces_are_the_whole_plan_and_none_is_longer_than_it_may_be(
    job: tuple[list[Group], list[CopyGroup]], kind: Kind, bytes_max: int, pages_max: int
) -> None:
    groups, copies = job
    packed = [group.packed() for group in groups], [copy.packed() for copy in copies]
    found = plan_pieces(*packed, ARENA, kind, bytes_max, pages_max)
    assert merged([copy for piece in found for copy in piece]) == plan(groups, copies, kind)
    ends, at = [], 0  # ends of pages, as positions in the stream
    for copy in copies:
        for page in pages(groups, copy, kind):
            at += page[3]
            ends.append(at)
    begin = 0
    for piece in found:
        end = begin + sum(count for *_, count in piece)
        before_end = bisect_left(ends, end)
        touched = before_end - bisect_right(ends, begin) + 1
        assert end - begin <= bytes_max
        assert touched <= pages_max
        assert end - begin == bytes_max or (touched == pages_max and ends[before_end] == end) or end == at
        begin = end


@pytest.mark.parametrize("blocks", [513, 2048, 2049, 70_001])
def test_many_shuffled_blocks_are_what_the_oracle_says(blocks: int) -> None:
    group = Group(7, blocks, (Run(0, 5, 1, 0, 12, 10),))
    ids = tuple(random.Random(blocks).sample(range(blocks), min(blocks, 5000)))
    chunks = chunks_touched(3, len(ids), 7)
    copies = [CopyGroup(0, 3, ids, tuple(4096 * chunk for chunk in range(chunks)))]
    kinds: tuple[Kind, ...] = ("store", "retrieve")
    for kind in kinds:
        assert native([group], copies, kind, 4096 * chunks) == plan([group], copies, kind)


KV_FIRST = Group(3, 20, (Run(0, 0, 4, 20 * 132, 132, 132),))
BLOCK_FIRST = Group(1, 20, (Run(0, 0, 4, 132, 4 * 132, 132),))


def test_consecutive_blocks_in_one_chunk_are_one_copy_per_region() -> None:
    copies = native([KV_FIRST], [CopyGroup(0, 3, (7, 8, 9), (8192,))], "retrieve")
    assert copies == [(0, r * 20 * 132 + 7 * 132, 8192 + r * 3 * 132, 3 * 132) for r in range(4)]


def test_block_first_regions_of_a_one_block_chunk_are_one_copy() -> None:
    assert native([BLOCK_FIRST], [CopyGroup(0, 5, (7,), (4096,))], "store") == [(0, 7 * 528, 4096, 528)]


def test_adjacent_slots_of_full_pages_merge_across_chunks() -> None:
    group = Group(2, 9, (Run(0, 0, 1, 0, 2048, 2048),))
    assert native([group], [CopyGroup(0, 0, (3, 4, 5, 6), (0, 4096))], "retrieve") == [(0, 3 * 2048, 0, 8192)]
    assert len(native([group], [CopyGroup(0, 0, (3, 4, 5, 6), (4096, 0))], "retrieve")) == 2


def test_pages_of_two_buffers_never_merge() -> None:
    group = Group(1, 2, (Run(0, 0, 1, 0, 64, 64), Run(1, 64, 1, 0, 64, 64)))
    assert len(native([group], [CopyGroup(0, 0, (0,), (0,))], "store")) == 2


def test_a_store_walks_the_pool_upwards_and_a_retrieve_the_prefix() -> None:
    copies = [CopyGroup(0, 0, (9, 2, 5), (0,))]
    sources = [source for _, source, _, _ in native([KV_FIRST], copies, "store")]
    assert sources == sorted(sources)
    targets = [target for _, _, target, _ in native([KV_FIRST], copies, "retrieve")]
    assert targets == sorted(targets)


def test_a_partial_chunk_stays_inside_its_blocks_of_the_slot() -> None:
    copies = native([KV_FIRST], [CopyGroup(0, 5, (1, 4), (0, 8192))], "retrieve")
    assert [(target, count) for _, _, target, count in copies] == [
        place for r in range(4) for place in ((r * 396 + 264, 132), (8192 + r * 396, 132))
    ]


def test_no_blocks_are_no_copies() -> None:
    assert native([KV_FIRST], [CopyGroup(0, 4, (), ())], "store") == []
    assert native([KV_FIRST], [], "store") == []


@pytest.mark.parametrize(
    ("code", "copies"),
    [
        ("block-range", [CopyGroup(0, 0, (0, 20), (0,))]),
        ("block-range", [CopyGroup(0, 0, (0, -1), (0,))]),
        ("block-range", [CopyGroup(0, 0, (-(2**31),), (0,))]),
        ("block-range", [CopyGroup(0, 0, (2**31 - 1,), (0,))]),
        ("block-range", [CopyGroup(1, 0, (0,), (0,))]),
        ("block-range", [CopyGroup(-1, 0, (0,), (0,))]),
        ("block-range", [CopyGroup(0, -1, (0,), (0,))]),
        ("block-range", [CopyGroup(0, 2**62, (0,), (0,))]),
        ("block-range", [CopyGroup(0, 0, (20,), (SKIP,))]),
        ("block-duplicate", [CopyGroup(0, 0, (4, 7, 4), (0,))]),
        ("block-duplicate", [CopyGroup(0, 0, (4,), (0,)), CopyGroup(0, 9, (4,), (8192,))]),
        ("slots", [CopyGroup(0, 0, (4, 5, 6, 7), (0,))]),
        ("slots", [CopyGroup(0, 2, (4, 5), (0,))]),
        ("slots", [CopyGroup(0, 0, (4,), (0, 8192))]),
        ("slots", [CopyGroup(0, 0, (), (0,))]),
        ("slots", [CopyGroup(0, 0, (4,), (-2,))]),
        ("slots", [CopyGroup(0, 0, (4,), (2048,))]),
        ("slots", [CopyGroup(0, 0, (4,), (ARENA,))]),
        ("slots", [CopyGroup(0, 0, (4,), (2**63 - 4096,))]),
    ],
)
def test_wrong_requests_are_refused_by_code(code: str, copies: list[CopyGroup]) -> None:
    with pytest.raises(ValueError, match=rf"^{code}: "):
        native([KV_FIRST], copies, "store")


def test_a_shard_may_end_with_the_arena_and_not_behind_it() -> None:
    group = Group(1, 3, (Run(0, 0, 1, 0, 4097, 4097),))
    assert native([group], [CopyGroup(0, 0, (1,), (2 * 4096,))], "store", arena_bytes=4 * 4096)
    with pytest.raises(ValueError, match=r"^slots: "):
        native([group], [CopyGroup(0, 0, (1,), (3 * 4096,))], "store", arena_bytes=4 * 4096)


def test_two_groups_may_use_the_same_block_id() -> None:
    copies = [CopyGroup(0, 0, (4,), (0,)), CopyGroup(1, 0, (4,), (8192,))]
    assert native([KV_FIRST, BLOCK_FIRST], copies, "store") == plan([KV_FIRST, BLOCK_FIRST], copies, "store")


@pytest.mark.parametrize(
    "group",
    [
        Group(0, 5, (Run(0, 0, 1, 0, 8, 8),)),
        Group(1, 0, (Run(0, 0, 1, 0, 8, 8),)),
        Group(1, 5, ()),
        Group(1, 5, (Run(-1, 0, 1, 0, 8, 8),)),
        Group(1, 5, (Run(0, -8, 1, 0, 8, 8),)),
        Group(1, 5, (Run(0, 0, 0, 0, 8, 8),)),
        Group(1, 5, (Run(0, 0, 1, 0, 8, 0),)),
        Group(1, 5, (Run(0, 0, 2, -8, 8, 8),)),
        Group(1, 5, (Run(0, 0, 2**20, 2**50, 2**50, 2**50),)),
        Group(2**30, 5, (Run(0, 0, 2**20, 1, 1, 2**20),)),
    ],
)
def test_impossible_layouts_are_refused(group: Group) -> None:
    with pytest.raises(ValueError, match=r"^layout: "):
        plan_pieces([group.packed()], [], ARENA, "store")


def test_packed_numbers_must_be_whole() -> None:
    with pytest.raises(ValueError, match="block_ids: 7 bytes"):
        plan_pieces([KV_FIRST.packed()], [(0, 0, b"1234567", b"", b"")], ARENA, "store")
    with pytest.raises(ValueError, match="slots: 9 bytes"):
        plan_pieces([KV_FIRST.packed()], [(0, 0, struct.pack("<i", 1), bytes(9), b"")], ARENA, "store")
