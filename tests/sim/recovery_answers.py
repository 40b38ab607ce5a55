"""Lookups before recovery has finished: the reply must say so whenever the rest may be on disk."""

from collections.abc import Set as AbstractSet

from kvserver.wire.messages import Found

from .content import names_two_prefixes
from .disk_promises import Shard
from .ledger import Ledger
from .memory import Wrong


class RecoveryAnswers:
    """The denials of one brain's life."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._denied: set[tuple[bytes, bytes]] = set()
        """(namespace, key) of chunks that a lookup was told are not there."""

    def told(self, found: Found, digest: bytes, keys: list[bytes], *, held: int, recovered: bool, hidden: bool) -> None:
        """Records one answer, and checks its `why`.

        held: chunks that DRAM and disks can serve as far as known. The lookup may find fewer: a declined read denies
        nothing. hidden: with quotas, the engine does not see this namespace, so the answer must reveal nothing about
        it.
        """
        missing = found.chunks < len(keys)
        if found.why and (recovered or not missing):
            raise Wrong(f"{found} to a lookup of {len(keys)} keys; what is on disk is known: {recovered}")
        if hidden and not found.why and not recovered:
            raise Wrong(f"{found} tells that there is nothing on disk in a namespace that the engine does not see")
        if names_two_prefixes(keys):
            return  # a chunk of the one hides what is missing of the other
        if held < len(keys) and not found.why and not recovered:
            self._denied.add((digest, keys[held]))

    def now_known(self, on_disk: AbstractSet[Shard], *, earlier: AbstractSet[Shard]) -> None:
        """No record that the service now lists on disk, and did not list earlier, was denied by a lookup."""
        for name in on_disk - earlier if self._denied else ():
            if name[:2] in self._denied and name not in self._ledger.held:
                raise Wrong(f"{name} was on disk, and a lookup that came before it was found was not told to doubt")

    def end(self) -> None:
        """Recovery is over: everything on disk is known."""
        self._denied.clear()
