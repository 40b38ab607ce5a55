"""KV memory of a CPU engine, born where the server can reach it: no copy, and nothing that outlives the engine.

vLLM allocates the KV cache of a worker by torch.zeros(bytes, dtype=int8): once from 0.29 on, in releases before once a
layer or once for several. In this context these calls are answered with memfds that can neither shrink nor grow.
"""

import fcntl
import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode


class Made(NamedTuple):
    """One allocation."""

    descriptor: int
    bytes: int


class SharedZeros(TorchFunctionMode):
    """The context. Owns the descriptors; the mappings belong to the tensors."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """sizes: of the allocations that make up the KV cache, in bytes."""
        super().__init__()
        self.made: dict[int, Made] = {}
        """By address."""
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
        made.zero_()  # as torch.zeros() does: otherwise requests pay for the pages, each on its first use
        self.made[made.untyped_storage().data_ptr()] = Made(descriptor, bytes_)
        return made
