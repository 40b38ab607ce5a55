"""KV caches in the shapes of engines: tensors in allocations, and the bytes of each block.

This is the oracle of these tests. It computes a block's bytes element by element from shape and strides,
independently of the server and kvclient.memory.layouts. Sizes are tiny, odd and differ in every axis.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from kvclient import DeviceBuffer, GroupSpec, full_group
from kvclient.memory.layouts import Heads, extent, region_runs

BLOCK_TOKENS = 5
BLOCKS = 23
CHUNK_TOKENS = 3 * BLOCK_TOKENS
LAYERS = 3
HEADS = 3
HEAD = 24


class Extent(NamedTuple):
    """Consecutive bytes of one block; block b is at offset + b * stride."""

    allocation: int
    offset: int
    stride: int
    bytes: int


@dataclass(frozen=True)
class Tensor:
    """A tensor of the engine: `strides` in elements; one block is `per_block` indices of the block axis."""

    group: int
    allocation: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block_axis: int
    element_bytes: int
    per_block: int = 1

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.element_bytes

    def extents(self) -> list[Extent]:
        """A block's bytes in this tensor, in address order."""
        axes = [range(length) for length in self.shape]
        axes[self.block_axis] = range(self.per_block)
        starts = sorted(
            sum(index * stride for index, stride in zip(indices, self.strides, strict=True)) * self.element_bytes
            for indices in itertools.product(*axes)
        )
        block_stride = self.strides[self.block_axis] * self.per_block * self.element_bytes
        found: list[Extent] = []
        for start in starts:
            last = found[-1] if found else None
            if last is not None and last.offset + last.bytes == self.offset + start:
                found[-1] = last._replace(bytes=last.bytes + self.element_bytes)
            else:
                found.append(Extent(self.allocation, self.offset + start, block_stride, self.element_bytes))
        return found


@dataclass
class Shape:
    """A whole cache. Tensors are added one after another, each in an allocation."""

    name: str
    allocations: list[int] = field(default_factory=list)
    """Bytes of each allocation."""
    tensors: list[Tensor] = field(default_factory=list)
    groups: int = 1
    blocks: list[int] = field(default_factory=lambda: [BLOCKS])
    block_tokens: list[int] = field(default_factory=lambda: [BLOCK_TOKENS])
    nan_bytes: bool = False
    """Contents are fp8 NaNs, infinities and zeros of both signs."""

    def add(
        self,
        shape: Sequence[int],
        *,
        block_axis: int,
        element_bytes: int = 2,
        order: Sequence[int] | None = None,
        group: int = 0,
        own_allocation: bool = False,
        gap: int = 0,
        per_block: int = 1,
    ) -> "Shape":
        """Adds a tensor. `order`: axes from outermost to innermost in memory. `gap`: unused bytes before it."""
        strides = [0] * len(shape)
        step = 1
        for axis in reversed(order or range(len(shape))):
            strides[axis] = step
            step *= shape[axis]
        if own_allocation or not self.allocations:
            self.allocations.append(0)
        tensor = Tensor(
            group,
            len(self.allocations) - 1,
            self.allocations[-1] + gap,
            tuple(shape),
            tuple(strides),
            block_axis,
            element_bytes,
            per_block,
        )
        self.tensors.append(tensor)
        self.allocations[-1] = tensor.offset + tensor.bytes
        return self

    def extents(self, group: int) -> list[Extent]:
        return [extent for tensor in self.tensors if tensor.group == group for extent in tensor.extents()]

    def blocks_per_chunk(self, group: int) -> int:
        return CHUNK_TOKENS // self.block_tokens[group]

    def registration(
        self, addresses: Sequence[int], *, shards: int = 1, shard: int = 0
    ) -> tuple[list[DeviceBuffer], list[GroupSpec]]:
        """Buffers and groups as an engine registers them. `addresses`: of the allocations.

        shards: that the heads are divided into, each with a cache of the same memory.
        """
        buffers: list[DeviceBuffer] = []
        groups = []
        for group in range(self.groups):
            regions = []
            for tensor in self.tensors:
                if tensor.group != group:
                    continue
                placed = Placed(tensor, addresses[tensor.allocation] + tensor.offset)
                heads = None
                if shards > 1:
                    ends = [HEADS * number // shards for number in (shard, shard + 1)]
                    heads = Heads(tensor.shape.index(HEADS), *ends)
                regions += region_runs(
                    placed,
                    buffer=len(buffers),
                    blocks=self.blocks[group],
                    block_dim=tensor.block_axis,
                    heads=heads,
                )
                buffers.append(DeviceBuffer(*extent(placed)))
            groups.append(
                full_group(
                    block_tokens=self.block_tokens[group],
                    blocks=self.blocks[group],
                    regions=regions,
                    shards=shards,
                    shard=shard,
                )
            )
        return buffers, groups


class Placed:
    """A tensor at an address, with the methods of a torch.Tensor."""

    def __init__(self, tensor: Tensor, address: int) -> None:
        self.shape = tensor.shape
        self._tensor = tensor
        self._address = address

    def stride(self) -> Sequence[int]:
        return self._tensor.strides

    def element_size(self) -> int:
        return self._tensor.element_bytes

    def data_ptr(self) -> int:
        return self._address


# ---------------------------------------------------------------- the shapes


def kv_first() -> Shape:
    """(2, blocks, tokens, heads, head), one tensor per layer, all in one allocation."""
    shape = Shape("kv_first")
    for _ in range(LAYERS):
        shape.add((2, BLOCKS, BLOCK_TOKENS, HEADS, HEAD), block_axis=1)
    return shape


def kv_first_hnd() -> Shape:
    """Like kv_first, but with heads before tokens in memory."""
    shape = Shape("kv_first_hnd")
    for _ in range(LAYERS):
        shape.add((2, BLOCKS, BLOCK_TOKENS, HEADS, HEAD), block_axis=1, order=(0, 1, 3, 2, 4))
    return shape


def block_first() -> Shape:
    """(blocks, 2, tokens, heads, head), every layer in its own allocation."""
    shape = Shape("block_first")
    for _ in range(LAYERS):
        shape.add((BLOCKS, 2, BLOCK_TOKENS, HEADS, HEAD), block_axis=0, own_allocation=True)
    return shape


def cross_layer() -> Shape:
    """(blocks, layers, 2, tokens, heads, head): a block's layers are contiguous."""
    return Shape("cross_layer").add((BLOCKS, LAYERS, 2, BLOCK_TOKENS, HEADS, HEAD), block_axis=0)


def layers_inside() -> Shape:
    """Per-layer tensors that are slices of one tensor whose layers are inside its blocks."""
    shape = Shape("layers_inside")
    whole = (BLOCKS, LAYERS, BLOCK_TOKENS, HEADS, HEAD)
    page = BLOCK_TOKENS * HEADS * HEAD
    strides = (LAYERS * page, HEADS * HEAD, HEAD, 1)
    for layer in range(LAYERS):
        slice_shape = (BLOCKS, BLOCK_TOKENS, HEADS, HEAD)
        shape.tensors.append(Tensor(0, 0, layer * page * 2, slice_shape, strides, 0, 2))
    shape.allocations.append(prod(whole) * 2)
    return shape


def mla() -> Shape:
    """(blocks, tokens, 576), one byte per element."""
    shape = Shape("mla")
    for _ in range(LAYERS):
        shape.add((BLOCKS, BLOCK_TOKENS, 576), block_axis=0, element_bytes=1)
    return shape


def token_major() -> Shape:
    """(blocks * tokens, 1, 576): the number of blocks is given, not visible in the shape."""
    shape = Shape("token_major")
    for _ in range(LAYERS):
        shape.add((BLOCKS * BLOCK_TOKENS, 1, 576), block_axis=0, per_block=BLOCK_TOKENS, own_allocation=True)
    return shape


def aiter() -> Shape:
    """AITER's K (blocks, heads, head/x, tokens, x) and V (blocks, heads, head, tokens) in fp8, with fp32 scales."""
    shape = Shape("aiter", nan_bytes=True)
    for _ in range(LAYERS):
        shape.add((BLOCKS, HEADS, HEAD // 8, BLOCK_TOKENS, 8), block_axis=0, element_bytes=1)
        shape.add((BLOCKS, HEADS, HEAD, BLOCK_TOKENS), block_axis=0, element_bytes=1)
        shape.add((BLOCKS, HEADS, BLOCK_TOKENS), block_axis=0, element_bytes=4, own_allocation=True)
        shape.add((BLOCKS, HEADS, BLOCK_TOKENS), block_axis=0, element_bytes=4)
    return shape


def heads_of_132() -> Shape:
    """(blocks, tokens, 132) bytes: a DeepSeek indexer's cache, fp8 with its scale inside."""
    shape = Shape("heads_of_132")
    for _ in range(LAYERS):
        shape.add((BLOCKS, BLOCK_TOKENS, 132), block_axis=0, element_bytes=1, gap=4)
    return shape


def heads_of_136() -> Shape:
    """(blocks, tokens, 136) bytes: 8 bytes is the widest word that copies every page."""
    shape = Shape("heads_of_136")
    for _ in range(LAYERS):
        shape.add((BLOCKS, BLOCK_TOKENS, 136), block_axis=0, element_bytes=1, gap=8)
    return shape


def mla_and_indexer() -> Shape:
    """Two kinds of layers in one group: (blocks, tokens, 576) of two bytes, and (blocks, tokens, 132) of one."""
    shape = Shape("mla_and_indexer", nan_bytes=True)
    for _ in range(LAYERS):
        shape.add((BLOCKS, BLOCK_TOKENS, 576), block_axis=0)
        shape.add((BLOCKS, BLOCK_TOKENS, 132), block_axis=0, element_bytes=1, own_allocation=True)
    return shape


def odd_bytes() -> Shape:
    """Pages of 127, 193, 333 and 350 bytes at odd offsets: only the narrow paths can copy them."""
    shape = Shape("odd_bytes", nan_bytes=True)
    shape.add((BLOCKS, 127), block_axis=0, element_bytes=1)
    shape.add((BLOCKS, 193), block_axis=0, element_bytes=1)
    shape.add((BLOCKS, BLOCK_TOKENS, 70), block_axis=0, element_bytes=1, gap=2)
    shape.add((BLOCKS, 333), block_axis=0, element_bytes=1, gap=1)
    return shape


def large_pages() -> Shape:
    """Pages larger than a crew's copy unit, and shards larger than a staging segment."""
    return Shape("large_pages", blocks=[7]).add((2, 7, BLOCK_TOKENS, 11, 53), block_axis=1, element_bytes=64)


def several_groups() -> Shape:
    """Two groups with different blocks in different tensors of one allocation and of another."""
    shape = Shape("several_groups", groups=2, blocks=[BLOCKS, 37], block_tokens=[BLOCK_TOKENS, 3])
    shape.add((2, BLOCKS, BLOCK_TOKENS, HEADS, HEAD), block_axis=1)
    shape.add((37, 3, 52), block_axis=0, group=1, gap=128)
    shape.add((37, 3, 66), block_axis=0, element_bytes=1, group=1, own_allocation=True)
    return shape


def many_pages() -> Shape:
    """Pages of 64 bytes: more copies in one job than a driver takes in one call."""
    shape = Shape("many_pages", blocks=[3100], block_tokens=[1])
    return shape.add((11, 3100, 32), block_axis=1)


SHAPES: dict[str, Callable[[], Shape]] = {
    make.__name__: make
    for make in (
        kv_first,
        kv_first_hnd,
        block_first,
        cross_layer,
        layers_inside,
        mla,
        token_major,
        aiter,
        heads_of_132,
        heads_of_136,
        mla_and_indexer,
        odd_bytes,
        large_pages,
        several_groups,
        many_pages,
    )
}
