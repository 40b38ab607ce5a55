"""The bytes of the arena that are taken, and their owners.

The arena is a row of equal slabs. A slab serves slots of one size, so a slot never crosses a slab and there is no
fragmentation inside it; a slab that empties may serve another size next. A slot is named by its arena offset. Every
taken slot has an owner: the chunk that holds it, or the job that still moves bytes in it.

Pure bookkeeping: this module does not touch the arena and decides no eviction.
"""

from collections.abc import Callable, Iterator
from heapq import nsmallest
from typing import Generic, TypeVar

SLOT_ALIGN = 4096
"""Slots start and end at multiples of it: O_DIRECT needs that, and the ledger has one entry for each multiple."""

Owner = TypeVar("Owner")


def slot_bytes_for(shard_bytes: int) -> int:
    """The slot that holds a shard: rounded up to SLOT_ALIGN."""
    return -(-shard_bytes // SLOT_ALIGN) * SLOT_ALIGN


class _Slab(Generic[Owner]):
    __slots__ = ("free", "fresh", "index", "owners", "slot_bytes", "used")

    def __init__(self, index: int, slot_bytes: int, slots: int) -> None:
        self.index = index
        self.slot_bytes = slot_bytes
        self.used = 0
        self.fresh = 0
        """Positions from this one on were never taken."""
        self.free: dict[int, None] = {}
        """Positions below `fresh` that were given back, the last one last. restore() takes them from anywhere."""
        self.owners: list[Owner | None] = [None] * slots

    @property
    def full(self) -> bool:
        return self.used == len(self.owners)


class SlotPool(Generic[Owner]):
    """Slots of several sizes in one arena."""

    def __init__(self, arena_bytes: int, slab_bytes: int, slots_per_slab: Callable[[int], int] | None = None) -> None:
        """slots_per_slab: number of slots of a size in a slab; needed if slots do not get all bytes of a slab."""
        assert slab_bytes % SLOT_ALIGN == 0
        assert arena_bytes % slab_bytes == 0
        self.slab_bytes = slab_bytes
        self.slabs_total = arena_bytes // slab_bytes
        self.slots_per_slab = slots_per_slab or (lambda slot_bytes: slab_bytes // slot_bytes)
        self.slabs_ready = 0
        self.bytes_used = 0
        self._slabs: list[_Slab[Owner] | None] = [None] * self.slabs_total
        self._empty: dict[int, None] = {}
        """Ready slabs that serve no size; the last one is taken next."""
        self._open: dict[int, dict[int, _Slab[Owner]]] = {}
        """slot_bytes -> slabs with a free slot, by index."""
        self._closed: dict[int, int] = {}
        """Slabs that are being emptied and give no slot -> the slot size that they will serve then."""
        self._free: dict[int, int] = {}
        """slot_bytes -> free slots in slabs of that size, closed slabs included."""

    def grow(self, slabs_ready: int) -> None:
        """Makes the first `slabs_ready` slabs usable."""
        assert self.slabs_ready <= slabs_ready <= self.slabs_total
        fresh = [index for index in range(self.slabs_ready, slabs_ready) if self._slabs[index] is None]
        self._empty.update(dict.fromkeys(reversed(fresh)))
        self.slabs_ready = slabs_ready

    def allocate(self, slot_bytes: int, owner: Owner) -> int | None:
        """Takes a slot for `owner` and returns its offset; None when none of that size is free."""
        slabs = self._open.get(slot_bytes)
        if slabs:
            slab = next(iter(slabs.values()))
        elif (index := self._emptied_for(slot_bytes)) is not None:
            del self._closed[index]
            slab = self._start(index, slot_bytes)
        elif self._empty:
            slab = self._start(self._empty.popitem()[0], slot_bytes)
        else:
            return None
        if slab.free:
            position, _ = slab.free.popitem()
        else:
            position = slab.fresh
            slab.fresh += 1
        assert slab.owners[position] is None
        slab.owners[position] = owner
        slab.used += 1
        self._free[slot_bytes] -= 1
        self.bytes_used += slot_bytes
        if slab.full:
            del self._open[slot_bytes][slab.index]
        return slab.index * self.slab_bytes + position * slot_bytes

    def free(self, offset: int) -> None:
        """Frees a slot. An emptied slab may serve another size."""
        slab, position = self._find(offset)
        assert slab.owners[position] is not None
        slab.owners[position] = None
        slab.free[position] = None
        closed = slab.index in self._closed
        if slab.full and not closed:
            self._open.setdefault(slab.slot_bytes, {})[slab.index] = slab
        slab.used -= 1
        self._free[slab.slot_bytes] += 1
        self.bytes_used -= slab.slot_bytes
        if slab.used == 0:
            self._slabs[slab.index] = None
            self._free[slab.slot_bytes] -= len(slab.owners)
            if not closed:
                del self._open[slab.slot_bytes][slab.index]
                if slab.index < self.slabs_ready:
                    self._empty[slab.index] = None

    def hand_over(self, offset: int, owner: Owner) -> None:
        """Gives the slot to another owner."""
        slab, position = self._find(offset)
        assert slab.owners[position] is not None
        slab.owners[position] = owner

    def owner(self, offset: int) -> Owner:
        slab, position = self._find(offset)
        owner = slab.owners[position]
        assert owner is not None
        return owner

    def slot_bytes(self, offset: int) -> int:
        """Bytes of a taken slot."""
        return self._find(offset)[0].slot_bytes

    def restore(self, offset: int, slot_bytes: int, owner: Owner) -> bool:
        """Takes exactly this slot while the pool is rebuilt. False when it collides with slots restored before."""
        index = offset // self.slab_bytes
        position, rest = divmod(offset % self.slab_bytes, slot_bytes)
        if rest or index >= self.slabs_total:
            return False
        slab = self._slabs[index]
        if position >= (self.slots_per_slab(slot_bytes) if slab is None else len(slab.owners)):
            return False
        if slab is None:
            if index < self.slabs_ready:
                del self._empty[index]
            slab = self._start(index, slot_bytes)
        if slab.slot_bytes != slot_bytes or slab.owners[position] is not None:
            return False
        if position >= slab.fresh:
            slab.free.update(dict.fromkeys(range(slab.fresh, position)))
            slab.fresh = position + 1
        else:
            del slab.free[position]
        slab.owners[position] = owner
        slab.used += 1
        self._free[slot_bytes] -= 1
        self.bytes_used += slot_bytes
        if slab.full:
            del self._open[slot_bytes][index]
        return True

    @property
    def slabs_empty(self) -> int:
        """Ready slabs that serve no size and wait for none."""
        return len(self._empty)

    def has_room(self, slot_bytes: int) -> bool:
        return bool(self._empty) or bool(self._open.get(slot_bytes)) or self._emptied_for(slot_bytes) is not None

    # ---------------------------------------------------------------- slabs that change their size

    def close(self, slab_index: int, for_bytes: int) -> None:
        """Closes a slab: it gives no slot. When it is empty, it serves only slots of that size."""
        slab = self._slabs[slab_index]
        assert slab is not None
        assert slab_index not in self._closed
        self._closed[slab_index] = for_bytes
        if not slab.full:
            del self._open[slab.slot_bytes][slab_index]

    def reopen(self, slab_index: int) -> None:
        """Opens a closed slab again. An open one stays as it is."""
        if self._closed.pop(slab_index, None) is None:
            return
        slab = self._slabs[slab_index]
        if slab is None:
            self._empty[slab_index] = None
        elif not slab.full:
            self._open.setdefault(slab.slot_bytes, {})[slab_index] = slab

    def is_closed(self, slab_index: int) -> bool:
        return slab_index in self._closed

    def slab_slot_bytes(self, slab_index: int) -> int:
        """The size that a slab serves; 0: none yet."""
        slab = self._slabs[slab_index]
        return 0 if slab is None else slab.slot_bytes

    def spare(self, slab_index: int) -> int:
        """Slots that other slabs can give, beyond those that the slots taken in this one would need there."""
        slab = self._slabs[slab_index]
        if slab is None:
            return 0
        return self._free[slab.slot_bytes] + (len(self._empty) - 1) * len(slab.owners)

    def nearly_full(self, slot_bytes: int, share: int) -> bool:
        """Fewer slots of this size can be had at once than this part (1 / share) of a slab's."""
        if self._empty or self._emptied_for(slot_bytes) is not None:
            return False
        return self._free.get(slot_bytes, 0) * share < self.slots_per_slab(slot_bytes)

    def movable(self, slot_bytes: int, most: int) -> list[int]:
        """Slabs of other sizes whose slots would all find a place in other slabs of their size, the emptiest first."""
        sizes = {
            size
            for size, free in self._free.items()
            if size != slot_bytes and free and free >= self.slots_per_slab(size)
        }
        if not sizes:
            return []
        slabs = (slab for slab in self._slabs if slab and slab.slot_bytes in sizes and slab.index not in self._closed)
        return [slab.index for slab in nsmallest(most, slabs, key=lambda slab: slab.used * slab.slot_bytes)]

    def _emptied_for(self, slot_bytes: int) -> int | None:
        """A closed slab that is empty and shall serve this size."""
        for index, size in self._closed.items():
            if size == slot_bytes and self._slabs[index] is None:
                return index
        return None

    # ---------------------------------------------------------------- what there is

    def slabs_of_other_sizes(self, slot_bytes: int) -> Iterator[int]:
        """Slabs that serve another size, for taking one over."""
        return (slab.index for slab in self._slabs if slab is not None and slab.slot_bytes != slot_bytes)

    def emptiest_of_other_sizes(self, slot_bytes: int, most: int) -> list[int]:
        """The slabs that serve another size and have the fewest bytes taken."""
        others = (slab for slab in self._slabs if slab is not None and slab.slot_bytes != slot_bytes)
        emptiest = nsmallest(most, others, key=lambda slab: slab.used * slab.slot_bytes)
        return [slab.index for slab in emptiest]

    def owners_of_size(self, slot_bytes: int) -> Iterator[Owner]:
        """The owner of each slot of this size."""
        for slab in self._slabs:
            if slab is not None and slab.slot_bytes == slot_bytes:
                yield from (owner for owner in slab.owners if owner is not None)

    def slab_owners(self, slab_index: int) -> list[Owner]:
        slab = self._slabs[slab_index]
        return [] if slab is None else [owner for owner in slab.owners if owner is not None]

    def taken(self) -> Iterator[tuple[int, int, Owner]]:
        """(offset, slot_bytes, owner) of every slot that is taken."""
        for slab in self._slabs:
            if slab is None:
                continue
            for position, owner in enumerate(slab.owners):
                if owner is not None:
                    yield slab.index * self.slab_bytes + position * slab.slot_bytes, slab.slot_bytes, owner

    def places(self, offset: int) -> Iterator[tuple[int, int, Owner | None]]:
        """(offset, bytes, owner) of each slot from this offset on. A slab that serves no size counts as a free slot."""
        for index in range(offset // self.slab_bytes, self.slabs_total):
            start, slab = index * self.slab_bytes, self._slabs[index]
            if slab is None:
                yield start, self.slab_bytes, None
                continue
            before = -(-max(0, offset - start) // slab.slot_bytes)
            for position in range(before, len(slab.owners)):
                yield start + position * slab.slot_bytes, slab.slot_bytes, slab.owners[position]

    def usage(self) -> dict[int, tuple[int, int]]:
        """slot_bytes -> (slots taken, slabs)."""
        usage: dict[int, tuple[int, int]] = {}
        for slab in self._slabs:
            if slab is not None:
                slots, slabs = usage.get(slab.slot_bytes, (0, 0))
                usage[slab.slot_bytes] = (slots + slab.used, slabs + 1)
        return usage

    def check(self) -> None:
        """Asserts that the counts and the lists of free places agree with the owners."""
        for index, slab in enumerate(self._slabs):
            if slab is None:
                continue
            assert slab.index == index
            assert slab.used == sum(owner is not None for owner in slab.owners) > 0
            assert slab.used + len(slab.free) == slab.fresh
            assert all(slab.owners[position] is None for position in slab.free)
            assert slab.full or (index in self._open.get(slab.slot_bytes, {})) != (index in self._closed)
            assert not (slab.full and index in self._open.get(slab.slot_bytes, {}))
        empty = sorted(self._empty.keys() | {index for index in self._closed if self._slabs[index] is None})
        assert empty == [i for i in range(self.slabs_ready) if self._slabs[i] is None]
        for slot_bytes, free in self._free.items():
            of_size = [slab for slab in self._slabs if slab is not None and slab.slot_bytes == slot_bytes]
            assert free == sum(len(slab.owners) - slab.used for slab in of_size)
        assert self.bytes_used == sum(slot_bytes for _, slot_bytes, _ in self.taken())

    def _start(self, index: int, slot_bytes: int) -> _Slab[Owner]:
        slab: _Slab[Owner] = _Slab(index, slot_bytes, self.slots_per_slab(slot_bytes))
        self._slabs[index] = slab
        self._open.setdefault(slot_bytes, {})[index] = slab
        self._free[slot_bytes] = self._free.get(slot_bytes, 0) + len(slab.owners)
        return slab

    def _find(self, offset: int) -> tuple[_Slab[Owner], int]:
        slab = self._slabs[offset // self.slab_bytes]
        assert slab is not None
        position, rest = divmod(offset % self.slab_bytes, slab.slot_bytes)
        assert rest == 0
        return slab, position
