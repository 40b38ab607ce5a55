"""Initial contents of the devices: chains of whole chunks, as left by an earlier life of the server.

A short seed stores little, and little of it leaves DRAM. With this start, most lookups need reads from disk.
"""

from random import Random

from kvserver.service.state.bounds import Bounds
from kvserver.service.state.clear_notes import GENERATIONS
from kvserver.tiers.extents import Extents, place_of, ranked
from kvserver.tiers.records import (
    DOCUMENT_FORMAT,
    NO_PARENT,
    NO_SUM,
    OWN_WRITERS,
    DiskRecord,
    GroupDocument,
    NamespaceDocument,
    encode_document,
)
from kvserver.wire.tenants import tag_of

from .content import Path, block_of, key_of
from .disk import Devices
from .shapes import Shape
from .sums import sum_of
from .tenants import tenant_of

PREFIXES = 5
"""Prefixes for each namespace."""


def leave_behind(
    devices: Devices, bounds: Bounds, shapes: dict[bytes, Shape], rng: Random, *, depth: int, fanout: int
) -> dict[bytes, list[Path]]:
    """Fills the devices. Returns namespace -> its prefixes."""
    extents: Extents[bytes] = Extents(
        devices=bounds.disk_devices, device_bytes=bounds.disk_device_bytes, segment_bytes=bounds.disk_segment_bytes
    )
    every = range(bounds.disk_devices)
    left: dict[bytes, list[Path]] = {}
    generation = 0
    for digest, shape in shapes.items():
        if all(group.kind != "full" for group in shape.groups):
            continue
        devices.note(every, digest, encode_document(_document(digest, shape)), 0)
        there: set[Path] = {()}
        for _ in range(PREFIXES):
            path = tuple(int(rng.random() * fanout) for _ in range(depth))
            for chunks in range(1, depth + 1):
                if path[:chunks] not in there:
                    generation += 1
                    if not _put(devices, extents, digest, shape, path[:chunks], generation=generation):
                        break
                    there.add(path[:chunks])
        left[digest] = sorted(there - {()})
    devices.note(every, GENERATIONS, b"", generation)
    return left


def _put(
    devices: Devices, extents: Extents[bytes], digest: bytes, shape: Shape, path: Path, *, generation: int
) -> bool:
    """Writes all shards of a chunk; False when there is no room for one of them."""
    key, parent = key_of(path), key_of(path[:-1]) or NO_PARENT
    device = ranked(key, range(len(extents.pools)))[0]
    tenant = tag_of(tenant_of(digest))
    records: list[DiskRecord] = []
    for index, group in enumerate(shape.groups):
        for shard in range(group.shards):
            extent_bytes = shape.slot_bytes(index, shard)
            extent = extents.allocate(device, extent_bytes, key) if extents.fits(extent_bytes) else None
            if extent is None:
                return False
            payload_bytes = shape.blocks_per_chunk(index) * group.regions * group.page_bytes[shard]
            what = digest, key, parent, index, shard, payload_bytes, tenant, extent_bytes, generation
            records.append(DiskRecord(-1, *what, NO_SUM, place_of(extent).offset, device, 0))
    for record in records:
        places = range(shape.blocks_per_chunk(record.group))
        blocks = [block_of(digest, key, record.group, record.shard, place) for place in places]
        devices.put(record, blocks, sum_of(blocks))
    return True


def _document(digest: bytes, shape: Shape) -> NamespaceDocument:
    groups = [
        GroupDocument(
            group.block_tokens,
            group.kind,
            group.window_tokens,
            group.shards,
            OWN_WRITERS,
            [[(group.regions, page_bytes)] for page_bytes in group.page_bytes],
        )
        for group in shape.groups
    ]
    return NamespaceDocument(DOCUMENT_FORMAT, digest, shape.chunk_tokens, groups)
