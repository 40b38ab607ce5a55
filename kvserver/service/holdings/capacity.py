"""Estimates how much the arena could hold of one namespace that has it alone.

A slab serves slots of one size at a time, so slabs are counted for each size, not the sum of the bytes: two sizes need
two slabs, however small they are. Shards that nobody has registered yet have no size and are left out.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from kvserver.index.coverage import first_needed
from kvserver.index.space import Space


def prompt_slots(space: Space, slot_bytes: Sequence[int], chunks: int) -> Counter[int]:
    """Slot size -> slots that a prompt of this many chunks needs at least to be served whole.

    slot_bytes: for each part, 0 where it is not known."""
    slots: Counter[int] = Counter()
    for group in range(len(space.geometry.groups)):
        needed = chunks - first_needed(space, group, chunks)
        for part in space.group_parts(group):
            slots[slot_bytes[part]] += needed
    del slots[0]
    return slots


def slabs_for(slots: Mapping[int, int], slab_bytes: int) -> int:
    """Slabs that these slots fill, by slot size."""
    return sum(-(-count // (slab_bytes // size)) for size, count in slots.items())


def chunks_that_fit(slot_bytes: Sequence[int], *, slab_bytes: int, slabs: int) -> int:
    """Whole chunks, with all their parts, that fit in these slabs."""
    chunk = Counter(size for size in slot_bytes if size)
    low, high = 0, slabs * slab_bytes // max(1, chunk.total())
    while low < high:
        middle = (low + high + 1) // 2
        if slabs_for({size: middle * count for size, count in chunk.items()}, slab_bytes) <= slabs:
            low = middle
        else:
            high = middle - 1
    return low if chunk else 0
