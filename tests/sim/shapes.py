"""Geometries of the simulated engines: tiny, odd, pairwise different, chunk != block, with slots of several sizes."""

import math
from collections import Counter
from dataclasses import dataclass, replace

from kvserver.tiers.slots import SLOT_ALIGN
from kvserver.wire.messages import HANDLE_BYTES, Buffer, DeviceKind, GroupSpec, Kind, RegionRun, Register, Staging

from .tenants import tenant_of


@dataclass(frozen=True)
class GroupShape:
    """One group, held by shards * writers ranks."""

    block_tokens: int
    kind: Kind
    window_tokens: int
    shards: int
    writers: int
    regions: int
    page_bytes: tuple[int, ...]
    """Page bytes of each shard; pipeline stages differ."""


@dataclass(frozen=True)
class Shape:
    name: str
    chunk_tokens: int
    ranks: int
    groups: tuple[GroupShape, ...]
    device: DeviceKind = "host"
    """Engines on a GPU use mode staged."""

    @property
    def descriptors(self) -> int:
        """Descriptors offered with a registration: one buffer for each group, or the ring."""
        return len(self.groups) if self.device == "host" else 1

    def device_id(self, rank: int) -> str:
        """The device id of a rank. The ranks of an engine share two GPUs."""
        return "" if self.device == "host" else f"{rank % 2:032x}@0000:{rank % 2:02x}:00.0"

    def blocks_per_chunk(self, group: int) -> int:
        return self.chunk_tokens // self.groups[group].block_tokens

    def shard_of(self, group: int, rank: int) -> int:
        return max(rank, 0) // self.groups[group].writers

    def writer_of(self, group: int, rank: int) -> int:
        return max(rank, 0) % self.groups[group].writers

    def held_by(self, times: int) -> "Shape":
        """The same chunks in an engine of another size: each shard of the least shared group is on `times` ranks."""
        fewest = math.gcd(*(group.writers for group in self.groups))
        groups = tuple(replace(group, writers=group.writers // fewest * times) for group in self.groups)
        return replace(self, ranks=self.ranks // fewest * times, groups=groups)

    def slot_bytes(self, group: int, shard: int) -> int:
        shape = self.groups[group]
        payload = self.blocks_per_chunk(group) * shape.regions * shape.page_bytes[shard]
        return -(-payload // SLOT_ALIGN) * SLOT_ALIGN

    def parts(self) -> list[tuple[int, int]]:
        """(group, shard) of each part of a chunk."""
        return [(group, shard) for group, shape in enumerate(self.groups) for shard in range(shape.shards)]

    def chunk_units(self) -> int:
        """Slot units of one chunk with all groups and shards."""
        return sum(self.slot_bytes(*part) for part in self.parts()) // SLOT_ALIGN

    def slot_units_max(self) -> int:
        return max(self.slot_bytes(*part) for part in self.parts()) // SLOT_ALIGN

    def chunk_slabs(self, slab_units: int) -> int:
        """Slabs that one chunk fills. Each slab holds slots of one size."""
        sizes = Counter(self.slot_bytes(*part) // SLOT_ALIGN for part in self.parts())
        return sum(-(-count // (slab_units // units)) for units, count in sizes.items())


def _group(
    block_tokens: int, kind: Kind, shards: int, regions: int, *page_bytes: int, window: int = 0, writers: int = 1
) -> GroupShape:
    pages = page_bytes if len(page_bytes) == shards else page_bytes * shards
    assert len(pages) == shards
    return GroupShape(block_tokens, kind, window, shards, writers, regions, pages)


SHAPES = (
    Shape("full", 6, 2, (_group(3, "full", 2, 2, 700),)),
    Shape("full-window", 15, 2, (_group(3, "full", 2, 2, 800), _group(5, "window", 2, 1, 1300, window=16))),
    Shape(
        "full-window-state",
        6,
        1,
        (_group(2, "full", 1, 3, 300), _group(3, "window", 1, 1, 1900, window=12), _group(6, "state", 1, 1, 9001)),
    ),
    Shape(
        "window-state", 10, 2, (_group(5, "window", 1, 2, 511, window=11, writers=2), _group(10, "state", 2, 1, 6007))
    ),
    Shape("replicated", 6, 3, (_group(2, "full", 1, 5, 401, writers=3),)),
    Shape(
        "grid", 9, 4, (_group(3, "full", 4, 3, 301, 302, 605, 607), _group(9, "full", 2, 1, 1009, writers=2)), "cuda"
    ),
    Shape("window", 6, 1, (_group(2, "window", 1, 1, 211, window=13),)),
)
OF_SEVERAL_SIZES = (
    Shape("one-unit", 6, 1, (_group(3, "full", 1, 1, 1501),)),
    Shape("two-units", 4, 1, (_group(2, "full", 1, 1, 3001),)),
    Shape("three-units", 9, 1, (_group(3, "full", 1, 1, 4003),)),
)
"""Shapes with one rank and records of one size, so that much is stored in a short time."""


def register_frame(
    shape: Shape, rank: int, *, request_id: int, name: str, digest: bytes, blocks: int, descriptors: list[int]
) -> Register:
    """A Register with one buffer for each group, and one run of regions for each buffer."""
    on_host = shape.device == "host"
    buffers, groups = [], []
    for index, group in enumerate(shape.groups):
        shard = shape.shard_of(index, rank)
        page = group.page_bytes[shard]
        region_stride = blocks * page + 7
        run = RegionRun(index, 5, group.regions, region_stride, page, page)
        bytes_needed = 5 + group.regions * region_stride
        buffers.append(
            Buffer(descriptors[index], b"", bytes_needed)
            if on_host
            else Buffer(-1, bytes([index]) * HANDLE_BYTES, bytes_needed)
        )
        groups.append(
            GroupSpec(
                group.block_tokens,
                blocks,
                group.kind,
                group.window_tokens,
                group.shards,
                shard,
                group.writers,
                shape.writer_of(index, rank),
                [run],
            )
        )
    return Register(
        request_id,
        name,
        digest,
        shape.chunk_tokens,
        shape.device,
        shape.device_id(rank),
        "",
        "direct" if on_host else "staged",
        tenant_of(digest),
        buffers,
        groups,
        [] if on_host else [Staging(bytes(HANDLE_BYTES), 1 << 20, descriptors[0])],
        0,
        f"model {digest[0] % 3}",
    )
