"""Shards to pieces, against a plain model: every byte of a shard has one place in the pool and one in staging."""

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserver._native import PIECE_BYTES_MAX, PIECES_MAX, expand_stretches, pack_stretches, pieces_at_most

Run = tuple[int, int, int, int, int, int]
Group = tuple[int, int, list[Run]]
Stretch = tuple[int, int, bytes, int, int, int]

SEGMENT_BYTES = 16 << 20
BASES = [0x7F00_0000_0000, 0x7F80_0001_0000]
ODD_PAGES = (1, 3, 66, 132, 333, 2112, 8192, 9001)


def ids(*numbers: int) -> bytes:
    return array("i", numbers).tobytes()


def shard_bytes(group: Group) -> int:
    per_chunk, _, runs = group
    return per_chunk * sum(regions * page for _, _, regions, _, _, page in runs)


def places(group: Group, first_in_chunk: int, block_ids: list[int]) -> list[int | None]:
    """Device address of each byte of the shard; None where its block was not asked for."""
    per_chunk, _, runs = group
    found: list[int | None] = []
    for buffer, offset, regions, region_stride, block_stride, page in runs:
        for region in range(regions):
            for place in range(per_chunk):
                index = place - first_in_chunk
                if 0 <= index < len(block_ids):
                    at = BASES[buffer] + offset + region * region_stride + block_ids[index] * block_stride
                    found.extend(range(at, at + page))
                else:
                    found.extend([None] * page)
    return found


@st.composite
def stretches(draw: st.DrawFn) -> tuple[Group, int, list[int], int, int, int]:
    """(group, first_in_chunk, block ids, staging, begin, end)."""
    per_chunk = draw(st.sampled_from((1, 2, 3, 5)))
    blocks = draw(st.integers(per_chunk, 11))
    runs = []
    for _ in range(draw(st.integers(1, 3))):
        page = draw(st.sampled_from(ODD_PAGES))
        block_stride = page + draw(st.sampled_from((0, 0, 7, 64)))
        region_stride = draw(st.sampled_from((0, 13))) + blocks * block_stride
        runs.append(
            (
                draw(st.integers(0, 1)),
                draw(st.integers(0, 99)),
                draw(st.integers(1, 4)),
                region_stride,
                block_stride,
                page,
            )
        )
    group = (per_chunk, blocks, runs)
    first = draw(st.integers(0, per_chunk - 1))
    count = draw(st.integers(1, per_chunk - first))
    block_ids = draw(st.permutations(range(blocks)))[:count]
    if draw(st.booleans()):
        block_ids.sort()  # neighbours that are merged
    begin = draw(st.integers(0, shard_bytes(group) - 1))
    end = draw(st.integers(begin + 1, shard_bytes(group)))
    return group, first, block_ids, draw(st.sampled_from((0, 1, 16, 4096))), begin, end


@settings(max_examples=300, deadline=None)
@given(stretches())
def test_every_byte_that_was_asked_for_moves_once_and_no_other(
    case: tuple[Group, int, list[int], int, int, int],
) -> None:
    group, first, block_ids, staging, begin, end = case
    packed = pack_stretches([(0, first, ids(*block_ids), staging, begin, end)])
    pieces = expand_stretches([group], packed, SEGMENT_BYTES, BASES)
    assert pieces is not None
    wanted = {
        staging + at - begin: address
        for at, address in enumerate(places(group, first, block_ids))
        if begin <= at < end and address is not None
    }
    moved = [(offset + i, pool + i) for pool, offset, size in pieces for i in range(size)]
    assert len(moved) == len(wanted)
    assert dict(moved) == wanted
    assert all(0 < size <= PIECE_BYTES_MAX for _, _, size in pieces)
    assert len(pieces) <= pieces_at_most([group], 0, begin, end)


def test_neighbours_are_merged_and_then_cut() -> None:
    """Whole chunks of a cache whose blocks lie back to back become few large pieces, whatever the page size."""
    group: Group = (7, 23, [(1, 0, 1, 0, 2048, 2048)])
    pieces = expand_stretches(
        [group], pack_stretches([(0, 0, ids(*range(4, 11)), 0, 0, 7 * 2048)]), SEGMENT_BYTES, BASES
    )
    at = BASES[1] + 4 * 2048
    assert pieces == [(at, 0, 8192), (at + 8192, 8192, 6144)]


def test_stretches_of_several_shards_share_a_segment() -> None:
    small: Group = (2, 5, [(0, 0, 1, 0, 66, 66)])
    large: Group = (1, 3, [(1, 10, 2, 999, 333, 333)])
    packed = pack_stretches([(0, 0, ids(4, 0), 0, 0, 132), (1, 0, ids(2), 144, 0, 666), (0, 1, ids(3), 816, 66, 132)])
    assert expand_stretches([small, large], packed, 1024, BASES) == [
        (BASES[0] + 4 * 66, 0, 66),
        (BASES[0], 66, 66),
        (BASES[1] + 10 + 666, 144, 333),
        (BASES[1] + 10 + 999 + 666, 477, 333),
        (BASES[0] + 3 * 66, 816, 66),
    ]


def test_more_pieces_than_a_segment_may_have_are_refused() -> None:
    regions = PIECES_MAX
    group: Group = (1, 2, [(0, 0, regions, 8, 4, 1)])
    whole = pack_stretches([(0, 0, ids(1), 0, 0, regions)])
    pieces = expand_stretches([group], whole, SEGMENT_BYTES, BASES)
    assert pieces is not None
    assert len(pieces) == PIECES_MAX
    again = (0, 0, ids(0), regions, 0, 1)
    assert expand_stretches([group], whole + pack_stretches([again]), SEGMENT_BYTES, BASES) is None


GROUP: Group = (3, 11, [(0, 0, 2, 999, 77, 66)])
GOOD: Stretch = (0, 1, ids(10, 0), 64, 5, 396)


@pytest.mark.parametrize(
    ("stretch", "says"),
    [
        ((1, 1, ids(10, 0), 64, 5, 396), "there is no group 1"),
        ((0, 2, ids(10, 0), 64, 5, 396), "blocks 2 \\+ 2 leave a chunk of 3"),
        ((0, 1, b"", 64, 5, 396), "blocks 1 \\+ 0 leave a chunk of 3"),
        ((0, 0xFFFF_FFFF, ids(10, 0), 64, 5, 396), "leave a chunk of 3"),
        ((0, 1, ids(11, 0), 64, 5, 396), "block 11 is not in \\[0, 11\\)"),
        ((0, 1, ids(10, -1), 64, 5, 396), "block -1 is not in \\[0, 11\\)"),
        ((0, 1, ids(10, 0), 64, 5, 397), "leave a shard of 396"),
        ((0, 1, ids(10, 0), 64, 396, 396), "leave a shard of 396"),
        ((0, 1, ids(10, 0), 64, 5, 4), "leave a shard of 396"),
        ((0, 1, ids(10, 0), 122, 5, 396), "391 bytes at 122 leave a segment of 512"),
        ((0, 1, ids(10, 0), 513, 5, 396), "leave a segment of 512"),
    ],
)
def test_a_list_that_does_not_fit_the_layout_is_refused(stretch: Stretch, says: str) -> None:
    """The list came over shared memory, and a kernel executes every list that passes this check."""
    assert expand_stretches([GROUP], pack_stretches([GOOD]), 512, BASES)
    with pytest.raises(ValueError, match=says):
        expand_stretches([GROUP], pack_stretches([GOOD, stretch]), 512, BASES)


def test_a_list_that_was_cut_anywhere_is_refused() -> None:
    whole = pack_stretches([GOOD])
    assert len(whole) == 40
    for end in range(len(whole)):
        with pytest.raises(ValueError, match="staging-list"):
            expand_stretches([GROUP], whole[:end], 512, BASES)
