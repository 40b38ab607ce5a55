"""Tenants' accounts: how much of the arena and of the disks each holds, may hold, and keeps safe from the others.

A tenant is the tag that caches are registered with. A namespace belongs to one account, so nobody finds or reads the
chunks of another; tags without a quota share one account. Each slot is charged to the account of its owner: *reserved*
when it is taken, *held* once its chunk is complete, refunded when it is free. Extents are charged in the same way to
separate accounts, which count all devices together: reserved while they are written. Three rules hold for each tier:

* the maximum: an account takes no more. When it is reached, the account makes room among its own chunks;
* the guarantee: others may evict only what an account holds above it. A tenant below its guarantee takes from tenants
  above theirs before any of its own chunks go;
* between the two, the chunks used longest ago go, of any account.

A chunk that leaves the index leaves both tiers, and then both guarantees must allow it.

Without quotas there are no accounts, and nothing is charged.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Literal, NamedTuple, TypeVar

from kvserver.index.space import Node, Space
from kvserver.service.holdings.place_owners import DiskJob, Orphan, Pending, SlotOwner
from kvserver.tiers.slots import SlotPool
from kvserver.wire.tenants import OTHERS, tag_of

Owner = TypeVar("Owner", bound=SlotOwner)


class Quota(NamedTuple):
    """A tenant's quota: the bytes that the operator guarantees it, and the most that it may take."""

    tenant: str
    guaranteed_bytes: int = 0
    max_bytes: int = 0
    """Maximum in DRAM; 0: no limit."""
    disk_guaranteed_bytes: int = 0
    """Guarantee in bytes of extents, all devices together. disk_max_bytes is counted in the same way."""
    disk_max_bytes: int = 0


class Account:
    """One tenant's bytes in one tier, counted in slots or extents."""

    __slots__ = (
        "evicted_chunks",
        "guaranteed_bytes",
        "held_bytes",
        "max_bytes",
        "name",
        "refused_slots",
        "reserved_bytes",
    )

    def __init__(self, quota: Quota) -> None:
        self.name = quota.tenant
        self.guaranteed_bytes = quota.guaranteed_bytes
        self.max_bytes = quota.max_bytes
        self.reserved_bytes = 0
        """Bytes of incomplete chunks, of copies that may still run, and of writes to disk."""
        self.held_bytes = 0
        self.evicted_chunks = 0
        """Chunks that left the tier to make room, for this tenant or for others."""
        self.refused_slots = 0
        """Slots or extents that the tenant asked for and did not get."""

    @property
    def taken_bytes(self) -> int:
        return self.reserved_bytes + self.held_bytes

    @property
    def spare_bytes(self) -> int:
        """Bytes that others may take from this account."""
        return max(0, self.held_bytes - self.guaranteed_bytes)

    def hold(self, count: int) -> None:
        """Charges bytes of complete chunks. Negative bytes are refunded, also in reserve()."""
        self.held_bytes += count

    def reserve(self, count: int) -> None:
        self.reserved_bytes += count

    def evicted(self) -> None:
        """One of its chunks left the tier to make room."""
        self.evicted_chunks += 1

    def refused(self) -> None:
        """It did not get a slot or an extent."""
        self.refused_slots += 1

    def lacks(self, more_bytes: int) -> int:
        """Bytes that the account must give up before it may take this many more."""
        return max(0, self.taken_bytes + more_bytes - self.max_bytes) if self.max_bytes else 0


class Accounts:
    """All accounts of one tier: one for each quota, and one for everybody else."""

    def __init__(
        self, quotas: Iterable[Quota], tier: Literal["dram", "disk"] = "dram", beside: "Accounts | None" = None
    ) -> None:
        self._tier = tier
        self.beside = beside
        """Accounts of the other tier, if there is a disk."""
        if beside is not None:
            beside._stand_beside(self)
        if tier == "disk":
            quotas = [Quota(quota.tenant, quota.disk_guaranteed_bytes, quota.disk_max_bytes) for quota in quotas]
        self._by_name = {quota.tenant: Account(quota) for quota in quotas}
        self._others = self._by_name.setdefault(OTHERS, Account(Quota(OTHERS)))
        self._by_tag = {tag_of(name): account for name, account in self._by_name.items() if name != OTHERS}

    def _stand_beside(self, other: "Accounts") -> None:
        self.beside = other

    def all(self) -> Iterable[Account]:
        return self._by_name.values()

    @property
    def guarantee(self) -> bool:
        """Some account has a guarantee."""
        return any(account.guaranteed_bytes for account in self.all())

    def of(self, tag: int) -> Account:
        return self._by_tag.get(tag, self._others)

    def of_space(self, space: Space) -> Account:
        assert space.tenant is not None, "a namespace with chunks has a tenant"
        return self.of(space.tenant)

    def of_owner(self, owner: SlotOwner) -> Account:
        match owner:
            case Node() | Orphan():
                return self.of(owner.tenant)
            case Pending() | DiskJob():
                return self.of(owner.node.tenant)

    def groups(self, node: Node) -> int:
        """Groups (bits) of a chunk that are in this tier."""
        return node.in_dram if self._tier == "dram" else node.on_disk

    def held_bytes(self, space: Space) -> int:
        """Slot bytes that a namespace holds in this tier."""
        return space.dram_bytes if self._tier == "dram" else space.disk_bytes

    def may_ever_hold(self, space: Space, chunk_bytes: int) -> bool:
        """A chunk of this size is within the maximum of the namespace's account."""
        most_bytes = self.of_space(space).max_bytes
        return not most_bytes or chunk_bytes <= most_bytes

    def spares(self, space: Space, retired: Sequence[Space]) -> bool:
        """Another tenant may take everything that a namespace holds in this tier."""
        account = self.of_space(space)
        spare_bytes = account.spare_bytes - self.leaving(retired).get(account, 0)
        return not account.guaranteed_bytes or self.held_bytes(space) <= spare_bytes

    def leaving(self, retired: Sequence[Space]) -> dict[Account, int]:
        """Bytes of cleared namespaces that accounts still hold: their turn to go has not come, or retrieves still read
        them. Nobody knows how much of a namespace hangs below a cut that is not taken over yet, so all of it counts."""
        bytes_of: dict[Account, int] = {}
        for space in dict.fromkeys(chain(retired, (space.origin for space in retired if space.origin is not None))):
            if held_bytes := self.held_bytes(space):
                account = self.of_space(space)
                bytes_of[account] = bytes_of.get(account, 0) + held_bytes
        return bytes_of

    def admits(self, space: Space, tag: int) -> bool:
        """Caches with this tag may use the namespace: it is unused, or used by the same account."""
        unused = space.tenant is None or not (space.nodes or space.caches)
        return unused or self.of_space(space) is self.of(tag)

    def takes_back(self, space: Space, tag: int) -> bool:
        """A chunk of an earlier brain may come back. Quotas may have changed since, and a namespace has one account:
        that of its caches, or of the first chunk that is found."""
        if space.tenant is None:
            space.belongs_to(tag)
        return self.of(tag) is self.of_space(space)


class Claim:
    """Decides which chunks may go to make room for `account`."""

    __slots__ = ("_accounts", "_leaving", "account", "own")

    def __init__(self, accounts: Accounts, account: Account, more_bytes: int, retired: Sequence[Space]) -> None:
        self._accounts = accounts
        self._leaving = accounts.leaving(retired)
        if accounts.beside is not None:
            self._leaving |= accounts.beside.leaving(retired)
        self.account = account
        self.own = account.taken_bytes + more_bytes > account.guaranteed_bytes
        """The account's own chunks may go. False while it is below its guarantee, unless others have nothing to
        give."""

    def turn_to_own(self) -> None:
        """Others have nothing to give."""
        self.own = True

    def allows(
        self, space: Space, node: Node, planned: dict[Account, int] | None = None, *, index: bool = False
    ) -> bool:
        """This chunk may go. planned: bytes by account that go together with it; the chunk is added there. index: it
        leaves the index, so its bytes in the other tier go too."""
        owner = self._accounts.of_space(space)
        if owner is self.account:
            return self.own
        going = {owner: space.group_bytes(self._accounts.groups(node))}
        beside = self._accounts.beside
        if beside is not None and (other := beside.groups(node)) and (index or other & space.needed != space.needed):
            going[beside.of_space(space)] = space.group_bytes(other)  # not enough to keep the chunk
        if planned is not None:
            going = {account: count + planned.get(account, 0) for account, count in going.items()}
        if any(
            account.guaranteed_bytes and count > account.spare_bytes - self._leaving.get(account, 0)
            for account, count in going.items()
        ):
            return False
        if planned is not None:
            planned.update(going)
        return True

    def is_own(self, space: Space) -> bool:
        return self._accounts.of_space(space) is self.account


class ChargedPool(SlotPool[Owner]):
    """The arena's slots or a device's extents, each charged to an account."""

    def __init__(
        self,
        arena_bytes: int,
        slab_bytes: int,
        slots_per_slab: Callable[[int], int] | None = None,
        *,
        accounts: Accounts,
    ) -> None:
        super().__init__(arena_bytes, slab_bytes, slots_per_slab)
        self._accounts = accounts

    def allocate(self, slot_bytes: int, owner: Owner) -> int | None:
        offset = super().allocate(slot_bytes, owner)
        if offset is not None:
            self._charge(owner, slot_bytes)
        return offset

    def restore(self, offset: int, slot_bytes: int, owner: Owner) -> bool:
        taken = super().restore(offset, slot_bytes, owner)
        if taken:
            self._charge(owner, slot_bytes)
        return taken

    def free(self, offset: int) -> None:
        self._charge(self.owner(offset), -self.slot_bytes(offset))
        super().free(offset)

    def hand_over(self, offset: int, owner: Owner) -> None:
        slot_bytes = self.slot_bytes(offset)
        self._charge(self.owner(offset), -slot_bytes)
        super().hand_over(offset, owner)
        self._charge(owner, slot_bytes)

    def _charge(self, owner: Owner, slot_bytes: int) -> None:
        """Charges the owner's account; negative bytes are refunded."""
        if isinstance(owner, DiskJob) and (owner.moves or owner.kind == "scrub"):
            return
        account = self._accounts.of_owner(owner)
        if isinstance(owner, Node):
            account.hold(slot_bytes)
        else:
            account.reserve(slot_bytes)
