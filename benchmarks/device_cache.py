"""Registers GPU memory of a benchmark's own engine as a cache of the server."""

from collections.abc import Sequence

from torch import Tensor

from kvclient import Cache, CacheSpec, Client, DeviceBuffer, full_group
from kvclient.memory.layouts import describe

REGISTER_S = 120.0


def register(
    client: Client,
    layers: Sequence[Tensor],
    *,
    namespace: bytes,
    blocks: int,
    block_dim: int,
    block_tokens: int,
    chunk_tokens: int,
    device: str = "cuda",
) -> Cache:
    """Registers all layers as one group of full attention."""
    described = describe(layers, blocks=blocks, block_dim=block_dim)
    cache = client.register_cache(
        CacheSpec(
            name="kv",
            namespace=namespace,
            chunk_tokens=chunk_tokens,
            buffers=[DeviceBuffer(*extent) for extent in described.extents],
            groups=[full_group(block_tokens=block_tokens, blocks=blocks, regions=described.regions)],
            device=device,
        )
    )
    if not cache.wait_registered(REGISTER_S):
        raise TimeoutError(f"{cache} was not registered within {REGISTER_S:g} s")
    return cache
