"""The chunks on disk: the counterpart of chunks.py. Only this file changes them.

Life of a chunk's groups on disk:

    begin_write() ──> the job owns the extents ──end_write()──> on disk ──┬── drop(): room is needed; nothing is lost if
                              │ failed: extents are free                  │           it is in DRAM too
                                                                          ├── lose(): it could not be read
                                                                          └── begin_write() again, to another device:
                                                                              it moves with end_write()

    begin_read() ──> the job owns fresh slots ──end_read()──> in DRAM as well

A job pins its node, so slots are not freed under a write nor extents under a read. Chunks are written head first and
their extents go leaf first. So the chunks on disk are closed under prefixes, until something is lost.
"""

from collections.abc import Iterator, Sequence
from functools import partial

from kvserver.index.eviction import DIRTY, NO_ROOM, REFUSED, LeafLru, Leftover, dirty
from kvserver.index.space import ABSENT, READY, Node, Space
from kvserver.service.holdings.accounts import Accounts, ChargedPool, Quota
from kvserver.service.holdings.chunks import Chunks
from kvserver.service.holdings.disk_eviction import DiskRoom, device_of
from kvserver.service.holdings.place_owners import DiskJob, ExtentOwner
from kvserver.service.telling.counters import Counters
from kvserver.tiers.extents import Extents, place_of
from kvserver.tiers.records import NO_PARENT, NO_SUM, DiskRecord, pack_disk
from kvserver.tiers.slots import SlotPool
from kvserver.wire.orders import DISK_ITEMS_MAX


class DiskChunks:
    """The extents of all chunks, and the reads and writes under way."""

    def __init__(
        self, chunks: Chunks, extents: Extents[ExtentOwner], counters: Counters, accounts: Accounts | None
    ) -> None:
        """accounts: accounts of the tenants on disk; None without quotas."""
        self.extents = extents
        self.accounts = accounts
        self.room = DiskRoom(extents, self._drop, accounts, chunks.retired)
        self.jobs: dict[int, DiskJob] = {}
        self.busy: dict[Node, DiskJob] = {}
        """Chunk -> its job. A chunk has one job at a time."""
        self.held = 0
        """Number of chunks that have something on disk."""
        self.chains_whole = True
        """No write or read has failed so far, so the chunks on disk are closed under prefixes."""
        self.blocked = ""
        """Why nothing is written now (placement.REFUSALS); empty: writes go on."""
        self._dirty: dict[Space, LeafLru] = {}
        self._chunks = chunks
        self._counters = counters

    def add_space(self, space: Space) -> None:
        self.room.add_space(space)
        self._dirty[space] = LeafLru(dirty, DIRTY)

    def drop_space(self, space: Space) -> list[Leftover]:
        """Stops writing and evicting chunks of a namespace. The caller drops the orders that are returned."""
        return [*self.room.drop_space(space), self._dirty.pop(space)]

    def offer(self, space: Space, node: Node) -> None:
        """Offers the node for eviction from disk, and for writing, if it qualifies."""
        self.room.offer(space, node)
        if dirty(node) and space in self._dirty:
            self._dirty[space].offer(node)

    def coldest_dirty(self) -> tuple[Space, Node] | None:
        """The dirty leaf of DRAM that would be lost next."""
        return min(self.dirty_spaces(), key=lambda found: found[1].used, default=None)

    def dirty_spaces(self) -> Iterator[tuple[Space, Node]]:
        """For each namespace, the dirty leaf of DRAM that would be lost next."""
        for space, order in self._dirty.items():
            node = order.coldest()
            if node is not None:
                yield space, node

    def device_of(self, node: Node) -> int:
        """The device of a node that has extents."""
        return device_of(node)

    def writable(self, space: Space) -> bool:
        """Chunks of the namespace can lie on disk: each has at least one full group, every record fits a segment, and a
        chunk is within its tenant's maximum."""
        if len(space.parts) > DISK_ITEMS_MAX or not space.needed:
            return False
        if not all(self.extents.fits(part.slot_bytes) for part in space.parts):
            return False
        if self.accounts is None or space.tenant is None:
            return True
        return self.accounts.may_ever_hold(space, sum(part.slot_bytes for part in space.parts))

    def block(self, reason: str) -> None:
        """The reason why the last write that was tried is not ordered; empty: it is."""
        self.blocked = reason

    def why_not(self, space: Space, node: Node) -> str:
        """The reason why a chunk that leaves DRAM is not on disk."""
        if not self.writable(space):
            return "shape"
        if node.queued & NO_ROOM:
            return "room"
        return "second-touch" if node.queued & REFUSED else self.blocked or "late"

    # ---------------------------------------------------------------- writes

    def begin_write(self, job: DiskJob, used: int) -> bool:
        """Takes extents for every shard of the job's groups, which are in DRAM; all of them or none. Chunks used before
        `used` may go to make room."""
        space, node = job.space, job.node
        assert node not in self.busy
        self._chunks.pin(node)
        space.set_written(node, written=True)
        taken: dict[int, int] = {}
        for part in sorted(job.parts, key=lambda part: self._turn_of(job.device, space.parts[part].slot_bytes)):
            extent_bytes = space.parts[part].slot_bytes
            if job.moves:
                extent = self.extents.allocate(job.device, extent_bytes, job)
            else:
                extent = self.room.take(self.room.wanted(job.device, extent_bytes, used, node.tenant), job)
            if extent is None:
                for mine in taken.values():
                    self.extents.free(mine)
                self._let_go_of_parent(space, node)
                self._chunks.unpin(space, node)
                return False
            taken[part] = extent
        job.takes([node.slots[part] for part in job.parts], [taken[part] for part in job.parts])
        self._began(job)
        return True

    def end_write(self, job: DiskJob, *, kept: bool) -> None:
        """Ends a write. kept: the bytes are on the device; otherwise nobody knows what is there."""
        node = job.node
        self._ended(job)
        self._let_go_of_parent(job.space, node)
        if kept and node.state == READY and self._lives(job.space):
            extents = list(node.disk.extents) if node.on_disk and node.disk else [ABSENT] * len(job.space.parts)
            for part, extent in zip(job.parts, job.extents, strict=True):
                if extents[part] != ABSENT:
                    self.extents.free(extents[part])
                extents[part] = extent
                self.extents.hand_over(extent, node)
            self._chunks.count(job.space, node, -1)
            self._put(job.space, node, node.on_disk | job.groups, tuple(extents), job.generation)
            self._chunks.count(job.space, node, 1)
        else:
            self.chains_whole &= job.groups & ~node.on_disk == 0
            for extent in job.extents:
                self.extents.free(extent)
        self._chunks.unpin(job.space, node)

    # ---------------------------------------------------------------- reads

    def begin_read(self, job: DiskJob, *, spares_dirty: bool = False) -> bool:
        """Takes slots for every shard that is on disk and not in DRAM; all of them or none. spares_dirty: only chunks
        that are also on disk may go to make room."""
        space, node = job.space, job.node
        assert node not in self.busy
        assert node.disk is not None
        self._chunks.pin(node)
        slots: list[int] = []
        for part in job.parts:
            slot = self._chunks.room.take(space.parts[part].slot_bytes, job, spares_dirty=spares_dirty)
            if slot is None:
                self._free_slots(slots)
                self._chunks.unpin(space, node)
                return False
            slots.append(slot)
        job.takes(slots, [node.disk.extents[part] for part in job.parts])
        self._began(job)
        return True

    def end_read(self, job: DiskJob, wrong: set[int], sums: Sequence[int]) -> None:
        """Ends a read: groups that were read whole are in DRAM from now on. wrong: parts whose bytes are not in their
        slots. sums: of the payload of each part of the job; empty if all are wrong."""
        space, node = job.space, job.node
        self._ended(job)
        lives = node.state == READY and self._lives(space)
        slots = list(node.slots) if node.slots else [ABSENT] * len(space.parts)
        in_dram = node.in_dram
        bad = {space.parts[part].group for part in wrong}
        self._chunks.count(space, node, -1)
        for index, (part, slot) in enumerate(zip(job.parts, job.slots, strict=True)):
            if lives and space.parts[part].group not in bad:
                slots[part] = slot
                self._chunks.pool.hand_over(slot, node)
                self._chunks.record(space, node, part, slot, sums[index])
                in_dram |= 1 << space.parts[part].group
            else:
                self._chunks.pool.free(slot)
        if in_dram != node.in_dram:
            space.put_in_dram(node, in_dram, slots)
        self._chunks.count(space, node, 1)
        self._chunks.unpin(space, node)

    def begin_scrub(self, job: DiskJob) -> bool:
        """Takes free slots for every shard that is on disk, without an eviction; all of them or none."""
        space, node = job.space, job.node
        assert node not in self.busy
        assert node.disk is not None
        slots: list[int] = []
        for part in job.parts:
            slot = self._chunks.pool.allocate(space.parts[part].slot_bytes, job)
            if slot is None:
                self._free_slots(slots)
                return False
            slots.append(slot)
        self._chunks.pin(node)
        job.takes(slots, [node.disk.extents[part] for part in job.parts])
        self._began(job)
        return True

    def end_scrub(self, job: DiskJob) -> None:
        self._ended(job)
        self._free_slots(job.slots)
        self._chunks.unpin(job.space, job.node)

    # ---------------------------------------------------------------- what goes

    def free_extents(self, space: Space, node: Node) -> None:
        """Frees all extents of a node that leaves the disk or the index."""
        assert node.disk is not None
        for extent in node.disk.extents:
            if extent != ABSENT:
                self.extents.free(extent)
        self._put(space, node, 0, (), 0)

    def lose(self, space: Space, node: Node, groups: int) -> None:
        """Takes groups of a node that cannot be read off the disk. The node is servable without them."""
        self._take_off(space, node, groups)
        self._chunks.settled(space, node)

    def lose_all(self, space: Space, node: Node, groups: int) -> Space:
        """Takes groups of a node that cannot be read off the disk, and cuts the node off: it is not servable without
        them. Returns the space below whose root it hangs now.

        The caller has ended the leases, and the waits for reads, below the node."""
        self._take_off(space, node, groups)
        return self._chunks.cut(space, node, "lost")

    def adopt(self, space: Space, node: Node, groups: int, extents: tuple[int, ...], generation: int) -> bool:
        """Recovery: takes in the records of a chunk that is in DRAM. False when its extents clash with others."""
        if not self._restore(space, node, extents):
            return False
        self._chunks.count(space, node, -1)
        self._put(space, node, groups, extents, generation)
        self._chunks.count(space, node, 1)
        self._chunks.settled(space, node)
        return True

    def adopt_new(self, space: Space, node: Node, groups: int, extents: tuple[int, ...], generation: int) -> bool:
        """Recovery: takes in a chunk that is nowhere else. `node` is not in the index yet, its parent is. False when
        its extents clash with others. Otherwise the caller offers the node before the event is over, unless it got
        children."""
        if not self._restore(space, node, extents):
            return False
        space.add_cold(node, groups, extents, generation)
        if self._chunks.changes is not None:
            self._chunks.changes[node] = space, 0, 0
        self._chunks.came()
        self.held += 1
        if self._chunks.pledged:
            self._chunks.pin_awaited(space, node)
        return True

    def give_up(self, space: Space, node: Node) -> list[bool]:
        """Frees the extents of a node and of all below it, which a restart would not find without the node. Chunks that
        DRAM alone does not keep servable leave the index, with all below them. Returns, for each chunk that had
        extents, whether it left; empty when something there is in use."""
        below = space.subtree(node)
        if any(at.pins or at.state != READY for at in below):
            return []
        lost: set[Node] = set()
        for at in below:
            if at.parent in lost or at.in_dram & space.needed != space.needed:
                lost.add(at)
        went: list[bool] = []
        for at in reversed(below):
            parent = at.parent
            assert parent is not None
            if at.on_disk:
                went.append(at in lost)
            if at in lost:
                self._counters.add("disk_evictions", at.on_disk != 0)
                self._chunks.gone.append((space.digest, at, "disk"))
                self._chunks.remove(space, at)
                self.room.offer(space, parent)
            elif at.on_disk:
                self._drop(space, at)
        return went

    def evict_leaf(self, tenant: int) -> bool:
        """Evicts a chunk that is on disk alone from the index, for a chunk of that tenant."""
        return self.room.evict_leaf(tenant)

    def drop_any(self, tenant: int) -> bool:
        """Frees the extents of one chunk, for a chunk of that tenant."""
        return self.room.drop_any(tenant)

    # ---------------------------------------------------------------- inside

    def _take_off(self, space: Space, node: Node, groups: int) -> None:
        assert node.disk is not None
        self.chains_whole = False
        extents = list(node.disk.extents)
        for part, extent in enumerate(extents):
            if extent != ABSENT and groups >> space.parts[part].group & 1:
                self.extents.free(extent)
                extents[part] = ABSENT
        self._chunks.count(space, node, -1)
        self._put(space, node, node.on_disk & ~groups, tuple(extents), node.disk.generation)
        self._chunks.count(space, node, 1)
        assert node.parent is not None
        self.room.offer(space, node.parent)

    def _restore(self, space: Space, node: Node, extents: tuple[int, ...]) -> bool:
        """Takes exactly these extents for a node, or none of them."""
        assert node.parent is not None
        for number, extent in enumerate(extents):
            if extent != ABSENT and not self.extents.restore(extent, space.parts[number].slot_bytes, node):
                for mine in extents[:number]:
                    if mine != ABSENT:
                        self.extents.free(mine)
                return False
        self.chains_whole &= node.parent.depth == 0 or node.parent.on_disk != 0
        return True

    def _turn_of(self, device: int, extent_bytes: int) -> tuple[bool, int]:
        """The order in which a chunk of several sizes takes its extents. The size that waits for an emptied segment is
        last. Otherwise the largest is first: a small one would take the only empty segment, which the large one then
        has to empty again."""
        return self.room.empties_for(device, extent_bytes), -extent_bytes

    def _free_slots(self, slots: list[int]) -> None:
        for slot in slots:
            self._chunks.pool.free(slot)

    def _began(self, job: DiskJob) -> None:
        self.jobs[job.number] = job
        self.busy[job.node] = job

    def _ended(self, job: DiskJob) -> None:
        del self.jobs[job.number]
        del self.busy[job.node]

    def _lives(self, space: Space) -> bool:
        return self._chunks.spaces.get(space.digest) is space

    def _let_go_of_parent(self, space: Space, node: Node) -> None:
        """Ends the node's claim on its parent after a write. If the node is not on disk, the parent may leave it."""
        assert node.parent is not None
        space.set_written(node, written=False)
        self.room.offer(space, node.parent)

    def _put(self, space: Space, node: Node, groups: int, extents: tuple[int, ...], generation: int) -> None:
        before = node.on_disk != 0
        space.put_on_disk(node, groups, extents, generation)
        self.held += (node.on_disk != 0) - before

    def _drop(self, space: Space, node: Node) -> None:
        """Frees a node's extents to make room. The node leaves the index if it is not servable from DRAM."""
        parent = node.parent
        assert parent is not None
        self._counters.add("disk_evictions")
        self._chunks.count(space, node, -1)
        self.free_extents(space, node)
        self._chunks.count(space, node, 1)
        if node.present & space.needed == space.needed:
            self._chunks.settled(space, node)
        else:
            self._chunks.gone.append((space.digest, node, "disk"))
            self._chunks.remove(space, node)
        self.room.offer(space, parent)


def disk_chunks(
    chunks: Chunks, counters: Counters, *, devices: int, device_bytes: int, segment_bytes: int, quotas: Sequence[Quota]
) -> DiskChunks:
    """The disk chunks of a new brain, which knows of nothing on disk yet. With quotas, extents are charged to separate
    accounts."""
    accounts = chunks.accounts
    disk_accounts = Accounts(quotas, "disk", beside=accounts) if accounts is not None else None
    extents: Extents[ExtentOwner] = Extents(
        devices=devices,
        device_bytes=device_bytes,
        segment_bytes=segment_bytes,
        pool_of=SlotPool if disk_accounts is None else partial(ChargedPool, accounts=disk_accounts),
    )
    return DiskChunks(chunks, extents, counters, disk_accounts)


def records_of(job: DiskJob) -> bytes:
    """The records of a job, as they are sent to the disk mover."""
    space, node = job.space, job.node
    assert node.parent is not None
    packed = []
    for part, slot, extent in zip(job.parts, job.slots, job.extents, strict=True):
        shape, place = space.parts[part], place_of(extent)
        packed.append(
            pack_disk(
                DiskRecord(
                    arena_offset=slot,
                    namespace=space.digest,
                    key=node.key,
                    parent=node.parent.key or NO_PARENT,
                    group=shape.group,
                    shard=shape.shard,
                    payload_bytes=shape.payload_bytes,
                    tenant=node.tenant,
                    extent_bytes=shape.slot_bytes,
                    generation=job.generation,
                    sum=NO_SUM,
                    offset=place.offset,
                    device=place.device,
                    stored_s=0,
                )
            )
        )
    return b"".join(packed)
