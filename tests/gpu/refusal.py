"""Registers a tensor of torch and prints `taken` or the refusal; started with the allocator settings to try."""

import torch

from kvclient import CacheSpec, Client, DeviceBuffer, RegionRun, RequestError, full_group

PAGE_BYTES, BLOCKS = 4096, 4099


def main() -> None:
    """Needs no server: the engine's own process knows what can be exported."""
    memory = torch.zeros(PAGE_BYTES * BLOCKS, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    group = full_group(block_tokens=2, blocks=BLOCKS, regions=[RegionRun(0, 0, 1, 0, PAGE_BYTES, PAGE_BYTES)])
    spec = CacheSpec(
        name="kv",
        namespace=bytes(32),
        chunk_tokens=6,
        buffers=[DeviceBuffer(memory.data_ptr(), memory.nbytes)],
        groups=[group],
        device="cuda",
        mode="server-gather",
    )
    with Client("/tmp/no-such-server.sock", engine="refusal") as client:
        try:
            client.register_cache(spec)
        except RequestError as refusal:
            print(f"{refusal.code}: {refusal.message}")
        else:
            print("taken")


if __name__ == "__main__":
    main()
