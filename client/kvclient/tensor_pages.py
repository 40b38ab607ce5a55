"""Pages of KV tensors picked up and laid down by torch alone: index_select and index_copy_ over the layout's runs.

What it does is plain to see, and right on every device that torch knows: the reference that all kernels are held
against, and the way of devices for which there are none. It is slow: each run of regions is copied into a tensor of its
own, and then once more.
"""

from collections.abc import Sequence
from math import gcd
from typing import Any

from kvclient.layouts import check_runs, extent
from kvserver.errors import RequestError
from kvserver.wire.messages import GroupSpec, RegionRun

RUN_ALIGN = 64
ITEM_BYTES = (8, 4, 2, 1)
"""Bytes are moved as integers, which torch copies as they are; floats that are no numbers might change."""

Moves = list[tuple[int, list[int], list[int]]]
"""For each group: its number, blocks of the engine, and as many places in the buffer on the host."""


class TensorPages:
    """The pages of a cache whose buffers are tensors, and a buffer on the host with room for `chunks` chunks of them.

    In the buffer a group has chunks * blocks_per_chunk places for blocks; a run's pages lie there [region][place],
    densely.
    """

    def __init__(self, tensors: Sequence[Any], groups: Sequence[GroupSpec], *, chunk_tokens: int, chunks: int) -> None:
        """RequestError("layout" | "device") when pages leave their tensors, or tensors lie on several devices."""
        if not tensors:
            raise RequestError("layout", "a portable cache needs tensors; it has none")
        check_runs(groups, [extent(tensor).bytes for tensor in tensors])
        devices = {str(tensor.device) for tensor in tensors}
        if len(devices) != 1:
            raise RequestError("device", f"tensors lie on {sorted(devices)}; a cache is on one device")
        self.device = devices.pop()
        self.groups, self.bytes = _packed(groups, chunk_tokens, chunks)
        """As the server is to know them: places in the buffer, whose index is 0."""
        self._tensors = list(tensors)
        self._runs = [list(group.regions) for group in groups]
        self._blocks = [group.blocks for group in groups]
        self._buffer: Any = None

    def attach(self, descriptor: int) -> None:
        """Maps the buffer on the host, a memfd of `bytes`. The mapping lives as long as this object."""
        path = f"/proc/self/fd/{descriptor}"
        self._buffer = _torch().from_file(path, shared=True, size=self.bytes, dtype=_torch().uint8)

    def gather(self, moves: Moves) -> None:
        """The engine's blocks are in the buffer when it returns. Raises what torch raises."""
        for group, blocks, places in moves:
            for here, there in self._views(group):
                picked = here.index_select(1, _index(blocks, self.device))
                there.index_copy_(1, _index(places, "cpu"), picked.cpu())

    def scatter(self, moves: Moves) -> None:
        """The blocks hold what the buffer held when it returns. Raises what torch raises."""
        last = None
        for group, blocks, places in moves:
            for here, there in self._views(group):
                picked = there.index_select(1, _index(places, "cpu"))
                here.index_copy_(1, _index(blocks, self.device), picked.to(self.device))
                last = here
        if last is not None:
            # Copies to a device may still be under way. A read behind them in the same stream ends after them, and
            # every device has that; ways to wait for a stream differ from device to device.
            last[0, 0, 0].item()

    def check(self, group: int, blocks: Sequence[int]) -> None:
        """RequestError as the server's: of these blocks it only sees places."""
        count = self._blocks[group]
        for block in blocks:
            if not 0 <= block < count:
                raise RequestError("block-range", f"block id {block} must be in [0, {count})")
        if len(set(blocks)) != len(blocks):
            raise RequestError("block-duplicate", f"group {group}: a block id came twice among {len(blocks)}")

    def _views(self, group: int) -> list[tuple[Any, Any]]:
        """Of each run: its pages in the tensor and those in the buffer, [region][block][item]."""
        found = []
        for run, packed in zip(self._runs[group], self.groups[group].regions, strict=True):
            tensor = self._tensors[run.buffer]
            first = tensor.storage_offset() * tensor.element_size() + run.offset
            item_bytes = _item_bytes(tensor, first, run)
            here = _view(tensor, item_bytes, first, run, self._blocks[group])
            found.append((here, _view(self._buffer, item_bytes, packed.offset, packed, self.groups[group].blocks)))
        return found


def _packed(groups: Sequence[GroupSpec], chunk_tokens: int, chunks: int) -> tuple[list[GroupSpec], int]:
    """The groups as they lie in the buffer, and its bytes. A shard's bytes are the same as of the engine's own layout:
    runs, regions and pages keep their order and size."""
    packed, end = [], 0
    for group in groups:
        places = chunks * (chunk_tokens // group.block_tokens)
        regions = []
        for run in group.regions:
            regions.append(RegionRun(0, end, run.regions, places * run.page_bytes, run.page_bytes, run.page_bytes))
            end += -(-run.regions * places * run.page_bytes // RUN_ALIGN) * RUN_ALIGN
        packed.append(
            GroupSpec(
                group.block_tokens,
                places,
                group.kind,
                group.window_tokens,
                group.shards,
                group.shard,
                group.writers,
                group.writer,
                regions,
            )
        )
    return packed, end


def _item_bytes(tensor: Any, first: int, run: RegionRun) -> int:
    """Of the widest integer that all of the run's pages are made of."""
    storage = tensor.untyped_storage()
    place = first, run.region_stride, run.block_stride, run.page_bytes
    common = gcd(*place, storage.data_ptr(), storage.nbytes())
    return next(size for size in ITEM_BYTES if common % size == 0)


def _view(tensor: Any, item_bytes: int, first: int, run: RegionRun, blocks: int) -> Any:
    """The run's pages in the tensor's storage as integers; `first`: the byte at which they begin."""
    torch = _torch()
    kind = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[item_bytes]
    return torch.empty(0, dtype=kind, device=tensor.device).set_(
        tensor.untyped_storage(),
        first // item_bytes,
        (run.regions, blocks, run.page_bytes // item_bytes),
        (run.region_stride // item_bytes, run.block_stride // item_bytes, 1),
    )


def _index(blocks: Sequence[int], device: str) -> Any:
    return _torch().tensor(blocks, dtype=_torch().int64).to(device)


def _torch() -> Any:
    """Whoever brings tensors has loaded it; an engine without torch imports this file too."""
    import torch  # noqa: PLC0415

    return torch
