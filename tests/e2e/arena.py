"""Corrupts stored bytes without the server's knowledge: a control which shows that comparing outputs can fail."""

import mmap
import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

FLIP = bytes(byte ^ 0x21 for byte in range(256))


class Slots(NamedTuple):
    """Slots of one size, in slabs that hold as many as fit."""

    slab_bytes: int
    slot_bytes: int
    first: int
    """Bytes at the start of each slot that stay unchanged."""


ALL = Slots(1 << 20, 1 << 20, 0)


def flip_stored_bytes(mover_pid: int, slots: Slots = ALL) -> None:
    """XORs bytes of the arena that a mover has mapped; a second call restores them."""
    for link in Path(f"/proc/{mover_pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            if "memfd:kvserver-arena" in os.readlink(link):
                return _flip(link, slots)
    raise AssertionError(f"mover {mover_pid} has no arena")


def _flip(link: Path, slots: Slots) -> None:
    with link.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        for slab in range(0, len(memory), slots.slab_bytes):
            for slot in range(slab, slab + slots.slab_bytes - slots.slot_bytes + 1, slots.slot_bytes):
                start, end = slot + slots.first, slot + slots.slot_bytes
                memory[start:end] = memory[start:end].translate(FLIP)
