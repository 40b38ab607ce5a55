"""Marks: ledger records of chunks that hold no slot.

Where a namespace has window and state groups alone, chunks that hold nothing lie before one that does; a restarted
brain finds the chain only if the ledger names them too. The ledger has a place for each offset of the arena where a
slot can start, and behind those one for each chunk that the index may hold; marks stand there. A place is named by the
offset that it would have if the arena went on.

Pure bookkeeping, like slots.py: what is marked, and when, is decided in service.
"""

from collections.abc import Iterable
from typing import Generic, TypeVar

from kvserver.tiers.slots import SLOT_ALIGN

Owner = TypeVar("Owner")


class Marks(Generic[Owner]):
    """Which chunk has its mark at which place."""

    def __init__(self, arena_bytes: int, chunks_max: int) -> None:
        self.places: dict[Owner, int] = {}
        self._first = arena_bytes
        self._end = arena_bytes + chunks_max * SLOT_ALIGN
        self._fresh = self._first
        """Places from here on were never taken."""
        self._free: list[int] = []

    def __contains__(self, owner: Owner) -> bool:
        return owner in self.places

    def take(self, owner: Owner) -> int:
        """A place for the owner's mark. There always is one: nothing but chunks of the index have any."""
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
        """The place is free again. Its record must be withdrawn."""
        place = self.places.pop(owner)
        self._free.append(place)
        return place

    def is_place(self, offset: int) -> bool:
        return self._first <= offset < self._end

    def restore(self, places: Iterable[tuple[Owner, int]]) -> None:
        """Exactly these are taken, while the tables are rebuilt."""
        self.places = dict(places)
        held = set(self.places.values())
        self._fresh = max(held, default=self._first - SLOT_ALIGN) + SLOT_ALIGN
        self._free = [place for place in range(self._first, self._fresh, SLOT_ALIGN) if place not in held]

    def check(self) -> None:
        """Asserts that each place is free or held once."""
        places = range(self._first, self._fresh, SLOT_ALIGN)
        assert sorted([*self.places.values(), *self._free]) == list(places)
