"""The slot pool against a dict: several sizes in one arena, slabs that change hands, growth and rebuilding."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserver.tiers.slots import SLOT_ALIGN, SlotPool, slot_bytes_for

SLAB_UNITS, SLABS = 7, 5
SIZES = (SLOT_ALIGN, 2 * SLOT_ALIGN, 3 * SLOT_ALIGN)
"""Slot sizes; the larger ones do not divide a slab."""
SLAB = SLAB_UNITS * SLOT_ALIGN

steps = st.lists(
    st.tuples(
        st.sampled_from(["take", "take", "take", "free", "free", "hand over", "grow", "rebuild"]), st.integers(0, 999)
    ),
    max_size=80,
)


class Model:
    """The slots taken: offset -> (bytes, owner)."""

    def __init__(self) -> None:
        self.taken: dict[int, tuple[int, str]] = {}
        self.slabs_ready = 0

    def has_room(self, slot_bytes: int) -> bool:
        """Whether there is a slab of this size with a free place, or an empty slab that is ready."""
        for slab in range(SLABS):
            sizes = [size for offset, (size, _) in self.taken.items() if offset // SLAB == slab]
            if not sizes and slab < self.slabs_ready:
                return True
            if sizes and sizes[0] == slot_bytes and len(sizes) < SLAB // slot_bytes:
                return True
        return False

    def check_place(self, offset: int, slot_bytes: int) -> None:
        """Checks that a slot is aligned, inside one slab of the arena, and apart from all others."""
        assert offset % SLOT_ALIGN == 0
        assert offset >= 0
        assert (offset + slot_bytes - 1) // SLAB == offset // SLAB < SLABS
        for other, (size, _) in self.taken.items():
            assert offset + slot_bytes <= other or other + size <= offset


@settings(max_examples=150)
@given(steps, st.randoms(use_true_random=False))
def test_the_pool_does_what_a_dict_of_slots_would_do(script: list[tuple[str, int]], random: object) -> None:
    pool: SlotPool[str] = SlotPool(SLABS * SLAB, SLAB)
    model = Model()
    for number, (step, dice) in enumerate(script):
        offsets = sorted(model.taken)
        match step:
            case "grow":
                model.slabs_ready += dice % (SLABS - model.slabs_ready + 1)
                pool.grow(model.slabs_ready)
            case "take":
                slot_bytes = SIZES[dice % 3]
                room = model.has_room(slot_bytes)
                assert pool.has_room(slot_bytes) == room
                offset = pool.allocate(slot_bytes, f"owner {number}")
                assert (offset is not None) == room
                if offset is not None:
                    model.check_place(offset, slot_bytes)
                    model.taken[offset] = (slot_bytes, f"owner {number}")
            case "free" if offsets:
                del model.taken[offsets[dice % len(offsets)]]
                pool.free(offsets[dice % len(offsets)])
            case "hand over" if offsets:
                offset = offsets[dice % len(offsets)]
                model.taken[offset] = (model.taken[offset][0], f"owner {number}")
                pool.hand_over(offset, f"owner {number}")
            case "rebuild":
                pool = rebuilt(model, sorted(offsets, key=lambda _: random.random()), grow_first=bool(dice % 2))
        pool.check()
        assert {offset: (size, owner) for offset, size, owner in pool.taken()} == model.taken
        assert pool.bytes_used == sum(size for size, _ in model.taken.values())
        assert all(pool.owner(offset) == owner for offset, (_, owner) in model.taken.items())
        for slab in range(SLABS):
            owners = [owner for offset, (_, owner) in sorted(model.taken.items()) if offset // SLAB == slab]
            assert pool.slab_owners(slab) == owners


def rebuilt(model: Model, offsets: list[int], *, grow_first: bool) -> SlotPool[str]:
    """A pool rebuilt from another pool's slots, in any order, before or after the arena is ready again."""
    pool: SlotPool[str] = SlotPool(SLABS * SLAB, SLAB)
    if grow_first:
        pool.grow(model.slabs_ready)
    for offset in offsets:
        size, owner = model.taken[offset]
        assert pool.restore(offset, size, owner)
        assert not pool.restore(offset, size, "somebody else")
        pool.check()
    pool.grow(model.slabs_ready)
    return pool


@pytest.mark.parametrize(
    ("offset", "slot_bytes"),
    [
        (SLOT_ALIGN, 2 * SLOT_ALIGN),  # not where a slot of that size can start
        (6 * SLOT_ALIGN, 2 * SLOT_ALIGN),  # would cross the slab
        (SLABS * SLAB, SLOT_ALIGN),  # after the arena
        (SLAB + 2 * SLOT_ALIGN, 2 * SLOT_ALIGN),  # in a slab of another size
        (SLAB + 3 * SLOT_ALIGN, 3 * SLOT_ALIGN),  # taken
    ],
)
def test_restoring_what_cannot_be_true_is_refused_and_changes_nothing(offset: int, slot_bytes: int) -> None:
    pool: SlotPool[str] = SlotPool(SLABS * SLAB, SLAB)
    pool.grow(3)
    assert pool.restore(SLAB + 3 * SLOT_ALIGN, 3 * SLOT_ALIGN, "first")
    before = list(pool.taken())
    assert not pool.restore(offset, slot_bytes, "second")
    pool.check()
    assert list(pool.taken()) == before


def test_a_slot_holds_its_shard_and_no_more_than_it_must() -> None:
    for shard_bytes in (1, SLOT_ALIGN - 1, SLOT_ALIGN, SLOT_ALIGN + 1, 5 * SLOT_ALIGN + 7):
        slot_bytes = slot_bytes_for(shard_bytes)
        assert slot_bytes % SLOT_ALIGN == 0
        assert 0 <= slot_bytes - shard_bytes < SLOT_ALIGN


def test_an_emptied_slab_serves_another_size() -> None:
    pool: SlotPool[str] = SlotPool(SLAB, SLAB)
    pool.grow(1)
    first = pool.allocate(SIZES[0], "small")
    assert first is not None
    assert pool.allocate(SIZES[2], "large") is None
    assert list(pool.slabs_of_other_sizes(SIZES[2])) == [0]
    pool.free(first)
    assert pool.allocate(SIZES[2], "large") is not None
    assert pool.usage() == {SIZES[2]: (1, 1)}
