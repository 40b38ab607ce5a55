"""Chooses the device that a chunk is written to.

A chain lies in runs: `disk_run_tokens` tokens in a row lie on one device, the next run on another. So a lost device
costs the prompts that have a run there, and not the end of nearly every prompt. A long prompt is read from several
devices at a time. docs/decisions/0012-placement-in-runs.md has the measurements.

A chunk follows its parent, unless it begins a run. A run begins at multiples of its length, and where a chain branches:
otherwise all prompts with one beginning would lie on the device of that beginning. If the parent's device takes no
writes, the chunk follows the nearest chunk above it in the same run, or begins the run anew.
"""

from collections import Counter
from collections.abc import Iterator

from kvserver.index.space import Node, Space
from kvserver.service.holdings.disk_eviction import device_of
from kvserver.service.state.core import Core
from kvserver.service.state.disk_tier import DiskTier
from kvserver.tiers.extents import ranked

DEVICES_AT_ONCE = 4
"""A device's share of the writes under way is 1 / this of all; more of fewer devices. Eight writes keep one busy."""
FREE_SHARES = 32
"""Devices count as equally free when the free part of their segments differs by less than 1 / this."""


def device_for(core: Core, tier: DiskTier, space: Space, node: Node, now_ns: int) -> int | None:
    """The device to which all groups of a chunk are written. None: no device takes writes.

    For a run that goes on after another, these are the devices with the fewest runs of the chain. The one that would
    take a write now comes first, then one that is not busy, then the one with more free segments: so devices fill
    evenly, and all of them write."""
    extents = tier.chunks.extents
    length = max(1, core.bounds.disk_run_tokens // space.geometry.chunk_tokens)
    head = node
    while (head.depth - 1) % length and not _branches_off(head):
        assert head.parent is not None
        head = head.parent
        device = _device_of(tier, head)
        if device is not None and extents.takes_writes[device]:
            return device
    devices = extents.writable
    if len(devices) > 1 and not _branches_off(head):
        runs = Counter(_devices_above(tier, head, length))
        fewest = min(runs[device] for device in devices)
        devices = [device for device in devices if runs[device] == fewest]
    write_bytes, occupied = space.group_bytes(head.present), busy(core, tier)

    def merit(device: int) -> tuple[bool, bool, int]:
        refused = tier.devices[device].placement.refusal(write_bytes, now_ns)
        return not refused, device not in occupied, _free(tier, device)

    return max(ranked(head.key, devices), key=merit, default=None)


def busy(core: Core, tier: DiskTier) -> set[int]:
    """Devices that have their share of the writes under way."""
    under_way, most = writing(tier), share(core, tier)
    return {device for device in tier.chunks.extents.writable if under_way[device] >= most}


def share(core: Core, tier: DiskTier) -> int:
    """Writes that a device may have under way while others could write too."""
    return max(1, core.bounds.disk_jobs_max // max(1, min(len(tier.chunks.extents.writable), DEVICES_AT_ONCE)))


def writing(tier: DiskTier) -> Counter[int]:
    """Device -> its writes under way."""
    return Counter(job.device for job in tier.chunks.jobs.values() if job.kind == "write")


def _free(tier: DiskTier, device: int) -> int:
    """How free the device is, in 1 / FREE_SHARES. One segment is no difference: it may just have been emptied. So full
    devices count as equal: otherwise one would lose its newest chunks, and another keep its oldest."""
    pool = tier.chunks.extents.pools[device]
    return pool.slabs_empty * FREE_SHARES // pool.slabs_total if pool.slabs_empty > 1 else 0


def _branches_off(node: Node) -> bool:
    """Another child of its parent is on disk, or being written."""
    assert node.parent is not None
    beside = node.parent.disk
    return beside is not None and beside.children > (node.disk is not None and node.disk.claims)


def _device_of(tier: DiskTier, node: Node) -> int | None:
    """The device on which a chunk lies, or to which it is being written. None: it is only in DRAM."""
    job = tier.chunks.busy.get(node)
    if job is not None and job.kind == "write":
        return job.device
    return device_of(node) if node.on_disk else None


def _devices_above(tier: DiskTier, head: Node, length: int) -> Iterator[int]:
    """The device of each whole run above this one."""
    at = head.parent
    while at is not None and at.depth:
        if at.depth % length == 0 and (device := _device_of(tier, at)) is not None:
            yield device
        at = at.parent
