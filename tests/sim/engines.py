"""Simulated inference engines: several ranks and one scheduler each, which agree on what to store and retrieve."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvserver.wire.messages import Await, Lookup, Pledge, Release, Unpledge

from .content import Path, key_of, keys_of
from .ledger import needed
from .processes import Process, RetrieveTask, StoreTask
from .shapes import Shape

if TYPE_CHECKING:
    from .world import World

UNKNOWN_KEYS = [bytes([200 + number]) * 32 for number in range(8)]
"""Keys that nobody ever stores."""


class Granted(NamedTuple):
    """A lease as the engine knows it."""

    number: int
    digest: bytes
    shape: Shape
    keys: list[bytes]


class SimEngine:
    """The processes that share one (engine, epoch)."""

    def __init__(self, world: "World", name: str, digest: bytes, shape: Shape, stored: Sequence[Path] = ()) -> None:
        """stored: prefixes that the engine may ask for from the start."""
        self.name = name
        self.epoch = 1
        self.digest = digest
        self.shape = shape
        self.leases: list[Granted] = []
        self._stored = list(stored)
        """Prefixes of recent stores."""
        self._steps: dict[Path, int] = {}
        """Pledged prefix -> the first chunk of the next piece that is stored."""
        self._world = world
        self.scheduler = Process(world, self, -1)
        self.workers = [Process(world, self, rank) for rank in range(shape.ranks)]

    @property
    def processes(self) -> list[Process]:
        return [self.scheduler, *self.workers]

    def replace(self, process: Process) -> None:
        """Replaces one dead process, or restarts the whole engine with a new epoch."""
        if self._world.chance("same-epoch"):
            fresh = Process(self._world, self, process.rank)
            if process is self.scheduler:
                self.scheduler = fresh
            else:
                self.workers[process.rank] = fresh
            return
        for other in self.processes:
            if other.alive:
                other.die()
        self.epoch += 1
        self.scheduler = Process(self._world, self, -1)
        self.workers = [Process(self._world, self, rank) for rank in range(self.shape.ranks)]
        for lease in self.leases:  # leases of the previous epoch, whose end the server may not have noticed yet
            self._world.rng.choice(self.workers).late.append(RetrieveTask(lease))

    # ---------------------------------------------------------------- plans

    def plan_store(self) -> None:
        """Plans a store of the same chunks on every rank; some ranks skip it, some store other groups."""
        world, rng = self._world, self._world.rng
        path, first = self._path(), 0
        if self._stored and rng.random() < 0.5:  # another turn of a conversation
            before = rng.choice(self._stored)
            longer = (before + path)[: world.swarm.depth]
            if len(longer) > len(before):
                path, first = longer, rng.choice((0, len(before), len(before), int(rng.random() * len(longer))))
        self._stored = [*self._stored[-3:], path]
        ranges = self._store_ranges(first, len(path))
        for worker in self.workers:
            if world.chance("rank-skips"):
                continue
            mine = self._store_ranges(first, len(path)) if world.chance("rank-differs") else ranges
            worker.todo.append(StoreTask(path, first, mine))
        if self.scheduler.cache:
            self.scheduler.todo.append(StoreTask(path, first, ranges))

    def plan_lookup(self) -> None:
        """One lookup for all ranks."""
        rng = self._world.rng
        keys = self.keys_to_ask()
        least = 0 if rng.random() < 0.7 else int(rng.random() * 4)
        self._lookup(self._digest(), keys, least)

    def keys_to_ask(self) -> list[bytes]:
        """Keys for a lookup: mostly recent stores, sometimes followed by chunks that nobody has stored."""
        rng = self._world.rng
        keys = keys_of(rng.choice(self._stored) if self._stored and rng.random() < 0.8 else self._path())
        if rng.random() < 0.1:
            keys += UNKNOWN_KEYS[: 1 + int(rng.random() * 5)]
        return keys

    def plan_pledge(self) -> None:
        """Pledges a prefix, mostly one that goes on where a recent store ended. Stores may follow, or not."""
        world, rng = self._world, self._world.rng
        path = self._path()
        if self._stored and rng.random() < 0.5:
            path = (rng.choice(self._stored) + path)[: world.swarm.depth]
        who = self.scheduler if rng.random() < 0.7 else rng.choice(self.workers)
        if who.ready:
            ttl_ms = world.swarm.ms(rng.choice((20, 300, 5000)))
            keys = self._torn(keys_of(path)) if rng.random() < 0.1 else keys_of(path)
            who.send(Pledge(who.next_id(), self._digest(), b"".join(keys), ttl_ms), who.quick_peer())
            world.pledged.append((self.digest, path))
            del world.pledged[:-6]
            self._steps[path] = 0
            for _ in range(int(rng.random() * 4)):
                self._store_next(path)
            for other in [other for other in world.engines if other is not self and other.digest == self.digest]:
                if rng.random() < 0.5:
                    other.plan_await()

    def plan_pledged_store(self) -> None:
        """Stores a piece of a pledged prefix, as an engine does that computes it in steps: its own, or another's."""
        rng = self._world.rng
        paths = [path for digest, path in self._world.pledged if digest == self.digest]
        if not paths:
            return
        path = rng.choice(paths[-3:])
        if rng.random() < 0.2:
            self._steps[path] = int(rng.random() * len(path))
        self._store_next(path)

    def _store_next(self, path: Path) -> None:
        rng = self._world.rng
        first = self._steps.get(path, 0)
        end = min(len(path), first + 1 + int(rng.random() * 2))
        self._steps[path] = end % len(path)
        self._stored = [*self._stored[-3:], path[:end]]
        for worker in self.workers:
            if not self._world.chance("rank-skips"):
                worker.todo.append(StoreTask(path[:end], first, self._store_ranges(first, end)))

    def plan_await(self, path: Path | None = None) -> None:
        """A lookup that may wait for this prefix, for a pledged one, or for one of which nobody knows."""
        rng = self._world.rng
        paths = [path for digest, path in self._world.pledged if digest == self.digest] if path is None else [path]
        keys = keys_of(rng.choice(paths)) if paths and rng.random() < 0.8 else self.keys_to_ask()
        if rng.random() < 0.3:
            keys = keys[: 1 + int(rng.random() * len(keys))]
        who = self.scheduler if rng.random() < 0.8 else rng.choice(self.workers)
        if who.ready:
            number, least = who.next_id(), 0 if rng.random() < 0.7 else int(rng.random() * 4)
            self._world.router.asks(who, number)
            who.send(Await(number, self._digest(), b"".join(keys), least), who.quick_peer())

    def unpledge(self) -> None:
        """Takes a pledge back: a living one of its own, one that is over, or another's."""
        rng = self._world.rng
        who = rng.choice(self.processes)
        if who.ready and who.pledges:
            owner = rng.choice(self._world.engines) if rng.random() < 0.2 else self
            numbers = [number for process in owner.processes for number in process.pledges] or who.pledges
            who.send(Unpledge(who.next_id(), rng.choice(numbers)), who.quick_peer())

    def plan_mixed_lookup(self) -> None:
        """Looks up keys that are not one chain, or awaits them. Only a broken client sends these."""
        rng = self._world.rng
        if rng.random() < 0.5:
            paths = [path for digest, path in self._world.pledged if digest == self.digest]
            self._lookup(self._digest(), self._torn(keys_of(rng.choice([*paths, self._path()]))), 0, Await)
            return
        keys = keys_of(self._path())
        for _ in range(1 + int(rng.random() * 2)):
            other = keys_of(self._path())
            keys[int(rng.random() * len(keys))] = rng.choice([*other, UNKNOWN_KEYS[0]])
        self._lookup(self._digest(), keys, 0)

    def _torn(self, keys: list[bytes]) -> list[bytes]:
        """These keys without one that others follow, or with one that comes twice."""
        at, rng = int(self._world.rng.random() * len(keys)), self._world.rng
        return keys[:at] + keys[at + 1 :] if rng.random() < 0.7 and len(keys) > 1 else [*keys[: at + 1], *keys[at:]]

    def _lookup(self, digest: bytes, keys: list[bytes], least: int, kind: type[Lookup] = Lookup) -> None:
        asker = self.scheduler if self._world.rng.random() < 0.8 else self._world.rng.choice(self.workers)
        if asker.ready:
            number = asker.next_id()
            self._world.router.asks(asker, number)
            asker.send(kind(number, digest, b"".join(keys), least), asker.quick_peer())

    def granted(self, digest: bytes, keys: list[bytes], lease: int) -> None:
        """Tells the ranks about a lease. Some never use it, and some leases go to another engine."""
        world = self._world
        shape = world.shapes.get(digest)
        if shape is None:
            return
        granted = Granted(lease, digest, shape, keys)
        self.leases.append(granted)
        del self.leases[:-8]
        user = world.rng.choice(world.engines) if world.chance("foreign-lease") else self
        registered_scheduler = (
            [user.scheduler] if user.scheduler.cache else []
        )  # a registered scheduler may store but never retrieves
        for worker in [*user.workers, *registered_scheduler]:
            if not world.chance("rank-skips"):
                worker.todo.append(RetrieveTask(granted))
            if world.chance("rank-repeats"):
                worker.todo.append(RetrieveTask(granted))

    def release(self) -> None:
        """Gives a lease back: a live one, an expired one, or another engine's."""
        rng = self._world.rng
        sender = rng.choice(self.processes)
        if not sender.ready:
            return
        engine = rng.choice(self._world.engines) if rng.random() < 0.3 else self
        lease = rng.choice(engine.leases).number if engine.leases else 99
        sender.send(Release(sender.next_id(), lease), sender.quick_peer())

    def _path(self) -> Path:
        rng, swarm = self._world.rng, self._world.swarm
        path = tuple(int(rng.random() * swarm.fanout) for _ in range(1 + int(rng.random() * swarm.depth)))
        key_of(path)
        return path

    def _digest(self) -> bytes:
        """Usually the engine's own namespace, sometimes another."""
        world = self._world
        return world.rng.choice(list(world.shapes)) if world.rng.random() < 0.1 else self.digest

    def _store_ranges(self, first: int, end: int) -> dict[int, tuple[int, int]]:
        """Group -> range of chunks to store: all for full groups, often only what a lookup needs for others."""
        rng = self._world.rng
        ranges: dict[int, tuple[int, int]] = {}
        for index, group in enumerate(self.shape.groups):
            if group.kind == "full":
                ranges[index] = (first, end)
                continue
            dice = rng.random()
            if dice < 0.5:
                ranges[index] = (max(first, needed(self.shape, index, end)[0]), end)
            elif dice < 0.7:
                ranges[index] = (first, end)
            elif dice < 0.9:
                begin = first + int(rng.random() * (end - first))
                ranges[index] = (begin, begin + 1 + int(rng.random() * (end - begin)))
        return ranges or {0: (first, end)}
