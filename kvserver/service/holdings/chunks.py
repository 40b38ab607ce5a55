"""The chunks we hold: index and slots together. Every change to which bytes are servable is made in this file.

Life of a chunk's part (one shard of one group):

    reserve() ──> reserved ──assign()──> assigned to a job ──seal()──> sealed
                     │                        │                          │ all shards of the group sealed:
                     └───── discard() ────────┤                          └── present, owned by the node
                                              └── the job keeps the slot as an orphan until its copy has ended

A slot is freed only when nothing can write to it any more: never while a job's copy may run. Ledger entries are
published after the bytes are final and withdrawn before the slot is used again. Both are collected here in order. The
shell carries them out before all other effects of the same event (see effects.py).
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from kvserver.index.arc import Arc
from kvserver.index.coverage import servable_chunks
from kvserver.index.eviction import Leftover
from kvserver.index.space import ABSENT, GONE, READY, Node, Space, is_below, settle
from kvserver.index.subtrees import Below, Cut
from kvserver.service.holdings.accounts import Accounts, ChargedPool
from kvserver.service.holdings.eviction import Need, Room
from kvserver.service.holdings.place_owners import SEALED, UNASSIGNED, Orphan, Pending, SlotOwner
from kvserver.service.telling.counters import Counters
from kvserver.service.telling.evicted_keys import Cause
from kvserver.tiers.marks import Marks
from kvserver.tiers.records import NO_GROUP, NO_PARENT, NO_SUM, Record, pack
from kvserver.tiers.slots import SLOT_ALIGN, SlotPool


class DiskSide(Protocol):
    """The part of disk_chunks.py that this file calls. That file stands above this one."""

    def add_space(self, space: Space) -> None: ...
    def drop_space(self, space: Space) -> list[Leftover]: ...
    def offer(self, space: Space, node: Node) -> None: ...
    def free_extents(self, space: Space, node: Node) -> None: ...
    def why_not(self, space: Space, node: Node) -> str: ...
    def evict_leaf(self, tenant: int) -> bool: ...
    def drop_any(self, tenant: int) -> bool: ...


class PledgeHolder(Protocol):
    """The wait that pins the chunk before the next pledged one."""

    @property
    def tail(self) -> Node | None: ...
    def moves_on(self, tail: Node) -> None: ...


class PledgedSide(Protocol):
    """The part of state/pledges.py that this file calls. It stands above this file."""

    def __len__(self) -> int: ...
    def servable(self, space: Space, node: Node) -> Sequence[PledgeHolder]:
        """All of them pin the chunk before."""

    def gave_up(self, space: Space, key: bytes) -> None: ...
    def cleared(self, space: Space) -> None: ...


ENTRIES_A_CHUNK = 4
"""Entries of eviction orders that can be dropped in the time that it takes to forget one chunk."""
STEPS_A_CHUNK = 2
"""A cut-off chunk is taken over in one step, and forgotten in another."""


@dataclass(slots=True)
class Forgetting:
    """A cleared namespace, or what was cut off of one, whose chunks are still being forgotten."""

    reason: Cause
    leftovers: list[Leftover]
    cut: Cut | None = None


class Chunks:
    """All namespaces and the arena."""

    def __init__(
        self,
        *,
        arena_bytes: int,
        slab_bytes: int,
        chunks_max: int,
        forget_chunks: int,
        counters: Counters,
        accounts: Accounts | None,
        eviction_policy: Literal["lru", "arc"],
    ) -> None:
        """accounts: accounts of the tenants; None without quotas."""
        self.accounts = accounts
        self.pool: SlotPool[SlotOwner] = (
            SlotPool(arena_bytes, slab_bytes)
            if accounts is None
            else ChargedPool(arena_bytes, slab_bytes, accounts=accounts)
        )
        self.spaces: dict[bytes, Space] = {}
        self.retired: list[Space] = []
        """Namespaces that were cleared or cut off and still have chunks."""
        self.cut_from: dict[Space, tuple[Space, Node]] = {}
        """Cut-off space -> where it was cut from: the space, and the chunk above. That chunk is pinned as long, because
        a retrieve of cut-off chunks may read those above as well."""
        self.forgetting: dict[Space, Forgetting] = {}
        """Retired spaces that are still being forgotten, the oldest first."""
        self._ahead = forget_chunks
        """Chunks of cleared namespaces that this event may still forget ahead of their turn."""
        self._at_once = STEPS_A_CHUNK * forget_chunks
        """Steps that this event may still take for what it has cut off."""
        self.pendings: dict[Node, Pending] = {}
        self.orphans: dict[int, list[int]] = {}
        """Job -> slots that are freed when its copy has ended."""
        self.marks: Marks[Node] = Marks(arena_bytes, chunks_max)
        self.chunks_max = chunks_max
        self._forget_chunks = forget_chunks
        self.chunks = 0
        self.pins = 0
        """Sum of `node.pins`, counted separately so that check() finds a leaked pin."""
        self.generation = 0
        self.records: list[bytes] = []
        """Ledger entries to publish."""
        self.withdrawn: list[int] = []
        """Slots whose ledger entries are to be withdrawn."""
        self.gone: list[tuple[bytes, Node, Cause]] = []
        """Namespace, chunk and cause of each chunk that left the index, for evicted_keys.py."""
        self.changes: dict[Node, tuple[Space, int, int]] | None = None
        """Chunks that this event changed, with the groups (bits) that each had in DRAM and on disk before. None: nobody
        subscribed (kv_events.py)."""
        self.arc = Arc(arena_bytes, chunks_max) if eviction_policy == "arc" else None
        """The ARC policy, which must be told which chunks come and are asked for. None: eviction is least recently
        used."""
        self.room = Room(self.pool, counters, self._leave_dram, accounts=accounts, retired=self.retired, arc=self.arc)
        self.clean_bytes = 0
        """Slot bytes that may go without loss, because their chunks are also on disk."""
        self.disk: DiskSide | None = None
        """The chunks on disk; None without a disk."""
        self.pledged: PledgedSide | None = None
        """The chunks that engines have pledged to store."""
        self._counters = counters

    def tell_of_pledged(self, pledged: PledgedSide) -> None:
        """Pledges are to be told what becomes of their chunks."""
        self.pledged = pledged

    def stand_above(self, disk: DiskSide) -> None:
        """There is a disk."""
        self.disk = disk

    # ---------------------------------------------------------------- what the event did

    def begin_changes(self) -> None:
        """Somebody subscribed to changes."""
        self.changes = {}

    def take_gone(self) -> list[tuple[bytes, Node, Cause]]:
        gone, self.gone = self.gone, []
        return gone

    def take_records(self) -> list[bytes]:
        records, self.records = self.records, []
        return records

    def take_withdrawn(self) -> list[int]:
        withdrawn, self.withdrawn = self.withdrawn, []
        return withdrawn

    # ---------------------------------------------------------------- namespaces

    def add_space(self, space: Space) -> None:
        assert space.digest not in self.spaces
        if not space.lookup_tokens:
            space.count_tokens_in(self._counters.lookup_tokens_of(""))
        self.spaces[space.digest] = space
        self.room.add_space(space)
        if self.disk is not None:
            self.disk.add_space(space)

    def clear(self, space: Space, reason: Cause) -> int:
        """Forgets a namespace: nothing that it holds now is ever served again. Returns how many chunks go; each call of
        forget_some() removes some. Running retrieves finish; their chunks stay in a retired space until then."""
        assert self.spaces.get(space.digest) is space
        chunks = len(space.nodes)
        del self.spaces[space.digest]
        self.retired.append(space)
        if self.pledged:
            self.pledged.cleared(space)  # before what is being stored is given up: no engine has broken its word
        for node in [pending.node for pending in self.pendings.values() if pending.space is space]:
            if node.state != GONE:
                self.discard(space, node, reason)
        self._counters.discarded[reason] += len(space.nodes)
        leftovers = self.room.drop_space(space) + (self.disk.drop_space(space) if self.disk is not None else [])
        self.forgetting[space] = Forgetting(reason, leftovers)
        space.doom()
        return chunks

    def still_forgetting(self, digests: Container[bytes]) -> list[Space]:
        """Cleared spaces of these namespaces that are still being forgotten."""
        return [space for space in self.forgetting if space.digest in digests]

    def forget_some(self) -> None:
        """Forgets some more chunks of cleared namespaces, within the bound for one call."""
        chunks = self._forget_chunks
        entries = ENTRIES_A_CHUNK * chunks
        while self.forgetting and chunks > 0 and entries > 0:
            space, rest = next(iter(self.forgetting.items()))
            if rest.cut is not None:
                steps = self._forget_some_of_cut(space, rest.cut, STEPS_A_CHUNK * chunks)
                chunks -= -(-steps // STEPS_A_CHUNK)
                continue
            before = len(space.doomed)
            self._forget_some_of(space, chunks)
            chunks -= before - len(space.doomed)
            if not space.doomed:
                entries -= 1 + self._let_go(rest, entries)
            if not space.doomed and not rest.leftovers:
                del self.forgetting[space]
                self._forget_if_empty(space)

    def event_ended(self) -> None:
        self._ahead = self._forget_chunks
        self._at_once = STEPS_A_CHUNK * self._forget_chunks

    def _forget_some_of(self, space: Space, chunks: int) -> None:
        """Forgets chunks, the newest first, so children go before their parents. A chunk that is still needed stays and
        goes with its last pin."""
        reason = self.forgetting[space].reason
        for _ in range(min(chunks, len(space.doomed))):
            node = space.next_doomed()
            self.gone.append((space.digest, node, reason))
            if node.children is None and not node.pins:
                self.remove(space, node)
                continue
            # Chunks that a retrieve still reads must not come back with the next brain.
            self.withdrawn.extend(offset for offset in node.slots if offset != ABSENT)
            if node in self.marks:
                self.withdrawn.append(self.marks.places[node])

    @staticmethod
    def _let_go(rest: Forgetting, entries: int) -> int:
        """Drops entries of eviction orders that a forgotten namespace left over. Returns how many."""
        left = entries
        while left and rest.leftovers:
            count = min(left, len(rest.leftovers[-1]))
            rest.leftovers[-1].let_go(count)
            left -= count
            if not len(rest.leftovers[-1]):
                rest.leftovers.pop()
        return entries - left

    def _forget_for_slot(self, slot_bytes: int, tenant: int) -> None:
        """Forgets cleared chunks to free a slot: they go before all others, also to get a tenant below its maximum. An
        event forgets as many ahead of their turn as any other event may, plus one for each further slot that it
        wants."""
        self._ahead += 1
        while self.forgetting and not self.pool.has_room(slot_bytes) and self._forget_ahead(self.forgetting):
            pass
        if self.accounts is not None:
            account = self.accounts.of(tenant)
            own = [each for each in self.forgetting if self._has_more(each) and self.accounts.of_space(each) is account]
            while own and account.lacks(slot_bytes) and self._forget_ahead(own):
                pass

    def _forget_ahead(self, spaces: Iterable[Space]) -> bool:
        """Forgets one cleared chunk before its turn. False when there is none, or this event has reached its bound."""
        space = next((space for space in spaces if self._has_more(space)), None)
        if space is None or not self._ahead:
            return False
        self._ahead -= 1
        cut = self.forgetting[space].cut
        if cut is None:
            self._forget_some_of(space, 1)
        else:
            self._forget_some_of_cut(space, cut, STEPS_A_CHUNK)
        return True

    def _has_more(self, space: Space) -> bool:
        """Some chunks of a retired space are still to be looked at."""
        rest = self.forgetting.get(space)
        return rest is not None and (rest.cut is not None or bool(space.doomed))

    def space_of(self, node: Node) -> Space | None:
        """The namespace of a node; None when it was cleared or cut off."""
        space = next((space for space in self.spaces.values() if space.nodes.get(node.key) is node), None)
        return None if space is None or space.is_cut(node) else space

    # ---------------------------------------------------------------- lookup and pins

    def servable(self, space: Space, keys: bytes) -> int:
        return servable_chunks(space, keys)

    def serves(self, space: Space, node: Node) -> bool:
        """The chunk is ready, and was neither cleared nor cut off. space: the one in which it was found."""
        return node.state == READY and self.spaces.get(space.digest) is space and not space.is_cut(node)

    def may_ever_fit(self, space: Space, needs: Mapping[Node, int]) -> bool:
        """Each chunk to be read (node -> groups) is within its tenant's maximum in DRAM. A larger one would never get a
        slot."""
        accounts = self.accounts
        return accounts is None or all(
            accounts.may_ever_hold(space, space.group_bytes(bits)) for bits in needs.values()
        )

    def pin(self, node: Node) -> None:
        """Pins a node, which also keeps all its ancestors."""
        node.pin()
        self.pins += 1
        settle(node)

    def unpin(self, space: Space, node: Node) -> None:
        self._drop_pin(node)
        if node.state == GONE:
            return
        self.settled(space, node)
        if self.spaces.get(space.digest) is not space:
            self._shrink_retired(space, node)
            self._forget_if_empty(space)

    def move_pin(self, space: Space, node: Node, child: Node, count: int = 1) -> None:
        """Moves a pin, or several, from a node to its child. The child's presence keeps the parent."""
        assert child.parent is node
        node.unpin(count)
        child.pin(count)
        settle(child)
        if node.disk is not None:  # otherwise its child keeps it
            self.settled(space, node)

    def offer(self, space: Space, node: Node) -> None:
        """Tells the eviction orders that the node may go, if it may."""
        self.room.offer(space, node)
        if self.disk is not None:
            self.disk.offer(space, node)

    # ---------------------------------------------------------------- store

    def node_for(self, space: Space, key: bytes, parent: Node, now_ns: int, tenant: int) -> Node | None:
        """The node of `key` under `parent`, made when it is new. None when the index is full and nothing can go, or
        `key` has another parent."""
        node = space.nodes.get(key)
        if node is not None and node.parent is parent:
            return node
        if node is not None and not self.make_way(space, key):
            return None
        self._ahead += 1
        while self.chunks >= self.chunks_max:
            if not self._forget_ahead(self.forgetting) and not self._shrink_index(tenant):
                return None
        node = space.add(key, parent, now_ns, tenant)
        self.came()
        if self.arc is not None:
            self.arc.comes(space, node)
        if not space.needed:
            for ready in space.make_ready(node):
                self.offer(space, ready)
        return node

    def came(self) -> None:
        """A chunk has entered the index."""
        self.chunks += 1

    def reserve(self, space: Space, node: Node, groups: Iterable[int], deadline_ns: int) -> bool:
        """Takes slots for every shard of those groups that are neither present nor reserved; all of them or none.

        The caller pins the node, because making room may evict any other."""
        assert node.pins > 0
        known = self.pendings.get(node)
        pending = known or Pending(space, node, deadline_ns)
        taken: dict[int, int] = {}
        for group in groups:
            if node.present >> group & 1:
                continue
            for part in space.group_parts(group):
                if part in pending.parts:
                    continue
                slot_bytes = space.parts[part].slot_bytes
                if self.forgetting:
                    self._forget_for_slot(slot_bytes, node.tenant)
                offset = self.room.take(slot_bytes, pending)
                if offset is None:
                    for mine in taken.values():
                        self.pool.free(mine)
                    return False
                taken[part] = offset
        if taken:
            pending.parts.update(dict.fromkeys(taken, UNASSIGNED))
            pending.slots.update(taken)
            if known is None:
                self.pendings[node] = pending
                self.pin(node)
        return True

    def assign(self, node: Node, part: int, job: int) -> int:
        """The slot of a part that `job` is to write. ABSENT when the part is sealed, or another job writes it."""
        pending = self.pendings.get(node)
        if pending is None or pending.parts.get(part) != UNASSIGNED:
            return ABSENT
        pending.parts[part] = job
        return pending.slots[part]

    def drop_if_bare(self, space: Space, node: Node) -> None:
        """Removes a new node for which nothing could be reserved. A node that existed before may be on disk alone, and
        stays."""
        bare = node not in self.pendings and not node.present and node.children is None
        if bare and node.state != GONE and node.pins == 0:
            self.remove(space, node)

    def seal(self, node: Node, part: int, job: int, payload_sum: int) -> bool:
        """Seals a part: its bytes are final, and this is their sum. False when the chunk is gone; then the slot was an
        orphan."""
        pending = self.pendings.get(node)
        if pending is None or pending.parts.get(part) != job:
            return False
        pending.parts[part] = SEALED
        space = pending.space
        if not space.needed:
            self._mark_before(space, node)
        self.record(space, node, part, pending.slots[part], payload_sum)
        self._complete(pending, space.parts[part].group)
        return True

    def part_held(self, node: Node, part: int, group: int) -> bool:
        """The part's bytes are final and its chunk is not gone."""
        if node.state == GONE:
            return False
        if node.present >> group & 1:
            return True
        pending = self.pendings.get(node)
        return pending is not None and pending.parts.get(part) == SEALED

    def give_up(self, node: Node, part: int, job: int, reason: Cause) -> None:
        """Ends a job's claim to a part that it did not seal. Another job may write it. If no other shard has been
        begun, the chunk goes."""
        pending = self.pendings.get(node)
        if pending is None or pending.parts.get(part) != job:
            return
        pending.parts[part] = UNASSIGNED
        if all(state == UNASSIGNED for state in pending.parts.values()):
            self.discard(pending.space, node, reason)

    def give_up_running(self, node: Node, job: int, reason: Cause) -> None:
        """Gives up a chunk that a job still writes. The job keeps its slots until it ends."""
        pending = self.pendings.get(node)
        if pending is not None and job in pending.parts.values():
            self.discard(pending.space, node, reason)

    def discard(self, space: Space, node: Node, reason: Cause) -> None:
        """Gives up the incomplete groups of a node. A node that was not ready goes, with all below it."""
        if node.state == READY:
            self.drop_pending(node)
            self.offer(space, node)
            return
        for at in reversed(space.subtree(node)):
            assert at.state != READY
            self.drop_pending(at)
            self._counters.discarded[reason] += 1
            self.gone.append((space.digest, at, reason))
            self.remove(space, at)

    def cut(self, space: Space, node: Node, cause: Literal["lost", "digest", "cleared"]) -> Space:
        """Cuts off a node that must not be served any more, with all below it. From now on nothing of it is found, and
        the next brain finds nothing either: its first chunk has left the ledger. Returns the space below whose root it
        hangs. The caller moves whoever still pins some of it there (take_along), and then has it forgotten (go_on)."""
        parent = node.parent
        assert parent is not None
        self._drop_pendings_below(space, node)
        rest = space.successor(caches=0)
        cut = Cut(node, parent, [node])
        self.forgetting[rest] = Forgetting(cause, [], cut)
        self.retired.append(rest)
        self._leaves(space, node, self.forgetting[rest])
        space.cut(node, rest)
        for other, (origin, above) in self.cut_from.items():
            if origin is space and is_below(above, node):
                self.take_along(space, above, rest)
                self.cut_from[other] = rest, above
        self.settled(space, parent)
        return rest

    def take_along(self, space: Space, node: Node, rest: Space) -> None:
        """Takes a node over that was cut off, before its turn: somebody pins it, or its key comes again."""
        if not rest.has(node):
            self._leaves(space, node, self.forgetting[rest])
            rest.take_over(node)

    def make_way(self, space: Space, key: bytes) -> bool:
        """Takes the node of this key out of the namespace if it was cut off. False when it was not."""
        node = space.nodes.get(key)
        if node is not None and space.is_cut(node):
            self.take_along(space, node, space.cut_of(node))
            return True
        return node is None

    def go_on(self, rest: Space) -> Cut:
        """Forgets as much of what was cut off as one event may. The next ones forget the others (forget_some)."""
        cut = self.forgetting[rest].cut
        assert cut is not None
        assert rest.origin is not None
        if cut.above.depth and any(node.pins for node in rest.nodes.values()):
            self.cut_from[rest] = rest.origin, cut.above
            self.pin(cut.above)
        self._at_once -= self._forget_some_of_cut(rest, cut, self._at_once)
        return cut

    def _drop_pendings_below(self, space: Space, node: Node) -> None:
        """Gives up what is reserved for a node and for all below it."""
        below = Below(node)
        for pending in [pending for pending in self.pendings.values() if pending.space is space]:
            if pending.node in below:  # stores reserve parents first
                self.drop_pending(pending.node)

    def _leaves(self, space: Space, node: Node, rest: Forgetting) -> None:
        """A node that was cut off is about to be taken over from the space that it was cut off from. Chunks that a
        retrieve still reads must not come back with the next brain."""
        self.count(space, node, -1)
        self.withdrawn.extend(offset for offset in node.slots if offset != ABSENT)
        if node in self.marks:
            self.withdrawn.append(self.marks.give_back(node))
        assert rest.cut is not None
        rest.cut.took_over()
        if self.spaces.get(space.digest) is space:  # otherwise the namespace was cleared meanwhile, and it is counted
            self.gone.append((space.digest, node, rest.reason))
            self._counters.discarded["cleared" if rest.reason == "cleared" else "failed"] += 1

    def _forget_some_of_cut(self, rest: Space, cut: Cut, steps: int) -> int:
        """Takes some steps to forget what was cut off. Returns how many; fewer only when it is all forgotten. A chunk
        that is still needed stays and goes with its last pin."""
        origin = rest.origin
        assert origin is not None
        taken = 0
        while taken < steps and not cut.is_over:
            taken += 1
            node = cut.next_down()
            if node is None:
                node = cut.next_up()
                if node.state != GONE and node.children is None and not node.pins:
                    self.remove(rest, node)
            elif node.state != GONE:
                assert rest.has(node) or not node.pins, "whoever pins it was moved with it"
                self.take_along(origin, node, rest)
                cut.goes_below(node)
        if cut.is_over:
            reason = self.forgetting.pop(rest).reason
            self.gone.append((rest.digest, cut.top, reason))  # remembered longest: the next lookup misses it first
            rest.all_taken_over()
            self._forget_if_empty(rest)
            self._forget_if_empty(origin)
        return taken

    def job_ended(self, job: int) -> None:
        """Frees the orphaned slots of a job whose copy has ended."""
        for offset in self.orphans.pop(job, ()):
            self.pool.free(offset)

    def adopt(
        self, space: Space, parent: Node, key: bytes, slots: tuple[int, ...], present: int, *, used: int, tenant: int
    ) -> Node | None:
        """Restore: takes back a chunk that was sealed before this brain began. None when its slots clash with others,
        or the namespace now belongs to another tenant."""
        if self.accounts is not None and not self.accounts.takes_back(space, tenant):
            return None
        node = space.add(key, parent, used, tenant)
        taken: list[int] = []
        for part, offset in zip(space.parts, slots, strict=True):
            if offset == ABSENT:
                continue
            if not self.pool.restore(offset, part.slot_bytes, node):
                for mine in taken:
                    self.pool.free(mine)
                space.remove(node)
                return None
            taken.append(offset)
        self.came()
        space.tags.add(tenant)
        space.put_in_dram(node, present, slots)
        self.count(space, node, 1)
        for ready in space.make_ready(node):
            self.offer(space, ready)
        return node

    # ---------------------------------------------------------------- generations

    def next_generation(self) -> int:
        """A generation above all that were given before."""
        self.generation += 1
        return self.generation

    def skip_generations(self, generation: int) -> None:
        """This generation is in use already, or may be."""
        self.generation = max(self.generation, generation)

    # ---------------------------------------------------------------- inside

    def _drop_pin(self, node: Node) -> None:
        node.unpin()
        self.pins -= 1

    def _complete(self, pending: Pending, group: int) -> None:
        """Makes a group present when its last shard is sealed, and then every node ready that can be."""
        space, node = pending.space, pending.node
        parts = space.group_parts(group)
        for part in parts:
            if pending.parts.get(part) != SEALED:
                return
        slots = list(node.slots) if node.slots else [ABSENT] * len(space.parts)
        for part in parts:
            slots[part] = pending.slots.pop(part)
            del pending.parts[part]
            self.pool.hand_over(slots[part], node)
        self.count(space, node, -1)
        space.put_in_dram(node, node.in_dram | 1 << group, slots)
        self.count(space, node, 1)
        self._counters.add("chunks_stored")
        if not pending.parts:
            del self.pendings[node]
            self._drop_pin(node)
        for ready in space.make_ready(node):
            if self.pledged:
                self.pin_awaited(space, ready)
            if ready is not node:
                self.offer(space, ready)
        self.settled(space, node)

    def pin_awaited(self, space: Space, node: Node) -> None:
        """Pins a chunk that has just become servable for those who await it: nothing can take it before."""
        assert self.pledged is not None
        holders = self.pledged.servable(space, node)
        if holders:
            assert node.parent is not None
            self.move_pin(space, node.parent, node, len(holders))
        for holder in holders:
            holder.moves_on(node)

    def drop_pending(self, node: Node) -> None:
        pending = self.pendings.pop(node, None)
        if pending is None:
            return
        self._drop_pin(node)
        self.settled(pending.space, node)
        if self.pledged and node.state != READY:
            self.pledged.gave_up(pending.space, node.key)
        for part, state in pending.parts.items():
            offset = pending.slots[part]
            if state > 0:
                self.pool.hand_over(offset, Orphan(state, node.tenant))
                self.orphans.setdefault(state, []).append(offset)
                continue
            if state == SEALED:
                self.withdrawn.append(offset)
            self.pool.free(offset)

    def _mark_before(self, space: Space, node: Node) -> None:
        """Marks the chunks above this one that hold nothing, before the chunk itself is recorded, so that a restart
        finds the whole chain. The walk up ends at a chunk that holds something or is marked: those above it were marked
        with it."""
        bare = []
        at = node.parent
        while at is not None and at.depth and not at.present and at not in self.marks:
            bare.append(at)
            at = at.parent

        for at in reversed(bare):  # head first: a restart in between finds no mark without its parent
            assert at.parent is not None
            place = self.marks.take(at), space.digest, at.key, at.parent.key or NO_PARENT, NO_GROUP, 0
            self.records.append(pack(Record(*place, 0, at.tenant, SLOT_ALIGN, self.generation, NO_SUM)))

    def record(self, space: Space, node: Node, part: int, offset: int, payload_sum: int) -> None:
        assert node.parent is not None
        shape = space.parts[part]
        place = offset, space.digest, node.key, node.parent.key or NO_PARENT, shape.group, shape.shard
        size = shape.payload_bytes, node.tenant, shape.slot_bytes
        self.records.append(pack(Record(*place, *size, self.generation, payload_sum)))

    def remove(self, space: Space, node: Node) -> None:
        """Takes a node without pins and without pending parts out of the index, and frees its slots."""
        assert node.pins == 0
        assert node not in self.pendings
        self.count(space, node, -1)
        self._free_slots(space, node)
        if node.on_disk:
            assert self.disk is not None
            self.disk.free_extents(space, node)
        if node in self.marks:
            self.withdrawn.append(self.marks.give_back(node))
        parent = space.remove(node)
        self.chunks -= 1
        self.settled(space, parent)

    def _leave_dram(self, space: Space, node: Node, need: Need) -> None:
        """Frees the slots of a node. The node stays in the index if its records on disk keep it servable."""
        if node.disk is None or not node.disk.keeps:
            if self.disk is not None:
                self._counters.disk_refused[self.disk.why_not(space, node)] += 1
            self.gone.append((space.digest, node, need))
            self.remove(space, node)
            return
        self._counters.add("evicted_to_disk")
        self.count(space, node, -1)
        self._free_slots(space, node)
        self.count(space, node, 1)
        self.settled(space, node)

    def count(self, space: Space, node: Node, sign: int) -> None:
        """Counts what a node has in DRAM or on disk. Call it with sign -1 before a change and with 1 after it."""
        if self.changes is not None and sign < 0 and node not in self.changes:
            self.changes[node] = space, node.in_dram, node.on_disk
        if self.arc is not None:
            self.arc.count(space, node, sign)
        if node.disk is not None and (clean := node.present & node.in_dram & node.on_disk):
            self.clean_bytes += sign * space.group_bytes(clean)

    def _free_slots(self, space: Space, node: Node) -> None:
        for offset in node.slots:
            if offset != ABSENT:
                if node.present:  # otherwise it was cut off and is withdrawn
                    self.withdrawn.append(offset)
                self.pool.free(offset)
        space.put_in_dram(node, 0, ())

    def settled(self, space: Space, node: Node) -> None:
        """Offers for eviction a node whose pins, slots, extents or children changed, and the node above that may now go
        instead."""
        above = settle(node)
        self.offer(space, node)
        if above is not node:
            self.offer(space, above)

    def _shrink_index(self, tenant: int) -> bool:
        """Evicts one chunk from the index to make room for one of that tenant. False when none can go."""
        disk = self.disk
        if disk is not None and disk.evict_leaf(tenant):
            return True
        return self.room.evict_leaf(tenant) or (disk is not None and disk.drop_any(tenant))

    def _shrink_retired(self, space: Space, node: Node) -> None:
        """Removes unpinned chunks of a cleared namespace, from this node up to the first one that is still needed. What
        a cut has not taken over yet is not its own."""
        at: Node | None = node
        while at is not None and space.has(at) and at.children is None and not at.pins and at.parent is not None:
            parent = at.parent
            self.remove(space, at)
            at = parent

    def _forget_if_empty(self, space: Space) -> None:
        if not space.nodes and space in self.retired and space not in self.forgetting:
            self.retired.remove(space)
            if space in self.cut_from:
                self.unpin(*self.cut_from.pop(space))
