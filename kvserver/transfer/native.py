"""The only door to the native data plane for the server: arena, ledger, copies. kvserver/_native.pyi is the manual.

Bare tuples cross the door. Here they become named records, and named records are made of the brain's orders.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from msgspec.structs import astuple

from kvserver._native import (
    ABANDONED,
    BUILD,
    DIGEST_PAYLOAD_BYTES_MAX,
    DONE,
    FAILED,
    FREE,
    LIVE,
    NO_DIGEST,
    SLOT_ALIGN,
    SUBMITTED,
    ArenaGrower,
    Board,
    CopyEngine,
    DeviceEngine,
    DiskEngine,
    DiskStore,
    DriverAbsent,
    DriverError,
    Ledger,
    Marker,
    MarkTable,
    Pattern,
    RecoveryOrder,
    Scrubber,
    add_digest_sums,
    copy_seconds,
    create_memfd,
    cut_job,
    digest_copy,
    digest_sum,
    fill_pattern,
    free_huge_pages,
    is_dax,
    payload_digest,
    plan_pieces,
    probe_driver,
)
from kvserver.wire.messages import RegionRun
from kvserver.wire.orders import Copy, MapCache

__all__ = [
    "ABANDONED",
    "BUILD",
    "DIGEST_PAYLOAD_BYTES_MAX",
    "DONE",
    "FAILED",
    "FREE",
    "LIVE",
    "NO_DIGEST",
    "SLOT_ALIGN",
    "SUBMITTED",
    "ArenaGrower",
    "Board",
    "Completion",
    "CopyEngine",
    "CopyGroup",
    "DeviceEngine",
    "DiskEngine",
    "DiskStore",
    "DriverAbsent",
    "DriverError",
    "Group",
    "JobMode",
    "Ledger",
    "MarkTable",
    "Marker",
    "Measured",
    "Pattern",
    "RecoveryOrder",
    "Run",
    "Scrubber",
    "add_digest_sums",
    "completions",
    "copy_groups",
    "copy_seconds",
    "create_memfd",
    "cut_job",
    "digest_copy",
    "digest_sum",
    "fill_pattern",
    "free_huge_pages",
    "groups",
    "is_dax",
    "pack_block_ids",
    "pack_slots",
    "payload_digest",
    "plan_pieces",
    "probe_driver",
]

JobMode = Literal["direct", "staged", "server-gather"]
"""How the bytes of a job went; "direct" on the host."""

Status = Literal["done", "abandoned", "failed", "invalid", "unmapped", "mapped", "refused", "broken"]


Packed = bytes


class Run(NamedTuple):
    """Equally spaced regions of one buffer, as wire.messages.RegionRun."""

    buffer: int
    offset: int
    regions: int
    region_stride: int
    block_stride: int
    page_bytes: int


assert Run._fields == RegionRun.__struct_fields__


class Group(NamedTuple):
    """Layers of a cache that share block ids."""

    blocks_per_chunk: int
    blocks: int
    runs: Sequence[Run]


class CopyGroup(NamedTuple):
    """One group of a job, as wire.orders.CopyGroup."""

    group: int
    first_block: int
    block_ids: bytes
    slots: bytes
    sums: bytes = b""
    """In a retrieve with digests: the sum of each slot's whole payload, packed u64; NO_DIGEST: not known."""


class Completion(NamedTuple):
    """The end of a job or of a mapping, as a copy engine reports it."""

    subject: int
    """The job; for "unmapped", "mapped" and "refused" the cache; 0 for "broken"."""
    status: Status
    bytes: int
    copy_ns: int
    code: str
    message: str
    mode: JobMode
    sums: Packed
    """With digests, of a store: the sum of each shard with a slot, packed u64, in the order of groups and slots."""
    wrong: list[int]
    """After a retrieve that failed as "digest": the shards with other bytes than were stored, in that order."""


class Measured(NamedTuple):
    """The link of a GPU: its rates, and the lengths from which copies are made without packing. 2**64 - 1: never."""

    store_gbps: float
    store_staged_bytes: int
    """For caches with staging."""
    store_bare_bytes: int
    """For caches without."""
    retrieve_gbps: float
    retrieve_staged_bytes: int
    retrieve_bare_bytes: int


def completions(engine: CopyEngine | DeviceEngine, most: int) -> list[Completion]:
    """The next completions, `most` at most."""
    return [Completion._make(end) for end in engine.completions(most)]


def groups(order: MapCache) -> list[Group]:
    """The groups of a cache that is to be mapped."""
    return [
        Group(
            blocks_per_chunk=order.chunk_tokens // group.block_tokens,
            blocks=group.blocks,
            runs=[Run._make(astuple(run)) for run in group.regions],
        )
        for group in order.groups
    ]


def copy_groups(order: Copy) -> list[CopyGroup]:
    """The groups of a job, without sums."""
    return [CopyGroup(group.group, group.first_block, group.block_ids, group.slots) for group in order.groups]


def pack_block_ids(block_ids: Iterable[int]) -> bytes:
    """Block ids as the data plane takes them: int32, little-endian like every machine that we run on."""
    return array("i", block_ids).tobytes()


def pack_slots(arena_offsets: Iterable[int]) -> bytes:
    """Arena offsets as the data plane takes them: int64; -1 = skip this chunk."""
    return array("q", arena_offsets).tobytes()
