"""Room on the devices that begin full: which evictions are held against the brain, and which are not."""

import dataclasses

import pytest

from kvserver.service.base.events import ArenaGrew
from kvserver.service.disk import mover
from kvserver.service.holdings.disk_eviction import DiskRoom, Wanted
from kvserver.service.holdings.place_owners import ExtentOwner
from tests.rigs.brain_rig import SLAB_BYTES
from tests.rigs.disk_quota_rig import CHAT, chunks_of, client_of, quota, rig_with, stored
from tests.rigs.disk_rig import EXTENT_BYTES, SEGMENT_BYTES, DiskRig, restart

from . import service_view
from .memory import Wrong
from .room_promises import RoomPromises

SEGMENTS, BEFORE = 29, 99
"""Segments of the device, and chunks that an earlier life wrote there."""
SIZES = 1


@pytest.fixture(autouse=True)
def ticks_evict_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mover, "OVER_MAXIMUM_AT_ONCE", 0)


def next_life(most: int) -> tuple[DiskRig, DiskRoom]:
    """A brain that finds its tenant's chunks on the devices, of which the tenant may have `most` today."""
    rig = rig_with(quota("chat", most=BEFORE), disk_device_bytes=SEGMENTS * SEGMENT_BYTES)
    stored(client_of(rig, "chat", CHAT), BEFORE // 3, seed=2)
    rig.bounds = dataclasses.replace(rig.bounds, tenants=(quota("chat", most=most),))
    restart(rig)
    rig.handle(ArenaGrew(rig.bounds.arena_bytes // SLAB_BYTES, ""))
    assert chunks_of(rig, "chat") == BEFORE
    room = service_view.disk_room(rig.service)
    assert room is not None
    return rig, room


def evict_two_for_each_extent(room: DiskRoom) -> None:
    take = room.take

    def greedy(wanted: Wanted, owner: ExtentOwner) -> int | None:
        extent = take(wanted, owner)
        for _ in range(2):
            room.drop_any(wanted.tenant)
        return extent

    room.take = greedy  # type: ignore[method-assign]


@pytest.mark.parametrize("most", [3, 17, BEFORE])
def test_what_is_above_a_maximum_that_was_lowered_goes_for_no_write(most: int) -> None:
    rig, room = next_life(most)
    promises = RoomPromises(room, rig.bounds, SIZES)
    stored(client_of(rig, "chat", CHAT), 1, seed=3)
    assert promises.taken_bytes == promises.evicted_bytes == 3 * EXTENT_BYTES
    assert chunks_of(rig, "chat") == most


@pytest.mark.parametrize("most", [71, BEFORE])
def test_a_room_that_evicts_twice_what_is_needed_is_noticed(most: int) -> None:
    rig, room = next_life(most)
    evict_two_for_each_extent(room)
    RoomPromises(room, rig.bounds, SIZES)
    with pytest.raises(Wrong, match="went from the devices"):
        stored(client_of(rig, "chat", CHAT), 12, seed=3)


def test_a_room_that_evicts_below_a_maximum_at_once_is_noticed() -> None:
    rig, room = next_life(most=19)
    take = room.take

    def empty_first(wanted: Wanted, owner: ExtentOwner) -> int | None:
        while room.drop_any(wanted.tenant):
            pass
        return take(wanted, owner)

    room.take = empty_first  # type: ignore[method-assign]
    RoomPromises(room, rig.bounds, SIZES)
    with pytest.raises(Wrong, match="went from the devices"):
        stored(client_of(rig, "chat", CHAT), 1, seed=3)
