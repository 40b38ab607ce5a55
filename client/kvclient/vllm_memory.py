"""KV memory of a CPU engine, born where the server can reach it: no copy, and nothing that outlives the engine.

vLLM allocates the whole KV cache of a worker by one torch.zeros(bytes, dtype=int8) inside the context that a connector
may give. In this context that call is answered with a memfd that can neither shrink nor grow.
"""

import fcntl
import os
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class SharedZeros(TorchFunctionMode):
    """The context. Owns the descriptor; the mapping belongs to the tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.descriptor = -1
        self.bytes = 0
        self.address = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if func is torch.zeros and options.get("dtype") is torch.int8 and self.descriptor < 0:
            return self._allocate(int(args[0]))
        return func(*args, **options)

    def close(self) -> None:
        """The mapping stays for as long as its tensors do."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def _allocate(self, bytes_: int) -> torch.Tensor:
        self.descriptor = os.memfd_create("kvserver-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, bytes_)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        path = f"/proc/self/fd/{self.descriptor}"
        made = torch.from_file(path, shared=True, size=bytes_, dtype=torch.int8)
        made.zero_()  # as torch.zeros() does: otherwise requests pay for the pages, each on its first use
        self.bytes, self.address = bytes_, made.untyped_storage().data_ptr()
        return made
