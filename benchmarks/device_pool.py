"""A pool of GPU memory, for benchmarks that also run on host memory."""

import torch

from benchmarks import bench_copy


class DevicePool(bench_copy.Pool):
    def fill(self) -> None:
        self.memory.copy_(self.truth)
        torch.cuda.synchronize()

    def wipe(self) -> None:
        self.memory.zero_()
        torch.cuda.synchronize()

    def wrong(self, sources: list[int], targets: list[int]) -> int:
        """Number of bytes in `targets` that differ from the original content of `sources`."""
        to, source = (torch.tensor(blocks, device="cuda") for blocks in (targets, sources))
        return sum(int((self.memory[region, to] != self.truth[region, source]).sum()) for region in range(self.regions))

    def close(self) -> None:
        """Does nothing: the memory goes with this object."""
