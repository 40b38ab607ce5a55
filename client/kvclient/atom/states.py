"""The states that ATOM keeps for each request, and the rows through which they are stored and loaded.

Recurrent layers (GDN, KDA) and DeepSeek-V4 (compressor state and windows) keep the state of a request in a slot. Each
forward overwrites it, so it is right for one prefix only: that of all tokens computed so far. No server could read it
in time. So the connector takes a few rows of GPU memory, which are the blocks of the cache's state group:

    store    slot ─► row, on the engine's stream before the next forward; then the server reads the row
    load     the server writes the row; then row ─► slot, on the engine's stream before the load is reported

A row belongs to one job on all ranks, from the order until all ranks have reported its end. The scheduler hands rows
out. A store that gets none brings its pages alone, and a load waits for a row.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from kvclient.atom.steps import StateCopy
from kvclient.memory.layouts import Extent
from kvclient.offload.values import RetrieveOrder, StoreOrder
from kvserver.errors import RequestError
from kvserver.wire.messages import RegionRun

CLASS = "state"
"""ATOM's name for slots in `pool_entries` of its Config."""
STATE = 1
"""The group of rows in a cache with states. Group 0 has the pages."""
NO_ROW = -1
"""Place in a table of rows without a state."""

# ---------------------------------------------------------------- where slots lie


class Plane(NamedTuple):
    """A part of every slot, in one tensor or region."""

    part: str
    layer: str
    address: int
    """Address of slot 0."""
    step: int
    """Bytes from a slot to the next. Negative for DeepSeek-V4, whose slots count from the end of their memory."""
    bytes: int
    shape: tuple[int, ...] = ()
    """Dimensions of one slot, if known."""
    kind: str = ""

    @property
    def facts(self) -> list[object]:
        """Facts that must be equal before a state is shared. The number of slots and their order do not matter."""
        return [self.part, self.layer, list(self.shape), self.kind, self.bytes]


def tensor_plane(part: str, layer: str, tensor: Any, *, span: int) -> Plane:
    """The plane of a tensor whose first dimension counts entries. span: those of a request; its state is in the first.

    The others are for tokens of a draft, and a prefill neither reads nor writes them.
    """
    shape = tuple(int(size) for size in tensor.shape[1:])
    entry_bytes = math.prod(shape) * tensor.element_size()
    kind = str(getattr(tensor, "dtype", tensor.element_size()))
    return Plane(part, layer, tensor.data_ptr(), span * entry_bytes, entry_bytes, shape, kind)


def region_planes(transfer_tensors: Any, *, slots: int) -> list[Plane]:
    """The planes of regions that have all of a request's state. RequestError("layout") if one is missing or odd."""
    regions = list(getattr(transfer_tensors, "swa_block_regions", None) or ())
    expected = getattr(transfer_tensors, "expected_full_slot_region_count", None)
    if expected is not None and expected != len(regions):
        raise RequestError("layout", f"{len(regions)} regions of request state; expected {expected}, one a plane")
    planes = []
    for region in regions:
        role, sizes = region.semantic_role, (region.base_addr, region.unit_bytes, region.total_bytes)
        whole = all(type(size) is int and size > 0 for size in sizes)
        if not whole or not role or region.total_bytes != slots * region.unit_bytes:
            raise RequestError(
                "layout",
                f"region {role!r} of request state has address, unit and total {sizes}; expected a name, and {slots} "
                "slots of one size",
            )
        last = region.base_addr + region.total_bytes - region.unit_bytes
        begin, step = (last, -region.unit_bytes) if region.reverse_indexed else (region.base_addr, region.unit_bytes)
        planes.append(Plane("slot", role, begin, step, region.unit_bytes))
    return planes


# ---------------------------------------------------------------- a worker's rows


class RowMemory(Protocol):
    """Memory of rows, and copies between any addresses on the engine's stream."""

    @property
    def extent(self) -> Extent: ...
    def note_stream(self) -> None:
        """The calling thread's stream is the one that forwards run on."""

    def copy(self, pieces: Sequence[tuple[int, int, int]]) -> None:
        """Queue copies behind all that was launched. Each piece: target, source, bytes."""


class Rows:
    """The rows of one rank, plane after plane in each. Belongs to the thread that launches forwards."""

    def __init__(self, planes: Sequence[Plane], memory: RowMemory) -> None:
        self._planes = planes
        self._memory = memory
        self._row_bytes = row_bytes(planes)

    @property
    def extent(self) -> Extent:
        return self._memory.extent

    def run(self, buffer: int) -> RegionRun:
        return RegionRun(buffer, 0, 1, 0, self._row_bytes, self._row_bytes)

    def note_stream(self) -> None:
        self._memory.note_stream()

    def keep(self, copy: StateCopy) -> None:
        """Copy a slot into its row."""
        self._memory.copy(list(self._pieces(copy)))

    def restore(self, copy: StateCopy) -> None:
        """Copy a row into its slot."""
        self._memory.copy([(slot, row, bytes_) for row, slot, bytes_ in self._pieces(copy)])

    def _pieces(self, copy: StateCopy) -> Iterator[tuple[int, int, int]]:
        at = self._memory.extent.address + copy.row * self._row_bytes
        for plane in self._planes:
            yield at, plane.address + copy.slot * plane.step, plane.bytes
            at += plane.bytes


def row_bytes(planes: Sequence[Plane]) -> int:
    return sum(plane.bytes for plane in planes)


class TorchRows:
    """Rows in GPU memory that torch allocates."""

    def __init__(self, bytes_: int) -> None:
        """RequestError("memory") if the GPU has not so much left."""
        import torch  # noqa: PLC0415  (on GPUs only)

        self._torch = torch
        try:
            self._memory = torch.empty(bytes_, dtype=torch.uint8, device="cuda")
        except torch.cuda.OutOfMemoryError as problem:
            raise RequestError(
                "memory", f"state_rows take {bytes_} bytes of GPU memory, and it has not so much left: {problem}"
            ) from problem
        self._views: dict[tuple[int, int], Any] = {}
        """Tensors over planes of slots and rows, whose number is fixed."""
        self.note_stream()

    @property
    def extent(self) -> Extent:
        return Extent(self._memory.data_ptr(), self._memory.numel())

    def note_stream(self) -> None:
        self._stream = self._torch.cuda.current_stream()

    def copy(self, pieces: Sequence[tuple[int, int, int]]) -> None:
        with self._torch.cuda.stream(self._stream):
            for target, source, bytes_ in pieces:
                self._view(target, bytes_).copy_(self._view(source, bytes_), non_blocking=True)

    def _view(self, address: int, bytes_: int) -> Any:
        view = self._views.get((address, bytes_))
        if view is None:
            view = self._views[address, bytes_] = self._torch.as_tensor(_Bytes(address, bytes_), device="cuda")
        return view


class _Bytes:
    """GPU memory for torch to look at."""

    def __init__(self, address: int, bytes_: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (bytes_,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 2,
        }


# ---------------------------------------------------------------- the scheduler's rows


class States:
    """Which job has which row, the same on all ranks. Belongs to the scheduler's thread."""

    def __init__(self, rows: int) -> None:
        self._free = list(range(rows))
        self._copies: dict[int, StateCopy] = {}
        """Job -> its row, until all ranks have reported its end."""
        self._waiting: deque[tuple[RetrieveOrder, int]] = deque()
        """Loads that wait for a row, with their slots. ATOM bounds the number of requests that wait for loads."""

    @staticmethod
    def table_for_load(chunks: int) -> list[int]:
        """The table of rows of a request that will load: any row, which take_loads() chooses."""
        return [0] * chunks

    def table_for_store(self, chunks: int, *, has_state: bool) -> list[int]:
        """The table of rows of a request with so many chunks. has_state: its slot has the state at the end of the last.

        Names no row if none is free, or if loads wait for rows.
        """
        table = [NO_ROW] * chunks
        if has_state and self.has_row_for_store:
            table[-1] = self._free[-1]
        return table

    @property
    def has_row_for_store(self) -> bool:
        return bool(self._free) and not self._waiting

    def stored(self, order: StoreOrder, *, slot: int) -> None:
        """Give the order the row that it names, if it names one."""
        for item in order.blocks:
            if item.group == STATE:
                (row,) = item.block_ids
                self._free.remove(row)
                self._copies[order.job] = StateCopy(row, slot)

    def wait(self, order: RetrieveOrder, *, slot: int) -> None:
        self._waiting.append((order, slot))

    def take_loads(self) -> Iterator[RetrieveOrder]:
        """The loads that have a row now, first come first served."""
        while self._waiting and self._free:
            order, slot = self._waiting.popleft()
            row = self._free.pop()
            self._copies[order.job] = StateCopy(row, slot)
            blocks = (item._replace(block_ids=[row]) if item.group == STATE else item for item in order.blocks)
            yield order._replace(blocks=tuple(blocks))

    def take_waiting(self) -> list[RetrieveOrder]:
        """All loads without a row, to be refused."""
        taken = [order for order, _ in self._waiting]
        self._waiting.clear()
        return taken

    def of(self, orders: Sequence[RetrieveOrder | StoreOrder]) -> Mapping[int, StateCopy]:
        return {order.job: self._copies[order.job] for order in orders if order.job in self._copies}

    def ended(self, job: int) -> None:
        copy = self._copies.pop(job, None)
        if copy is not None:
            self._free.append(copy.row)
