"""The stored bytes, looked at and changed without the server's knowledge. Changed bytes are a control which shows that
comparing outputs can fail."""

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
    with _arena(mover_pid) as memory:
        for start in _starts(memory, slots):
            end = start + slots.slot_bytes
            memory[start + slots.first : end] = memory[start + slots.first : end].translate(FLIP)


def stored_slots(mover_pid: int, slots: Slots) -> dict[int, bytes]:
    """Offset -> bytes of the slots in which something was ever stored, if all slots have one size."""
    with _arena(mover_pid) as memory:
        held = {start: memory[start + slots.first : start + slots.slot_bytes] for start in _starts(memory, slots)}
    return {start: data for start, data in held.items() if data.strip(b"\0")}


def _starts(memory: mmap.mmap, slots: Slots) -> Iterator[int]:
    for slab in range(0, len(memory), slots.slab_bytes):
        yield from range(slab, slab + slots.slab_bytes - slots.slot_bytes + 1, slots.slot_bytes)


@contextmanager
def _arena(mover_pid: int) -> Iterator[mmap.mmap]:
    for link in Path(f"/proc/{mover_pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            if "memfd:kvserver-arena" in os.readlink(link):
                with link.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
                    yield memory
                return
    raise AssertionError(f"mover {mover_pid} has no arena")
