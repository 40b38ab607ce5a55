"""Room in DRAM: takes slots, and decides which chunks go when none is free.

Only ready leaves without pins go, so a chunk that a lease, a retrieve or a store pins stays, and children go before
their parents. The policy (index/eviction.py, index/arc.py) decides which goes first, by default the one used longest
ago; "colder" here means ranked lower by the policy. But a slot is free for another size only when its whole slab is,
and the coldest chunks lie all over the arena. So a slab is emptied on purpose in two cases: all its chunks are colder
than any of the wanted size (`_take_over`), or much has gone in vain (`_after_much_in_vain`).

With quotas (accounts.py), every request for room carries a claim, and only chunks that the claim allows may go.
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
"""Slabs of other sizes that are looked at before one of them is taken over."""
TAKEOVER_PAUSE = 256
"""Evictions between two attempts to take over a slab when the last one found nothing."""
VAIN_SLABS = 32
"""The emptiest slabs of other sizes that are looked at. One is emptied after a slab's worth of evictions was in
vain."""
VAIN_LOOKS_MIN, VAIN_LOOKS_A_SLOT = 16_384, 8
"""Chunks that are looked at before the search for a slab stops: the first number, or the second for each slot of a slab
if that is more. Looking at a chunk costs a fifth of an eviction, and a slab's worth of evictions came before."""
VAIN_PRICE_MAX = 4
"""Chunks that may go for each slot of a slab that is emptied."""
OWN_CHUNKS_MAX = 4096
"""Chunks that go for one slot when a tenant is above its maximum. A maximum that was lowered while the brain was away
may be exceeded by any number of chunks, and no other tenant shall wait for that."""
VAIN_CHUNKS = 32
"""The coldest chunks with a slot of the wanted size that are tried when no slab can be emptied. One of them goes."""


Need = Literal["store", "promote", "index"]
"""The purpose of an eviction: a store, a read from disk, or another chunk in the index (counters.EVICTED_FOR)."""


class Victim(NamedTuple):
    space: Space
    node: Node


class Closure(NamedTuple):
    """The chunks that must go so that certain slots come free."""

    doomed: list[Victim]
    """Children first. It holds all chunks when `end` is whole, otherwise those found before the search stopped."""
    end: Literal["whole", "stays", "dear"]
    """stays: one of the chunks must stay. dear: too many would go for the slots that come free."""


class Search(NamedTuple):
    """The result of a search for chunks to evict."""

    doomed: list[Victim] | None
    """All chunks that go, or None when nothing was found."""
    more: bool
    """Some candidates were left alone because too many chunks would go for them, or were never looked at."""


class Room:
    """The arena's slots, and the eviction order of each namespace."""

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
        """let_go: frees a chunk's slots and removes it from the index unless it is on disk. retired: cleared namespaces
        whose chunks are still read. arc: the policy; None: least recently used."""
        self._pool = pool
        self._counters = counters
        self._let_go = let_go
        self._accounts = accounts
        self._retired = retired
        self._claim: Claim | None = None
        """The claim of the tenant for which room is being made; None without quotas."""
        self._arc = arc
        self._policy = arc or Lru()
        self._rank = self._policy.rank
        self._orders: dict[Space, EvictionPolicy] = {}
        self._takeover_pause = 0
        self._need: Need = "store"
        """The purpose for which room is being made."""
        self._spares_dirty = False
        """Chunks that are only in DRAM are spared while room is being made."""

    def add_space(self, space: Space) -> None:
        self._orders[space] = self._policy.add_space(space)

    def drop_space(self, space: Space) -> list[Leftover]:
        """Stops evicting chunks of a namespace. The caller drops the orders that are returned."""
        self._policy.drop_space(space)
        return self._orders.pop(space).leftovers()

    def offer(self, space: Space, node: Node) -> None:
        """Tells the namespace's eviction order that the node may go, if it may."""
        if evictable(node) and space in self._orders:
            self._orders[space].offer(node)

    def take(self, slot_bytes: int, owner: SlotOwner, *, spares_dirty: bool = False) -> int | None:
        """Takes a slot for `owner` and evicts whatever must go for it. None when nothing can go. spares_dirty: only
        chunks that are also on disk may go."""
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
                claim.turn_to_own()
                offset = self._take(slot_bytes, owner)
        if offset is None:
            claim.account.refused()
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
        """Evicts one chunk, whatever the size of its slots. False when none can go."""
        victim = self._coldest()
        if victim is None:
            return False
        self._evict(*victim)
        return True

    def evict_leaf(self, tenant: int) -> bool:
        """Evicts a chunk without children, so that the index has room for one of that tenant. False when none can
        go."""
        self._need = "index"
        victims = [victim for victim in self._leaves() if victim.node.children is None]
        if self._accounts is not None:
            claim = self._claim = Claim(self._accounts, self._accounts.of(tenant), 0, self._retired)
            claim.turn_to_own()
            victims = [victim for victim in victims if claim.allows(*victim, index=True)]
        if not victims:
            return False
        self._evict(*min(victims, key=lambda victim: self._rank(victim.node)))
        return True

    def let_go(self, space: Space, node: Node) -> None:
        """Takes a chunk out of DRAM that was read only to be moved on disk, if that loses nothing."""
        self._need = "promote"
        if evictable(node) and not _is_dirty(node):
            self._evict(space, node)

    def send_away(self, space: Space, node: Node) -> None:
        """Takes a chunk out of DRAM that its records on disk keep servable, also while leases keep it."""
        assert node.disk is not None
        assert node.disk.keeps
        assert not _is_dirty(node)
        self._need = "promote"
        self._went(space, node)

    def coldest_used(self, default: int) -> int:
        """Last use of the chunk that goes next. default: returned when nothing can go."""
        return min((victim.node.used for victim in self._leaves()), default=default)

    # ---------------------------------------------------------------- inside

    def _leaves(self) -> Iterator[Victim]:
        """The next chunk to go of each namespace."""
        for space, order in self._orders.items():
            node = order.coldest()
            if node is not None:
                yield Victim(space, node)

    def _may_go(self) -> Iterator[Victim]:
        """The next chunks to go that the claim allows and that need not be spared."""
        claim, spares_dirty = self._claim, self._spares_dirty
        for victim in self._leaves():
            if (claim is None or claim.allows(*victim)) and not (spares_dirty and _is_dirty(victim.node)):
                yield victim

    def _coldest(self) -> Victim | None:
        return min(self._may_go(), key=lambda victim: self._rank(victim.node), default=None)

    def _fit_quota(self, claim: Claim, slot_bytes: int) -> bool:
        """Gets the tenant below its maximum. False when that is not done yet, or none of its own chunks can go."""
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
        """Evicts something that may help to place a slot of this size. False when nothing can go.

        The coldest leaf of a namespace with slots of this size goes. A whole slab of another size changes hands instead
        when it is colder, or when this size has nothing to give."""
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
        """Empties a slab of another size if every chunk that must go for it may, and is colder than this size's
        coldest."""
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
        """Empties a slab when this size has nothing to give. If every slab would cost too many chunks now, a slab's
        worth of the coldest chunks goes before the next attempt."""
        before = self._pool.bytes_used
        if not self._after_much_in_vain(slot_bytes):
            return False
        while not self._pool.has_room(slot_bytes) and before - self._pool.bytes_used < self._pool.slab_bytes:
            if not self.evict_coldest():
                return False
        return True

    def _after_much_in_vain(self, slot_bytes: int) -> bool:
        """Empties one of the emptiest slabs, however warm, after a slab's worth of chunks went and no slot of this size
        came free. When no slab can be emptied, a chunk with a slot of this size goes. Also true when nothing went but
        there is more: each further round of evictions makes it cheaper."""
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
        """Every chunk that must go so that these owners give back their slots. More than chunks_max are too dear."""
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
            while below:  # not subtree(): a large part of the index may hang below a shared prefix
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
            if not node.cold:  # a node without slots turns cold once all below it went
                self._evict(space, node)

    def _evict(self, space: Space, node: Node) -> None:
        assert evictable(node)
        self._went(space, node)

    def _went(self, space: Space, node: Node) -> None:
        before = self._pool.bytes_used
        if self._accounts is not None:
            self._accounts.of_space(space).evicted()
        was_cut = self._arc is not None and space.is_cut(node)
        self._let_go(space, node, self._need)
        freed_bytes = before - self._pool.bytes_used
        if self._arc is not None and not was_cut:
            self._arc.evicted(space, node, freed_bytes)
        self._counters.evicted_for[self._need] += 1
        self._counters.add("evicted_bytes", freed_bytes)


def _is_dirty(node: Node) -> bool:
    """Some of its groups are in DRAM only."""
    return node.in_dram & ~node.on_disk != 0


def _victims(doomed: dict[Node, Space]) -> list[Victim]:
    return [Victim(doomed[node], node) for node in sorted(doomed, key=lambda node: -node.depth)]


def _holds_up(node: Node) -> bool:
    """The node is not on disk, and a child of it is, or will be once it leaves DRAM."""
    if node.disk is None or node.disk.keeps:
        return False
    return any(child.disk is not None and child.disk.keeps for child in node.child_nodes())


def _inner(owners: list[SlotOwner]) -> int:
    """How many of these chunks have children, which would have to go as well."""
    return sum(isinstance(owner, Node) and owner.children is not None for owner in owners)


def _warmth(doomed: list[Victim], rank: Callable[[Node], int], coldest: int) -> int:
    """How much is lost with a closure: the sum, over its chunks, of how far the chunk's rank is above that of the
    coldest leaf of all. A chunk counts with the warmest rank at or below it. With ranks by last use the unit is
    time."""
    total = 0
    warmest_below: dict[Node | None, int] = {}
    for _, node in doomed:
        warmest = max(rank(node), warmest_below.get(node, 0))
        warmest_below[node.parent] = max(warmest, warmest_below.get(node.parent, 0))
        total += max(0, warmest - coldest)
    return total
