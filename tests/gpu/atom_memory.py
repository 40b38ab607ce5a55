"""KV memory of one rank of an ATOM engine on a GPU, for tests/atom_engine/rig.py: bf16, one tensor for all layers.

A block's bytes are a function of the tokens up to its first one. So they are made and compared one block at a time,
in place: in torch's tensors on a GPU, else in the simulated driver's memory.
"""

import hashlib
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from tests.atom_engine.memory import Tensor
from tests.device.simulated import LIBRARY, Driver

X = 8
"""Elements of bf16 in 16 bytes."""
ITEM_BYTES = 2
POISON = 0x5A


class Shape(NamedTuple):
    """The parts of a shape that Rig uses, and the sizes of a page."""

    name: str
    layers: int
    heads: int
    dim: int
    block_tokens: int
    blocks: int
    form: str = "mha"
    contexts: int = 1
    slots: int = 0
    span: int = 1

    @property
    def page_bytes(self) -> int:
        return self.heads * self.dim * self.block_tokens * ITEM_BYTES

    @property
    def block_bytes(self) -> int:
        return 2 * self.layers * self.page_bytes

    @property
    def k(self) -> tuple[int, ...]:
        return (self.blocks, self.heads, self.dim // X, self.block_tokens, X)

    @property
    def v(self) -> tuple[int, ...]:
        return (self.blocks, self.heads, self.block_tokens // X, self.dim, X)


class DeviceMemory:
    """Like Memory of tests/atom_engine, but it counts wrong blocks instead of naming them: controls expect some."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.pools: list[Any] = []
        self.wrong_blocks = 0
        self.compared_blocks = 0

    # ---------------------------------------------------------------- Rig's interface

    def kv_caches(self) -> dict[str, Any]:
        self._kept = {  # references, because dropped tensors would be memory that ATOM gives back
            f"layer_{layer}": SimpleNamespace(
                layer_num=layer, k_cache=k, v_cache=v, k_scale=None, v_scale=None, index_cache=None
            )
            for layer, (k, v) in enumerate(self.tensors())
        }
        return self._kept

    def transfer_tensors(self) -> Any:
        return None

    def write(self, block_table: Sequence[int], tokens: Sequence[int], first: int, end: int) -> None:
        begin, behind = first // self.shape.block_tokens, -(-end // self.shape.block_tokens)
        self.fill(list(block_table[begin:behind]), self._seeds(tokens, behind)[begin:])

    def wrong(self, block_table: Sequence[int], tokens: Sequence[int], first: int, end: int) -> list[str]:
        begin, behind = first // self.shape.block_tokens, -(-end // self.shape.block_tokens)
        if begin < behind:
            self.wrong_blocks += self.differing(list(block_table[begin:behind]), self._seeds(tokens, behind)[begin:])
            self.compared_blocks += behind - begin
        return []

    def spoil(self, block: int) -> None:
        """Does nothing: freed blocks already have their poison."""

    def _seeds(self, tokens: Sequence[int], blocks: int) -> list[int]:
        chain, at, seeds = hashlib.sha256(), 0, []
        for block in range(blocks):
            behind = block * self.shape.block_tokens + 1
            chain.update(b"".join(token.to_bytes(4, "little") for token in tokens[at:behind]))
            at = behind
            seeds.append(int.from_bytes(chain.digest()[:4], "little", signed=True))
        return seeds

    # ---------------------------------------------------------------- device specific

    def tensors(self) -> list[tuple[Any, Any]]:
        """K and V of each layer."""
        raise NotImplementedError

    def fill(self, blocks: list[int], seeds: list[int]) -> None:
        raise NotImplementedError

    def differing(self, blocks: list[int], seeds: list[int]) -> int:
        """Number of blocks that do not hold the bytes of their seeds."""
        raise NotImplementedError

    def poison(self, blocks: list[int]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class TorchMemory(DeviceMemory):
    """Memory in torch tensors. All work is launched on torch's current stream, like a forward."""

    def __init__(self, shape: Shape) -> None:
        import torch  # noqa: PLC0415  (on GPUs only)

        super().__init__(shape)
        self._torch = torch
        self.delay_cycles = 0
        """Delay on the stream before a forward writes."""
        words = shape.page_bytes // 4
        self._pool = torch.full((2, shape.layers, shape.blocks, words), POISON, dtype=torch.int32, device="cuda")
        self._ramp = (torch.arange(2 * shape.layers * words, device="cuda") * 0x9E3779B1).to(torch.int32)
        self._ramp = self._ramp.view(2, shape.layers, 1, words)
        torch.cuda.synchronize()

    def tensors(self) -> list[tuple[Any, Any]]:
        typed, shape = self._pool.view(self._torch.bfloat16), self.shape
        return [(typed[0, layer].view(shape.k), typed[1, layer].view(shape.v)) for layer in range(shape.layers)]

    def fill(self, blocks: list[int], seeds: list[int]) -> None:
        at, content = self._on_gpu(blocks), self._content(seeds)  # a copy from the host waits for earlier launches
        if self.delay_cycles:
            self._torch.cuda._sleep(self.delay_cycles)
        self._pool[:, :, at] = content

    def differing(self, blocks: list[int], seeds: list[int]) -> int:
        wrong = self._pool[:, :, self._on_gpu(blocks)] != self._content(seeds)
        return int(wrong.any(dim=3).any(dim=1).any(dim=0).sum())

    def poison(self, blocks: list[int]) -> None:
        self._pool[:, :, self._on_gpu(blocks)] = POISON

    def close(self) -> None:
        self._torch.cuda.synchronize()

    def _content(self, seeds: list[int]) -> Any:
        return self._ramp + self._torch.tensor(seeds, dtype=self._torch.int32, device="cuda").view(1, 1, -1, 1)

    def _on_gpu(self, blocks: list[int]) -> Any:
        return self._torch.tensor(blocks, device="cuda")


class SimulatedMemory(DeviceMemory):
    """Memory of the simulated driver, which this process's environment selects as its libcuda."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self._driver = Driver("cuda", LIBRARY["cuda"])
        self._stream = self._driver.stream()
        size = shape.blocks * shape.block_bytes
        self.address, self.bytes = self._driver.alloc(size), size
        self._bytes = self._driver.host(self.address, size)
        self.poison(list(range(shape.blocks)))

    def recorded_event(self) -> int:
        event = self._driver.event()
        self._driver.record(event, self._stream)
        return event

    def tensors(self) -> list[tuple[Any, Any]]:
        layer_bytes = self.shape.blocks * self.shape.page_bytes

        def tensor(part: str, layer: int, dims: tuple[int, ...]) -> Tensor:
            offset = layer * layer_bytes + (self.shape.layers * layer_bytes if part == "v_cache" else 0)
            return Tensor(self, self, offset, dims, item_bytes=ITEM_BYTES, part=part, layer=layer)

        return [
            (tensor("k_cache", layer, self.shape.k), tensor("v_cache", layer, self.shape.v))
            for layer in range(self.shape.layers)
        ]

    def fill(self, blocks: list[int], seeds: list[int]) -> None:
        for block, seed in zip(blocks, seeds, strict=True):
            content = self._content(seed)
            for begin, at in self._pages(block):
                self._bytes[begin : begin + self.shape.page_bytes] = content[at : at + self.shape.page_bytes]

    def differing(self, blocks: list[int], seeds: list[int]) -> int:
        return sum(self._differs(block, self._content(seed)) for block, seed in zip(blocks, seeds, strict=True))

    def poison(self, blocks: list[int]) -> None:
        for block in blocks:
            for begin, _ in self._pages(block):
                self._bytes[begin : begin + self.shape.page_bytes] = bytes([POISON]) * self.shape.page_bytes

    def close(self) -> None:
        """Does nothing: the end of the process frees it."""

    def _differs(self, block: int, content: bytes) -> bool:
        size = self.shape.page_bytes
        return any(self._bytes[begin : begin + size] != content[at : at + size] for begin, at in self._pages(block))

    def _pages(self, block: int) -> list[tuple[int, int]]:
        """(offset in the memory, offset in the block's content) of each of a block's pages."""
        size = self.shape.page_bytes
        return [((number * self.shape.blocks + block) * size, number * size) for number in range(2 * self.shape.layers)]

    def _content(self, seed: int) -> bytes:
        return random.Random(seed).randbytes(self.shape.block_bytes)
