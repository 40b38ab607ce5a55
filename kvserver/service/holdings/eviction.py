"""Room for what is to be stored: slots are taken here, and when none is free it is decided here who goes.

Only ready leaves without pins go, so a chunk that a lease, a retrieve or a store keeps stays, and children go before
their parents. What goes first is the policy's word (index/eviction.py, index/arc.py), by default what was used longest
ago, and here "colder" is what it ranks lower. But a slot is free for another size only when its whole
slab is, and what was used longest ago lies all over the arena. So a slab is emptied on purpose when all that it holds
is colder than what the wanted size could give (`_take_over`), or when much has gone in vain (`_after_much_in_vain`).

Where tenants have quotas (accounts.py), whoever wants room has a claim, and only what that allows goes.
"""

from collections.abc import Callable, Iterator, Sequence
from heapq import nsmallest
from itertools import islice
from typing import Literal, NamedTuple

from kvserver.index.arc import Arc
from kvserver.index.eviction import EvictionPolicy, Leftover, Lru, evictable
from kvserver.index.space import READY, Node, Space
from kvserver.service.holdings.accounts import Account, Accounts, Claim
from kvserver.service.holdings.place_owners import DiskJob, SlotOwner
from kvserver.service.telling.counters import Counters
from kvserver.tiers.slots import SlotPool

TAKEOVER_SLABS = 8
"""Slabs of another size that are looked at when one size takes a slab from another."""
TAKEOVER_PAUSE = 256
"""Evictions between two attempts that found nothing."""
VAIN_SLABS = 32
"""The emptiest slabs of other sizes: one of them is emptied after a slab's worth of evictions was in vain."""
VAIN_LOOKS_MIN, VAIN_LOOKS_A_SLOT = 16_384, 8
"""Chunks after which no further slab is looked at: so many, or so many for each slot of a slab when that is more. To
look at one costs a fifth of an eviction, and a slab's worth of evictions came before."""
VAIN_PRICE_MAX = 4
"""Chunks that may go for each slot of a slab that is emptied."""
OWN_CHUNKS_MAX = 4096
"""Chunks that go for one slot when a tenant has more than its maximum. A maximum that was lowered while the brain was
away may be exceeded by any number of them, and nobody else shall wait for that."""
VAIN_CHUNKS = 32
"""Coldest chunks with a slot of the wanted size, one of which goes when no slab can be emptied."""


Need = Literal["store", "promote", "index"]
"""What room is made for: a store, what is read from disk, or another chunk in the index (counters.EVICTED_FOR)."""


class Victim(NamedTuple):
    space: Space
    node: Node


class Closure(NamedTuple):
    """What has to go so that some slots come free."""

    doomed: list[Victim]
    """Children first. All, when `end` is whole; else as far as was looked."""
    end: Literal["whole", "stays", "dear"]
    """stays: something among it must stay. dear: it is too much for what comes free."""


class Search(NamedTuple):
    """For what may be evicted to make room."""

    doomed: list[Victim] | None
    """All that goes, or None when nothing was found."""
    more: bool
    """Something was left alone because too many chunks would have to go for it, or was never looked at."""


class Room:
    """The arena's slots, and for each namespace the order in which its chunks go."""

    def __init__(
        self,
        pool: SlotPool[SlotOwner],
        counters: Counters,
        let_go: Callable[[Space, Node, Need], None],
        *,
        accounts: Accounts | None,
        retired: Sequence[Space],
        arc: Arc | None,
    ) -> None:
        """let_go: frees the slots of a chunk, which goes out of the index unless it is on disk. retired: cleared
        namespaces of which something is still read. arc: the policy; None: least recently used."""
        self._pool = pool
        self._counters = counters
        self._let_go = let_go
        self._accounts = accounts
        self._retired = retired
        self._claim: Claim | None = None
        """Of the tenant for which room is being made, where there are quotas."""
        self._arc = arc
        self._policy = arc or Lru()
        self._rank = self._policy.rank
        self._orders: dict[Space, EvictionPolicy] = {}
        self._takeover_pause = 0
        self._need: Need = "store"
        """Of whoever room is being made for."""
        self._spares_dirty = False
        """For it nothing goes that would be lost with DRAM."""

    def add_space(self, space: Space) -> None:
        self._orders[space] = self._policy.add_space(space)

    def drop_space(self, space: Space) -> list[Leftover]:
        """Nothing goes of a namespace to make room any more. What was kept for it is the caller's to drop."""
        self._policy.drop_space(space)
        return self._orders.pop(space).leftovers()

    def offer(self, space: Space, node: Node) -> None:
        """Tells the order of the namespace that the node may go, if it may."""
        if evictable(node) and space in self._orders:
            self._orders[space].offer(node)

    def take(self, slot_bytes: int, owner: SlotOwner, *, spares_dirty: bool = False) -> int | None:
        """A slot that now belongs to `owner`; whatever has to go for it goes. None when nothing can go. spares_dirty:
        only what is on disk as well may go."""
        self._spares_dirty = spares_dirty
        try:
            return self._take_for(slot_bytes, owner)
        finally:
            self._spares_dirty = False

    def _take_for(self, slot_bytes: int, owner: SlotOwner) -> int | None:
        self._need = "promote" if isinstance(owner, DiskJob) else "store"
        if self._accounts is None:
            return self._take(slot_bytes, owner)
        claim = self._claim = Claim(self._accounts, self._accounts.of_owner(owner), slot_bytes, self._retired)
        offset = None
        if self._fit_quota(claim, slot_bytes):
            offset = self._take(slot_bytes, owner)
            if offset is None and not claim.own:
                claim.own = True
                offset = self._take(slot_bytes, owner)
        claim.account.refused_slots += offset is None
        return offset

    def _take(self, slot_bytes: int, owner: SlotOwner) -> int | None:
        vain_bytes = 0
        while True:
            offset = self._pool.allocate(slot_bytes, owner)
            if offset is not None:
                return offset
            before = self._pool.bytes_used
            if vain_bytes < self._pool.slab_bytes:
                going = self._make_room(slot_bytes)
            else:
                going = self._after_much_in_vain(slot_bytes)
                vain_bytes = 0
            if not going:
                return None
            vain_bytes += before - self._pool.bytes_used

    def evict_coldest(self) -> bool:
        """Evicts one chunk, whatever its slots; False when none can go."""
        victim = self._coldest()
        if victim is None:
            return False
        self._evict(*victim)
        return True

    def evict_leaf(self, tenant: int) -> bool:
        """Evicts a chunk below which there is nothing, so that the index has room for one of that tenant; False when
        none can go."""
        self._need = "index"
        victims = [victim for victim in self._leaves() if victim.node.children is None]
        if self._accounts is not None:
            claim = self._claim = Claim(self._accounts, self._accounts.of(tenant), 0, self._retired)
            claim.own = True
            victims = [victim for victim in victims if claim.allows(*victim, index=True)]
        if not victims:
            return False
        self._evict(*min(victims, key=lambda victim: self._rank(victim.node)))
        return True

    def let_go(self, space: Space, node: Node) -> None:
        """Takes a chunk out of DRAM that was brought there for its disk's sake, where that loses nothing."""
        self._need = "promote"
        if evictable(node) and not _is_dirty(node):
            self._evict(space, node)

    def coldest_used(self, default: int) -> int:
        """When the chunk that goes next was used last; default: nothing can go."""
        return min((victim.node.used for victim in self._leaves()), default=default)

    # ---------------------------------------------------------------- inside

    def _leaves(self) -> Iterator[Victim]:
        """Of each namespace the one that goes next."""
        for space, order in self._orders.items():
            node = order.coldest()
            if node is not None:
                yield Victim(space, node)

    def _may_go(self) -> Iterator[Victim]:
        """Those of them that may go for whoever room is being made for."""
        claim, spares_dirty = self._claim, self._spares_dirty
        for victim in self._leaves():
            if (claim is None or claim.allows(*victim)) and not (spares_dirty and _is_dirty(victim.node)):
                yield victim

    def _coldest(self) -> Victim | None:
        return min(self._may_go(), key=lambda victim: self._rank(victim.node), default=None)

    def _fit_quota(self, claim: Claim, slot_bytes: int) -> bool:
        """Makes room below the tenant's maximum; False when that is not done yet, or nothing of its own can go."""
        for _ in range(OWN_CHUNKS_MAX):
            if not claim.account.lacks(slot_bytes) or not self._evict_own(claim):
                break
        return not claim.account.lacks(slot_bytes)

    def _evict_own(self, claim: Claim) -> bool:
        """Evicts the coldest chunk of the tenant that has reached its maximum."""
        own = (victim for victim in self._leaves() if claim.is_own(victim.space))
        victim = min(own, key=lambda victim: self._rank(victim.node), default=None)
        if victim is not None:
            self._evict(*victim)
        return victim is not None

    def _make_room(self, slot_bytes: int) -> bool:
        """Frees something that may help to place a slot of this size; False when nothing can go.

        The coldest leaf of a namespace with slots of this size goes, unless what another size holds is colder by a
        whole slab, or this size has nothing to give: then that slab changes hands."""
        victim: Victim | None = None
        stranger: Victim | None = None
        rank = self._rank
        for leaf in self._may_go():
            if slot_bytes in leaf.space.slot_sizes:
                if victim is None or rank(leaf.node) < rank(victim.node):
                    victim = leaf
            elif stranger is None or rank(leaf.node) < rank(stranger.node):
                stranger = leaf
        if victim is None:
            return stranger is not None and self._take_from_others(slot_bytes)
        if stranger is not None and rank(stranger.node) < rank(victim.node):
            if self._takeover_pause:
                self._takeover_pause -= 1
            elif self._take_over(slot_bytes, rank(victim.node)):
                return True
            else:
                self._takeover_pause = TAKEOVER_PAUSE
        self._evict(*victim)
        return True

    def _take_over(self, slot_bytes: int, colder_than: int) -> bool:
        """Empties a slab of another size if all that must go for it is evictable, and colder than the own coldest."""
        best: list[Victim] | None = None
        best_warmest = 0
        looked = 0
        for slab in self._pool.slabs_of_other_sizes(slot_bytes):
            doomed, end = self._closure(self._pool.slab_owners(slab), colder_than=colder_than)
            if end != "whole":
                continue
            warmest = max(self._rank(node) for _, node in doomed)
            if best is None or warmest < best_warmest:
                best, best_warmest = doomed, warmest
            looked += 1
            if looked == TAKEOVER_SLABS:
                break
        if best is None:
            return False
        self._evict_all(best)
        return True

    def _take_from_others(self, slot_bytes: int) -> bool:
        """Empties a slab, when this size has nothing to give. When each would cost too many chunks now, a slab's worth
        goes along the order before the next attempt."""
        before = self._pool.bytes_used
        if not self._after_much_in_vain(slot_bytes):
            return False
        while not self._pool.has_room(slot_bytes) and before - self._pool.bytes_used < self._pool.slab_bytes:
            if not self.evict_coldest():
                return False
        return True

    def _after_much_in_vain(self, slot_bytes: int) -> bool:
        """A slab's worth of chunks went and no slot of this size came free: empties one of the emptiest slabs, however
        warm; when none can be emptied, a chunk with a slot of this size goes. True also when nothing went and there is
        more: each further round along the order makes it cheaper."""
        doomed, more = self._cheapest_slab(slot_bytes)
        if doomed is None:
            doomed, more_of_size = self._coldest_of_size(slot_bytes)
            more |= more_of_size
        if doomed is not None:
            self._evict_all(doomed)
        return doomed is not None or more

    def _cheapest_slab(self, slot_bytes: int) -> Search:
        best: list[Victim] | None = None
        best_warmth = looked = 0
        coldest = self._coldest()
        coldest_rank = self._rank(coldest.node) if coldest is not None else 0
        emptiest = self._pool.emptiest_of_other_sizes(slot_bytes, VAIN_SLABS + 1)
        more = len(emptiest) > VAIN_SLABS
        for owners in sorted(map(self._pool.slab_owners, emptiest[:VAIN_SLABS]), key=_inner):
            if looked > max(VAIN_LOOKS_MIN, VAIN_LOOKS_A_SLOT * len(owners)):
                more = True
                break
            doomed, end = self._closure(owners, chunks_max=VAIN_PRICE_MAX * len(owners))
            looked += len(doomed)
            more |= end == "dear"
            if end == "whole":
                warmth = _warmth(doomed, self._rank, coldest_rank)
                if best is None or warmth < best_warmth:
                    best, best_warmth = doomed, warmth
        return Search(best, more)

    def _coldest_of_size(self, slot_bytes: int) -> Search:
        owners = list(islice(self._pool.owners_of_size(slot_bytes), VAIN_LOOKS_MIN))
        nodes = (owner for owner in owners if isinstance(owner, Node))
        coldest = nsmallest(VAIN_CHUNKS + 1, nodes, key=self._rank)
        more = len(owners) == VAIN_LOOKS_MIN or len(coldest) > VAIN_CHUNKS
        chunks_max = VAIN_PRICE_MAX * (self._pool.slab_bytes // slot_bytes)
        for node in coldest[:VAIN_CHUNKS]:
            doomed, end = self._closure([node], chunks_max=chunks_max)
            if end == "whole":
                return Search(doomed, more)
            more |= end == "dear"
        return Search(None, more)

    def _closure(
        self, owners: list[SlotOwner], *, colder_than: int | None = None, chunks_max: int | None = None
    ) -> Closure:
        """Every chunk that has to go so that these give back their slots. More than chunks_max are dear."""
        doomed: dict[Node, Space] = {}
        planned: dict[Account, int] = {}
        for owner in owners:
            if not isinstance(owner, Node):
                return Closure(_victims(doomed), "stays")
            if owner in doomed:
                continue
            space = next((space for space in self._orders if space.nodes.get(owner.key) is owner), None)
            if space is None:
                return Closure(_victims(doomed), "stays")
            below = [owner]
            while below:  # not subtree(): below a shared prefix hangs a large part of the index, and most are too warm
                node = below.pop()
                if node in doomed:
                    continue
                too_warm = colder_than is not None and self._rank(node) >= colder_than
                if node.pins or node.state != READY or too_warm:
                    return Closure(_victims(doomed), "stays")
                if _holds_up(node) or (self._spares_dirty and _is_dirty(node)):
                    return Closure(_victims(doomed), "stays")
                if len(doomed) == chunks_max:
                    return Closure(_victims(doomed), "dear")
                if self._claim is not None and not self._claim.allows(space, node, planned):
                    return Closure(_victims(doomed), "stays")
                doomed[node] = space
                below.extend(child for child in node.child_nodes() if not child.cold)
        return Closure(_victims(doomed), "whole")

    def _evict_all(self, doomed: list[Victim]) -> None:
        for space, node in doomed:
            if not node.cold:  # what had nothing in DRAM of its own is, once all below it went
                self._evict(space, node)

    def _evict(self, space: Space, node: Node) -> None:
        assert evictable(node)
        before = self._pool.bytes_used
        if self._accounts is not None:
            self._accounts.of_space(space).evicted_chunks += 1
        self._let_go(space, node, self._need)
        freed_bytes = before - self._pool.bytes_used
        if self._arc is not None:
            self._arc.evicted(space, node, freed_bytes)
        self._counters.evicted_for[self._need] += 1
        self._counters.evicted_bytes += freed_bytes


def _is_dirty(node: Node) -> bool:
    """Something of it would be lost with DRAM."""
    return node.in_dram & ~node.on_disk != 0


def _victims(doomed: dict[Node, Space]) -> list[Victim]:
    return [Victim(doomed[node], node) for node in sorted(doomed, key=lambda node: -node.depth)]


def _holds_up(node: Node) -> bool:
    """It is not on disk, and a chunk below it is, or will be when it leaves DRAM."""
    if node.disk is None or node.disk.keeps:
        return False
    return any(child.disk is not None and child.disk.keeps for child in node.child_nodes())


def _inner(owners: list[SlotOwner]) -> int:
    """How many of these have others below them, which would have to go as well."""
    return sum(isinstance(owner, Node) and owner.children is not None for owner in owners)


def _warmth(doomed: list[Victim], rank: Callable[[Node], int], coldest: int) -> int:
    """How much is lost with a closure: for each chunk how far its rank, or that of something below it, is above that of
    the coldest leaf of all. Where ranks are times of last use that is the time between."""
    total = 0
    warmest_below: dict[Node | None, int] = {}
    for _, node in doomed:
        warmest = max(rank(node), warmest_below.get(node, 0))
        warmest_below[node.parent] = max(warmest, warmest_below.get(node.parent, 0))
        total += max(0, warmest - coldest)
    return total
