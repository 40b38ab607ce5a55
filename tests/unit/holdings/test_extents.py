"""Extents: places on devices, and the choice of a chunk's device."""

from collections import Counter
from hashlib import sha256

import pytest

from kvserver._native import DiskStore
from kvserver.tiers.extents import Extents, extent_at, extents_per_segment, place_of, ranked

PAGE = 4096


def extents(devices: int = 3, segments: int = 5, pages: int = 13) -> Extents[str]:
    return Extents(devices=devices, device_bytes=segments * pages * PAGE, segment_bytes=pages * PAGE)


@pytest.mark.parametrize("segment_pages", [2, 3, 13, 256, 4097, 16384])
@pytest.mark.parametrize("extent_pages", [1, 2, 5, 12, 255])
def test_a_segment_has_as_many_positions_as_the_store_says(segment_pages: int, extent_pages: int) -> None:
    sizes = segment_pages * PAGE, extent_pages * PAGE
    assert extents_per_segment(*sizes) == DiskStore.extents_per_segment(*sizes)


def test_an_extent_is_named_by_device_and_offset() -> None:
    places = extents()
    extent = places.allocate(2, 3 * PAGE, "a")
    assert extent is not None
    assert place_of(extent).device == 2
    assert extent_at(*place_of(extent)) == extent


def test_a_device_gives_no_more_than_fits_with_headers() -> None:
    places = extents(devices=1)
    taken = 0
    while places.allocate(0, 3 * PAGE, "a") is not None:
        taken += 1
    assert taken == 5 * 4
    places.check()


def test_keys_prefer_all_devices_alike_and_keep_their_order_without_one_of_them() -> None:
    keys = [sha256(bytes([number])).digest() for number in range(200)]
    orders = {key: ranked(key, range(3)) for key in keys}
    assert min(Counter(order[0] for order in orders.values()).values()) > 40
    for key, order in orders.items():
        assert sorted(order) == [0, 1, 2]
        assert ranked(key, [2, 0]) == [device for device in order if device != 1]
    assert ranked(keys[0], []) == []


def test_what_was_taken_before_can_be_taken_again_and_nothing_that_clashes() -> None:
    places = extents()
    assert places.restore(extent_at(1, 3 * PAGE), 3 * PAGE, "a")
    assert not places.restore(extent_at(1, 3 * PAGE), 3 * PAGE, "b")
    assert not places.restore(extent_at(1, PAGE), 2 * PAGE, "b"), "its segment serves another size"
    assert not places.restore(extent_at(3, 0), PAGE, "b"), "no such device"
    assert not places.restore(extent_at(0, 0), 13 * PAGE, "b"), "no segment holds it"
    places.check()
