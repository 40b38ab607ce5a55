"""Events for subscribers: which chunks each tier holds, as that changes.

Every change of a chunk's groups in DRAM or on disk is announced beforehand (Chunks.count). The end of the event
compares the state before with the state now, so a chunk that came and went within the event is not mentioned. A cleared
namespace is one event; chunks that still hang in it are not mentioned any more. Chunks of an earlier brain are told at
ticks, some at a time.
"""

from itertools import islice

from kvserver.index.space import Node, Space
from kvserver.service.base.effects import Tell
from kvserver.service.state.core import Core
from kvserver.wire.kv_events import Begun, ChunksRemoved, ChunksStored, KvEvent, NamespaceCleared, Tier

UNTOLD_PER_TICK = 1000
CHUNKS_PER_BATCH = 1024
"""Chunks in one batch, so that no message grows with the index when a long prefix is cleared."""


def begin(core: Core) -> None:
    """Begins to track changes. Called once, when the index has been restored."""
    core.chunks.begin_changes()
    for space in core.chunks.spaces.values():
        core.untold.append((space, space.subtree(space.root)[:0:-1]))
    core.emit(Tell([Begun(core.chunks.chunks)]))


def tick(core: Core) -> None:
    """Tells some chunks of an earlier brain, as they are now. Their later changes, and those in this event, are told as
    always, so departures are told too."""
    if not core.untold:
        return
    space, nodes = core.untold[-1]
    some = [nodes.pop() for _ in range(min(UNTOLD_PER_TICK, len(nodes)))]
    if events := _events(core, [(node, (space, 0, 0)) for node in some]):
        core.emit(Tell(events))
    if not nodes:
        core.untold.pop()


def cleared(core: Core, space: Space) -> None:
    if core.chunks.changes is not None:
        core.emit(Tell([NamespaceCleared(space.digest)]))


def tell(core: Core, changes: dict[Node, tuple[Space, int, int]]) -> None:
    """Tells the changes of an event. Called at its end."""
    left = iter(changes.items())
    while some := list(islice(left, CHUNKS_PER_BATCH)):
        events = _events(core, some)
        if events:
            core.emit(Tell(events))
    changes.clear()


def holds(space: Space, groups: int) -> bool:
    """Whether these groups (bits) include all full groups of a chunk or, in a namespace without one, any group."""
    return groups != 0 and groups & space.needed == space.needed


def _events(core: Core, changes: list[tuple[Node, tuple[Space, int, int]]]) -> list[KvEvent]:
    events: list[KvEvent] = []
    for node, (space, dram, disk) in changes:
        if core.chunks.spaces.get(space.digest) is not space:
            continue
        here = _is_here(core, space, node)
        now_dram, now_disk = (node.in_dram, node.on_disk) if here else (0, 0)
        _compare(events, space, node, "dram", before=dram, now=now_dram)
        _compare(events, space, node, "disk", before=disk, now=now_disk)
    return events


def _is_here(core: Core, space: Space, node: Node) -> bool:
    return core.chunks.spaces.get(space.digest) is space and space.nodes.get(node.key) is node


def _compare(events: list[KvEvent], space: Space, node: Node, tier: Tier, *, before: int, now: int) -> None:
    if holds(space, now) == holds(space, before):
        return
    if not holds(space, now):
        match events[-1] if events else None:
            case ChunksRemoved(space.digest, known, keys) if known == tier:
                keys.append(node.key)
            case _:
                events.append(ChunksRemoved(space.digest, tier, [node.key]))
        return
    assert node.parent is not None
    match events[-1] if events else None:
        case ChunksStored(space.digest, known, _, keys) if known == tier and keys[-1] == node.parent.key:
            keys.append(node.key)
        case _:
            tokens = space.geometry.chunk_tokens
            events.append(ChunksStored(space.digest, tier, node.parent.key, [node.key], tokens))
