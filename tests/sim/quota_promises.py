"""Quota promises: tenants' maxima and guarantees, checked with the ledger alone."""

from collections import Counter
from collections.abc import Callable, Container, Mapping

from kvserver.service.holdings.accounts import Quota
from kvserver.tiers.records import NO_GROUP

from .ledger import Ledger
from .memory import Wrong
from .shapes import Shape
from .tenants import OTHERS, tenant_of

Shards = Mapping[tuple[bytes, bytes, int, int], tuple[int, int]]
"""(namespace, key, group, shard) -> (extent, generation) of each shard on disk."""


class Quotas:
    """The quotas of one brain's tenants."""

    def __init__(self, quotas: tuple[Quota, ...], ledger: Ledger, shapes: dict[bytes, Shape]) -> None:
        self._quotas = {quota.tenant: quota for quota in quotas}
        self._ledger = ledger
        self._shapes = shapes

    def __bool__(self) -> bool:
        return bool(self._quotas)

    def account(self, tenant: str) -> str:
        return tenant if tenant in self._quotas else OTHERS

    def account_of(self, digest: bytes) -> str:
        return self.account(tenant_of(digest))

    def allow(self, accounts: set[str], digest: bytes) -> bool:
        """True if an engine with caches of these accounts sees the namespace; without quotas everybody does."""
        return not self or self.account_of(digest) in accounts

    def sealed_bytes(self, going: Container[int] = ()) -> Counter[str]:
        """Sealed DRAM bytes of each account, without the offsets in `going`: cleared slots not yet withdrawn."""
        sealed: Counter[str] = Counter()
        for offset, record in self._ledger.records.items():
            if record.group != NO_GROUP and offset not in going:
                sealed[self.account_of(record.namespace)] += record.slot_bytes
        return sealed

    def check_most(self) -> None:
        for name, taken in self.sealed_bytes().items():
            quota = self._quotas.get(name)
            if quota and quota.max_bytes and taken > quota.max_bytes:
                raise Wrong(f"tenant {name} holds {taken} bytes, at most {quota.max_bytes} may be its")

    def check_disk(
        self,
        before: Shards,
        after: Shards,
        *,
        writes: Counter[str],
        excused: Callable[[str], bool],
        known: bool,
    ) -> int:
        """Accounts stay within their disk maxima, and only excused causes bring one below its guarantee.

        An earlier life may have left an account above its maximum; then its usage must not grow. writes: bytes being
        written for each account. known: recovery has found everything on disk. Returns the number of accounts that
        gave something to another.
        """
        had, has = self._disk_bytes(before), self._disk_bytes(after)
        gave, over = 0, self.over_maximum(before)
        for name in had.keys() | has.keys() | writes.keys():
            quota = self._quotas.get(name, Quota(name))
            taken = has[name] + writes[name]
            if quota.disk_max_bytes and known and taken > max(quota.disk_max_bytes, had[name]):
                raise Wrong(f"tenant {name} takes {taken} bytes of disk, at most {quota.disk_max_bytes} may be its")
            if has[name] >= had[name] or name in over or excused(name):
                continue
            gave += 1
            if has[name] < quota.disk_guaranteed_bytes:
                raise Wrong(
                    f"of {had[name]} bytes of disk {has[name]} were left to {name}, "
                    f"{quota.disk_guaranteed_bytes} are guaranteed"
                )
        return gave

    def over_maximum(self, on_disk: Shards) -> set[str]:
        """Accounts above their disk maximum."""
        has = self._disk_bytes(on_disk)
        return {name for name, quota in self._quotas.items() if 0 < quota.disk_max_bytes < has[name]}

    def _disk_bytes(self, on_disk: Shards) -> Counter[str]:
        has: Counter[str] = Counter()
        for digest, _, group, shard in on_disk:
            has[self.account_of(digest)] += self._shapes[digest].slot_bytes(group, shard)
        return has

    def check_guarantees(self, before: Counter[str], after: Counter[str], claimant: str) -> int:
        """The claimant's request took no guaranteed bytes from others. Returns how many others gave some."""
        gave = 0
        for name, taken in before.items():
            if name == claimant or after[name] >= taken:
                continue
            gave += 1
            quota = self._quotas.get(name)
            if quota and after[name] < quota.guaranteed_bytes:
                raise Wrong(
                    f"{claimant} took from {name}: {taken} bytes were left, {after[name]} are, "
                    f"{quota.guaranteed_bytes} are guaranteed"
                )
        return gave
