"""Lookups that come before it is known what is on disk: they must say so wherever the rest may be there."""

from collections.abc import Set as AbstractSet

from kvserver.wire.messages import Found

from .disk_promises import Shard
from .ledger import Ledger
from .memory import Wrong


class Doubts:
    """Of one brain's life."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._denied: set[tuple[bytes, bytes]] = set()
        """(namespace, key): lookups were told that it is not there."""

    def told(self, found: Found, digest: bytes, keys: list[bytes], *, held: int, recovered: bool, hidden: bool) -> None:
        """held: chunks that DRAM and disks can serve as far as is known. The lookup may have found fewer: to decline a
        read denies nothing. hidden: with quotas, a namespace that the engine does not see, of which it must learn
        nothing."""
        missing = found.chunks < len(keys)
        if found.why and (recovered or not missing):
            raise Wrong(f"{found} to a lookup of {len(keys)} keys; what is on disk is known: {recovered}")
        if hidden and not found.why and not recovered:
            raise Wrong(f"{found} tells that there is nothing on disk in a namespace that the engine does not see")
        if held < len(keys) and not found.why and not recovered:
            self._denied.add((digest, keys[held]))

    def now_known(self, on_disk: AbstractSet[Shard], *, earlier: AbstractSet[Shard]) -> None:
        """Nothing of what the service says to be on disk, and did not say earlier, was denied."""
        for name in on_disk - earlier if self._denied else ():
            if name[:2] in self._denied and name not in self._ledger.held:
                raise Wrong(f"{name} was on disk, and a lookup that came before it was found was not told to doubt")

    def end(self) -> None:
        """All that is on disk is known."""
        self._denied.clear()
