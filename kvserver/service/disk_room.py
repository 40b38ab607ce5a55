"""Room on the devices: extents are taken here, and when none is free it is decided here what goes.

The order is that of DRAM, leaf first and least recently used first, among what has extents. Two things can be lost with
extents: nothing, when the chunk is in DRAM as well; or the chunk, which must then be a leaf of the index.

Where tenants have quotas (accounts.py), whoever wants room has a claim, and only what that allows goes. A quota counts
all devices together, so a tenant at its maximum makes room wherever its coldest chunks lie, and who has less than its
guarantee gets what others have above theirs on the device that its chunk is for.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvserver.index.eviction import DeviceLru, droppable
from kvserver.index.space import ABSENT, READY, Node, Space
from kvserver.service.accounts import Account, Accounts, Claim
from kvserver.service.owners import ExtentOwner
from kvserver.tiers.extents import Extents, place_of

SEGMENTS_LOOKED_AT = 8
"""Of another size, when one of them must be emptied."""
PRICE_MAX = 4
"""Chunks that may go for each extent of a segment that is emptied: below a shared prefix hang a million."""
USED_EVER = 1 << 63
"""Later than any chunk was used."""
OWN_CHUNKS_MAX = 4096
"""Chunks that go for one extent when a tenant is at its maximum: its records may be of sizes that differ widely."""


class Wanted(NamedTuple):
    """An extent, and what may go for it."""

    device: int
    extent_bytes: int
    used: int
    """What was used before may go."""
    claim: Claim | None = None
    """Of its tenant, where there are quotas."""

    def lets_go(self, space: Space, node: Node, planned: dict[Account, int] | None = None) -> bool:
        """What others have above their guarantees goes for who has less than its own, also what was used later."""
        claim = self.claim
        if claim is None:
            return node.used < self.used
        return (node.used < self.used or not claim.own) and claim.allows(space, node, planned)


class DiskRoom:
    """The extents, and for each namespace and device the order in which they go."""

    def __init__(
        self,
        extents: Extents[ExtentOwner],
        drop: Callable[[Space, Node], None],
        accounts: Accounts | None = None,
        retired: Sequence[Space] = (),
    ) -> None:
        """drop: takes its extents from a chunk, and the chunk out of the index when it is nowhere else. retired:
        cleared namespaces of which something is still read."""
        self.extents = extents
        self._let_go = drop
        self._accounts = accounts
        self._retired = retired
        self._orders: dict[Space, list[DeviceLru]] = {}

    def add_space(self, space: Space) -> None:
        self._orders[space] = [DeviceLru(device) for device in range(len(self.extents.pools))]

    def drop_space(self, space: Space) -> None:
        self._orders.pop(space, None)

    def offer(self, space: Space, node: Node) -> None:
        if droppable(node) and space in self._orders:
            self._orders[space][device_of(node)].offer(node)

    def has(self, wanted: Wanted) -> bool:
        """take() is likely to give one."""
        claim = wanted.claim
        if claim is not None and claim.account.lacks(wanted.extent_bytes):
            own = self._coldest_of(claim.account)
            if own is None or own[1].used >= wanted.used:
                return False
        if self.extents.pools[wanted.device].has_room(wanted.extent_bytes) or self._coldest(wanted) is not None:
            return True
        if claim is None or claim.own:
            return False
        claim.own = True
        return self._coldest(wanted) is not None

    def wanted(self, device: int, extent_bytes: int, used: int, tenant: int) -> Wanted:
        """An extent for a chunk of that tenant, for which what was used before `used` may go."""
        return Wanted(device, extent_bytes, used, self._claim(tenant, extent_bytes))

    def take(self, wanted: Wanted, owner: ExtentOwner) -> int | None:
        """An extent that now belongs to `owner`; what is used longest ago of that which may goes for it. None when
        nothing can go.

        Without the bound by use, chunks of a DRAM that holds more than the device would push each other out for
        ever."""
        claim = wanted.claim
        if claim is None:
            return self._take(wanted, owner)
        extent = None
        if self._fit_quota(claim.account, wanted):
            extent = self._take(wanted, owner)
            if extent is None and not claim.own:
                claim.own = True
                extent = self._take(wanted, owner)
        claim.account.refused_slots += extent is None
        return extent

    def keep_maxima(self, chunks_max: int) -> None:
        """Of each tenant that has more than its maximum the coldest chunks go, at most so many. A maximum that was
        lowered while the brain was away may be exceeded by all that is found, and others wait."""
        for account in self._accounts.all() if self._accounts is not None else ():
            for _ in range(chunks_max):
                own = self._coldest_of(account) if account.lacks(0) else None
                if own is None:
                    break
                self._drop(*own)

    def evict_leaf(self, tenant: int) -> bool:
        """Takes the coldest chunk that is on disk alone out of the index, so that this has room for one of that tenant;
        False when none can go."""
        claim = self._claim_of_all(tenant)
        leaves = [
            (node.used, space, node)
            for space, orders in self._orders.items()
            for order in orders
            if (node := order.coldest()) is not None and not node.in_dram and node.children is None
            if claim is None or claim.allows(space, node)
        ]
        if not leaves:
            return False
        _, space, node = min(leaves, key=lambda leaf: leaf[0])
        self._drop(space, node)
        return True

    def drop_any(self, tenant: int) -> bool:
        """Takes the extents of one chunk with which nothing in DRAM is lost; False when none can go for that tenant."""
        claim = self._claim_of_all(tenant)
        for device in range(len(self.extents.pools)):
            best = self._coldest(Wanted(device, 0, USED_EVER, claim))
            if best is not None and (not best[1].in_dram or best[1].in_dram & best[0].needed == best[0].needed):
                self._drop(*best)
                return True
        return False

    def closure(self, owners: Sequence[ExtentOwner], wanted: Wanted, chunks_max: int) -> dict[Node, Space] | None:
        """Every chunk that has to give its extents back so that these do. None when one of them must stay (it is
        pinned, may not go for this, or something below it that is in DRAM hangs on it), or they are too many."""
        doomed: dict[Node, Space] = {}
        planned: dict[Account, int] = {}
        for owner in owners:
            if not isinstance(owner, Node):
                return None
            space = self.space_of(owner)
            if space is None:
                return None
            below = [owner]
            while below:
                node = below.pop()
                if node in doomed:
                    continue
                lost = node.on_disk & ~node.in_dram != 0
                if (
                    len(doomed) == chunks_max
                    or node.pins
                    or node.state != READY
                    or (lost and any(not child.away for child in node.child_nodes()))
                    or not wanted.lets_go(space, node, planned)
                ):
                    return None
                doomed[node] = space
                below.extend(child for child in node.child_nodes() if child.on_disk)
        return doomed

    def space_of(self, node: Node) -> Space | None:
        """The namespace of a node; None when it was cleared, or cut off."""
        return next((space for space in self._orders if space.nodes.get(node.key) is node), None)

    # ---------------------------------------------------------------- inside

    def _claim(self, tenant: int, more_bytes: int) -> Claim | None:
        accounts = self._accounts
        return Claim(accounts, accounts.of(tenant), more_bytes, self._retired) if accounts is not None else None

    def _claim_of_all(self, tenant: int) -> Claim | None:
        """Also what is its own may go, since room on the devices is not what it lacks."""
        claim = self._claim(tenant, 0)
        if claim is not None:
            claim.own = True
        return claim

    def _take(self, wanted: Wanted, owner: ExtentOwner) -> int | None:
        pool = self.extents.pools[wanted.device]
        vain_bytes = 0
        while True:
            extent = self.extents.allocate(wanted.device, wanted.extent_bytes, owner)
            if extent is not None:
                return extent
            before = pool.bytes_used
            if vain_bytes < self.extents.segment_bytes:
                going = self._drop_coldest(wanted)
            else:
                going = self._empty_a_segment(wanted)
                vain_bytes = 0
            if not going:
                return None
            vain_bytes += before - pool.bytes_used

    def _fit_quota(self, account: Account, wanted: Wanted) -> bool:
        """Makes room below the tenant's maximum; False when that is not done yet, or nothing of its own can go."""
        for _ in range(OWN_CHUNKS_MAX):
            own = self._coldest_of(account) if account.lacks(wanted.extent_bytes) else None
            if own is None or own[1].used >= wanted.used:
                break
            self._drop(*own)
        return not account.lacks(wanted.extent_bytes)

    def _drop_coldest(self, wanted: Wanted) -> bool:
        best = self._coldest(wanted)
        if best is None:
            return False
        self._drop(*best)
        return True

    def _drop(self, space: Space, node: Node) -> None:
        if self._accounts is not None:
            self._accounts.of_space(space).evicted_chunks += 1
        self._let_go(space, node)

    def _coldest(self, wanted: Wanted) -> tuple[Space, Node] | None:
        """What goes next on a device, of that which may."""
        best: tuple[Space, Node] | None = None
        for space, orders in self._orders.items():
            node = orders[wanted.device].coldest()
            if node is not None and (best is None or node.used < best[1].used) and wanted.lets_go(space, node):
                best = space, node
        return best

    def _coldest_of(self, account: Account) -> tuple[Space, Node] | None:
        """What goes next of a tenant's chunks, wherever it lies."""
        best: tuple[Space, Node] | None = None
        for space, orders in self._orders.items():
            if space.tenant is None or self._accounts is None or self._accounts.of_space(space) is not account:
                continue
            for order in orders:
                node = order.coldest()
                if node is not None and (best is None or node.used < best[1].used):
                    best = space, node
        return best

    def _empty_a_segment(self, wanted: Wanted) -> bool:
        """A segment's worth went and no extent of this size came free: the emptiest segment of another size that can be
        emptied is."""
        pool = self.extents.pools[wanted.device]
        for segment in pool.emptiest_of_other_sizes(wanted.extent_bytes, SEGMENTS_LOOKED_AT):
            owners = pool.slab_owners(segment)
            doomed = self.closure(owners, wanted, PRICE_MAX * len(owners))
            if doomed is not None:
                for node in sorted(doomed, key=lambda node: -node.depth):
                    if droppable(node):
                        self._drop(doomed[node], node)
                return True
        return False


def device_of(node: Node) -> int:
    """The device of a node that has extents."""
    assert node.disk is not None
    return place_of(next(extent for extent in node.disk.extents if extent != ABSENT)).device
