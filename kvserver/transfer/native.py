"""The only door to the native data plane for the server: arena, ledger, copies. kvserver/_native.pyi is the manual."""

from array import array
from collections.abc import Iterable
from typing import Literal

from kvserver._native import (
    ABANDONED,
    BUILD,
    DONE,
    FAILED,
    FREE,
    LIVE,
    SLOT_ALIGN,
    SUBMITTED,
    ArenaGrower,
    Board,
    CopyEngine,
    DeviceEngine,
    DiskEngine,
    DiskStore,
    DiskTelling,
    DriverAbsent,
    DriverError,
    Ledger,
    Pattern,
    copy_seconds,
    create_memfd,
    cut_job,
    fill_pattern,
    free_huge_pages,
    plan_copies,
    plan_pieces,
    probe_driver,
)

__all__ = [
    "ABANDONED",
    "BUILD",
    "DONE",
    "FAILED",
    "FREE",
    "LIVE",
    "SLOT_ALIGN",
    "SUBMITTED",
    "ArenaGrower",
    "Board",
    "Completion",
    "CopyEngine",
    "DeviceEngine",
    "DiskEngine",
    "DiskStore",
    "DiskTelling",
    "DriverAbsent",
    "DriverError",
    "JobMode",
    "Ledger",
    "Pattern",
    "copy_seconds",
    "create_memfd",
    "cut_job",
    "fill_pattern",
    "free_huge_pages",
    "pack_block_ids",
    "pack_slots",
    "plan_copies",
    "plan_pieces",
    "probe_driver",
]

JobMode = Literal["direct", "staged", "server-gather"]
"""How the bytes of a job went; "direct" on the host."""

Status = Literal["done", "abandoned", "failed", "invalid", "unmapped", "mapped", "refused", "broken"]
Completion = tuple[int, Status, int, int, str, str, JobMode]
"""(job or cache, status, bytes, copy_ns, code, message, mode), as the engines' completions() return them."""


def pack_block_ids(block_ids: Iterable[int]) -> bytes:
    """Block ids as the data plane takes them: int32, little-endian like every machine that we run on."""
    return array("i", block_ids).tobytes()


def pack_slots(arena_offsets: Iterable[int]) -> bytes:
    """Arena offsets as the data plane takes them: int64; -1 = skip this chunk."""
    return array("q", arena_offsets).tobytes()
