"""Room on the devices: takes extents, and decides which chunks go when none is free.

The order is that of DRAM, leaf first and least recently used first, among the chunks with extents. If a chunk is in
DRAM as well, nothing is lost with its extents. Otherwise the chunk itself is lost, so it must be a leaf of the index.
The chunks of a chain lie on several devices, so making room on one may have to begin with leaves on another.

A segment serves extents of one size. When chunks of other sizes have given back as many extents as a segment holds, no
more of them go: the records of one segment move to those places, and the segment changes its size (segments.py).

With quotas (accounts.py), every request for room carries a claim, and only chunks that the claim allows may go. A quota
counts all devices together. So a tenant at its maximum makes room wherever its coldest chunks lie. A tenant below its
guarantee takes from tenants above theirs, on the device that its chunk is for.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from kvserver.index.eviction import DeviceLru, droppable
from kvserver.index.space import ABSENT, READY, Node, Space
from kvserver.service.holdings.accounts import Account, Accounts, Claim
from kvserver.service.holdings.place_owners import ExtentOwner
from kvserver.tiers.extents import Extents, place_of

SEGMENTS_LOOKED_AT = 8
"""The emptiest segments that are looked at: those of other sizes when one must be emptied, those of any size when no
order names a chunk."""
AHEAD_SHARE = 4
"""Another segment is emptied for a size when less than 1 / this of a segment is left for it."""
OTHERS_LOOKED_AT = 32
"""Chunks of each order that are looked at when a device's coldest chunk is warmer than those of other devices."""
LOOKS_MAX = 256
"""Chunks in the emptiest segments that are looked at when no order names a chunk."""
CHUNKS_MAX = 4096
"""Chunks that may go for one record: a million may hang below a shared prefix."""
USED_EVER = 1 << 63
"""A time of use later than any real one."""
OWN_CHUNKS_MAX = 4096
"""Chunks that go for one extent when a tenant is at its maximum: the sizes of its records may differ widely."""


class Wanted(NamedTuple):
    """A request for an extent, and the chunks that may go for it."""

    device: int
    extent_bytes: int
    used: int
    """Chunks used before this may go."""
    tenant: int = 0
    claim: Claim | None = None
    """The tenant's claim; None without quotas."""

    def lets_go(self, space: Space, node: Node, planned: dict[Account, int] | None = None) -> bool:
        """Whether a chunk may go for this request. For a tenant below its guarantee, chunks of tenants above theirs may
        go even if they were used later."""
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
    """Size of the extents that the segment will serve afterwards."""
    used: int
    """Chunks used before this may go for it: the latest such time among the chunks that wait."""
    tenant: int
    """Tenant of the first chunk that waits."""
    queue: list[Node] = field(default_factory=list)
    """Chunks with a record in the segment that are still to be looked at."""
    moving: dict[Node, Space] = field(default_factory=dict)
    fetched: set[Node] = field(default_factory=set)
    """Chunks in `moving` that were read to DRAM only for the move."""
    dropped_bytes: int = 0
    """Bytes of the chunks that went because they could not be moved."""
    in_vain: bool = False
    """A chunk can neither be moved nor go, so the segment cannot be emptied."""
    records: int = -1
    """Records in the segment at the last progress; -1: not counted yet."""
    since_ns: int = 0
    """Time of the last progress; 0: nobody has looked yet."""

    def serve(self, used: int) -> None:
        """Another chunk waits for the segment; chunks used before this may go for it too."""
        self.used = max(self.used, used)

    def has_left(self, records: int, now_ns: int) -> bool:
        """Whether the number of records in the segment shows progress."""
        if records == self.records and self.since_ns:
            return False
        self.records, self.since_ns = records, now_ns
        return True

    def look_at(self, owners: Iterable[ExtentOwner]) -> None:
        """Begins another round when all chunks of the last one were looked at."""
        if not self.queue:
            self.queue = [owner for owner in dict.fromkeys(owners) if isinstance(owner, Node)]

    def dropped(self, count: int) -> None:
        """Chunks of so many bytes went because one of them could not be moved; 0: they may not go either."""
        self.dropped_bytes += count
        if not count:
            self.give_up()

    def wait(self, now_ns: int) -> None:
        """Only the device's limits delay it; that is no lack of progress."""
        self.since_ns = now_ns

    def give_up(self) -> None:
        self.in_vain = True


class DiskRoom:
    """The extents, and the eviction order for each namespace and device."""

    def __init__(
        self,
        extents: Extents[ExtentOwner],
        drop: Callable[[Space, Node], None],
        accounts: Accounts | None = None,
        retired: Sequence[Space] = (),
    ) -> None:
        """drop: frees a chunk's extents, and removes the chunk from the index when it is nowhere else. retired: cleared
        namespaces whose chunks are still read."""
        self.extents = extents
        self._let_go = drop
        self._accounts = accounts
        self._retired = retired
        self._orders: dict[Space, list[DeviceLru]] = {}
        self.emptying: dict[int, Emptying] = {}
        """Device -> the segment that is being emptied, one at a time."""
        self._avoided: dict[int, set[int]] = {}
        """Device -> segments that could not be emptied since the last success."""

    def add_space(self, space: Space) -> None:
        self._orders[space] = [DeviceLru(device) for device in range(len(self.extents.pools))]

    def drop_space(self, space: Space) -> list[DeviceLru]:
        """Stops evicting chunks of a namespace. Returns its orders."""
        return self._orders.pop(space)

    def offer(self, space: Space, node: Node) -> None:
        if droppable(node) and space in self._orders:
            self._orders[space][device_of(node)].offer(node)

    def has(self, wanted: Wanted) -> bool:
        """take() is likely to succeed."""
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
        claim.turn_to_own()
        return self._next(wanted) is not None

    def wanted(self, device: int, extent_bytes: int, used: int, tenant: int) -> Wanted:
        """A request for an extent for a chunk of that tenant. Chunks used before `used` may go for it."""
        return Wanted(device, extent_bytes, used, tenant, self._claim(tenant, extent_bytes))

    def take(self, wanted: Wanted, owner: ExtentOwner) -> int | None:
        """Takes an extent for `owner`, and evicts the coldest allowed chunks for it. None when nothing can go, or a
        segment of the device is being emptied.

        Without the bound by use, a DRAM larger than the device would make its chunks push each other off the device for
        ever."""
        extent = self._take_within_quota(wanted, owner)
        if extent is None and wanted.device not in self.emptying:
            self._avoided.pop(wanted.device, None)  # every segment has had its turn
            if wanted.claim is not None:
                wanted.claim.account.refused()
        return extent

    def prepare(self, wanted: Wanted) -> None:
        """Begins to empty a segment before the last extents of a size are taken, if chunks of other sizes would go
        next. Later writes then need not wait."""
        pool = self.extents.pools[wanted.device]
        at_maximum = wanted.claim is not None and wanted.claim.account.lacks(wanted.extent_bytes)
        if wanted.device in self.emptying or at_maximum:
            return
        while pool.nearly_full(wanted.extent_bytes, AHEAD_SHARE):  # an eviction may empty a whole segment
            if movable := pool.movable(wanted.extent_bytes, SEGMENTS_LOOKED_AT):
                self._begin_emptying(wanted, movable)
                return
            going = self._next(wanted)
            if going is None or wanted.extent_bytes in going[0].slot_sizes or going[1].in_dram:
                return  # a chunk in DRAM would be written again before the chunk that is prepared for
            self._drop(*going)

    def empties_for(self, device: int, extent_bytes: int) -> bool:
        """A segment of the device is emptied, or is empty, for extents of this size. A chunk of several sizes takes
        these extents last: once taken, a segment is open to others even if the chunk gives its extents back."""
        going = self.emptying.get(device)
        return going is not None and going.for_bytes == extent_bytes

    def stop_emptying(self, device: int, *, in_vain: bool) -> None:
        """Ends emptying a segment, which then serves any size. in_vain: it could not be emptied, and another one is
        tried next."""
        going = self.emptying.pop(device)
        self.extents.pools[device].reopen(going.segment)
        if in_vain:
            self._avoided.setdefault(device, set()).add(going.segment)
        else:
            self._avoided.pop(device, None)

    def drop_with_all_below(self, node: Node, wanted: Wanted, bytes_max: int) -> int:
        """Frees the extents of a chunk and of all below it if all of them may go and they are at most so many bytes.
        Returns their bytes; 0 when none went."""
        doomed = self.closure([node], wanted, CHUNKS_MAX) or {}
        count = sum(space.group_bytes(at.on_disk) for at, space in doomed.items())
        if count > bytes_max:
            return 0
        for at in sorted(doomed, key=lambda node: -node.depth):
            if droppable(at):
                self._drop(doomed[at], at)
        return count

    def keep_maxima(self, chunks_max: int) -> None:
        """Evicts the coldest chunks of each tenant above its maximum, at most this many each. A maximum that was
        lowered while the brain was away may be exceeded by everything that recovery finds, and others wait meanwhile.
        What was cleared or cut off goes by itself."""
        if self._accounts is None:
            return
        going = self._accounts.leaving(self._retired)
        for account in self._accounts.all():
            for _ in range(chunks_max):
                own = self._coldest_of(account) if account.lacks(-going.get(account, 0)) else None
                if own is None:
                    break
                self._drop(*own)

    def evict_leaf(self, tenant: int) -> bool:
        """Evicts the coldest chunk that is on disk alone, so that the index has room for one of that tenant. False when
        none can go."""
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
        """Frees the extents of one chunk whose loss leaves DRAM complete. False when none can go for that tenant."""
        claim = self._claim_of_all(tenant)
        for device in range(len(self.extents.pools)):
            best = self._coldest(Wanted(device, 0, USED_EVER, tenant, claim))
            if best is not None and (not best[1].in_dram or best[1].in_dram & best[0].needed == best[0].needed):
                self._drop(*best)
                return True
        return False

    def closure(self, owners: Sequence[ExtentOwner], wanted: Wanted, chunks_max: int) -> dict[Node, Space] | None:
        """Every chunk that must give its extents back so that these owners can. None when one of them must stay or they
        are too many. A chunk must stay when it is pinned, may not go for this request, or keeps a chunk in DRAM below
        it servable."""
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
        """The namespace of a node; None when the node's space was cleared or cut off."""
        space = next((space for space in self._orders if space.nodes.get(node.key) is node), None)
        return None if space is None or space.is_cut(node) else space

    # ---------------------------------------------------------------- inside

    def _claim(self, tenant: int, more_bytes: int) -> Claim | None:
        accounts = self._accounts
        return Claim(accounts, accounts.of(tenant), more_bytes, self._retired) if accounts is not None else None

    def _claim_of_all(self, tenant: int) -> Claim | None:
        """A claim for room in the index. The tenant's own chunks may go, because room on the devices is not what it
        lacks."""
        claim = self._claim(tenant, 0)
        if claim is not None:
            claim.turn_to_own()
        return claim

    def _take_within_quota(self, wanted: Wanted, owner: ExtentOwner) -> int | None:
        claim = wanted.claim
        if claim is None:
            return self._take(wanted, owner)
        if not self._fit_quota(claim.account, wanted):
            return None
        extent = self._take(wanted, owner)
        if extent is None and not claim.own:
            claim.turn_to_own()
            extent = self._take(wanted, owner)
        return extent

    def _take(self, wanted: Wanted, owner: ExtentOwner) -> int | None:
        pool = self.extents.pools[wanted.device]
        while True:
            going = self.emptying.get(wanted.device)
            if going is None or not self._is_spoken_for(going, wanted):
                extent = self.extents.allocate(wanted.device, wanted.extent_bytes, owner)
                if extent is not None:
                    return extent
            if going is not None and going.for_bytes == wanted.extent_bytes:
                going.serve(wanted.used)
                return None
            movable = pool.movable(wanted.extent_bytes, SEGMENTS_LOOKED_AT)
            if movable and going is None:
                self._begin_emptying(wanted, movable)
            if movable or not self._drop_next(wanted):
                return None

    def _is_spoken_for(self, going: Emptying, wanted: Wanted) -> bool:
        """All free extents of that size on the device are needed for the records that move. An emptied segment that has
        been taken since is not closed any more, and nothing moves out of it."""
        pool = self.extents.pools[wanted.device]
        if not pool.is_closed(going.segment) or pool.slab_slot_bytes(going.segment) != wanted.extent_bytes:
            return False
        return pool.spare(going.segment) <= 0

    def _begin_emptying(self, wanted: Wanted, movable: list[int]) -> None:
        avoided = self._avoided.get(wanted.device, set())
        segment = next((segment for segment in movable if segment not in avoided), None)
        if segment is None:
            return
        self.emptying[wanted.device] = Emptying(wanted.device, segment, wanted.extent_bytes, wanted.used, wanted.tenant)
        self.extents.pools[wanted.device].close(segment, wanted.extent_bytes)

    def _fit_quota(self, account: Account, wanted: Wanted) -> bool:
        """Gets the tenant below its maximum. False when that is not done yet, or none of its own chunks can go."""
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
        """The chunk that goes next to make room on a device: the coldest there, or a colder leaf elsewhere that must go
        before something there can."""
        return self._coldest_above(wanted, self._coldest(wanted)) or self._any_leaf(wanted)

    def _drop(self, space: Space, node: Node) -> None:
        if self._accounts is not None:
            self._accounts.of_space(space).evicted()
        self._let_go(space, node)

    def _coldest(self, wanted: Wanted) -> tuple[Space, Node] | None:
        """The coldest chunk on a device that may go."""
        best: tuple[Space, Node] | None = None
        for space, orders in self._orders.items():
            node = orders[wanted.device].coldest()
            if node is not None and (best is None or node.used < best[1].used) and wanted.lets_go(space, node):
                best = space, node
        return best

    def _coldest_of(self, account: Account) -> tuple[Space, Node] | None:
        """The coldest chunk of a tenant, on any device."""
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
        """The coldest chunk on any device that lies below a chunk on this device, if it is colder than `best`. A few
        more chunks of each device are looked at when none is, and every other device has a colder chunk, or there is no
        `best`."""
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
        if found or colder < (1 if best is None else len(self.extents.pools) - 1):
            return best
        for space, orders in self._orders.items():
            for order in orders:
                for node in order.among_the_coldest(OTHERS_LOOKED_AT):
                    is_colder = best is None or node.used < best[1].used
                    if is_colder and wanted.lets_go(space, node) and _hangs_on(node, wanted.device):
                        best = space, node
        return best

    def _any_leaf(self, wanted: Wanted) -> tuple[Space, Node] | None:
        """A leaf that may go when the orders name none: they name only their coldest, which may have to stay. The
        emptiest segments are searched for a record that may go with all below it. The coldest leaf below it is the one
        to go."""
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
    """An ancestor of the node has extents on the device."""
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
