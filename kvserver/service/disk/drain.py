"""Drains a device: moves all its chunks away, so that it can be taken out.

Its chunks move one after the other to the remaining devices, run by run (runs.py): straight from DRAM if
they are there too, else by way of DRAM. A chunk stays found all the while; its old extents go when the new ones hold
it. Moves count as ordinary writes: they stay within the queue and the daily bytes of their device, and chunks used
longer ago go for them. A chunk that finds no place there stays in DRAM alone, if that has room, or is given up and
counted. So is a chunk that is larger than the daily budget ever allows at once.

The mover keeps a mark in the directory that the device is being drained, so neither a restarted brain nor a restarted
server uses it again. When nothing is left, the device's file is removed.

The walk over the device is in state/drains.py.
"""

from kvserver.errors import DeviceError, RequestError
from kvserver.index.space import Node, Space
from kvserver.service.disk import reads, runs, writes
from kvserver.service.holdings.disk_eviction import device_of
from kvserver.service.requests import movers
from kvserver.service.state.core import MILLISECOND_NS, Core
from kvserver.service.state.disk_tier import DiskTier
from kvserver.service.state.drains import Drain
from kvserver.wire.orders import DeviceIs, DrainDevice, EraseDevice

MOVING_MAX = 8
"""Chunks that move at a time: enough to keep a device busy, few compared with what engines read."""
MOVING_SHARE = 16
"""Moving chunks take at most 1 / this of the arena, unless it is a single chunk."""
LOOKS_MAX = 64
"""Chunks that are looked at in one event, because other events wait."""


def begin(core: Core, device: int) -> None:
    """Begins to drain a device: it takes no more writes, and all its chunks are moved away. Raises RequestError when
    there is no such device. Raises DeviceError when the device is not open, or was not open when the others were read:
    nothing could be moved, and it would be erased all the same."""
    tier = core.disk
    if tier is None or not 0 <= device < len(tier.devices):
        devices = f"devices are 0 to {core.bounds.disk_devices - 1}" if tier is not None else "there is no disk tier"
        raise RequestError("disk-device", f"there is no device {device} to drain: {devices}")
    wanted = tier.devices[device]
    if not tier.is_at_hand(wanted) and (wanted.drain is None or wanted.drain.state == "draining"):
        why = wanted.problem or "it was opened when the others had been read; start the server anew"
        raise DeviceError(
            "disk-not-open",
            f"device {device} is not open, so nothing on it can be moved, and nothing there is touched: {why}",
        )
    if wanted.drain is None:
        wanted.begin_drain()
        core.log("disk drain begins", *wanted.fields, ("bytes", tier.chunks.extents.pools[device].bytes_used))
        _tell(tier, DrainDevice(device))


def ready(tier: DiskTier) -> None:
    """Tells a new mover about the drains. It has read the marks in its directories, but may have missed an order."""
    for drain in tier.drains():
        if drain.state == "draining":
            _tell(tier, DrainDevice(drain.device))


def gone(core: Core, tier: DiskTier) -> None:
    """Forgets the orders of a mover that has been reaped; the next one gets them again."""
    for drain in tier.drains():
        drain.stop_erasing()
        core.timers.cancel("erase", drain.device)


def erase_overdue(core: Core, tier: DiskTier, device: int) -> None:
    assert tier.mover is not None
    movers.kill(core, tier.mover, f"did not erase device {device}")


def said(core: Core, tier: DiskTier, report: DeviceIs) -> None:
    """Handles the drain state that a device's directory records."""
    device = tier.devices[report.device]
    device.say_open(is_open=report.bytes > 0)
    if not report.drain:
        return
    drain = device.begin_drain()
    if report.drain == "drained" and drain.state == "draining":
        drain.become_drained()
        core.timers.cancel("erase", drain.device)
        core.log("disk drained", *device.fields)
    elif not device.is_open:  # the mover could not open it, so it has not erased it
        drain.stop_erasing()
        core.timers.cancel("erase", drain.device)


def turn(core: Core, tier: DiskTier, now_ns: int) -> None:
    """Goes on with all drains. Called at ticks and when a read or write has ended, not in the event that answers a
    store: room for the next one may be made of its chunks."""
    if not tier.readable or not tier.recovered:
        return
    for drain in tier.drains():
        if drain.state == "draining" and now_ns >= drain.wait_until_ns:
            _go_on(core, tier, drain, now_ns)


# ---------------------------------------------------------------- the walk


def _go_on(core: Core, tier: DiskTier, drain: Drain, now_ns: int) -> None:
    if not tier.is_at_hand(tier.devices[drain.device]):
        drain.wait_for("store")
        return
    drain.wait_for("")
    for node, space in list(drain.moving.items()):
        _step(core, tier, drain, (space, node), now_ns)
    for _ in range(LOOKS_MAX):
        if drain.waits or not _has_hands_free(core, drain) or not _goes_on(core, tier, drain, now_ns):
            break
        if drain.queue:
            _take_up(core, tier, drain, drain.queue.pop(), now_ns)
    if drain.waits:
        drain.pause(now_ns)


def _take_up(core: Core, tier: DiskTier, drain: Drain, node: Node, now_ns: int) -> None:
    space = tier.chunks.room.space_of(node)
    if space is not None and node not in drain.moving and _is_here(core, drain, space, node):
        drain.moving[node] = space
        _step(core, tier, drain, (space, node), now_ns)


def _has_hands_free(core: Core, drain: Drain) -> bool:
    moving_bytes = sum(space.group_bytes(node.on_disk) for node, space in drain.moving.items())
    most_bytes = core.bounds.arena_bytes // MOVING_SHARE
    return not drain.moving or (len(drain.moving) < MOVING_MAX and moving_bytes < most_bytes)


def _goes_on(core: Core, tier: DiskTier, drain: Drain, now_ns: int) -> bool:
    """Goes on to the next chunks. False when the walk is over for now, or the device is empty: then it is erased."""
    pool = tier.chunks.extents.pools[drain.device]
    if drain.queue or pool.bytes_used:
        return drain.walk(pool, now_ns)
    if drain.begin_erasing():
        _tell(tier, EraseDevice(drain.device))
        core.timers.set(now_ns + core.bounds.job_ttl_ms * MILLISECOND_NS, "erase", drain.device)
    return False


def _is_on_disk(core: Core, space: Space, node: Node) -> bool:
    return node.on_disk != 0 and core.chunks.serves(space, node)


def _is_here(core: Core, drain: Drain, space: Space, node: Node) -> bool:
    """The chunk still has extents on the device."""
    return _is_on_disk(core, space, node) and device_of(node) == drain.device


# ---------------------------------------------------------------- one chunk


def _step(core: Core, tier: DiskTier, drain: Drain, chunk: tuple[Space, Node], now_ns: int) -> None:
    """Takes the next step for a chunk: reads it, writes it, or leaves it alone."""
    space, node = chunk
    assert node.disk is not None
    if not _is_here(core, drain, space, node):
        del drain.moving[node]
        core.counters.disk_drained["moved"] += _is_on_disk(core, space, node)
        return
    if node in tier.chunks.busy:
        return
    away = node.on_disk & ~node.in_dram
    if not away and _waits_for_parent(tier, drain, node):
        return
    wait = _move(core, tier, chunk, away, now_ns)
    if wait in ("device", "room"):
        wait = _bring_home(core, tier, chunk, away, now_ns)
    match wait:
        case "":
            pass
        case "room" | "arena":
            del drain.moving[node]
            drain.wait_for("arena" if wait == "arena" else "")
            _give_up(core, tier, drain, chunk, patient=wait == "arena" or node.disk.children > 0)
        case _:
            drain.wait_for(wait)


def _waits_for_parent(tier: DiskTier, drain: Drain, node: Node) -> bool:
    """The chunk goes where its parent goes (runs.py), which is not known yet."""
    if node.parent not in drain.moving:
        return False
    job = tier.chunks.busy.get(node.parent)
    return job is None or job.kind != "write"


def _move(core: Core, tier: DiskTier, chunk: tuple[Space, Node], away: int, now_ns: int) -> str:
    """Orders the move of a chunk to another device. Returns why not (placement.REFUSALS, "queue", "arena"); empty when
    a job was ordered."""
    space, node = chunk
    device = runs.device_for(core, tier, space, node, now_ns)
    if device is None:
        return "device"
    used = node.used if node.children is None else now_ns  # others depend on it
    placement, count = tier.devices[device].placement, space.group_bytes(node.on_disk)
    if not placement.budget.may_ever_allow(count):
        return "room"
    if refusal := placement.refusal(count, now_ns):
        return refusal
    if not away:
        job = writes.write_of(core, space, node, device=device, now_ns=now_ns, whole=True)
        return writes.order(core, tier, job, used=used, now_ns=now_ns)
    room = tier.chunks.room
    sizes = _extent_sizes(space, node.on_disk)
    if not all(room.has(room.wanted(device, extent_bytes, used, node.tenant)) for extent_bytes in sizes):
        return "room"
    return "" if reads.order(core, tier, space, node, groups=away, now_ns=now_ns) else "arena"


def _bring_home(core: Core, tier: DiskTier, chunk: tuple[Space, Node], away: int, now_ns: int) -> str:
    """Orders the read of a chunk to DRAM, if DRAM has free room or something in DRAM lies below the chunk. Returns
    "room" when there is nothing to read or no place."""
    space, node = chunk
    if not away:
        return "room"
    free = all(core.chunks.pool.has_room(slot_bytes) for slot_bytes in _extent_sizes(space, away))
    if not free and not any(child.in_dram for child in node.child_nodes()):
        return "room"
    return "" if reads.order(core, tier, space, node, groups=away, now_ns=now_ns) else "arena"


def _give_up(core: Core, tier: DiskTier, drain: Drain, chunk: tuple[Space, Node], *, patient: bool) -> None:
    """Gives up a chunk that has no other place. patient: that may change, when chunks below it move or the arena has
    room again. Then a chunk is given up only after a walk that freed nothing, one for each such walk."""
    stuck = drain.may_give_up()
    if patient and not stuck:
        return
    for lost in tier.chunks.give_up(*chunk):
        core.counters.disk_drained["given-up" if lost else "kept"] += 1


def _extent_sizes(space: Space, groups: int) -> set[int]:
    """Sizes of the extents, and of the slots, that these groups (bits) take."""
    numbers = range(len(space.geometry.groups))
    return {
        space.parts[part].slot_bytes for group in numbers if groups >> group & 1 for part in space.group_parts(group)
    }


def _tell(tier: DiskTier, order: DrainDevice | EraseDevice) -> None:
    if tier.readable:
        tier.tell(order)
