"""Regions of KV tensors against an oracle that walks over every byte of every element."""

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvclient.memory.layouts import Extent, describe, extent, region_runs
from kvserver.errors import RequestError
from kvserver.wire.messages import RegionRun


class Strided(NamedTuple):
    """A tensor without memory."""

    shape: Sequence[int]
    strides: Sequence[int]
    item_bytes: int = 2
    address: int = 0x7F0000000000

    def stride(self) -> Sequence[int]:
        return self.strides

    def element_size(self) -> int:
        return self.item_bytes

    def data_ptr(self) -> int:
        return self.address


def dense(*shape: int, item_bytes: int = 2) -> Strided:
    strides, step = [], 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= size
    return Strided(shape, strides, item_bytes)


def seen_as(tensor: Strided, *order: int) -> Strided:
    """The tensor with its dimensions permuted, as by permute()."""
    return tensor._replace(
        shape=[tensor.shape[index] for index in order], strides=[tensor.strides[index] for index in order]
    )


def bytes_of_block(tensor: Strided, blocks: int, block_dim: int, block: int) -> list[int]:
    """Every byte offset that the block owns, ascending."""
    tokens = tensor.shape[block_dim] // blocks
    ranges = [range(size) for size in tensor.shape]
    ranges[block_dim] = range(block * tokens, (block + 1) * tokens)
    first = (
        tensor.item_bytes * sum(i * stride for i, stride in zip(index, tensor.strides, strict=True))
        for index in product(*ranges)
    )
    return sorted(offset + byte for offset in first for byte in range(tensor.item_bytes))


def bytes_of_runs(runs: list[RegionRun], block: int) -> list[int]:
    return [
        run.offset + region * run.region_stride + block * run.block_stride + byte
        for run in runs
        for region in range(run.regions)
        for byte in range(run.page_bytes)
    ]


NB, BS, H, D, L = 7, 4, 3, 10, 5

LAYOUTS = {
    # name: (tensor, block_dim, regions expected of a tensor, page bytes expected)
    "kv-first": (dense(2, NB, BS, H, D), 1, 2, BS * H * D * 2),
    "kv-first hnd": (seen_as(dense(2, NB, H, BS, D), 0, 1, 3, 2, 4), 1, 2, BS * H * D * 2),
    "block-first": (dense(NB, 2, BS, H, D), 0, 1, 2 * BS * H * D * 2),
    "block-first seen kv-first": (seen_as(dense(NB, 2, BS, H, D), 1, 0, 2, 3, 4), 1, 1, 2 * BS * H * D * 2),
    "block-first hnd": (seen_as(dense(NB, 2, H, BS, D), 0, 1, 3, 2, 4), 0, 1, 2 * BS * H * D * 2),
    "cross-layer": (dense(NB, L, 2, BS, H, D), 0, 1, L * 2 * BS * H * D * 2),
    "a layer of cross-layer": (
        Strided((NB, 2, BS, H, D), (L * 2 * BS * H * D, BS * H * D, H * D, D, 1)),
        0,
        1,
        2 * BS * H * D * 2,
    ),
    "all layers kv-first": (dense(L, 2, NB, BS, H, D), 2, 2 * L, BS * H * D * 2),
    "mla": (dense(NB, BS, 576), 0, 1, BS * 576 * 2),
    "token-major": (dense(NB * BS, 1, 576), 0, 1, BS * 576 * 2),
    "aiter k": (dense(NB, H, 16 // 8, BS, 8), 0, 1, H * 16 * BS * 2),
    "aiter v": (dense(NB, H, 16, BS), 0, 1, H * 16 * BS * 2),
    "fp32 scales": (dense(NB, H, BS, item_bytes=4), 0, 1, H * BS * 4),
    "fp8, 132-byte heads": (dense(2, NB, BS, H, 132, item_bytes=1), 1, 2, BS * H * 132),
    "padded pages": (Strided((NB, 2, BS, H, D), (2 * BS * H * D + 24, BS * H * D, H * D, D, 1)), 0, 1, 480),
    "padded heads": (Strided((NB, BS, H, D), (BS * H * 16, H * 16, 16, 1)), 0, BS * H, D * 2),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_byte_of_a_block_is_in_one_page(name: str) -> None:
    tensor, block_dim, regions, page_bytes = LAYOUTS[name]
    runs = region_runs(tensor, buffer=3, blocks=NB, block_dim=block_dim)
    assert (sum(run.regions for run in runs), {run.page_bytes for run in runs}) == (regions, {page_bytes})
    assert {run.buffer for run in runs} == {3}
    for block in range(NB):
        assert sorted(bytes_of_runs(runs, block)) == bytes_of_block(tensor, NB, block_dim, block)


def test_evenly_spaced_regions_are_one_run() -> None:
    assert len(region_runs(dense(L, 2, NB, BS, H, D), buffer=0, blocks=NB)) == 1
    uneven = Strided((L, 2, NB, BS), (2 * NB * BS + 5, NB * BS, BS, 1))
    assert [run.offset for run in region_runs(uneven, buffer=0, blocks=NB)] == [2 * 61 * layer for layer in range(L)]


@st.composite
def strided(draw: st.DrawFn) -> tuple[Strided, int, int]:
    """Any order in memory, any padding after a dimension; (tensor, blocks, block_dim)."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    strides, step = [0] * len(shape), 1
    for index in draw(st.permutations(range(len(shape)))):
        strides[index] = step
        step = step * shape[index] + draw(st.sampled_from([0, 0, 0, 1, 3]))
    block_dim = draw(st.integers(0, len(shape) - 1))
    blocks = draw(st.sampled_from([n for n in range(1, shape[block_dim] + 1) if shape[block_dim] % n == 0]))
    return Strided(shape, strides, draw(st.sampled_from([1, 2, 4]))), blocks, block_dim


@given(strided())
def test_any_strided_tensor_is_covered_byte_by_byte(case: tuple[Strided, int, int]) -> None:
    tensor, blocks, block_dim = case
    runs = region_runs(tensor, buffer=0, blocks=blocks, block_dim=block_dim)
    last = 0
    for block in range(blocks):
        offsets = bytes_of_runs(runs, block)
        assert sorted(offsets) == bytes_of_block(tensor, blocks, block_dim, block)
        last = max(last, *offsets)
    assert extent(tensor) == Extent(tensor.address, last + 1)


def test_tensors_of_a_group_follow_each_other() -> None:
    k, v, scales = dense(NB, H, D // 5, BS, 5), dense(NB, H, D, BS), dense(NB, H, BS, item_bytes=4)
    v, scales = v._replace(address=0x1000), scales._replace(address=0x9000)
    described = describe([k, v, scales], blocks=NB, first_buffer=2)
    assert [run.buffer for run in described.regions] == [2, 3, 4]
    assert described.extents == [
        Extent(k.address, NB * H * D * BS * 2),
        Extent(0x1000, NB * H * D * BS * 2),
        Extent(0x9000, NB * H * BS * 4),
    ]


def test_layers_give_the_same_regions_in_one_allocation_and_in_many() -> None:
    """Only buffers differ: an allocator's placement of a layer must not change the bytes of a slot."""
    layer = dense(2, NB, BS, H, D)
    together = [layer._replace(address=layer.address + nth * extent(layer).bytes) for nth in range(L)]
    apart = [layer._replace(address=layer.address + nth * 0x40000000) for nth in range(L)]
    assert describe(together, blocks=NB).regions == describe(apart, blocks=NB).regions


@pytest.mark.parametrize(
    ("tensor", "blocks", "block_dim", "said"),
    [
        (dense(5, 5, 3), 5, None, "2 dimensions of size blocks=5"),
        (dense(5, 4, 3), 7, None, "0 dimensions of size blocks=7"),
        (dense(10, 1, 3), 4, 0, "blocks=4 must divide dimension 0"),
        (dense(10, 3), 0, 0, "blocks=0 must divide"),
        (dense(0, 3), 1, 0, "must divide dimension 0"),
        (dense(10, 3), 5, 2, "block_dim=2 must be a dimension"),
        (Strided((5, 3, 4), (4, 0, 1)), 5, 0, "elements share memory"),
    ],
)
def test_what_cannot_be_blocks_is_refused(tensor: Strided, blocks: int, block_dim: int | None, said: str) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        region_runs(tensor, buffer=0, blocks=blocks, block_dim=block_dim)
    assert caught.value.code == "layout"
