"""Marks: ledger records of chunks that hold no slot.

In a namespace with only window and state groups, chunks without a slot lie before a chunk with one. A restarted brain
finds that chain only if the ledger names all of them. The ledger has a place for each offset of the arena where a slot
can start. After those it has one place for each chunk of the index: these are for marks. Such a place is named by the
offset that it would have if the arena were longer.

Pure bookkeeping, like slots.py: the service decides which chunks are marked, and when.
"""

from collections.abc import Iterable
from typing import Generic, TypeVar

from kvserver.tiers.slots import SLOT_ALIGN

Owner = TypeVar("Owner")


class Marks(Generic[Owner]):
    """The places of all marks."""

    def __init__(self, arena_bytes: int, chunks_max: int) -> None:
        self.places: dict[Owner, int] = {}
        self._first = arena_bytes
        self._end = arena_bytes + chunks_max * SLOT_ALIGN
        self._fresh = self._first
        """Places from this one on were never taken."""
        self._free: list[int] = []

    def __contains__(self, owner: Owner) -> bool:
        return owner in self.places

    def take(self, owner: Owner) -> int:
        """Takes a place for the owner's mark. One is always free, because only chunks of the index have marks."""
        assert owner not in self.places
        if self._free:
            place = self._free.pop()
        else:
            place = self._fresh
            assert place < self._end
            self._fresh += SLOT_ALIGN
        self.places[owner] = place
        return place

    def give_back(self, owner: Owner) -> int:
        """Frees the owner's place and returns it. The caller must withdraw its record."""
        place = self.places.pop(owner)
        self._free.append(place)
        return place

    def is_place(self, offset: int) -> bool:
        return self._first <= offset < self._end

    def restore(self, places: Iterable[tuple[Owner, int]]) -> None:
        """Takes exactly these places, while the tables are rebuilt."""
        self.places = dict(places)
        held = set(self.places.values())
        self._fresh = max(held, default=self._first - SLOT_ALIGN) + SLOT_ALIGN
        self._free = [place for place in range(self._first, self._fresh, SLOT_ALIGN) if place not in held]

    def check(self) -> None:
        """Asserts that each place is free or held once."""
        places = range(self._first, self._fresh, SLOT_ALIGN)
        assert sorted([*self.places.values(), *self._free]) == list(places)
