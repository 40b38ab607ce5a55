"""Tensors with only a shape, strides and an address, and layers that keep further tensors beside their KV cache."""

import itertools
import math
from types import SimpleNamespace
from typing import Any, NamedTuple

_addresses = itertools.count(1 << 40, 1 << 30)


class Storage(NamedTuple):
    address: int
    bytes: int

    def data_ptr(self) -> int:
        return self.address

    def nbytes(self) -> int:
        return self.bytes


class Tensor:
    """A dense tensor, with its own memory unless a storage is given."""

    def __init__(
        self, *shape: int, item_bytes: int = 4, device: str = "cuda:0", storage: Storage | None = None, offset: int = 0
    ) -> None:
        self.shape, self.device, self._item_bytes, self._offset = shape, device, item_bytes, offset
        self.dtype = f"float{8 * item_bytes}"
        self._storage = storage or Storage(next(_addresses), math.prod(shape) * item_bytes)

    def stride(self) -> tuple[int, ...]:
        return tuple(math.prod(self.shape[place + 1 :]) for place in range(len(self.shape)))

    def element_size(self) -> int:
        return self._item_bytes

    def data_ptr(self) -> int:
        return self._storage.address + self._offset

    def untyped_storage(self) -> Storage:
        return self._storage

    def __getitem__(self, place: int) -> "Tensor":
        bytes_ = math.prod(self.shape[1:]) * self._item_bytes
        return Tensor(
            *self.shape[1:],
            item_bytes=self._item_bytes,
            device=self.device,
            storage=self._storage,
            offset=self._offset + place * bytes_,
        )


class Layer(SimpleNamespace):
    """An attention layer of vLLM, and the values that it computes with."""

    def __init__(self, **more: Any) -> None:
        super().__init__(kv_cache=Tensor(0), impl=SimpleNamespace(), **more)

    def get_attn_backend(self) -> object:
        return object


class AtomLayer:
    """AttentionForVllmMHA of ATOM's plug-in: its scales are made in the first forward pass that computes something."""

    __module__ = "atom.plugin.vllm.attention.layer_mha"

    def __init__(self, kv_cache_dtype: str = "fp8") -> None:
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_cache = Tensor(0)
        self.kv_scale: Any = Tensor()
        self.k_scale: Any = None
        self.v_scale: Any = None

    @property
    def impl(self) -> "AtomLayer":
        return self

    def get_attn_backend(self) -> object:
        return object

    def forward(self, scales: Any = None) -> None:
        """scales: used in place of those that it would allocate."""
        _, blocks, tokens, heads, _ = self.kv_cache.shape
        if self.kv_cache_dtype == "fp8" and self.k_scale is None:
            self.kv_scale = Tensor(2, blocks, heads, tokens) if scales is None else scales
            self.k_scale, self.v_scale = self.kv_scale[0], self.kv_scale[1]
