"""What tenants are held to, and what they were promised, read out of the ledger alone."""

from collections import Counter

from kvserver.service.accounts import Quota
from kvserver.tiers.records import NO_GROUP

from .ledger import Ledger
from .memory import Wrong
from .tenants import OTHERS, tenant_of


class Quotas:
    """What is promised to tenants of one brain."""

    def __init__(self, quotas: tuple[Quota, ...], ledger: Ledger) -> None:
        self._quotas = {quota.tenant: quota for quota in quotas}
        self._ledger = ledger

    def __bool__(self) -> bool:
        return bool(self._quotas)

    def account(self, tenant: str) -> str:
        return tenant if tenant in self._quotas else OTHERS

    def account_of(self, digest: bytes) -> str:
        return self.account(tenant_of(digest))

    def allow(self, accounts: set[str], digest: bytes) -> bool:
        """An engine with caches of these accounts finds what is in the namespace; everybody does without quotas."""
        return not self or self.account_of(digest) in accounts

    def sealed_bytes(self) -> Counter[str]:
        """Of each account, in DRAM."""
        sealed: Counter[str] = Counter()
        for record in self._ledger.records.values():
            if record.group != NO_GROUP:
                sealed[self.account_of(record.namespace)] += record.slot_bytes
        return sealed

    def check_most(self) -> None:
        for name, taken in self.sealed_bytes().items():
            quota = self._quotas.get(name)
            if quota and quota.max_bytes and taken > quota.max_bytes:
                raise Wrong(f"tenant {name} holds {taken} bytes, at most {quota.max_bytes} may be its")

    def check_guarantees(self, before: Counter[str], claimant: str) -> int:
        """What `claimant` asked for took nothing from others that they were guaranteed. Returns how many others gave
        something."""
        after = self.sealed_bytes()
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
