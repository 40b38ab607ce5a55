"""Marks: each has its own place, and no place is lost across a restart."""

from hypothesis import given
from hypothesis import strategies as st

from kvserver.tiers.marks import Marks
from kvserver.tiers.slots import SLOT_ALIGN

ARENA = 7 * SLOT_ALIGN
CHUNKS_MAX = 5


@given(st.lists(st.integers(-CHUNKS_MAX, CHUNKS_MAX), max_size=80))
def test_places_are_taken_once_and_found_again(steps: list[int]) -> None:
    """steps: positive takes a place, negative gives one back, zero restarts."""
    marks, held = Marks[int](ARENA, CHUNKS_MAX), dict[int, int]()
    for owner, step in enumerate(steps):
        if step == 0:
            marks = Marks[int](ARENA, CHUNKS_MAX)
            marks.restore(held.items())
        elif step < 0 and held:
            going = list(held)[step % len(held)]
            assert marks.give_back(going) == held.pop(going)
        elif step > 0 and len(held) < CHUNKS_MAX:
            held[owner] = marks.take(owner)
        marks.check()
        assert marks.places == held
        assert len(set(held.values())) == len(held)
        assert all(marks.is_place(place) and place % SLOT_ALIGN == 0 for place in held.values())
    assert not marks.is_place(ARENA - SLOT_ALIGN)
    assert not marks.is_place(ARENA + CHUNKS_MAX * SLOT_ALIGN)
