"""Room on the devices: promises for each extent taken for a write, and for the evictions it causes.

A write is refused only when no colder chunk on its device may be evicted. Evictions are at most 1.5 times the bytes
written, plus one segment of each size on each device: a segment serves only one size, so less is impossible. A chain
lies on several devices, and what makes room on one of them may take the whole chain. The room on the others is for
later writes, so one chain is allowed for each other device.

A maximum may be lower today than when an earlier life wrote. A tenant's first write then takes out all that is above
it, as the next ticks would. Those bytes must go for the quota and not for the write, so they are no evictions here. A
byte below the maximum is one.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

from kvserver.index.eviction import droppable
from kvserver.index.space import Node
from kvserver.service.holdings.accounts import Quota
from kvserver.service.holdings.disk_eviction import CHUNKS_MAX, DiskRoom, Wanted, device_of
from kvserver.service.holdings.place_owners import ExtentOwner
from kvserver.service.state.bounds import Bounds
from kvserver.wire.tenants import tag_of

from .memory import Wrong
from .tenants import OTHERS


class RoomPromises:
    """The promises of one brain. This wraps the disk tier's room and only observes it."""

    def __init__(self, room: DiskRoom, bounds: Bounds, sizes: int, chain_bytes: int = 0) -> None:
        """sizes: number of record sizes in the world's namespaces. chain_bytes: the most that a chain can have."""
        self._room = room
        self._slack_bytes = bounds.disk_devices * (sizes + 1) * bounds.disk_segment_bytes
        self._slack_bytes += (bounds.disk_devices - 1) * chain_bytes
        self._quotas = {tag_of(quota.tenant): quota for quota in bounds.tenants if quota.tenant != OTHERS}
        self._others = next((quota for quota in bounds.tenants if quota.tenant == OTHERS), Quota(OTHERS))
        self.taken_bytes = self.evicted_bytes = 0
        self._take = room.take
        room.take = self.take  # type: ignore[method-assign]
        for name in ("prepare", "drop_with_all_below"):
            setattr(room, name, self._counted(getattr(room, name)))

    def take(self, wanted: Wanted, owner: ExtentOwner) -> int | None:
        before, above = self._room.extents.bytes_used, self._above_maxima()
        extent = self._take(wanted, owner)
        got = wanted.extent_bytes if extent is not None else 0
        self.taken_bytes += got
        self._went(before + got - self._room.extents.bytes_used, above)
        if extent is None and wanted.claim is None and wanted.device not in self._room.emptying:
            self._check_refusal(wanted)
        return extent

    def _counted(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def outer(*args: Any) -> Any:
            before, above = self._room.extents.bytes_used, self._above_maxima()
            result = inner(*args)
            self._went(before - self._room.extents.bytes_used, above)
            return result

        return outer

    def _above_maxima(self) -> int:
        """Bytes of extents that tenants have above their maxima, counted from the owners of the extents."""
        quotas = (*self._quotas.values(), self._others)
        if not any(quota.disk_max_bytes for quota in quotas):
            return 0
        has: Counter[Quota] = Counter()
        for _, extent_bytes, owner in self._room.extents.taken():
            tenant = owner.tenant if isinstance(owner, Node) else owner.node.tenant
            has[self._quotas.get(tenant, self._others)] += extent_bytes
        return sum(max(0, count - quota.disk_max_bytes) for quota, count in has.items() if quota.disk_max_bytes)

    def _went(self, went: int, above: int) -> None:
        """above: bytes above maxima before anything went."""
        count = went - max(0, above - self._above_maxima()) if went else 0
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
