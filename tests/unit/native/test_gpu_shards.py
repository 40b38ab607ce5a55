"""Packed jobs cut into segments: every byte once, within all bounds, and refused like any other job."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserver.transfer.native import SLOT_ALIGN, cut_job
from tests.rigs.oracle_plan import SKIP, CopyGroup, Group, Run

ARENA = 1 << 28
PIECES, LIST = 16384, 128 << 10
HEAD_BYTES = 32
STAGING_ALIGN = 16

Segments = list[list[tuple[int, int, int, int]]]


def group(page_bytes: int, *, regions: int = 3, per_chunk: int = 4, blocks: int = 64) -> Group:
    return Group(per_chunk, blocks, (Run(0, 0, regions, blocks * page_bytes, page_bytes, page_bytes),))


def slots(count: int, shard_bytes: int) -> tuple[int, ...]:
    apart = -(-shard_bytes // SLOT_ALIGN) * SLOT_ALIGN
    return tuple(apart * (count - 1 - number) for number in range(count))


def whole(cut: Group, chunks: int, number: int = 0) -> CopyGroup:
    ids = random.Random(chunks).sample(range(cut.blocks), chunks * cut.blocks_per_chunk)
    return CopyGroup(number, 0, tuple(ids), slots(chunks, cut.shard_bytes))


def segments_of(
    groups: list[Group],
    copies: list[CopyGroup],
    segment_bytes: int,
    *,
    kind: str = "store",
    pieces_max: int = PIECES,
    list_bytes_max: int = LIST,
    alone: bool = True,
) -> Segments:
    described = [entry.packed() for entry in groups], [copy.packed() for copy in copies]
    if kind == "store":
        return cut_job(*described, ARENA, "store", segment_bytes, pieces_max, list_bytes_max, alone)
    return cut_job(*described, ARENA, "retrieve", segment_bytes, pieces_max, list_bytes_max, alone)


def check(segments: Segments, expected: dict[int, int], segment_bytes: int) -> None:
    """Checks that parts cover the shards (slot → bytes) once, front to back, and lie apart inside their segments."""
    reached = dict.fromkeys(expected, 0)
    for parts in segments:
        at = 0
        for slot, begin, end, staging in parts:
            assert begin == reached[slot] < end <= expected[slot]
            assert begin % SLOT_ALIGN == 0
            assert end % SLOT_ALIGN == 0 or end == expected[slot]
            assert staging % STAGING_ALIGN == begin % STAGING_ALIGN == 0
            assert staging >= at
            reached[slot], at = end, staging + end - begin
        assert 0 < at <= segment_bytes
    assert reached == expected


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_every_byte_is_in_one_part_and_within_its_segment(data: st.DataObject) -> None:
    pages = data.draw(st.lists(st.sampled_from((66, 132, 333, 2112, 4096, 70_001)), min_size=1, max_size=3))
    per_chunk = data.draw(st.integers(1, 5))
    groups = [group(page, regions=data.draw(st.integers(1, 7)), per_chunk=per_chunk) for page in pages]
    segment_bytes = data.draw(st.integers(1, 40)) * SLOT_ALIGN
    kind = data.draw(st.sampled_from(("store", "retrieve")))
    copies, expected, base = [], {}, 0
    for number, cut in enumerate(groups):
        chunks = data.draw(st.integers(1, 64 // per_chunk))
        shifted = tuple(base + slot for slot in slots(chunks, cut.shard_bytes))
        base += ARENA // 4
        copies.append(CopyGroup(number, 0, tuple(range(chunks * per_chunk)), shifted))
        expected |= dict.fromkeys(shifted, cut.shard_bytes)
    check(segments_of(groups, copies, segment_bytes, kind=kind), expected, segment_bytes)


def test_skipped_chunks_are_in_no_segment() -> None:
    cut = group(333)
    copy = CopyGroup(0, 0, tuple(range(12)), (8192, SKIP, 32768))
    (parts,) = segments_of([cut], [copy], 1 << 20)
    assert [part[0] for part in parts] == [8192, 32768]


def test_a_retrieve_of_some_blocks_brings_whole_shards() -> None:
    cut = group(333)
    copy = CopyGroup(0, 3, (5, 9, 2), (0, 8192))  # the last block of one chunk, the first two of the next
    (parts,) = segments_of([cut], [copy], 1 << 20, kind="retrieve")
    assert [part[:3] for part in parts] == [(0, 0, cut.shard_bytes), (8192, 0, cut.shard_bytes)]


def test_small_pages_end_a_segment_before_its_bytes_do() -> None:
    cut = group(2, regions=8, per_chunk=64, blocks=640)  # 512 pages in a shard of 1 KiB
    segments = segments_of([cut], [whole(cut, 10)], 1 << 20, pieces_max=4200)
    assert [len(parts) for parts in segments] == [8, 2]


def test_long_lists_of_blocks_end_a_segment() -> None:
    cut = group(333, per_chunk=5)  # 5 ids take 24 bytes
    segments = segments_of([cut], [whole(cut, 7)], 1 << 20, list_bytes_max=3 * (HEAD_BYTES + 24))
    assert [len(parts) for parts in segments] == [3, 3, 1]


def lengths(segments: Segments) -> list[int]:
    return [sum(end - begin for _, begin, end, _ in parts) // SLOT_ALIGN for parts in segments]


def test_a_long_store_begins_small_and_a_long_retrieve_ends_small() -> None:
    cut = group(SLOT_ALIGN, regions=25, per_chunk=1)
    copies = [whole(cut, 4)]
    assert lengths(segments_of([cut], copies, 32 * SLOT_ALIGN)) == [4, 8, 16, 32, 32, 8]
    assert lengths(segments_of([cut], copies, 32 * SLOT_ALIGN, kind="retrieve")) == [32, 32, 18, 9, 5, 4]


def test_a_job_that_is_not_alone_is_cut_into_whole_segments() -> None:
    cut = group(SLOT_ALIGN, regions=25, per_chunk=1)
    for kind in ("store", "retrieve"):
        assert lengths(segments_of([cut], [whole(cut, 4)], 32 * SLOT_ALIGN, kind=kind, alone=False)) == [32, 32, 32, 4]


def test_what_fits_one_segment_is_not_cut() -> None:
    cut = group(SLOT_ALIGN, regions=8, per_chunk=1)
    for kind in ("store", "retrieve"):
        assert lengths(segments_of([cut], [whole(cut, 4)], 32 * SLOT_ALIGN, kind=kind)) == [32]


@pytest.mark.parametrize(
    ("copy", "code"),
    [
        (CopyGroup(0, 0, (1, 2, 3, 64), (0,)), "block-range"),
        (CopyGroup(0, 0, (1, 2, 3, -1), (0,)), "block-range"),
        (CopyGroup(1, 0, (1, 2, 3, 4), (0,)), "block-range"),
        (CopyGroup(0, 0, (1, 2, 3, 1), (0,)), "block-duplicate"),
        (CopyGroup(0, 0, (1, 2, 3, 4), (0, 8192)), "slots"),
        (CopyGroup(0, 0, (1, 2, 3, 4), (5,)), "slots"),
        (CopyGroup(0, 0, (1, 2, 3, 4), (ARENA,)), "slots"),
    ],
)
@pytest.mark.parametrize("kind", ["store", "retrieve"])
def test_what_a_plan_refuses_is_refused(copy: CopyGroup, code: str, kind: str) -> None:
    with pytest.raises(ValueError, match=f"^{code}: "):
        segments_of([group(333)], [copy], 1 << 20, kind=kind)


@pytest.mark.parametrize("first_block", [0, 2, 3])
def test_a_store_of_a_part_of_a_chunk_is_refused(first_block: int) -> None:
    """The rest of its slot would get random bytes from staging."""
    copy = CopyGroup(0, first_block, (1, 2, 3), (0, 8192) if first_block > 1 else (0,))
    with pytest.raises(ValueError, match=r"^slots: "):
        segments_of([group(333)], [copy], 1 << 20)
