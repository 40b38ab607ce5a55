"""Copies of KV pages by torch alone: index_select and index_copy_ over the layout's runs.

Simple, and correct on every device that torch knows. It is the reference for all kernels, and the path for devices
without kernels. It is slow: each run of regions is copied into a temporary tensor, and then once more.
"""

from collections.abc import Sequence
from math import gcd
from typing import Any

from msgspec.structs import replace

from kvclient.memory.layouts import check_runs, extent
from kvserver.errors import RequestError
from kvserver.wire.messages import GroupSpec, RegionRun

RUN_ALIGN = 64
ITEM_BYTES = (8, 4, 2, 1)
"""Bytes are moved as integers, which torch copies unchanged. Floats that are NaN might change."""

Moves = list[tuple[int, list[int], list[int]]]
"""For each group: its number, blocks of the engine, and as many places in the buffer on the host."""


class TensorPages:
    """The pages of a cache whose buffers are tensors, and a host buffer with room for `chunks` chunks of them.

    In the buffer each group has chunks * blocks_per_chunk places for blocks. A run's pages lie there [region][place],
    densely.
    """

    def __init__(self, tensors: Sequence[Any], groups: Sequence[GroupSpec], *, chunk_tokens: int, chunks: int) -> None:
        """RequestError("layout" | "device") if pages leave their tensors, or tensors lie on several devices."""
        if not tensors:
            raise RequestError("layout", "a portable cache needs tensors; it has none")
        check_runs(groups, [extent(tensor).bytes for tensor in tensors])
        devices = {str(tensor.device) for tensor in tensors}
        if len(devices) != 1:
            raise RequestError("device", f"tensors lie on {sorted(devices)}; a cache is on one device")
        self.device = devices.pop()
        self.groups, self.bytes = _packed(groups, chunk_tokens, chunks)
        """The groups as registered with the server: places in the buffer, whose index is 0. And the buffer's bytes."""
        self._tensors = list(tensors)
        self._runs = [list(group.regions) for group in groups]
        self._blocks = [group.blocks for group in groups]
        self._buffer: Any = None

    def attach(self, descriptor: int) -> None:
        """Map the buffer on the host, a memfd of `bytes`. The mapping lives as long as this object."""
        path = f"/proc/self/fd/{descriptor}"
        self._buffer = _torch().from_file(path, shared=True, size=self.bytes, dtype=_torch().uint8)

    def gather(self, moves: Moves) -> None:
        """Copy the engine's blocks into the buffer. Complete when it returns. Raises what torch raises."""
        for group, blocks, places in moves:
            for here, there in self._views(group):
                picked = here.index_select(1, _index(blocks, self.device))
                there.index_copy_(1, _index(places, "cpu"), picked.cpu())

    def scatter(self, moves: Moves) -> None:
        """Copy the buffer's places into the engine's blocks. Complete when it returns. Raises what torch raises."""
        last = None
        for group, blocks, places in moves:
            for here, there in self._views(group):
                picked = there.index_select(1, _index(places, "cpu"))
                here.index_copy_(1, _index(blocks, self.device), picked.to(self.device))
                last = here
        if last is not None:
            # Copies to a device may still be running. A read after them in the same stream ends after them, and works
            # on every device. Ways to wait for a stream differ between devices.
            last[0, 0, 0].item()

    def check(self, group: int, blocks: Sequence[int]) -> None:
        """Raise RequestError for wrong blocks, as the server would. It sees only places, so it cannot check them."""
        count = self._blocks[group]
        for block in blocks:
            if not 0 <= block < count:
                raise RequestError("block-range", f"block id {block} must be in [0, {count})")
        if len(set(blocks)) != len(blocks):
            raise RequestError("block-duplicate", f"group {group}: a block id came twice among {len(blocks)}")

    def _views(self, group: int) -> list[tuple[Any, Any]]:
        """Pairs of views for each run: its pages in the tensor and in the buffer, [region][block][item]."""
        found = []
        for run, packed in zip(self._runs[group], self.groups[group].regions, strict=True):
            tensor = self._tensors[run.buffer]
            first = tensor.storage_offset() * tensor.element_size() + run.offset
            item_bytes = _item_bytes(tensor, first, run)
            here = _view(tensor, item_bytes, first, run, self._blocks[group])
            found.append((here, _view(self._buffer, item_bytes, packed.offset, packed, self.groups[group].blocks)))
        return found


def _packed(groups: Sequence[GroupSpec], chunk_tokens: int, chunks: int) -> tuple[list[GroupSpec], int]:
    """The groups as they lie in the buffer, and the buffer's bytes.

    Runs, regions and pages keep their order and size, so a shard has the same bytes as with the engine's own layout.
    """
    packed, end = [], 0
    for group in groups:
        places = chunks * (chunk_tokens // group.block_tokens)
        regions = []
        for run in group.regions:
            regions.append(RegionRun(0, end, run.regions, places * run.page_bytes, run.page_bytes, run.page_bytes))
            end += -(-run.regions * places * run.page_bytes // RUN_ALIGN) * RUN_ALIGN
        packed.append(replace(group, blocks=places, regions=regions))
    return packed, end


def _item_bytes(tensor: Any, first: int, run: RegionRun) -> int:
    """Bytes of the widest integer that divides all of the run's pages and strides."""
    storage = tensor.untyped_storage()
    place = first, run.region_stride, run.block_stride, run.page_bytes
    common = gcd(*place, storage.data_ptr(), storage.nbytes())
    return next(size for size in ITEM_BYTES if common % size == 0)


def _view(tensor: Any, item_bytes: int, first: int, run: RegionRun, blocks: int) -> Any:
    """The run's pages in the tensor's storage as integers. first: byte where they begin."""
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
    """The torch module. Imported here because engines without torch import this file too."""
    import torch  # noqa: PLC0415

    return torch
