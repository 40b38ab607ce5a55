"""The bytes of each device that are taken, and their owners.

A device is a row of equal segments; a segment serves extents of one size, as a slab of the arena serves slots. An
extent is named by one number: its device, and its offset there. A chunk lies on one device.

Pure bookkeeping: this module touches no device and decides no eviction.
"""

from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from typing import Generic, NamedTuple, TypeVar

from kvserver.tiers.slots import SLOT_ALIGN, SlotPool

DEVICES_MAX = 64
DEVICE_SPAN = 1 << 48
"""Bytes that the names of one device's extents span."""

ENTRY_BYTES = 256
"""Bytes of a header in its table, and the table's label."""

Owner = TypeVar("Owner")


class Place(NamedTuple):
    """The place of an extent."""

    device: int
    offset: int


def extents_per_segment(segment_bytes: int, extent_bytes: int) -> int:
    """Number of extents in a segment; 0: none fits. A 64th of the segment is the table of their headers.

    A test compares it with kvserver._native.DiskStore.extents_per_segment."""
    table_bytes = max(1, segment_bytes // 64 // SLOT_ALIGN) * SLOT_ALIGN
    return min((segment_bytes - table_bytes) // extent_bytes, table_bytes // ENTRY_BYTES - 1)


def place_of(extent: int) -> Place:
    return Place(*divmod(extent, DEVICE_SPAN))


def extent_at(device: int, offset: int) -> int:
    return device * DEVICE_SPAN + offset


def ranked(key: bytes, devices: Iterable[int]) -> list[int]:
    """The devices in the order in which a key prefers them (rendezvous hashing): without one of them, the order of the
    others is the same."""
    return sorted(devices, key=lambda device: blake2b(key, salt=bytes([device]), digest_size=8).digest())


class Extents(Generic[Owner]):
    """The extents of all devices."""

    def __init__(
        self,
        *,
        devices: int,
        device_bytes: int,
        segment_bytes: int,
        pool_of: Callable[[int, int, Callable[[int], int]], SlotPool[Owner]] = SlotPool,
    ) -> None:
        """pool_of: makes the pool of one device."""
        assert 0 < devices <= DEVICES_MAX
        assert device_bytes < DEVICE_SPAN
        self.segment_bytes = segment_bytes
        self.pools: list[SlotPool[Owner]] = [
            pool_of(device_bytes, segment_bytes, lambda extent_bytes: extents_per_segment(segment_bytes, extent_bytes))
            for _ in range(devices)
        ]
        for pool in self.pools:
            pool.grow(pool.slabs_total)
        self.takes_writes = [True] * devices

    def let_write(self, device: int, may: bool) -> None:
        """Sets whether the device takes writes."""
        self.takes_writes[device] = may

    @property
    def bytes_used(self) -> int:
        return sum(pool.bytes_used for pool in self.pools)

    @property
    def writable(self) -> list[int]:
        """The devices that take writes."""
        return [device for device, takes in enumerate(self.takes_writes) if takes]

    def fits(self, extent_bytes: int) -> bool:
        """Whether a segment can hold an extent of this size."""
        return extent_bytes > 0 and extents_per_segment(self.segment_bytes, extent_bytes) > 0

    def allocate(self, device: int, extent_bytes: int, owner: Owner) -> int | None:
        """Takes an extent for `owner`; None when none of that size is free there."""
        offset = self.pools[device].allocate(extent_bytes, owner)
        return None if offset is None else extent_at(device, offset)

    def free(self, extent: int) -> None:
        device, offset = place_of(extent)
        self.pools[device].free(offset)

    def hand_over(self, extent: int, owner: Owner) -> None:
        """Gives the extent to another owner."""
        device, offset = place_of(extent)
        self.pools[device].hand_over(offset, owner)

    def restore(self, extent: int, extent_bytes: int, owner: Owner) -> bool:
        """Takes exactly this extent while the tables are rebuilt. False when it collides with those taken before."""
        device, offset = divmod(extent, DEVICE_SPAN)
        usable = device < len(self.pools) and extent_bytes > 0
        return usable and self.pools[device].restore(offset, extent_bytes, owner)

    def taken(self) -> Iterator[tuple[int, int, Owner]]:
        """(extent, extent_bytes, owner) of every taken extent."""
        for device, pool in enumerate(self.pools):
            for offset, extent_bytes, owner in pool.taken():
                yield extent_at(device, offset), extent_bytes, owner

    def check(self) -> None:
        """Asserts that counts and owners agree, and that no device holds more than its segments."""
        for pool in self.pools:
            pool.check()
            assert pool.bytes_used < max(1, pool.slabs_total * self.segment_bytes), "headers need room too"
