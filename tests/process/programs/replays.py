"""Replays that are small enough for a test."""

from dataclasses import replace

from benchmarks.replay.options import Arm, ReplayOptions

SMALL = ReplayOptions(
    requests=150,
    users=5,
    context_tokens_max=60_000,
    regions=2,
    page_bytes=64,
    pool_tokens=70_000,
    arena_bytes=16 << 20,
    arms=(Arm("+ DRAM"),),
    stall_s_max=40.0,
)
DISK_FLAGS = ("--disk-bytes", "40MiB", "--disk-segment-bytes", "1MiB")
TOO_SMALL = replace(SMALL, page_bytes=512, arena_bytes=1 << 20, arms=(Arm("+ DRAM"), Arm("+ DRAM + NVMe", DISK_FLAGS)))
"""A chunk is a page, a token 16 bytes: the arena holds one long prompt, the disk everything."""
