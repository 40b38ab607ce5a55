"""Stored bytes, changed behind the server's back: the control that shows that a comparison of outputs can fail."""

import mmap
import os
from contextlib import suppress
from pathlib import Path

FLIP = bytes(byte ^ 0x21 for byte in range(256))


def flip_stored_bytes(mover_pid: int, *, slot_bytes: int = 1 << 20, first: int = 0) -> None:
    """XORs every byte of the arena that a mover has mapped; a second call restores them.

    first: leaves that many at the begin of each slot as they are, where all chunks have slots of slot_bytes."""
    for link in Path(f"/proc/{mover_pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            if "memfd:kvserver-arena" in os.readlink(link):
                return _flip(link, slot_bytes, first)
    raise AssertionError(f"mover {mover_pid} has no arena")


def _flip(link: Path, slot_bytes: int, first: int) -> None:
    with link.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        for start in range(first, len(memory), slot_bytes):
            end = start - first + slot_bytes
            memory[start:end] = memory[start:end].translate(FLIP)
