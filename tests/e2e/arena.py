"""Stored bytes, changed behind the server's back: the control that shows that a comparison of outputs can fail."""

import mmap
import os
from contextlib import suppress
from pathlib import Path

FLIP = bytes(byte ^ 0x21 for byte in range(256))


def flip_stored_bytes(mover_pid: int) -> int:
    """XORs every byte of the arena that a mover has mapped; a second call restores them. Returns how many."""
    for link in Path(f"/proc/{mover_pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            if "memfd:kvserver-arena" in os.readlink(link):
                return _flip(link)
    raise AssertionError(f"mover {mover_pid} has no arena")


def _flip(link: Path) -> int:
    with link.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        step = 1 << 20
        for start in range(0, len(memory), step):
            memory[start : start + step] = memory[start : start + step].translate(FLIP)
        return len(memory)
