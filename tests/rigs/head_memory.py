"""KV memory of one tensor rank as vLLM lays it out, in shared memory, with known bytes for every head of the model."""

import math
import os
from array import array
from itertools import product
from types import SimpleNamespace

from kvserver._native import create_memfd
from kvserver.wire.messages import RegionRun
from tests.rigs.vllm_tensors import Storage

LAYERS, TOKENS, CONTENT = 3, 5, 7
ITEM_BYTES = 2
ORDERS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}
"""vLLM's layouts: dimensions of [layer, block, head, token, content] in memory order, outermost first."""

_addresses = iter(range(1 << 40, 1 << 50, 1 << 30))


class FullAttentionSpec(SimpleNamespace):
    """vLLM's description of a layer with heads, one slot for each."""


class Tensor:
    """One layer's cache: [block, head, token, content]."""

    def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...], offset: int, storage: Storage) -> None:
        self.shape = shape
        self._strides, self._offset, self._storage = strides, offset, storage

    def stride(self) -> tuple[int, ...]:
        return self._strides

    def element_size(self) -> int:
        return ITEM_BYTES

    def data_ptr(self) -> int:
        return self._storage.address + self._offset

    def untyped_storage(self) -> Storage:
        return self._storage


class HeadMemory:
    """Rank `rank` of `ranks`, which divide `heads` evenly."""

    def __init__(self, *, heads: int, ranks: int, rank: int, blocks: int, order: str, kernel_blocks: int = 1) -> None:
        """kernel_blocks: parts of a block that the kernels count as blocks."""
        self.heads, self.ranks, self.rank, self.blocks, self.order = heads, ranks, rank, blocks, order
        self._here, self._tokens = heads // ranks, TOKENS * kernel_blocks
        self._sizes = LAYERS, blocks * kernel_blocks, self._here, TOKENS, CONTENT
        self._strides = _strides(self._sizes, ORDERS[order])
        self._kernel_blocks = kernel_blocks
        self.bytes = math.prod(self._sizes) * ITEM_BYTES
        self.fd = create_memfd("head-memory", self.bytes)
        storage = Storage(next(_addresses), self.bytes)
        self.caches = {
            f"layer {layer}": Tensor(self._sizes[1:], self._strides[1:], layer * self._strides[0] * ITEM_BYTES, storage)
            for layer in range(LAYERS)
        }
        page_bytes = self._here * self._tokens * CONTENT * ITEM_BYTES
        spec = FullAttentionSpec(
            block_size=self._tokens, page_size_bytes=page_bytes, num_kv_heads=self._here, num_head_slots=None
        )
        self.config = SimpleNamespace(
            num_blocks=blocks,
            kv_cache_groups=[SimpleNamespace(layer_names=list(self.caches), kv_cache_spec=spec)],
            kv_cache_tensors=[
                SimpleNamespace(
                    layers=list(self.caches),
                    offset=0,
                    layer_stride=self._strides[0] * ITEM_BYTES,
                    block_stride=self._strides[1] * kernel_blocks * ITEM_BYTES,
                )
            ],
        )

    @property
    def block_tokens(self) -> int:
        return self._tokens

    def _elements(self) -> "array[int]":
        return array("H", os.pread(self.fd, self.bytes, 0))

    def fill(self, blocks: dict[int, int]) -> None:
        """Write blocks as the engine would: block id -> the place in the prompt whose KV it holds."""
        held = self._elements()
        for (layer, block, head, token), place in self._cells(blocks):
            start = self._start(layer, block, head, token)
            step = self._strides[4]
            for content in range(CONTENT):
                held[start + content * step] = self._value(layer, place, head, content)
        os.pwrite(self.fd, held.tobytes(), 0)

    def wrong(self, blocks: dict[int, int]) -> list[tuple[int, ...]]:
        """(layer, block, head, token) of everything that does not hold what fill() would write."""
        held = self._elements()
        return [
            cell
            for cell, place in self._cells(blocks)
            if any(
                held[self._start(*cell) + content * self._strides[4]] != self._value(cell[0], place, cell[2], content)
                for content in range(CONTENT)
            )
        ]

    def shard_bytes(self, runs: list[RegionRun], blocks: list[int]) -> bytes:
        """The bytes that the server keeps of some blocks: [run][region][block][page]."""
        held = os.pread(self.fd, self.bytes, 0)
        pages = [
            run.offset + region * run.region_stride + block * run.block_stride
            for run in runs
            for region in range(run.regions)
            for block in blocks
        ]
        sizes = [run.page_bytes for run in runs for _ in range(run.regions) for _ in blocks]
        return b"".join(held[start : start + size] for start, size in zip(pages, sizes, strict=True))

    def close(self) -> None:
        os.close(self.fd)

    def _cells(self, blocks: dict[int, int]) -> list[tuple[tuple[int, int, int, int], int]]:
        """(layer, kernel block, head here, token in it), and the token's place in the prompt."""
        return [
            ((layer, block * self._kernel_blocks + part, head, token), place * self._tokens + part * TOKENS + token)
            for block, place in blocks.items()
            for layer, part, head, token in product(
                range(LAYERS), range(self._kernel_blocks), range(self._here), range(TOKENS)
            )
        ]

    def _start(self, layer: int, block: int, head: int, token: int) -> int:
        return sum(index * stride for index, stride in zip((layer, block, head, token), self._strides[:4], strict=True))

    def _value(self, layer: int, token: int, head: int, content: int) -> int:
        """A function of all that tells one element of the model's KV from another."""
        whole_head = self.rank * self._here + head
        return (((layer * 97 + token) * 31 + whole_head) * 11 + content + 1) % 65_521


def _strides(sizes: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    strides: dict[int, int] = {}
    step = 1
    for dimension in reversed(order):
        strides[dimension] = step
        step *= sizes[dimension]
    return tuple(strides[dimension] for dimension in range(len(sizes)))
