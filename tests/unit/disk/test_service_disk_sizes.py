"""A model with records of another size starts while every device is full of an earlier model's records."""

import random
from dataclasses import replace
from itertools import product
from operator import attrgetter
from typing import Any

import pytest

from kvserver.index.space import Node
from kvserver.service.base.events import ArenaGrew
from kvserver.service.disk.drain import MOVING_SHARE
from kvserver.tiers.extents import extents_per_segment
from kvserver.tiers.records import DiskRecord, unpack_disk
from kvserver.wire.admin import DrainServer
from kvserver.wire.messages import KEY_BYTES, GroupBlocks, GroupSpec, RegionRun
from kvserver.wire.orders import Promote
from tests.rigs.admin_rig import command
from tests.rigs.brain_rig import SLAB_BYTES, Client, chain, ids, key
from tests.rigs.disk_quota_rig import hold_writes, quota, resume_writes
from tests.rigs.disk_rig import EXTENT_BYTES, SEGMENT_BYTES, DiskRig, restart

SEGMENT_UNITS = 16
SEGMENTS = 23
"""Segments per device."""
BLOCKS = 24
TURNS_MAX = 4
"""Turns per conversation, of two chunks each; chunks added later lie elsewhere."""
OLD, NEW = (bytes([number]) * 32 for number in (3, 5))


class Scene(DiskRig):
    """Devices full of one model's conversations, which continued now and then."""

    events_a_check = 499

    def __init__(self, devices: int, **bounds: Any) -> None:
        segment_bytes = bounds.setdefault("disk_segment_bytes", SEGMENT_UNITS * EXTENT_BYTES)
        bounds.setdefault("arena_bytes", (4 + 2 * devices) * SLAB_BYTES)
        super().__init__(disk_devices=devices, disk_device_bytes=SEGMENTS * segment_bytes, **bounds)
        self.rng = random.Random(devices)
        self.turns: dict[int, int] = {}

    def client(self, namespace: bytes, units: int, tenant: str = "") -> Client:
        page_bytes = units * EXTENT_BYTES // 3
        group = GroupSpec(2, BLOCKS, "full", 0, 1, 0, 1, 0, [RegionRun(0, 0, 1, 0, page_bytes, page_bytes)])
        client = Client(self, engine=f"engine {namespace[0]}")
        return client.register((group,), namespace=namespace, tenant=tenant, buffer_bytes=BLOCKS * page_bytes)

    def store(self, client: Client, keys: bytes) -> None:
        client.ask(client.storing(keys, GroupBlocks(0, 0, ids(*range(3 * (len(keys) // KEY_BYTES))))))
        self.wait_ms(50)

    def converse(self, client: Client, namespace: bytes) -> None:
        """Continues one of many conversations; a few of them are chosen often."""
        seed = int(self.rng.paretovariate(0.6)) % (SEGMENTS * self.bounds.disk_devices * 3)
        turns = self.turns[seed] = min(TURNS_MAX, self.turns.get(seed, 0) + 1)
        keys = chain(seed, 2 * turns)
        client.release(client.lookup(keys, namespace))
        self.store(client, keys)

    def fill(self, client: Client, namespace: bytes) -> None:
        most = self.bounds.disk_devices * self.bounds.disk_device_bytes
        while self.service.counters.disk_written_bytes < 1.5 * most:
            self.converse(client, namespace)

    @property
    def used_bytes(self) -> int:
        return sum(disk.used_bytes for disk in self.service.status(self.now_ns).disks)

    @property
    def written_bytes(self) -> int:
        """Bytes written to disk, without moved records."""
        return self.service.counters.disk_written_bytes - self.service.counters.disk_rewritten_bytes

    def nodes(self, namespace: bytes) -> list[Node]:
        return list(self.core.chunks.spaces[namespace].nodes.values())

    def on_disk(self, namespace: bytes) -> int:
        return sum(node.on_disk != 0 for node in self.nodes(namespace))

    def record(self, keys: bytes) -> DiskRecord:
        """The newest record of a chunk."""
        return max((record for record in self.devices.values() if record.key == keys), key=attrgetter("generation"))


def test_moves_on_all_devices_together_leave_dram_to_others() -> None:
    """Each device moves at least one record at a time."""
    rig = Scene(3, disk_write_through=True)
    rig.fill(rig.client(OLD, units=3), OLD)
    new = rig.client(NEW, units=1)
    rig.disk_works = False
    for seed in range(9):
        rig.store(new, chain(100_000 + seed, 5))
    reads = [unpack_disk(order.records) for _, order in rig.moving if isinstance(order, Promote)]
    records = [record for read in reads for record in read]
    devices = {record.device for record in records}
    assert len(devices) > 1
    most = rig.bounds.arena_bytes // MOVING_SHARE + len(devices) * 3 * EXTENT_BYTES
    assert sum(record.extent_bytes for record in records) <= most


@pytest.mark.parametrize(
    ("devices", "write_through", "tenants"),
    [*product((1, 2), (False, True), (False, True)), (8, True, False)],  # eight take longer than all others
)
def test_a_model_with_another_record_size_finds_room_on_full_devices(
    devices: int, write_through: bool, tenants: bool
) -> None:
    bounds = {"tenants": (quota("others", guaranteed=1),)} if tenants else {}
    rig = Scene(devices, disk_write_through=write_through, **bounds)
    rig.fill(rig.client(OLD, units=3), OLD)
    new = rig.client(NEW, units=1)
    full, written = rig.used_bytes, rig.written_bytes
    lowest = full
    prompts = [chain(100_000 + seed, 5) for seed in range(2 * SEGMENTS * devices)]
    for keys in prompts:
        rig.store(new, keys)
        lowest = min(lowest, rig.used_bytes)
    wrote = rig.written_bytes - written
    evicted = full + wrote - rig.used_bytes
    assert wrote > 3 * devices * SEGMENT_UNITS * EXTENT_BYTES
    assert lowest > 0.9 * full
    assert evicted < 1.5 * wrote
    if write_through:
        stored = {key(keys, chunk) for keys in prompts for chunk in range(5)}
        assert stored <= set(rig.keys_written()), "what was stored found room"
        assert rig.on_disk(NEW) > 0.95 * len(stored)
    command(rig, DrainServer())
    rig.wait_ms(1_000)
    status = rig.service.status(rig.now_ns)
    assert (status.drain, status.warnings) == ("drained", ["no store is taken: the server is drained"])
    assert not any(node.in_dram & ~node.on_disk for node in rig.nodes(NEW)), "and so did what was not yet written"


def test_a_chain_of_which_all_leaves_lie_on_another_device_makes_room_all_the_same() -> None:
    """The write of another prompt needs room on the first device. Only heads lie there, and none of them is a leaf."""
    rig = Scene(2, disk_write_through=True, disk_run_tokens=1)
    client, extents = rig.client(OLD, units=1), rig.core.disk.chunks.extents  # type: ignore[union-attr]
    places = SEGMENTS * extents_per_segment(SEGMENT_UNITS * EXTENT_BYTES, EXTENT_BYTES)
    for seed in range(places):
        for device, keys in enumerate((chain(seed, 1), chain(seed, 1) + chain(1000 + seed, 1))):
            extents.takes_writes[:] = [device == 0, device == 1]
            rig.store(client, keys)
    assert [disk.used_bytes for disk in rig.service.status(rig.now_ns).disks] == [places * EXTENT_BYTES] * 2
    extents.takes_writes[:] = [True, False]
    late = chain(places, 1)
    rig.store(client, late)
    assert rig.core.chunks.spaces[OLD].nodes[late].on_disk
    assert rig.used_bytes == (2 * places - 1) * EXTENT_BYTES, "the coldest chain went, and no more"


def test_records_move_out_of_a_segment_as_they_were_and_nothing_of_them_is_lost() -> None:
    rig = Scene(1, disk_write_through=True)
    old = rig.client(OLD, units=1)
    places = SEGMENTS * extents_per_segment(SEGMENT_UNITS * EXTENT_BYTES, EXTENT_BYTES)
    prompts = [chain(seed, 1) for seed in range(places)]
    for keys in prompts:
        rig.store(old, keys)
    cold = set(rig.rng.sample(prompts, places // SEGMENTS + 1))  # all over the device
    for keys in prompts:
        if keys not in cold:
            old.release(old.lookup(keys, OLD))
    before = {record.key: record for record in rig.devices.values()}
    rig.store(rig.client(NEW, units=3), late := chain(-1, 1))
    rig.wait_ms(500)
    assert rig.core.chunks.spaces[NEW].nodes[late].on_disk
    kept = [keys for keys in prompts if (node := rig.core.chunks.spaces[OLD].nodes.get(keys)) and node.on_disk]
    assert len(kept) >= places - places // SEGMENTS
    assert set(prompts) - set(kept) <= cold
    moved = [keys for keys in kept if rig.record(keys).offset != before[keys].offset]
    assert moved
    for keys in kept:
        now = rig.record(keys)
        assert now.generation > before[keys].generation if keys in moved else now == before[keys]


def test_eviction_ahead_of_writes_ends_with_the_first_empty_segment() -> None:
    """Prompts of about the same age lie side by side, so a segment empties as the oldest of them go."""
    rig = Scene(1, disk_write_through=True)
    old = rig.client(OLD, units=1)
    places = SEGMENTS * extents_per_segment(SEGMENT_UNITS * EXTENT_BYTES, EXTENT_BYTES)
    for seed in range(places):
        rig.store(old, chain(seed, 1))
    assert rig.on_disk(OLD) == places
    new = rig.client(NEW, units=3)
    hold_writes(rig)
    rig.store(new, late := chain(-1, 1))
    rig.wait_ms(500)
    resume_writes(rig)
    assert rig.core.chunks.spaces[NEW].nodes[late].on_disk
    assert rig.on_disk(OLD) >= places - places // SEGMENTS


def test_eviction_ahead_of_writes_spares_chunks_that_dram_would_write_again() -> None:
    """They are colder than the new chunk, so they would take the free places before it, again and again."""
    rig = Scene(1, disk_write_through=True, arena_bytes=40 * SLAB_BYTES)
    old = rig.client(OLD, units=1)
    places = SEGMENTS * extents_per_segment(SEGMENT_UNITS * EXTENT_BYTES, EXTENT_BYTES)
    for seed in range(places):
        rig.store(old, chain(seed, 1))
    assert all(node.in_dram for node in rig.nodes(OLD))
    new = rig.client(NEW, units=3)
    hold_writes(rig)
    rig.store(new, late := chain(-1, 1))
    rig.wait_ms(500)
    assert rig.on_disk(OLD) == places
    resume_writes(rig)
    rig.wait_ms(500)
    assert rig.core.chunks.spaces[NEW].nodes[late].on_disk
    written = rig.written_bytes
    rig.wait_ms(5_000)
    assert rig.written_bytes == written


def test_a_segment_that_is_in_use_keeps_its_records_and_another_one_is_emptied() -> None:
    """A lease without a waiting retrieve keeps a chunk in place only while it is read; otherwise the chunk moves."""
    rig = Scene(1, disk_write_through=True, lease_ttl_ms=600_000)
    old = rig.client(OLD, units=1)
    places = SEGMENTS * extents_per_segment(SEGMENT_UNITS * EXTENT_BYTES, EXTENT_BYTES)
    prompts = [chain(seed, 1) for seed in range(places)]
    for keys in prompts:
        rig.store(old, keys)
    leased = prompts[::7]
    leases = [old.lookup(keys, OLD) for keys in leased[-9:]]
    assert all(lease.lease for lease in leases)
    new = rig.client(NEW, units=3)
    late = [chain(-seed, 1) for seed in range(1, 30)]
    for keys in late:
        rig.store(new, keys)
    rig.wait_ms(5_000)
    assert rig.on_disk(NEW) == len(late)
    assert all(rig.core.chunks.spaces[OLD].nodes[keys].on_disk for keys in leased[-9:])


def test_a_record_too_large_to_move_within_the_daily_budget_is_dropped_for_a_write_to_its_segment() -> None:
    """The budget was lowered at a restart. The move of such a record would wait for ever, and all writes with it."""
    rig = Scene(1, disk_write_through=True)
    old = rig.client(OLD, units=3)
    places = SEGMENTS * extents_per_segment(SEGMENT_UNITS * EXTENT_BYTES, 3 * EXTENT_BYTES)
    prompts = [chain(seed, 1) for seed in range(places)]
    for keys in prompts:
        rig.store(old, keys)
    assert rig.on_disk(OLD) == places
    rig.bounds = replace(rig.bounds, disk_daily_write_bytes=24 * 2 * EXTENT_BYTES)
    restart(rig)
    rig.handle(ArenaGrew(rig.bounds.arena_bytes // SLAB_BYTES, ""))
    old = rig.client(OLD, units=3)
    cold = set(prompts[::4])  # all over the device
    for keys in prompts:
        if keys not in cold:
            old.release(old.lookup(keys, OLD))
    rig.wait_ms(50)
    rig.store(rig.client(NEW, units=1), late := chain(-1, 1))
    rig.wait_ms(10_000)
    assert rig.core.chunks.spaces[NEW].nodes[late].on_disk
    assert 0 < places - rig.on_disk(OLD) <= 2 * SEGMENT_UNITS // 3, "the records of a segment or two went, and no more"


def test_a_chunk_of_several_sizes_leaves_the_only_empty_segment_to_its_largest_records() -> None:
    """Its small records find room elsewhere. Otherwise the large one would wait until the segment is emptied again."""
    rig = DiskRig(disk_device_bytes=2 * SEGMENT_BYTES)
    small = Client(rig).register()
    for seed in range(3):
        small.ask(small.storing(chain(seed, 1), GroupBlocks(0, 0, ids(0, 1, 2))))
        rig.wait_ms(50)
    sizes = (1, 1, 3)
    pages = [units * EXTENT_BYTES // 3 for units in sizes]
    groups = [
        GroupSpec(2, 3, "full", 0, 1, 0, 1, 0, [RegionRun(0, 3 * sum(pages[:at]), 1, 0, page, page)])
        for at, page in enumerate(pages)
    ]
    mixed = Client(rig, engine="mixed").register(tuple(groups), namespace=NEW, buffer_bytes=3 * sum(pages))
    rig.disk_works = False
    mixed.ask(mixed.storing(chain(-1, 1), *(GroupBlocks(group, 0, ids(0, 1, 2)) for group in range(3))))
    rig.wait_ms(2)
    (order,) = (order for _, order in rig.moving)
    assert [record.extent_bytes for record in unpack_disk(order.records)] == [units * EXTENT_BYTES for units in sizes]
