"""A pool of GPU memory for benchmarks that run on host memory as well."""

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
        """Bytes of `targets` that are not what `sources` held when the pool was filled."""
        to, source = (torch.tensor(blocks, device="cuda") for blocks in (targets, sources))
        return sum(int((self.memory[region, to] != self.truth[region, source]).sum()) for region in range(self.regions))

    def close(self) -> None:
        """The memory goes with this object."""
