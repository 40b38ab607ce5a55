"""Simulated inference engines: several ranks and a scheduler each, that agree on what to store and to retrieve."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvserver.wire.messages import Lookup, Release

from .content import Path, key_of, keys_of
from .ledger import needed
from .processes import Process, RetrieveTask, StoreTask
from .shapes import Shape

if TYPE_CHECKING:
    from .world import World

UNKNOWN_KEYS = [bytes([200 + number]) * 32 for number in range(8)]
"""Keys that nobody ever stores."""


class Granted(NamedTuple):
    """A lease as its engine knows it."""

    number: int
    digest: bytes
    shape: Shape
    keys: list[bytes]


class SimEngine:
    """The processes that say the same (engine, epoch)."""

    def __init__(self, world: "World", name: str, digest: bytes, shape: Shape, stored: Sequence[Path] = ()) -> None:
        """stored: prefixes that it may ask for from the first."""
        self.name = name
        self.epoch = 1
        self.digest = digest
        self.shape = shape
        self.leases: list[Granted] = []
        self._stored = list(stored)
        """What was to be stored lately."""
        self._world = world
        self.scheduler = Process(world, self, -1)
        self.workers = [Process(world, self, rank) for rank in range(shape.ranks)]

    @property
    def processes(self) -> list[Process]:
        return [self.scheduler, *self.workers]

    def replace(self, process: Process) -> None:
        """A process that died comes back alone, or the whole engine starts anew under another epoch."""
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
        for lease in self.leases:  # of an engine of the same name that is no more, perhaps not quite yet
            self._world.rng.choice(self.workers).late.append(RetrieveTask(lease))

    # ---------------------------------------------------------------- plans

    def plan_store(self) -> None:
        """Every rank is to store its shards of the same chunks; some forget it, some store other groups."""
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
        """Mostly of what was stored lately; now and then with chunks behind it that nobody has stored."""
        rng = self._world.rng
        keys = keys_of(rng.choice(self._stored) if self._stored and rng.random() < 0.8 else self._path())
        if rng.random() < 0.1:
            keys += UNKNOWN_KEYS[: 1 + int(rng.random() * 5)]
        return keys

    def plan_mixed_lookup(self) -> None:
        """Keys that are not one chain, which only a broken client sends."""
        rng = self._world.rng
        keys = keys_of(self._path())
        for _ in range(1 + int(rng.random() * 2)):
            other = keys_of(self._path())
            keys[int(rng.random() * len(keys))] = rng.choice([*other, UNKNOWN_KEYS[0]])
        self._lookup(self._digest(), keys, 0)

    def _lookup(self, digest: bytes, keys: list[bytes], least: int) -> None:
        asker = self.scheduler if self._world.rng.random() < 0.8 else self._world.rng.choice(self.workers)
        if asker.ready:
            asker.send(Lookup(asker.next_id(), digest, b"".join(keys), least), asker.quick_peer())

    def granted(self, digest: bytes, keys: list[bytes], lease: int) -> None:
        """The ranks are told of a lease; some never use it, and some leases end up with another engine."""
        world = self._world
        shape = world.shapes.get(digest)
        if shape is None:
            return
        granted = Granted(lease, digest, shape, keys)
        self.leases.append(granted)
        del self.leases[:-8]
        user = world.rng.choice(world.engines) if world.chance("foreign-lease") else self
        registered_scheduler = [user.scheduler] if user.scheduler.cache else []  # which may store, and never retrieves
        for worker in [*user.workers, *registered_scheduler]:
            if not world.chance("rank-skips"):
                worker.todo.append(RetrieveTask(granted))
            if world.chance("rank-repeats"):
                worker.todo.append(RetrieveTask(granted))

    def release(self) -> None:
        """Gives a lease back: a living one, one that is over, or another engine's."""
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
        """Its own namespace; now and then another one."""
        world = self._world
        return world.rng.choice(list(world.shapes)) if world.rng.random() < 0.1 else self.digest

    def _store_ranges(self, first: int, end: int) -> dict[int, tuple[int, int]]:
        """Group -> the chunks whose blocks it brings: all for full groups, else often just what a lookup needs."""
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
