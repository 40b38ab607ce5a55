"""Block ids in every shape that engines use, and stores and retrieves cut into requests."""

from array import array
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvclient import CacheSpec, GroupSpec, RegionRun, RequestError
from kvclient.memory.blocks import (
    HALVED_BYTES,
    PART_BYTES,
    STREAMED_BYTES,
    StorePart,
    cut_retrieve,
    cut_store,
    pack_ids,
)
from kvclient.transport.transports import LOCAL_FRAME_BYTES_MAX
from kvserver.wire.codec import encode
from kvserver.wire.messages import BLOCKS_MAX, PLACES_MAX, GroupBlocks, Limits, Store

PACKED = b"\x05\0\0\0\x00\x01\0\0\xff\xff\xff\xff"


@pytest.mark.parametrize(
    "ids",
    [
        PACKED,
        bytearray(PACKED),
        memoryview(PACKED),
        array("i", [5, 256, -1]),
        memoryview(array("i", [5, 256, -1])),
        memoryview(array("i", [5, 77, 256, 77, -1, 77]))[::2],
        array("q", [5, 256, -1]),
        [5, 256, -1],
        (5, 256, -1),
        range(3),
    ],
    ids=lambda ids: type(ids).__name__,
)
def test_every_shape_packs_to_the_same_bytes(ids: Any) -> None:
    assert pack_ids(ids) == (PACKED if not isinstance(ids, range) else b"\0\0\0\0\x01\0\0\0\x02\0\0\0")


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (PACKED[:-1], "11 bytes"),
        ([2**31], "must be integers that fit int32"),
        ([1.5], "must be integers that fit int32"),
        (["7"], "must be integers that fit int32"),
        (array("q", [2**31]), "must be integers that fit int32"),
        (array("d", [1.0]), "must be integers that fit int32"),
    ],
)
def test_ids_that_are_none_are_refused(ids: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        pack_ids(ids)


@st.composite
def stores(draw: st.DrawFn) -> tuple[CacheSpec, StorePart, Limits]:
    """A store to a full group, and perhaps to one that covers only the end."""
    per_chunk = draw(st.sampled_from([(3,), (3, 2), (2, 5), (1, 7)]))
    chunk_tokens = 210
    groups = [
        GroupSpec(chunk_tokens // blocks, 1, "window" if index else "full", index, 1, 0, 1, 0, [])
        for index, blocks in enumerate(per_chunk)
    ]
    spec = CacheSpec(name="kv", namespace=bytes(32), chunk_tokens=chunk_tokens, buffers=[], groups=groups)
    first, count = draw(st.integers(0, 9)), draw(st.integers(1, 40))
    packed = []
    for index, blocks in enumerate(per_chunk):
        skipped = draw(st.integers(0, count - 1)) if index else 0
        begin = (first + skipped) * blocks
        ids = array("i", range(1000 * index + begin, 1000 * index + (first + count) * blocks))
        packed.append(GroupBlocks(index, begin, ids.tobytes()))
    keys = b"".join(bytes([number]) * 32 for number in range(1, count + 1))
    parent = b"p" * 32 if first else b""
    limits = Limits(draw(st.integers(1, 50)), draw(st.integers(sum(per_chunk), 60)), 1, 1)
    return spec, StorePart(first, parent, keys, packed), limits


@given(stores())
def test_parts_of_a_store_are_the_store(store: tuple[CacheSpec, StorePart, Limits]) -> None:
    spec, whole, limits = store
    parts = cut_store(spec, whole, limits)
    assert b"".join(part.keys for part in parts) == whole.keys
    expected_parent, expected_first = whole.parent, whole.first_chunk
    for part in parts:
        assert (part.first_chunk, part.parent) == (expected_first, expected_parent)
        assert 1 <= part.chunks <= limits.chunks_max
        assert sum(len(group.block_ids) for group in part.groups) // 4 <= limits.blocks_max
        for group in part.groups:
            blocks = 210 // spec.groups[group.group].block_tokens
            end = group.first_block + len(group.block_ids) // 4
            assert group.block_ids
            assert part.first_chunk * blocks <= group.first_block < end <= (part.first_chunk + part.chunks) * blocks
            # Ids show their group and place, so a shifted cut is noticed.
            assert array("i", group.block_ids)[0] == 1000 * group.group + group.first_block
        expected_first += part.chunks
        expected_parent = part.keys[-32:]
    for group in whole.groups:
        pieces = [piece.block_ids for part in parts for piece in part.groups if piece.group == group.group]
        assert b"".join(pieces) == group.block_ids


@pytest.mark.parametrize(("per_chunk", "parts"), [(1000, 4), (9000, 50), (20_000, 50)])
def test_parts_are_short_enough_for_the_local_connection_if_a_chunk_is(per_chunk: int, parts: int) -> None:
    groups = [GroupSpec(1, 1, "full", 0, 1, 0, 1, 0, [])]
    spec = CacheSpec(name="kv", namespace=bytes(32), chunk_tokens=per_chunk, buffers=[], groups=groups)
    store = StorePart(0, b"", bytes(range(32)) * 50, [GroupBlocks(0, 0, bytes(4 * per_chunk * 50))])
    cut = cut_store(spec, store, Limits(4096, 60_000, 1, 1))
    assert len(cut) == parts
    longest = max(len(encode(Store(1, 1, 1, 1, 1, *part))) for part in cut)
    assert (longest <= LOCAL_FRAME_BYTES_MAX) == (per_chunk < 16_000)


def test_chunk_that_no_request_can_carry_is_refused() -> None:
    spec = CacheSpec(
        name="kv",
        namespace=bytes(32),
        chunk_tokens=12,
        buffers=[],
        groups=[GroupSpec(4, 1, "full", 0, 1, 0, 1, 0, [])],
    )
    store = StorePart(0, b"", bytes(32), [GroupBlocks(0, 0, bytes(12))])
    with pytest.raises(RequestError, match="one chunk has 3 blocks, the server accepts 2 in a request"):
        cut_store(spec, store, Limits(5, 2, 1, 1))


@given(stores(), st.data())
def test_parts_of_a_retrieve_are_the_retrieve(store: tuple[CacheSpec, StorePart, Limits], data: st.DataObject) -> None:
    spec, whole, limits = store
    groups = [_some_of(data, group) for group in whole.groups]
    parts = cut_retrieve(spec, groups, limits, from_disk=data.draw(st.booleans()))
    assert all(parts)
    for part in parts:
        assert sum(len(group.block_ids) for group in part) // 4 <= limits.blocks_max
        for group in part:
            assert array("i", group.block_ids)[0] == 1000 * group.group + group.first_block
    for before, after in pairwise(parts):
        assert max(_chunks(spec, group)[1] for group in before) <= min(_chunks(spec, group)[0] for group in after)
    for group in groups:
        pieces = [piece.block_ids for part in parts for piece in part if piece.group == group.group]
        assert b"".join(pieces) == group.block_ids


def test_parts_of_many_small_groups_fit_one_order_to_a_mover() -> None:
    """The server bounds both chunks and blocks; groups of one block per chunk reach the bound on chunks first."""
    groups = [GroupSpec(12, 1, "full", 0, 1, 0, 1, 0, []) for _ in range(7)]
    spec = CacheSpec(name="kv", namespace=bytes(32), chunk_tokens=12, buffers=[], groups=groups)
    chunks, limits = 6000, Limits(8000, BLOCKS_MAX, 1, 1)
    blocks = [GroupBlocks(group, 0, bytes(4 * chunks)) for group in range(7)]
    stored = [part.groups for part in cut_store(spec, StorePart(0, b"", bytes(32 * chunks), blocks), limits)]
    for parts in (stored, cut_retrieve(spec, blocks, limits, from_disk=False)):
        assert all(3 * sum(len(group.block_ids) // 4 for group in part) <= PLACES_MAX for part in parts)
        assert sum(len(part[0].block_ids) // 4 for part in parts) == chunks


def test_a_store_is_cut_by_bytes_where_its_blocks_are_large() -> None:
    page_bytes = PART_BYTES // 11
    pages = [RegionRun(0, 0, 1, 1 << 40, page_bytes, page_bytes)]
    groups = [GroupSpec(4, 99, "full", 0, 1, 0, 1, 0, pages)]
    spec = CacheSpec(name="kv", namespace=bytes(32), chunk_tokens=12, buffers=[], groups=groups)
    store = StorePart(0, b"", bytes(32 * 10), [GroupBlocks(0, 0, bytes(4 * 30))])
    assert [part.chunks for part in cut_store(spec, store, Limits(4096, 60_000, 1, 1))] == [3, 3, 3, 1]


@pytest.mark.parametrize(
    ("device", "chunks", "bytes_less", "parts"),
    [("cuda", 7, 0, [4, 3]), ("hip", 2, 0, [1, 1]), ("cuda", 7, 1, [7]), ("cuda", 1, 0, [1]), ("host", 7, 0, [7])],
)
def test_a_store_of_gpu_memory_is_two_parts_unless_it_is_small(
    device: str, chunks: int, bytes_less: int, parts: list[int]
) -> None:
    page_bytes = -(-HALVED_BYTES // (3 * chunks)) - bytes_less
    pages = [RegionRun(0, 0, 1, 1 << 40, page_bytes, page_bytes)]
    groups = [GroupSpec(4, 99, "full", 0, 1, 0, 1, 0, pages)]
    spec = CacheSpec(name="kv", namespace=bytes(32), chunk_tokens=12, buffers=[], groups=groups, device=device)
    store = StorePart(0, b"", bytes(32 * chunks), [GroupBlocks(0, 0, bytes(12 * chunks))])
    assert [part.chunks for part in cut_store(spec, store, Limits(4096, 60_000, 1, 1))] == parts


def _some_of(data: st.DataObject, group: GroupBlocks) -> GroupBlocks:
    """Blocks that may start and end inside a chunk."""
    blocks = len(group.block_ids) // 4
    begin = data.draw(st.integers(0, blocks - 1))
    end = data.draw(st.integers(begin + 1, blocks))
    return GroupBlocks(group.group, group.first_block + begin, group.block_ids[4 * begin : 4 * end])


def _chunks(spec: CacheSpec, group: GroupBlocks) -> tuple[int, int]:
    blocks = 210 // spec.groups[group.group].block_tokens
    return group.first_block // blocks, -(-(group.first_block + len(group.block_ids) // 4) // blocks)


def test_a_retrieve_from_disk_is_cut_by_bytes_and_one_from_memory_is_not() -> None:
    page_bytes = STREAMED_BYTES // 9
    pages = [RegionRun(0, 0, 1, 1 << 40, page_bytes, page_bytes)]
    spec = CacheSpec(
        name="kv",
        namespace=bytes(32),
        chunk_tokens=12,
        buffers=[],
        groups=[GroupSpec(4, 99, "full", 0, 1, 0, 1, 0, pages)],
    )
    blocks = [GroupBlocks(0, 2, array("i", range(40)).tobytes())]
    assert cut_retrieve(spec, blocks, Limits(5, 1000, 1, 1), from_disk=False) == [blocks]
    parts = cut_retrieve(spec, blocks, Limits(5, 1000, 1, 1), from_disk=True)
    assert [(part[0].first_block, len(part[0].block_ids) // 4) for part in parts] == [
        *((2, 7), (9, 9), (18, 9), (27, 9), (36, 6))
    ]
