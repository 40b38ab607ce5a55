"""The positions of pages in KV tensors, found from shape and strides alone. Imports no framework and touches no memory.

A tensor has one dimension that counts blocks. Of the others, those that lie densely together within a block form the
page, and the rest counts regions. This one rule covers all layouts (NB blocks of BS tokens, H heads of D elements):

    K/V-first (2, NB, BS, H, D)          two regions, a page is one side of a block
    block-first (NB, 2, BS, H, D)        one region, a page is both sides
    cross-layer (NB, L, 2, BS, H, D)     one region, a page is a block of all layers
    HND seen as NHD, or the reverse      as above: the order inside a page does not matter, only that it is dense
    MLA (NB, BS, 576)                    one region
    token-major (NB * BS, 1, 576)        one region; `blocks` and `block_dim` say how to cut it
    AITER K (NB, H, D / x, BS, x) and V, scales (NB, H, BS): each one region

Bytes are copied as they are, of any type. The same shape and strides always give the same regions, whichever
allocations hold the tensors. The byte order in a slot must not depend on where an engine's tensors happen to lie.
"""

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple, Protocol

from kvserver.errors import RequestError
from kvserver.wire.messages import GroupSpec, RegionRun


class Tensor(Protocol):
    """The methods of a tensor that are used; torch.Tensor has them."""

    @property
    def shape(self) -> Sequence[int]: ...
    def stride(self) -> Sequence[int]: ...
    def element_size(self) -> int: ...
    def data_ptr(self) -> int: ...


class Extent(NamedTuple):
    """A range of memory: a tensor from its first byte to its last, gaps included, or the allocation that holds it."""

    address: int
    bytes: int


class Described(NamedTuple):
    """Registration data of a group of tensors: one buffer per tensor, and the regions tensor by tensor."""

    extents: list[Extent]
    regions: list[RegionRun]


class Heads(NamedTuple):
    """Heads [begin, end) of those that a tensor holds in dimension `dim`."""

    dim: int
    begin: int
    end: int


class Axis(NamedTuple):
    size: int
    stride_bytes: int


def describe(
    tensors: Sequence[Tensor], *, blocks: int, block_dim: int | None = None, first_buffer: int = 0
) -> Described:
    """Describe the tensors of one group: the layers' caches, and tensors that belong to them (scales).

    blocks: number of blocks in each tensor. first_buffer: index that the first tensor's extent will have.

    block_dim: the dimension that counts blocks. Required if another dimension has the same size, or if it counts the
    tokens of `blocks` blocks.
    """
    extents = [extent(tensor) for tensor in tensors]
    regions = [
        run
        for number, tensor in enumerate(tensors)
        for run in region_runs(tensor, buffer=first_buffer + number, blocks=blocks, block_dim=block_dim)
    ]
    return Described(extents, regions)


def extent(tensor: Tensor) -> Extent:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return Extent(tensor.data_ptr(), (last + 1) * tensor.element_size())


def region_runs(
    tensor: Tensor, *, buffer: int, blocks: int, block_dim: int | None = None, heads: Heads | None = None
) -> list[RegionRun]:
    """The regions of one tensor, first dimension outermost. Offsets count from its first byte.

    heads: the regions of these heads alone. A page then ends where they end, and heads are joined with nothing outside
    of them. So as many heads have the same regions and pages in a tensor of any number of heads.

    RequestError("layout") if no dimension, or more than one, can count blocks, or if two elements share memory.
    """
    item_bytes = tensor.element_size()
    axes = [Axis(size, stride * item_bytes) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    shown = f"shape {tuple(tensor.shape)}, strides {tuple(tensor.stride())}"
    if any(size > 1 and stride_bytes < item_bytes for size, stride_bytes in axes):
        raise RequestError("layout", f"{shown}: elements share memory")
    index = _block_dimension(tensor.shape, blocks, block_dim)
    tokens, stride_bytes = axes[index].size // blocks, axes[index].stride_bytes
    inside = [*axes[:index], Axis(tokens, stride_bytes), *axes[index + 1 :]]
    start_bytes, head = 0, None
    if heads is not None:
        head = inside[heads.dim] = Axis(heads.end - heads.begin, axes[heads.dim].stride_bytes)
        start_bytes = heads.begin * head.stride_bytes
    page_bytes, outside = _dense(item_bytes, [axis for axis in inside if axis.size > 1], head)
    *outer, innermost = _joined(outside, head) or [Axis(1, 0)]
    starts = product(*(range(0, size * stride, stride) for size, stride in outer))
    return [
        RegionRun(
            buffer=buffer,
            offset=start_bytes + sum(start),
            regions=innermost.size,
            region_stride=innermost.stride_bytes,
            block_stride=tokens * stride_bytes,
            page_bytes=page_bytes,
        )
        for start in starts
    ]


def check_runs(groups: Sequence[GroupSpec], sizes: Sequence[int]) -> None:
    """Raise RequestError("layout") if a page leaves its buffer. sizes: bytes of each buffer.

    Only this side knows the buffers' ends. The server sees whole allocations, and would take bytes beside a tensor for
    a page.
    """
    for group in groups:
        for run in group.regions:
            if not 0 <= run.buffer < len(sizes):
                raise RequestError("layout", f"buffer={run.buffer} must be in [0, {len(sizes)})")
            end = run.offset + (run.regions - 1) * run.region_stride + (group.blocks - 1) * run.block_stride
            if run.offset < 0 or end + run.page_bytes > sizes[run.buffer]:
                raise RequestError(
                    "layout",
                    f"pages reach [{run.offset}, {end + run.page_bytes}) of buffer {run.buffer}, which has "
                    f"{sizes[run.buffer]} bytes",
                )


def _block_dimension(shape: Sequence[int], blocks: int, block_dim: int | None) -> int:
    if block_dim is None:
        fitting = [index for index, size in enumerate(shape) if size == blocks]
        if len(fitting) != 1:
            raise RequestError(
                "layout",
                f"shape {tuple(shape)} has {len(fitting)} dimensions of size blocks={blocks}, not 1: say block_dim",
            )
        return fitting[0]
    if not 0 <= block_dim < len(shape):
        raise RequestError("layout", f"block_dim={block_dim} must be a dimension of shape {tuple(shape)}")
    if blocks < 1 or shape[block_dim] < 1 or shape[block_dim] % blocks:
        raise RequestError(
            "layout", f"blocks={blocks} must divide dimension {block_dim} of shape {tuple(shape)}, and not be 0"
        )
    return block_dim


def _dense(item_bytes: int, axes: list[Axis], head: Axis | None) -> tuple[int, list[Axis]]:
    """Number of bytes around an element without a gap, and the dimensions outside of them.

    head: the bytes do not reach beyond this dimension.
    """
    dense_bytes = item_bytes
    inner = [axis for axis in axes if head is None or axis is head or axis.stride_bytes < head.stride_bytes]
    while (following := next((axis for axis in inner if axis.stride_bytes == dense_bytes), None)) is not None:
        axes, inner = ([axis for axis in some if axis is not following] for some in (axes, inner))
        dense_bytes *= following.size
    return dense_bytes, axes


def _joined(axes: list[Axis], head: Axis | None) -> list[Axis]:
    """Join neighbouring dimensions that step evenly, except `head` with any other."""
    joined: list[Axis] = []
    for axis in axes:
        may_join = bool(joined) and axis is not head and joined[-1] is not head
        if may_join and joined[-1].stride_bytes == axis.size * axis.stride_bytes:
            joined[-1] = Axis(joined[-1].size * axis.size, axis.stride_bytes)
        else:
            joined.append(axis)
    return joined
