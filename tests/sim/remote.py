"""Simulated remote stores, their movers, and the other servers that use them.

A chunk in the store is its head and the contents of its shards. Other servers write chunks, clear namespaces, and lose
their notes; the store drops what it likes, and gives other bytes than it took. The mover carries orders out in any
order, fails some, and reads block by block. What it tells is true: a read that went well has brought the bytes whose
digests are in the head.
"""

from array import array
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Literal

from kvserver.config.remotes import Remote, parse
from kvserver.remote.announcement import GONE, STORED, WRITTEN, mark_of, pack, unpack
from kvserver.remote.chunk_value import Head, Shard, decode, encode
from kvserver.tiers.records import NO_PARENT, NO_SUM
from kvserver.tiers.slots import SLOT_ALIGN
from kvserver.wire.messages import KEY_BYTES
from kvserver.wire.orders import (
    AnnounceRemote,
    ArenaReady,
    Cancel,
    FetchRemote,
    ListenRemote,
    Order,
    ProbeRemote,
    PutRemote,
    ReadRemoteNote,
    Ready,
    RemoteEnded,
    RemoteHeard,
    RemoteIs,
    RemoteNoteRead,
    RemoteNoteWritten,
    RemoteProbed,
    Report,
    Scrub,
    WriteRemoteNote,
)

from .board import Board
from .content import Block, block_of, key_of
from .memory import Pool, Wrong
from .scrub import scrubbed
from .shapes import Shape
from .streams import Streams
from .sums import packed, sum_of

if TYPE_CHECKING:
    from .world import World

ACTS: dict[str, float] = {
    "write": 60,
    "clear": 2,
    "evict": 4,
    "spoil": 3,
    "lose-note": 1,
    "damage-note": 1,
    "down": 2,
    "lose-log": 1,
    "lie": 2,
}
"""Acts of other servers and of the store, with their weights."""
HOSTILE_ACTS = {
    "write": 60,
    "clear": 0.3,
    "evict": 12,
    "spoil": 12,
    "lose-note": 0.2,
    "damage-note": 0.2,
    "down": 0.6,
    "lose-log": 0.3,
    "lie": 5,
}
"""The same with many faults, and with epochs that live long enough for chunks to be read."""
FAULTS = ("remote-slow", "remote-down", "remote-full", "left-alone")
Name = tuple[bytes, int, bytes]
"""Namespace, epoch, key."""


@dataclass(eq=False)
class Value:
    """One chunk in the store."""

    head: Head
    shards: list[list[Block]]


class Store:
    """A store, and the other servers. It has a generator of its own, so that worlds without it stay as they were."""

    def __init__(self, world: "World", seed: int, *, is_hostile: bool = False) -> None:
        """is_hostile: it or other servers act before most steps."""
        self.rng = Random(seed)
        self.values: dict[Name, Value] = {}
        self.epochs: dict[bytes, int] = {}
        """Namespace -> epoch in its note."""
        self.damaged: set[bytes] = set()
        """Namespaces whose note cannot be read."""
        self.was_epoch: dict[bytes, set[int]] = {}
        """Namespace -> epochs that its note has had before. None of them comes back."""
        self.notes_written: Counter[bytes] = Counter()
        """Namespace -> how often its note has got an epoch."""
        self._asked: dict[tuple[int, int], tuple[bytes, int]] = {}
        """(peer, request) of a Clear -> its namespace, and `notes_written` of it when it was asked for."""
        self.logs: defaultdict[tuple[bytes, int], list[int]] = defaultdict(list)
        """(namespace, epoch) -> marks that servers have announced."""
        self.told_share = self.rng.choice((0.0, 0.9, 1.0, 1.0))
        """Of chunks that other servers write."""
        self.is_down = False
        self.fault_share = self.rng.choice((0.0, 0.05, 0.3))
        self.acts, self.act_share, self._is_hostile = ACTS, 0.05, is_hostile
        if is_hostile:
            self.acts, self.act_share = HOSTILE_ACTS, 0.7
        self._world = world
        self.streams: Streams | None = None
        if world.swarm.pledges_much:  # other servers do what the engines here do
            self.streams, self.act_share = Streams(world, self), 0.02
            self.acts = {**self.acts, "write": 10}
            self.fault_share = self.rng.choice((0.0, 0.0, 0.03, 0.1))
            self.told_share = self.rng.choice((0.9, 1.0, 1.0))

    def head_of(self, digest: bytes, key: bytes, parent: bytes, epoch: int, shards: list[list[Block]]) -> Head:
        """The head of a chunk with all groups, whose shards have these contents."""
        shape = self._world.shapes[digest]
        told = [
            Shard(group, shard, payload_bytes(shape, group, shard), sum_of(blocks))
            for (group, shard), blocks in zip(shape.parts(), shards, strict=True)
        ]
        return Head(digest, key, parent, epoch, self.rng.getrandbits(64), 0, tuple(told))

    def set_epoch(self, digest: bytes, epoch: int) -> None:
        before = self.epochs.get(digest)
        if before is not None:
            self.was_epoch.setdefault(digest, set()).add(before)
        if epoch in self.was_epoch.get(digest, ()):
            raise Wrong(f"epoch {epoch} of a cleared namespace came back")
        self.epochs[digest] = epoch
        self.notes_written[digest] += 1
        self.damaged.discard(digest)

    def clear_comes(self, peer: int, request: int, digest: bytes) -> None:
        self._asked[peer, request] = digest, self.notes_written[digest]

    def clear_is_answered(self, peer: int, request: int) -> None:
        """Who cleared a namespace is told that it is done only when its note has another epoch."""
        digest, written = self._asked.pop((peer, request), (b"", -1))
        if digest and self.notes_written[digest] == written:
            raise Wrong("who cleared a namespace was answered, and the remote store does not know of it")

    def act(self) -> None:
        """One act of other servers, or of the store itself."""
        rng, world = self.rng, self._world
        digest = rng.choice(list(world.shapes))
        act = rng.choices(list(self.acts), list(self.acts.values()))[0]
        if self.is_down and self._is_hostile and rng.random() < 0.1:
            act = "down"
        world.counts[f"remote {act}"] += 1
        world.counts["remote faults"] += act != "write"
        match act:
            case "write":
                chunks = 1 + int(rng.random() * world.swarm.depth)
                path = tuple(int(rng.random() * world.swarm.fanout) for _ in range(chunks))
                for depth in range(1, len(path) + 1):
                    self.write(digest, path[:depth])
            case "clear":
                self.set_epoch(digest, rng.getrandbits(64))
            case "evict" if self.values:
                del self.values[rng.choice(list(self.values))]
            case "spoil" if self.values:
                shards = rng.choice(list(self.values.values())).shards
                blocks = rng.choice(shards)
                blocks[int(rng.random() * len(blocks))] = ("from the store", rng.getrandbits(32))
            case "lose-note":
                if digest in self.epochs:
                    self.was_epoch.setdefault(digest, set()).add(self.epochs.pop(digest))
            case "damage-note" if digest in self.epochs:
                self.damaged.add(digest)
            case "down":
                self.is_down = not self.is_down
            case "lose-log":
                self.logs.pop((digest, self.epochs.get(digest, 0)), None)
            case "lie" if digest in self.epochs:
                path = tuple(int(rng.random() * world.swarm.fanout) for _ in range(1 + int(rng.random() * 3)))
                kind = rng.choice((STORED, WRITTEN, GONE))
                self.tell(digest, self.epochs[digest], mark_of(digest, self.epochs[digest], key_of(path)) | kind)

    def write(self, digest: bytes, path: tuple[int, ...]) -> None:
        epoch, key = self.epochs.get(digest), key_of(path)
        if epoch is None or (digest, epoch, key) in self.values:
            return
        shape = self._world.shapes[digest]
        shards = [
            [block_of(digest, key, group, shard, place) for place in range(shape.blocks_per_chunk(group))]
            for group, shard in shape.parts()
        ]
        head = self.head_of(digest, key, key_of(path[:-1]) or NO_PARENT, epoch, shards)
        self.keep((digest, epoch, key), Value(head, shards))
        if self.rng.random() < self.told_share:
            self.tell(digest, epoch, mark_of(digest, epoch, key) | WRITTEN)

    def keep(self, name: Name, value: Value) -> None:
        """A chunk is in the store from now on."""
        self.values[name] = value

    def tell(self, digest: bytes, epoch: int, mark: int) -> None:
        """Another server tells of a chunk."""
        self.logs[digest, epoch].append(mark)
        if self.streams is not None:
            self.streams.told(mark)


def payload_bytes(shape: Shape, group: int, shard: int) -> int:
    one = shape.groups[group]
    return shape.blocks_per_chunk(group) * one.regions * one.page_bytes[shard]


@dataclass(eq=False)
class Reading:
    """A read that is under way."""

    order: FetchRemote
    head: Head
    offsets: list[int]
    came: list[list[Block]]
    """Contents that the store gave, shard by shard."""
    left: list[tuple[int, int]] = field(default_factory=list)
    """(shard, place) of each block that is still to be written into the arena."""


class SimRemoteMover:
    """The mover process of the store."""

    def __init__(self, world: "World", number: int, store: Store) -> None:
        self.number = number
        self.state: Literal["starting", "running", "killed", "reaped"] = "starting"
        self.stopped = False
        self.inbox: deque[tuple[Order, Pool | None, Board | None]] = deque()
        self.reports: deque[Report] = deque()
        self._orders: list[Order] = []
        self._reads: list[Reading] = []
        self._told_down = False
        self._heard: Counter[tuple[bytes, int]] = Counter()
        """(namespace, epoch) -> announcements that it has read."""
        self._world = world
        self.store = store

    @property
    def busy(self) -> bool:
        has_news = self.state == "running" and self._is_down() != self._told_down
        return bool(self.inbox or self._orders or self._reads) or has_news or self.state == "starting"

    def step(self) -> None:
        """One step of the process on its own."""
        if self.stopped or self.state == "reaped":
            return
        rng = self.store.rng
        if self.state == "starting":
            self.state = "running"
            self.reports += [Ready(3000 + self.number, "simulated", []), RemoteIs("", [])]
            return
        if self.state == "running":
            self._tell_state()
            while self.inbox:
                self._orders.append(self.inbox.popleft()[0])
        if self._reads and (not self._orders or rng.random() < 0.6):
            self._go_on(rng.choice(self._reads))
        elif self._orders and self.state == "running":
            self._carry_out(self._orders.pop(int(rng.random() * len(self._orders))))

    def reap(self) -> None:
        """From now on the mover cannot write."""
        self.state = "reaped"
        for reading in self._reads:
            self._world.promises.remote_over(reading.order.job)
        for order in [*self._orders, *(order for order, _, _ in self.inbox)]:
            if isinstance(order, FetchRemote | PutRemote):
                self._world.promises.remote_over(order.job)
        self._orders.clear()
        self._reads.clear()
        self.inbox.clear()

    def _tell_state(self) -> None:
        down = self._is_down()
        if down != self._told_down:
            self._told_down = down
            self.reports.append(RemoteIs("it is down" if down else "", []))

    def _is_down(self) -> bool:
        return self.store.is_down and not self._world.calm

    def _fault(self) -> str:
        store = self.store
        if self._world.calm:
            return ""
        fault = "remote-down" if store.is_down else ""
        fault = fault or (store.rng.choice(FAULTS) if store.rng.random() < store.fault_share else "")
        self._world.counts["remote faults"] += bool(fault)
        return fault

    # ---------------------------------------------------------------- orders

    def _carry_out(self, order: Order) -> None:
        store = self.store
        match order:
            case ProbeRemote():
                self.reports.append(self._probed(order))
            case FetchRemote():
                self._fetch(order)
            case PutRemote():
                self._end(order.job, self._put(order))
            case ReadRemoteNote(job, namespace):
                fault = self._fault()
                epoch = store.epochs.get(namespace)
                state: Literal["here", "absent", "damaged"] = "absent" if epoch is None else "here"
                if epoch is not None and namespace in store.damaged:
                    state, epoch = "damaged", 0
                self.reports.append(RemoteNoteRead(job, fault, state, 0 if fault else epoch or 0, b""))
            case WriteRemoteNote():
                self._write_note(order)
            case AnnounceRemote():
                fault = self._fault()
                if not fault or store.rng.random() < 0.3:
                    store.logs[order.namespace, order.epoch] += unpack(order.marks)
                if store.streams is not None:
                    store.streams.told_by_us(order.marks)
                self._end(order.job, fault)
            case ListenRemote():
                self._listen(order)
            case Scrub():
                self.reports.append(scrubbed(self._world, order))
            case Cancel():
                self._world.counts["remote orders given up for another store"] += 1
            case ArenaReady():
                pass
            case _:
                raise Wrong(f"{order} was sent to the mover of the remote store")

    def _listen(self, order: ListenRemote) -> None:
        name, fault = (order.namespace, order.epoch), self._fault()
        told = [] if fault else self.store.logs[name][self._heard[name] :]
        given = told[: 1 + int(self.store.rng.random() * 20)]
        self._heard[name] += len(given)
        self._world.counts["announcements heard"] += len(given)
        self.reports.append(RemoteHeard(order.job, fault, pack(given), len(given) == len(told)))

    def _probed(self, order: ProbeRemote) -> RemoteProbed:
        fault = self._fault()
        keys = [order.keys[at : at + KEY_BYTES] for at in range(0, len(order.keys), KEY_BYTES)]
        if fault:
            return RemoteProbed(order.job, [b""] * len(keys), [fault] * len(keys), 1)
        found = [self.store.values.get((order.namespace, order.epoch, key)) for key in keys]
        return RemoteProbed(order.job, [encode(value.head) if value else b"" for value in found], [], 1)

    def _fetch(self, order: FetchRemote) -> None:
        head, store = decode(order.head), self.store
        value = store.values.get((head.namespace, head.epoch, head.key))
        fault = self._fault()
        if fault or value is None or value.head.write != head.write:
            self._end(order.job, fault or "gone")
            return
        reading = Reading(order, head, list(array("q", order.slots)), [list(blocks) for blocks in value.shards])
        for index, offset in enumerate(reading.offsets):
            if offset >= 0:
                reading.left += [(index, place) for place in range(len(reading.came[index]))]
        self._reads.append(reading)

    def _go_on(self, reading: Reading) -> None:
        rng, arena = self.store.rng, self._world.arena
        shape = self._world.shapes[reading.head.namespace]
        for _ in range(1 + int(rng.random() * 4)):
            if not reading.left:
                break
            index, place = reading.left.pop(int(rng.random() * len(reading.left)))
            shard, blocks = reading.head.shards[index], reading.came[index]
            slot_bytes = shape.slot_bytes(shard.group, shard.shard)
            arena.write(reading.offsets[index], slot_bytes, len(blocks), place, blocks[place])
        if not reading.left and self.state == "running":
            self._reads.remove(reading)
            self._finish(reading)

    def _finish(self, reading: Reading) -> None:
        wanted = [index for index, offset in enumerate(reading.offsets) if offset >= 0]
        sums = [sum_of(blocks) for blocks in reading.came]
        name = reading.head.namespace, reading.head.epoch, reading.head.key
        if any(sums[index] != reading.head.shards[index].digest for index in wanted):
            self.store.values.pop(name, None)
            self._end(reading.order.job, "digest")
            return
        for index in wanted:
            self._world.arena.tell(reading.offsets[index], sums[index])
        fault = self._fault() if self.store.rng.random() < 0.1 else ""
        self._end(reading.order.job, fault, packed([sums[index] for index in wanted]) if not fault else b"")

    def _put(self, order: PutRemote) -> str:
        """Writes a chunk. Returns the fault."""
        world, store, head = self._world, self.store, decode(order.head)
        shards = []
        for shard, offset in zip(head.shards, array("q", order.slots), strict=True):
            entry = world.ledger.entries[offset]
            name = head.namespace, head.key, shard.group, shard.shard
            if (entry.namespace, entry.key, entry.group, entry.shard) != name:
                raise Wrong(f"a write to the remote store names another chunk than slot {offset} holds")
            if entry.sum == NO_SUM:
                return "unsummed"
            blocks = list(world.arena.slot(offset))
            if sum_of(block or ("nothing",) for block in blocks) != entry.sum:
                if not world.arena.faults_of(offset):
                    raise Wrong(f"a write to the remote store found slot {offset} wrong that no fault has touched")
                world.counts["noticed by a write to the remote store"] += 1
                world.promises.digests.found(order.job, [entry])
                return "digest"
            shards.append((shard, entry.sum, [block or ("nothing",) for block in blocks]))
        if fault := self._fault():
            return fault
        name = head.namespace, head.epoch, head.key
        if name in store.values:
            return "existed"
        full = head._replace(shards=tuple(shard._replace(digest=total) for shard, total, _ in shards))
        store.keep(name, Value(full, [blocks for _, _, blocks in shards]))
        return store.rng.choice(FAULTS[:2]) if store.rng.random() < store.fault_share / 2 else ""

    def _write_note(self, order: WriteRemoteNote) -> None:
        store, fault = self.store, self._fault()
        happens = not fault or (fault == "remote-slow" and store.rng.random() < 0.5)
        is_first = order.replaces or order.namespace not in store.epochs
        if happens and is_first:
            store.set_epoch(order.namespace, order.epoch)
        self.reports.append(RemoteNoteWritten(order.job, fault, is_first))

    def _end(self, job: int, fault: str, sums: bytes = b"") -> None:
        self._world.promises.remote_over(job)
        if self.state == "running":
            self.reports.append(RemoteEnded(job, fault, 1, sums))
            self._world.counts[f"remote ended {fault}".rstrip()] += 1


def units_of(shape: Shape, head: Head, offsets: list[int]) -> dict[int, list[int]]:
    """Slot -> its arena units, for slots of an order."""
    return {
        offset: list(range(offset // SLOT_ALIGN, (offset + shape.slot_bytes(shard.group, shard.shard)) // SLOT_ALIGN))
        for shard, offset in zip(head.shards, offsets, strict=True)
        if offset >= 0
    }


WRITING = ("through", "through", "reuse", "through&pledged=write", "reuse&pledged=write", "reuse&pledged=write")
REMOTES = [parse(f"sim=file:///simulated?tokens_min=0&write={write}")[0] for write in WRITING]
NAMES = ("near", "far")
WRITES = ("through", "through", "reuse", "never", "reuse&pledged=write", "through&pledged=write")


def several(rng: Random) -> tuple[Remote, ...]:
    """Two stores, one for each name of NAMES."""
    texts = (f"{name}=file:///{name}?tokens_min=0&write={rng.choice(WRITES)}" for name in NAMES)
    return parse(" ".join(texts))
