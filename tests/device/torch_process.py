"""An engine in its own process whose KV cache is torch tensors, on any device that torch supports: portable.

Other engines must be able to retrieve its chunks, and the reverse: kernels are checked against it. `python -m
tests.device.torch_process FD OPTIONS` is the process; it ends when its pipe closes.
"""

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from kvclient import CacheSpec, TensorBuffer
from tests.device.engine_process import Remote, main
from tests.device.shapes import SHAPES, Shape
from tests.gpu.engine_process import large_cache, small_cache
from tests.gpu.plain_driver import DeviceView


class Allocations:
    """Replaces a driver: memory is torch's."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._tensors: dict[int, torch.Tensor] = {}

    def alloc(self, size: int) -> int:
        made = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._tensors[made.data_ptr()] = made
        return made.data_ptr()

    def free(self, address: int) -> None:
        del self._tensors[address]

    def tensor(self, address: int, size: int) -> torch.Tensor:
        """A view of the memory at an address."""
        base = max(start for start in self._tensors if start <= address)
        return self._tensors[base][address - base : address - base + size]

    def host(self, address: int, size: int) -> Any:
        if self._device == "cpu":
            return memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")
        return DeviceView(self, address, size)

    def write(self, address: int, content: bytes) -> None:
        if content:
            self.tensor(address, len(content)).copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))

    def read(self, address: int, size: int) -> bytes:
        here = self.tensor(address, size).cpu().contiguous()
        return ctypes.string_at(here.data_ptr(), size)


class TorchRemote(Remote):
    """The methods that can be called through the pipe."""

    SHAPES: ClassVar[Mapping[str, Callable[[], Shape]]] = {
        **SHAPES,
        "large_cache": large_cache,
        "small_cache": small_cache,
    }
    driver: Any

    def __init__(self, *, torch_device: str = "cpu", **options: Any) -> None:
        self.DRIVER = lambda *_: Allocations(torch_device)  # type: ignore[assignment,misc]
        super().__init__(**options)

    def _as_told(self, spec: CacheSpec) -> CacheSpec:
        tensors = [TensorBuffer(self.driver.tensor(*buffer)) for buffer in spec.buffers]
        return replace(spec, device="portable", library="", mode="", buffers=tensors)


if __name__ == "__main__":
    main(TorchRemote)
