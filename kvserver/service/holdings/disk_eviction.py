"""Room on the devices: extents are taken here, and when none is free it is decided here what goes.

The order is that of DRAM, leaf first and least recently used first, among what has extents. Two things can be lost with
extents: nothing, when the chunk is in DRAM as well; or the chunk, which must then be a leaf of the index. The chunks of
a chain lie on several devices, so room on one may have to begin with leaves on another.

A segment serves extents of one size. When chunks of other sizes have given back as many extents as a segment holds, no
more of them go: the records of one segment move to those places, and the segment changes its size (segments.py).

Where tenants have quotas (accounts.py), whoever wants room has a claim, and only what that allows goes. A quota counts
all devices together, so a tenant at its maximum makes room wherever its coldest chunks lie, and who has less than its
guarantee gets what others have above theirs on the device that its chunk is for.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from kvserver.index.eviction import DeviceLru, droppable
from kvserver.index.space import ABSENT, READY, Node, Space
from kvserver.service.holdings.accounts import Account, Accounts, Claim
from kvserver.service.holdings.place_owners import ExtentOwner
from kvserver.tiers.extents import Extents, place_of

SEGMENTS_LOOKED_AT = 8
"""The emptiest ones of other sizes, when one of them must be emptied; of any size, when no order names a chunk."""
AHEAD_SHARE = 4
"""When less than this part of a segment is left for a size, another segment is emptied for it."""
OTHERS_LOOKED_AT = 32
"""Of each order, when what is coldest on a device is warmer than what others have."""
LOOKS_MAX = 256
"""Chunks of these that are looked at then."""
CHUNKS_MAX = 4096
"""Chunks that may go for one record: below a shared prefix hang a million."""
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
    tenant: int = 0
    claim: Claim | None = None
    """Of its tenant, where there are quotas."""

    def lets_go(self, space: Space, node: Node, planned: dict[Account, int] | None = None) -> bool:
        """What others have above their guarantees goes for who has less than its own, also what was used later."""
        claim = self.claim
        if claim is None:
            return node.used < self.used
        return (node.used < self.used or not claim.own) and claim.allows(space, node, planned)


@dataclass(slots=True, eq=False)
class Emptying:
    """A segment whose records move to other segments of the same device, so that it can serve another size."""

    device: int
    segment: int
    for_bytes: int
    """The size of the extents that it shall serve then."""
    used: int
    """What was used before may go for it; so the newest of those who wait was used then."""
    tenant: int
    """Of the first who waits."""
    queue: list[Node] = field(default_factory=list)
    """Chunks with a record there, still to be looked at."""
    moving: dict[Node, Space] = field(default_factory=dict)
    fetched: set[Node] = field(default_factory=set)
    """Of these, those that are in DRAM for no other reason."""
    records: int = -1
    """That were there when something last went on."""
    since_ns: int = 0
    """When that was; 0: nobody has looked at it yet."""


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
        self.emptying: dict[int, Emptying] = {}
        """Device -> its segment that is being emptied, one at a time."""
        self._avoided: dict[int, set[int]] = {}
        """Device -> segments that could not be emptied, since one last was."""

    def add_space(self, space: Space) -> None:
        self._orders[space] = [DeviceLru(device) for device in range(len(self.extents.pools))]

    def drop_space(self, space: Space) -> list[DeviceLru]:
        """Nothing goes of a namespace to make room any more."""
        return self._orders.pop(space)

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
        pool = self.extents.pools[wanted.device]
        if pool.has_room(wanted.extent_bytes) or pool.movable(wanted.extent_bytes, 1) or self._next(wanted) is not None:
            return True
        if claim is None or claim.own:
            return False
        claim.own = True
        return self._next(wanted) is not None

    def wanted(self, device: int, extent_bytes: int, used: int, tenant: int) -> Wanted:
        """An extent for a chunk of that tenant, for which what was used before `used` may go."""
        return Wanted(device, extent_bytes, used, tenant, self._claim(tenant, extent_bytes))

    def take(self, wanted: Wanted, owner: ExtentOwner) -> int | None:
        """An extent that now belongs to `owner`; what is used longest ago of that which may goes for it. None when
        nothing can go, or a segment of the device is being emptied.

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
        claim.account.refused_slots += extent is None and wanted.device not in self.emptying
        return extent

    def prepare(self, wanted: Wanted) -> None:
        """Begins to empty a segment before the last extents of a size are taken, where it is chunks of other sizes that
        go next: who is to be written then need not wait."""
        pool = self.extents.pools[wanted.device]
        at_maximum = wanted.claim is not None and wanted.claim.account.lacks(wanted.extent_bytes)
        if wanted.device in self.emptying or at_maximum or not pool.nearly_full(wanted.extent_bytes, AHEAD_SHARE):
            return
        while not (movable := pool.movable(wanted.extent_bytes, SEGMENTS_LOOKED_AT)):
            going = self._next(wanted)
            if going is None or wanted.extent_bytes in going[0].slot_sizes:
                return
            self._drop(*going)
        self._begin_emptying(wanted, movable)

    def take_free(self, wanted: Wanted, owner: ExtentOwner) -> int | None:
        """The same for a record that moves: nothing goes for it but what its tenant has above its maximum meanwhile."""
        if wanted.claim is not None and not self._fit_quota(wanted.claim.account, wanted):
            return None
        return self.extents.allocate(wanted.device, wanted.extent_bytes, owner)

    def stop_emptying(self, device: int, *, in_vain: bool) -> None:
        """The segment serves whoever comes. in_vain: it could not be emptied, and another one is tried next."""
        going = self.emptying.pop(device)
        self.extents.pools[device].reopen(going.segment)
        if in_vain:
            self._avoided.setdefault(device, set()).add(going.segment)
        else:
            self._avoided.pop(device, None)

    def drop_with_all_below(self, node: Node, wanted: Wanted) -> bool:
        """Takes its extents from a chunk, and from all below it, where they may go; else nothing happens."""
        doomed = self.closure([node], wanted, CHUNKS_MAX)
        for at in sorted(doomed or (), key=lambda node: -node.depth):
            if doomed is not None and droppable(at):
                self._drop(doomed[at], at)
        return doomed is not None

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
            best = self._coldest(Wanted(device, 0, USED_EVER, tenant, claim))
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
        while True:
            going = self.emptying.get(wanted.device)
            if going is None or not self._is_spoken_for(going, wanted):
                extent = self.extents.allocate(wanted.device, wanted.extent_bytes, owner)
                if extent is not None:
                    return extent
            if going is not None and going.for_bytes == wanted.extent_bytes:
                going.used = max(going.used, wanted.used)
                return None
            movable = pool.movable(wanted.extent_bytes, SEGMENTS_LOOKED_AT)
            if movable and going is None:
                self._begin_emptying(wanted, movable)
            if movable or not self._drop_next(wanted):
                return None

    def _is_spoken_for(self, going: Emptying, wanted: Wanted) -> bool:
        """Whatever is free of that size on the device is needed for the records that move."""
        pool = self.extents.pools[wanted.device]
        size = pool.slab_slot_bytes(going.segment)
        return size == wanted.extent_bytes and pool.spare(going.segment) <= 0

    def _begin_emptying(self, wanted: Wanted, movable: list[int]) -> None:
        avoided = self._avoided.get(wanted.device, set())
        segment = next((segment for segment in movable if segment not in avoided), None)
        if segment is None:
            del self._avoided[wanted.device]  # each has had its turn
            return
        self.emptying[wanted.device] = Emptying(wanted.device, segment, wanted.extent_bytes, wanted.used, wanted.tenant)
        self.extents.pools[wanted.device].close(segment, wanted.extent_bytes)

    def _fit_quota(self, account: Account, wanted: Wanted) -> bool:
        """Makes room below the tenant's maximum; False when that is not done yet, or nothing of its own can go."""
        for _ in range(OWN_CHUNKS_MAX):
            own = self._coldest_of(account) if account.lacks(wanted.extent_bytes) else None
            if own is None or own[1].used >= wanted.used:
                break
            self._drop(*own)
        return not account.lacks(wanted.extent_bytes)

    def _drop_next(self, wanted: Wanted) -> bool:
        best = self._next(wanted)
        if best is None:
            return False
        self._drop(*best)
        return True

    def _next(self, wanted: Wanted) -> tuple[Space, Node] | None:
        """What goes next, so that there is room on a device: the coldest there, or a colder leaf that lies elsewhere
        and has to go before something there can."""
        return self._coldest_above(wanted, self._coldest(wanted)) or self._any_leaf(wanted)

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

    def _coldest_above(self, wanted: Wanted, best: tuple[Space, Node] | None) -> tuple[Space, Node] | None:
        """The coldest on any device that hangs on something on this one, if it is colder than `best`. Where all other
        devices have something colder, but nothing that does, a few more of theirs are looked at."""
        used = best[1].used if best is not None else USED_EVER
        colder = 0
        for space, orders in self._orders.items():
            for order in orders:
                node = order.coldest()
                if node is None or node.used >= used or not wanted.lets_go(space, node):
                    continue
                colder += 1
                if (best is None or node.used < best[1].used) and _hangs_on(node, wanted.device):
                    best = space, node
        found = best is not None and best[1].used < used
        if found or colder < len(self.extents.pools) - 1:
            return best
        for space, orders in self._orders.items():
            for order in orders:
                for node in order.among_the_coldest(OTHERS_LOOKED_AT):
                    is_colder = best is None or node.used < best[1].used
                    if is_colder and wanted.lets_go(space, node) and _hangs_on(node, wanted.device):
                        best = space, node
        return best

    def _any_leaf(self, wanted: Wanted) -> tuple[Space, Node] | None:
        """The orders name only their coldest, which may stay for a reason of its own. So the emptiest segments are
        looked through for a record that may go with all below it; what goes is the coldest leaf of that."""
        for node in islice(self._nodes_in_the_emptiest(wanted.device), LOOKS_MAX):
            doomed = self.closure([node], wanted, CHUNKS_MAX)
            leaves = [at for at in doomed or () if droppable(at)]
            if doomed and leaves:
                leaf = min(leaves, key=lambda node: node.used)
                return doomed[leaf], leaf
        return None

    def _nodes_in_the_emptiest(self, device: int) -> Iterator[Node]:
        pool = self.extents.pools[device]
        for segment in pool.emptiest_of_other_sizes(0, SEGMENTS_LOOKED_AT):
            yield from (owner for owner in dict.fromkeys(pool.slab_owners(segment)) if isinstance(owner, Node))


def _hangs_on(node: Node, device: int) -> bool:
    """Something above it has extents on the device."""
    above = node.parent
    while above is not None and above.depth:
        if above.on_disk and device_of(above) == device:
            return True
        above = above.parent
    return False


def device_of(node: Node) -> int:
    """The device of a node that has extents."""
    assert node.disk is not None
    return place_of(next(extent for extent in node.disk.extents if extent != ABSENT)).device
