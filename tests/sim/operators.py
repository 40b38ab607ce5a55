"""Simulated operators: the commands they give, and the promises checked for them.

A cleared prefix is never served again, not even from disk by a later brain, until it is stored again. A pinned chunk
stays in DRAM until its pin expires. Nothing is stored while the server is drained, nor in a namespace whose weights
have changed.
"""

from collections.abc import Container
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvserver.service.base.events import Commanded
from kvserver.tiers.records import DiskRecord
from kvserver.wire.admin import (
    AnyCommand,
    Changed,
    ClearNamespace,
    ClearTenant,
    DrainServer,
    Held,
    LetGo,
    NewWeights,
    Outcome,
    Pin,
    Reload,
    Resume,
    SetLogLevel,
    TenantCleared,
    Unpin,
    Warm,
)
from kvserver.wire.messages import KEY_BYTES, Cleared, Draining, Error
from kvserver.wire.orders import Demote

from . import service_view
from .content import Path, key_of, keys_of, path_of
from .disk import Devices, SimDiskMover, items_of
from .ledger import Ledger
from .memory import Wrong
from .shapes import Shape
from .tenants import TENANTS, namespaces_of

if TYPE_CHECKING:
    from .world import World

Name = tuple[bytes, bytes, int, int]
Chunk = tuple[bytes, bytes]

ANSWERS: dict[type, type] = {
    ClearNamespace: Cleared,
    ClearTenant: TenantCleared,
    NewWeights: Cleared,
    Pin: Held,
    Warm: Held,
    Unpin: LetGo,
    DrainServer: Draining,
    Resume: Draining,
    SetLogLevel: Changed,
    Reload: Changed,
}
MS = 1_000_000


def act(world: "World") -> None:
    """Sends one random command, sometimes a wrong one."""
    rng, swarm = world.rng, world.swarm
    digest, path = _somewhere(world)
    depth = 1 + int(rng.random() * len(path))
    keys = b"".join(keys_of(path)) if rng.random() < 0.5 else key_of(path[:depth])
    holds = world.promises.operators.holds
    hold = rng.choice([*holds]) if holds else 0
    good: tuple[tuple[AnyCommand, float], ...] = (
        (ClearNamespace(namespace=digest, key=key_of(path[:depth])), 3.0),
        (ClearNamespace(namespace=rng.choice((digest, bytes(32)))), 0.3),
        (ClearTenant(tenant=rng.choice(TENANTS[:-1])), 0.3),
        (NewWeights(namespace=digest, quiet_ms=swarm.ms(rng.choice((0, 50, 300)))), 0.3),
        (Pin(namespace=digest, keys=keys, ttl_ms=swarm.ms(rng.choice((10, 200, 900)))), 4.0),
        (Warm(namespace=digest, keys=keys), 2.0),
        (Unpin(hold=hold), 1.0),
        (DrainServer(), 0.3),
        (Resume(), 2.0),
        (SetLogLevel(level=rng.choice(("debug", "error"))), 0.2),
        (Reload(values={"disk_clean_percent": rng.choice((10, 90)), "log_level": "info"}), 0.3),
    )
    bad: tuple[AnyCommand, ...] = (
        ClearNamespace(namespace=digest, key=b"short"),
        ClearNamespace(namespace=b"short"),
        ClearTenant(tenant=""),
        Pin(namespace=digest, keys=keys, ttl_ms=0),
        Pin(namespace=digest, keys=keys[:-1], ttl_ms=1),
        Pin(namespace=bytes(32), keys=keys, ttl_ms=1),
        Warm(namespace=digest, keys=bytes(32)),
        Unpin(hold=1 << 40),
        NewWeights(namespace=digest, quiet_ms=-1),
        Reload(values={"arena_bytes": 1}),
    )
    must_fail = rng.random() < 0.1
    command = rng.choice(bad) if must_fail else rng.choices(*zip(*good, strict=True))[0]
    world.feed(Commanded(world.new_number(), "token sim", command), must_fail=must_fail)


def clear_prefix(world: "World") -> None:
    """Clears a prefix, often one that most chunks hang on."""
    digest, path = _somewhere(world)
    depth = 1 + int(world.rng.random() * min(3, len(path)))
    command = ClearNamespace(namespace=digest, key=key_of(path[:depth]))
    world.feed(Commanded(world.new_number(), "token sim", command))


def _somewhere(world: "World") -> tuple[bytes, Path]:
    """A random prefix, usually one held in DRAM or on disk."""
    rng, swarm = world.rng, world.swarm
    held = [(name[0], name[1]) for name in world.ledger.held]
    held += [(stored.record.namespace, stored.record.key) for stored in world.devices.records.values()]
    if held and rng.random() < 0.85:
        digest, key = rng.choice(held)
        return digest, path_of(key)
    path = tuple(int(rng.random() * swarm.fanout) for _ in range(swarm.depth))
    return rng.choice([*world.shapes]), path


@dataclass(eq=False)
class Pinned:
    """A prefix that was completely in DRAM when it was pinned."""

    digest: bytes
    path: Path
    names: set[Name]
    expires_ns: int


class Voided:
    """Chunks whose prefix was cleared and that were not stored since. Outlives brains, as the devices do."""

    def __init__(self) -> None:
        self.chunks: set[Chunk] = set()
        self.unanswered: dict[int, set[Chunk]] = {}
        """Peer -> its cleared chunks. They become a promise only when the peer is answered."""
        self.owed: set[Chunk] = set()
        """Chunks of clears that no disk has noted yet. They become a promise once a disk has; a dead brain drops them.
        """

    def stored(self, digest: bytes, key: bytes) -> None:
        for chunks in (self.chunks, self.owed, *self.unanswered.values()):
            chunks.discard((digest, key))

    def brain_died(self) -> None:
        self.unanswered.clear()
        self.owed.clear()

    def check(self, on_disk: dict[Name, tuple[int, int]], *, are_owed: bool) -> None:
        """are_owed: the service says that a clear is not durable yet."""
        if not are_owed:
            self.chunks |= self.owed
            self.owed.clear()
        for digest, key, _, _ in on_disk:
            if (digest, key) in self.chunks:
                raise Wrong(f"chunk {path_of(key)} was cleared with its prefix, and is on disk again")


class OperatorPromises:
    """The operator promises of one brain's life."""

    def __init__(self, ledger: Ledger, shapes: dict[bytes, Shape]) -> None:
        self._ledger = ledger
        self._shapes = shapes
        self.holds: dict[int, Pinned] = {}
        self.fences: dict[bytes, int] = {}
        self.draining = False

    def answered(self, command: AnyCommand, outcome: Outcome, now_ns: int) -> None:
        match command, outcome:
            case Pin(), Held(hold=hold, chunks=chunks, chunks_on_disk=0):
                path = path_of(command.keys[-32:])
                path = path[:chunks] if len(command.keys) > 32 else path
                self._pinned(hold, command, path, now_ns)
            case Unpin(hold), LetGo():
                self.holds.pop(hold, None)
            case DrainServer(), Draining():
                self.draining = True
                self.holds.clear()
            case Resume(), Draining():
                self.draining = False

    def weights_changed(self, command: NewWeights, now_ns: int) -> None:
        """Fences the namespace from the command on, however late the disks note it and the answer comes."""
        until_ns = now_ns + command.quiet_ms * MS
        self.fences[command.namespace] = max(until_ns, self.fences.get(command.namespace, 0))

    def _pinned(self, hold: int, command: Pin, path: Path, now_ns: int) -> None:
        digest, shape = command.namespace, self._shapes[command.namespace]
        names: set[Name] = set()
        for key in keys_of(path):
            for index, group in enumerate(shape.groups):
                if self._ledger.present(digest, key, index, group.shards):
                    names.update((digest, key, index, shard) for shard in range(group.shards))
                elif group.kind == "full":
                    raise Wrong(f"chunk {path_of(key)} is pinned, of which group {index} is not in DRAM")
        self.holds[hold] = Pinned(digest, path, names, now_ns + command.ttl_ms * MS)

    def cleared(self, digest: bytes, path: Path, going: Container[int] = ()) -> None:
        """All chunks at and below `path` are forgotten now. going: offsets of chunks that left the index earlier and
        are withdrawn step by step. The clear is answered when they are gone."""
        held = [name for name, offset in self._ledger.held.items() if name[0] == digest and offset not in going]
        if any(is_below(path_of(name[1]), path) for name in held):
            raise Wrong(f"{path} was cleared, and the ledger still holds some of it")
        self.dropped(digest, path)

    def dropped(self, digest: bytes, path: Path) -> None:
        """The chunks at and below `path` have left. Holds on them are over."""
        self.holds = {
            number: pinned
            for number, pinned in self.holds.items()
            if pinned.digest != digest or not is_below(pinned.path, path)
        }

    def check(self, now_ns: int) -> None:
        """Runs after each event: every pinned chunk is in DRAM."""
        for number, pinned in list(self.holds.items()):
            if pinned.expires_ns <= now_ns:
                del self.holds[number]
            elif not pinned.names <= self._ledger.held.keys():
                raise Wrong(f"{pinned.path} is pinned, and has left DRAM")

    def store_begins(self, digest: bytes, now_ns: int) -> None:
        if self.draining:
            raise Wrong("a store was begun while the server is drained")
        if now_ns < self.fences.get(digest, 0):
            raise Wrong("a store was begun too soon after the weights had changed")


def is_below(path: Path, prefix: Path) -> bool:
    return path[: len(prefix)] == prefix


def before(world: "World", peer: int, command: AnyCommand) -> None:
    """Remembers the chunks that a clear is about, on the devices and on their way there."""
    cleared: list[tuple[bytes, Path]]
    match command:
        case ClearNamespace(namespace, b"") | NewWeights(namespace=namespace):
            cleared = [(namespace, ())]
        case ClearNamespace(namespace, key) if len(key) == KEY_BYTES:
            cleared = [(namespace, path_of(key))]
        case ClearTenant(tenant):
            cleared = [(namespace, ()) for namespace in namespaces_of(tenant, world.shapes)]
        case _:
            return
    world.voided.unanswered[peer] = {
        (record.namespace, record.key)
        for record in _records(world)
        for namespace, path in cleared
        if record.namespace == namespace and is_below(path_of(record.key), path)
    }


def after(world: "World", peer: int, outcome: Outcome) -> None:
    chunks = world.voided.unanswered.pop(peer, set())
    if not isinstance(outcome, Error):
        world.voided.chunks |= chunks
        world.counts["chunks voided on disk"] += len(chunks)
    elif outcome.code == "disk-clear" and service_view.clears_are_owed(world.shell.service):
        # Otherwise a device could not be opened: its answer says to clear again, and promises nothing.
        world.voided.owed |= chunks
        world.counts["clears owed"] += 1


def _records(world: "World") -> list[DiskRecord]:
    devices: Devices = world.devices
    records = [stored.record for stored in devices.records.values()]
    for mover in world.supervisor.movers.values():
        if isinstance(mover, SimDiskMover):
            records += [record for run in mover.runs if run.kind == "write" for _, record, _ in run.left]
            orders = [order for order, _, _ in mover.inbox if isinstance(order, Demote)]
            records += [record for order in orders for _, record, _ in items_of(order.records)]
    return records
