"""States of requests in one rank's memory, in ATOM's layouts, with every byte known; and rows on the host.

A state's bytes are a function of rank, plane and all tokens up to it. So a state of another prefix, another boundary,
another rank or another plane is noticed, and so is one that a forward has moved on.
"""

import hashlib
import math
import struct
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from kvclient.memory.layouts import Extent

if TYPE_CHECKING:
    from tests.atom_engine.memory import Pool, Shape

RECURRENT_LAYERS = 2
CONV, SSM = ((3, 5), 2), ((2, 3, 4), 4)
"""Dimensions of an entry of the two tensors of a recurrent layer, and bytes of an item."""
V4_SLOT_BYTES = {"dsv4.main_kv.nope": 193, "dsv4.main_kv.rope": 127}


class StateTensor:
    """The parts of torch.Tensor that the connector uses of a recurrent layer."""

    def __init__(self, pool: "Pool", offset: int, shape: Sequence[int], *, item_bytes: int) -> None:
        self.pool, self.offset = pool, offset
        self.shape = tuple(shape)
        self.device = SimpleNamespace(type="cpu")
        self.dtype = f"state{item_bytes}"
        self._item_bytes = item_bytes

    def stride(self) -> tuple[int, ...]:
        return tuple(math.prod(self.shape[nth + 1 :]) for nth in range(len(self.shape)))

    def element_size(self) -> int:
        return self._item_bytes

    def data_ptr(self) -> int:
        return self.pool.address + self.offset


class _Plane(NamedTuple):
    pool: "Pool"
    first: int
    """Offset of slot 0 in the pool."""
    step: int
    bytes: int


class StateMemory:
    """The slots of one rank."""

    def __init__(self, shape: "Shape", rank: int, made: Callable[[int], "Pool"]) -> None:
        """made: makes an allocation."""
        self._rank = rank
        self.tensors: dict[str, tuple[StateTensor, StateTensor]] = {}
        self.regions: list[Any] = []
        self._planes: list[_Plane] = []
        self._images: dict[tuple[int, ...], list[bytes]] = {}
        """Blocks that ATOM keeps a checkpoint in -> its planes."""
        if shape.form == "v4":
            self._make_regions(shape, made)
        else:
            self._make_tensors(shape, made)

    def _make_tensors(self, shape: "Shape", made: Callable[[int], "Pool"]) -> None:
        entries = shape.slots * shape.span
        sizes = [math.prod(dims) * item_bytes for dims, item_bytes in (CONV, SSM)]
        pool = made(RECURRENT_LAYERS * entries * sum(sizes))
        at = 0
        for layer in range(RECURRENT_LAYERS):
            pair = []
            for (dims, item_bytes), size in zip((CONV, SSM), sizes, strict=True):
                pair.append(StateTensor(pool, at, (entries, *dims), item_bytes=item_bytes))
                self._planes.append(_Plane(pool, at, shape.span * size, size))
                at += entries * size
            self.tensors[f"layer_{shape.first_layer + 50 + layer}"] = (pair[0], pair[1])

    def _make_regions(self, shape: "Shape", made: Callable[[int], "Pool"]) -> None:
        for role, unit in V4_SLOT_BYTES.items():
            pool = made(shape.slots * unit)
            self._planes.append(_Plane(pool, (shape.slots - 1) * unit, -unit, unit))
            self.regions.append(
                SimpleNamespace(
                    base_addr=pool.address,
                    total_bytes=pool.bytes,
                    unit_bytes=unit,
                    reverse_indexed=True,
                    semantic_role=role,
                )
            )

    @property
    def bytes_of_slot(self) -> int:
        return sum(plane.bytes for plane in self._planes)

    def write(self, slot: int, tokens: Sequence[int]) -> None:
        """Leaves the state of a forward that has computed these tokens."""
        self._put(slot, self._right(tokens))

    def is_right(self, slot: int, tokens: Sequence[int]) -> bool:
        return self._held(slot) == self._right(tokens)

    def keep_checkpoint(self, slot: int, blocks: tuple[int, ...]) -> None:
        self._images[blocks] = self._held(slot)

    def restore_checkpoint(self, slot: int, blocks: tuple[int, ...]) -> None:
        self._put(slot, self._images[blocks])

    def _right(self, tokens: Sequence[int]) -> list[bytes]:
        chain = hashlib.sha256(struct.pack(f"<{len(tokens)}I", *tokens)).digest()
        return [
            hashlib.shake_128(chain + bytes([7, self._rank, number])).digest(plane.bytes)
            for number, plane in enumerate(self._planes)
        ]

    def _places(self, slot: int) -> list[tuple["Pool", slice]]:
        begins = [(plane, plane.first + slot * plane.step) for plane in self._planes]
        return [(plane.pool, slice(begin, begin + plane.bytes)) for plane, begin in begins]

    def _held(self, slot: int) -> list[bytes]:
        return [pool.map[place] for pool, place in self._places(slot)]

    def _put(self, slot: int, parts: Sequence[bytes]) -> None:
        for (pool, place), part in zip(self._places(slot), parts, strict=True):
            pool.map[place] = part


class HostRows:
    """Rows for states as the connector has them on a GPU, in memory of the host."""

    def __init__(self, pool: "Pool", pool_at: Callable[[int], "Pool"]) -> None:
        self.pool = pool
        self.copies = 0
        self._pool_at = pool_at

    @property
    def extent(self) -> Extent:
        return Extent(self.pool.address, self.pool.bytes)

    def note_stream(self) -> None:
        """Does nothing: copies on the host are over at once."""

    def copy(self, pieces: Sequence[tuple[int, int, int]]) -> None:
        self.copies += 1
        for target, source, bytes_ in pieces:
            into, out_of = self._pool_at(target), self._pool_at(source)
            begin, at = target - into.address, source - out_of.address
            assert begin + bytes_ <= into.bytes
            assert at + bytes_ <= out_of.bytes
            into.map[begin : begin + bytes_] = out_of.map[at : at + bytes_]
