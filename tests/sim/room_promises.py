"""Room on the devices: promises for each extent taken for a write, and for the evictions it causes.

A write is refused only when no colder chunk on its device may be evicted. Evictions are at most 1.5 times the bytes
written, plus one segment of each size on each device: a segment serves only one size, so less is impossible.
"""

from collections.abc import Callable
from typing import Any

from kvserver.index.eviction import droppable
from kvserver.index.space import Node
from kvserver.service.holdings.disk_eviction import CHUNKS_MAX, DiskRoom, Wanted, device_of
from kvserver.service.holdings.place_owners import ExtentOwner
from kvserver.service.state.core import Bounds

from .memory import Wrong


class RoomPromises:
    """The promises of one brain. This wraps the disk tier's room and only observes it."""

    def __init__(self, room: DiskRoom, bounds: Bounds, sizes: int) -> None:
        """sizes: number of record sizes in the world's namespaces."""
        self._room = room
        self._slack_bytes = bounds.disk_devices * (sizes + 1) * bounds.disk_segment_bytes
        self.taken_bytes = self.evicted_bytes = 0
        self._take = room.take
        room.take = self.take  # type: ignore[method-assign]
        for name in ("prepare", "drop_with_all_below"):
            setattr(room, name, self._counted(getattr(room, name)))

    def take(self, wanted: Wanted, owner: ExtentOwner) -> int | None:
        before = self._room.extents.bytes_used
        extent = self._take(wanted, owner)
        got = wanted.extent_bytes if extent is not None else 0
        self.taken_bytes += got
        self._went(before + got - self._room.extents.bytes_used)
        if extent is None and wanted.claim is None and wanted.device not in self._room.emptying:
            self._check_refusal(wanted)
        return extent

    def _counted(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def outer(*args: Any) -> Any:
            before = self._room.extents.bytes_used
            result = inner(*args)
            self._went(before - self._room.extents.bytes_used)
            return result

        return outer

    def _went(self, count: int) -> None:
        self.evicted_bytes += count
        if count and self.evicted_bytes > 1.5 * self.taken_bytes + self._slack_bytes:
            raise Wrong(f"{self.evicted_bytes} bytes went from the devices for {self.taken_bytes} that were written")

    def _check_refusal(self, wanted: Wanted) -> None:
        if self._room.extents.pools[wanted.device].movable(wanted.extent_bytes, 1):
            return  # enough was evicted, but chunks in use keep every segment that was tried
        for extent, _, owner in self._room.extents.taken():
            if not isinstance(owner, Node) or device_of(owner) != wanted.device:
                continue
            doomed = self._room.closure([owner], wanted, CHUNKS_MAX)
            if any(droppable(node) for node in doomed or ()):  # unless something below is being written
                raise Wrong(f"{wanted} was refused, and what lies at {extent} may go, with all below it")
