"""kvclient: what an engine process uses of kvserver.

    from kvclient import Blocks, CacheSpec, Client, HostBuffer, RegionRun, chunk_keys, full_group, namespace_digest

    client = Client("/run/kvserver/kvserver.sock")
    namespace = namespace_digest({"model": model_digest, "dtype": "bfloat16", "block_tokens": 16, "chunk_tokens": 256})
    pages = RegionRun(0, 0, layers, layer_bytes, block_bytes, block_bytes)  # buffer, offset, regions, strides, page
    group = full_group(block_tokens=16, blocks=blocks, regions=[pages])
    cache = client.register_cache(CacheSpec(name="kv", namespace=namespace, chunk_tokens=256,
                                            buffers=[HostBuffer(memfd, pool_bytes)], groups=[group]))
    keys = chunk_keys(token_ids, 256)
    found = client.lookup(namespace, keys)                                            # a miss when there is no server
    if found.lease is not None:
        client.retrieve(cache, found.lease, [Blocks(0, 0, block_ids[: found.chunks * 16])]).result()
    client.store(cache, 0, b"", keys, [Blocks(0, 0, block_ids[: len(keys) // 32 * 16])]).result()     # whole chunks

The server may be absent, stop, hang or be replaced at any time: calls then miss, and the client connects and registers
again by itself. Futures complete in a background thread; their callbacks run there and must be short.
"""

from kvserver.errors import DeviceError, KvError, NativeModuleError, RequestError, ResourceError

try:
    import kvserver._native  # noqa: F401  (imported first, for a better error message)
except ImportError as error:
    raise NativeModuleError(
        "native-module",
        f"{error}; kvclient needs the compiled part of kvserver: install kvserver again in this environment "
        "(pip install --force-reinstall --no-deps kvserver); `kvserver doctor` says more",
    ) from error

from kvclient.client import Client
from kvclient.counters import Counters
from kvclient.keys import chunk_keys, key_from_text, key_to_text, keys_from_block_hashes, namespace_digest
from kvclient.sequences import Sequences
from kvclient.transport.caches import Cache
from kvclient.values import (
    Blocks,
    CacheSpec,
    DeviceBuffer,
    Found,
    HostBuffer,
    Lease,
    PledgeResult,
    RetrieveResult,
    StoreResult,
    TensorBuffer,
    Timeouts,
    full_group,
)
from kvserver.wire.messages import GroupSpec, RegionRun

__all__ = [
    "Blocks",
    "Cache",
    "CacheSpec",
    "Client",
    "Counters",
    "DeviceBuffer",
    "DeviceError",
    "Found",
    "GroupSpec",
    "HostBuffer",
    "KvError",
    "Lease",
    "NativeModuleError",
    "PledgeResult",
    "RegionRun",
    "RequestError",
    "ResourceError",
    "RetrieveResult",
    "Sequences",
    "StoreResult",
    "TensorBuffer",
    "Timeouts",
    "chunk_keys",
    "full_group",
    "key_from_text",
    "key_to_text",
    "keys_from_block_hashes",
    "namespace_digest",
]
