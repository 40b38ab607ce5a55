"""Copies of KV pages by torch alone: index_select and index_copy_ over the layout's runs.

Simple, and correct on every device that torch knows. It is the reference for all kernels, and the path for devices
without kernels. Between a device and the buffer, pieces go through two halves of staging memory on the host: while one
half is copied by the device, the processor empties or fills the other.

Rule: a half is used again only when the device has passed the mark behind its last use. Also after an error no copy is
left that still reads or writes a half, or the engine's blocks.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import gcd
from typing import Any, NamedTuple

from msgspec.structs import replace

from kvclient.memory.layouts import check_runs, extent
from kvclient.memory.torch_device import TorchDevice
from kvserver.errors import RequestError
from kvserver.wire.messages import GroupSpec, RegionRun

RUN_ALIGN = 64
ITEM_BYTES = (8, 4, 2, 1)
"""Bytes are moved as integers, which torch copies unchanged. Floats that are NaN might change."""

HALF_BYTES = 8 << 20
"""Staging memory of a piece, or one page if that is longer. As much again is taken on the device while it is copied."""

HOST_PIECE_BYTES = 256 << 10
"""Bytes of a piece on a CPU. torch copies more by several threads, and these wait for each other on busy cores."""

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
        self._by = TorchDevice(self.device)
        self._halves: list[Any] = []
        self._is_lost = False

    def attach(self, descriptor: int) -> None:
        """Map the buffer on the host, a memfd of `bytes`, and take the staging memory. Both live as long as this."""
        path = f"/proc/self/fd/{descriptor}"
        self._buffer = _torch().from_file(path, shared=True, size=self.bytes, dtype=_torch().uint8)
        if not self._by.is_host:
            longest = max(run.page_bytes for runs in self._runs for run in runs)
            half_bytes = -(-min(self.bytes, max(HALF_BYTES, longest)) // RUN_ALIGN) * RUN_ALIGN
            self._halves = [self._by.host_memory(half_bytes) for _ in range(2)]

    @property
    def staging(self) -> str:
        """How bytes get from the device to the buffer, for the log."""
        if self._by.is_host:
            return "none"
        return f"{sum(half.numel() for half in self._halves)} {'pinned' if self._by.pins else 'pageable'}"

    def gather(self, moves: Moves) -> None:
        """Copy the engine's blocks into the buffer. Complete when it returns. Raises what torch raises."""
        if self._by.is_host:
            for piece in self._pieces(moves, host_bytes=HOST_PIECE_BYTES):
                if (target := piece.consecutive_places()) is not None:
                    _torch().index_select(piece.here, 1, piece.blocks, out=target)
                else:
                    piece.there.index_copy_(1, piece.places, piece.here.index_select(1, piece.blocks))
            return
        try:
            self._gather_by_halves(moves)
        finally:
            self._settle()

    def scatter(self, moves: Moves) -> None:
        """Copy the buffer's places into the engine's blocks. Complete when it returns. Raises what torch raises."""
        if self._by.is_host:
            for piece in self._pieces(moves):
                piece.here.index_copy_(1, piece.blocks, piece.in_buffer())
            return
        try:
            self._scatter_by_halves(moves)
        finally:
            self._settle()

    def _gather_by_halves(self, moves: Moves) -> None:
        before: tuple[_Piece, Any, Any] | None = None
        for number, piece in enumerate(self._pieces(moves)):
            half = piece.view_of(self._halves[number % 2])
            self._by.gather(half, piece.here, piece.blocks)
            mark = self._by.mark()
            if before is not None:
                self._empty(*before)
            before = piece, half, mark
        if before is not None:
            self._empty(*before)

    def _empty(self, piece: "_Piece", half: Any, mark: Any) -> None:
        self._by.wait(mark)
        if (target := piece.consecutive_places()) is not None:
            target.copy_(half)
        else:
            piece.there.index_copy_(1, piece.places, half)

    def _scatter_by_halves(self, moves: Moves) -> None:
        marks: list[Any] = [None, None]
        for number, piece in enumerate(self._pieces(moves)):
            half = piece.view_of(self._halves[number % 2])
            if (mark := marks[number % 2]) is not None:
                self._by.wait(mark)
            half.copy_(piece.in_buffer())
            self._by.scatter(half, piece.here, piece.blocks)
            marks[number % 2] = self._by.mark()

    def _settle(self) -> None:
        """Wait until the device has done everything that was queued. Raises what torch raises; then nothing is copied
        until a later wait ends."""
        self._is_lost = True
        self._by.wait(self._by.mark())
        self._is_lost = False

    def check(self, group: int, blocks: Sequence[int]) -> None:
        """Raise RequestError for wrong blocks, as the server would. It sees only places, so it cannot check them."""
        count = self._blocks[group]
        for block in blocks:
            if not 0 <= block < count:
                raise RequestError("block-range", f"block id {block} must be in [0, {count})")
        if len(set(blocks)) != len(blocks):
            raise RequestError("block-duplicate", f"group {group}: a block id came twice among {len(blocks)}")

    def _pieces(self, moves: Moves, *, host_bytes: int = 0) -> Iterator["_Piece"]:
        """The moves in pieces, which fit into a half.

        On the host: pieces of one region and `host_bytes`, or whole runs if it is 0.
        """
        if self._is_lost:
            raise RuntimeError(f"device {self.device} has not ended its last copies")
        for group, blocks, places in moves:
            on_device, on_host = _index(blocks, self.device), _index(places, "cpu")
            first = places[0] if all(after - place == 1 for place, after in pairwise(places)) else -1
            for here, there in self._views(group):
                regions, page_bytes, count = here.shape[0], here.shape[2] * here.element_size(), len(blocks)
                if self._halves:
                    count = min(count, self._halves[0].numel() // page_bytes)
                    regions = min(regions, self._halves[0].numel() // (count * page_bytes))
                elif host_bytes:
                    count, regions = min(count, max(1, host_bytes // page_bytes)), 1
                for region in range(0, here.shape[0], regions):
                    for at in range(0, len(blocks), count):
                        yield _Piece(
                            here[region : region + regions],
                            there[region : region + regions],
                            on_device[at : at + count],
                            on_host[at : at + count],
                            first + at if first >= 0 else -1,
                        )

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


class _Piece(NamedTuple):
    """Some blocks in some regions of a run."""

    here: Any
    there: Any
    blocks: Any
    """Index on the device."""
    places: Any
    """Index on the host."""
    first_place: int
    """If the places follow each other, else -1."""

    def consecutive_places(self) -> Any:
        """View of the places in the buffer, or None if they do not follow each other."""
        if self.first_place < 0:
            return None
        return self.there[:, self.first_place : self.first_place + len(self.places)]

    def in_buffer(self) -> Any:
        """The places' bytes: a view, or a copy if they do not follow each other."""
        view = self.consecutive_places()
        return self.there.index_select(1, self.places) if view is None else view

    def view_of(self, half: Any) -> Any:
        """The piece's place in staging memory, [region][block][item]."""
        shape = self.here.shape[0], len(self.places), self.here.shape[2]
        items = half.view(self.here.dtype)
        return items[: shape[0] * shape[1] * shape[2]].view(shape)


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
