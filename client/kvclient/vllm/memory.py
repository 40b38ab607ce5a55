"""KV memory of a CPU engine, allocated as memfds that the server can map. No copies, and nothing outlives the engine.

vLLM allocates a worker's KV cache by torch.zeros(bytes, dtype=int8): once since 0.29, before that once per layer or
once per several layers. This context answers these calls with memfds that can neither shrink nor grow.
"""

import fcntl
import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kvclient.values import HostBuffer


class SharedZeros(TorchFunctionMode):
    """The context around the allocation. Owns the descriptors; the tensors own the mappings."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """sizes: bytes of each allocation that makes up the KV cache."""
        super().__init__()
        self.made: dict[int, HostBuffer] = {}
        """Address -> allocation."""
        self._left = Counter(sizes)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        is_bytes = func is torch.zeros and options.get("dtype") is torch.int8
        if is_bytes and args and isinstance(args[0], int) and self._left[args[0]] > 0:
            return self._allocate(args[0])
        return func(*args, **options)

    def _allocate(self, bytes_: int) -> torch.Tensor:
        self._left[bytes_] -= 1
        descriptor = os.memfd_create("kvserver-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, bytes_)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        path = f"/proc/self/fd/{descriptor}"
        made = torch.from_file(path, shared=True, size=bytes_, dtype=torch.int8)
        made.zero_()  # as torch.zeros() does: otherwise requests pay for the page faults, on each page's first use
        self.made[made.untyped_storage().data_ptr()] = HostBuffer(descriptor, bytes_)
        return made
