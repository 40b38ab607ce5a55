"""Where chains lie: in runs on one device, on several devices when they are long, evenly on all."""

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from kvserver.service.base.events import ArenaGrew
from kvserver.service.disk import drain
from kvserver.tiers.records import unpack_disk
from kvserver.wire.messages import KEY_BYTES, GroupBlocks, GroupSpec, RegionRun
from kvserver.wire.orders import Demote, Promote
from tests.rigs.brain_rig import CHUNK_TOKENS, SLAB_BYTES, Client, chain, ids, key
from tests.rigs.disk_rig import EXTENT_BYTES, DiskRig, restart

RUN = 4
"""Chunks of a run."""
SEGMENTS = 37
"""Segments of a device, unless a test says otherwise."""
SEGMENT_BYTES = 6 * EXTENT_BYTES
CHUNKS_OF_DEVICE = SEGMENTS * 5


class Disks(DiskRig):
    events_a_check = 97

    def __init__(self, devices: int, segments: int = SEGMENTS, **bounds: Any) -> None:
        super().__init__(
            disk_devices=devices,
            disk_segment_bytes=SEGMENT_BYTES,
            disk_device_bytes=segments * SEGMENT_BYTES,
            **{"arena_bytes": 40 * SLAB_BYTES, "disk_run_tokens": RUN * CHUNK_TOKENS + 5, **bounds},
        )
        blocks, page_bytes = 99, EXTENT_BYTES // 3
        self.group = GroupSpec(2, blocks, "full", 0, 1, 0, 1, 0, [RegionRun(0, 0, 1, 0, page_bytes, page_bytes)])
        self.client = Client(self).register((self.group,), buffer_bytes=blocks * page_bytes)

    def store(self, keys: bytes) -> None:
        chunks = len(keys) // KEY_BYTES
        self.client.ask(self.client.storing(keys, GroupBlocks(0, 0, ids(*range(3 * chunks)))))
        self.wait_ms(20)

    def start_anew(self) -> Client:
        """Another brain, with nothing in DRAM, and a client of it."""
        restart(self)
        self.handle(ArenaGrew(self.bounds.arena_bytes // SLAB_BYTES, ""))
        self.wait_ms(100)
        return Client(self).register((self.group,), buffer_bytes=99 * (EXTENT_BYTES // 3))

    def places(self, keys: bytes) -> list[int]:
        """The device of each chunk, as the devices' newest records say; -1: no device has it."""
        newest = {record.key: record.device for record in sorted(self.devices.values(), key=lambda r: r.generation)}
        return [newest.get(key(keys, chunk), -1) for chunk in range(len(keys) // KEY_BYTES)]

    def chunks_on(self) -> list[int]:
        """Chunks that each device holds."""
        return [disk.used_bytes // EXTENT_BYTES for disk in self.service.status(self.now_ns).disks]

    def under_way(self, kind: type[Demote | Promote]) -> Counter[int]:
        """Orders under way of each device."""
        orders = (order for _, order in self.moving if isinstance(order, kind))
        return Counter(next(iter(unpack_disk(order.records))).device for order in orders)


def runs_of(places: list[int]) -> list[list[int]]:
    return [places[at : at + RUN] for at in range(0, len(places), RUN)]


@pytest.mark.parametrize("devices", [2, 3, 5])
def test_a_run_lies_on_one_device_and_the_next_one_on_another(devices: int) -> None:
    rig = Disks(devices, segments=501)  # so many that one run makes no device fuller than others
    rig.store(keys := chain(1, 5 * RUN + 3))
    runs = runs_of(rig.places(keys))
    assert all(len(set(run)) == 1 for run in runs)
    assert all(before[0] != after[0] for before, after in pairwise(runs))
    counts = Counter(run[0] for run in runs)
    assert max(counts[device] for device in range(devices)) - min(counts[device] for device in range(devices)) <= 1


def test_a_chain_that_is_stored_little_by_little_lies_as_one_that_was_stored_at_once() -> None:
    rig = Disks(3)
    keys = chain(1, 3 * RUN + 1)
    for chunks in range(1, 3 * RUN + 2):
        rig.store(keys[: chunks * KEY_BYTES])
    assert all(len(set(run)) == 1 for run in runs_of(rig.places(keys)))


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_devices_are_evenly_full_while_they_fill_and_all_of_them_become_full(devices: int) -> None:
    rig = Disks(devices)
    prompts = devices * CHUNKS_OF_DEVICE // RUN
    for seed in range(prompts):
        rig.store(chain(seed, RUN))
        if seed % 29 == 0:
            held = rig.chunks_on()
            assert max(held) - min(held) <= 0.05 * CHUNKS_OF_DEVICE + RUN
    assert min(rig.chunks_on()) >= 0.95 * CHUNKS_OF_DEVICE


def test_full_devices_get_the_same_share_of_what_is_stored_later() -> None:
    """Otherwise one of them would keep the oldest chunks, and another lose the newest."""
    rig = Disks(2)
    for seed in range(2 * CHUNKS_OF_DEVICE // RUN + 50):
        rig.store(chain(seed, RUN))
    before = [disk.written_bytes for disk in rig.service.status(rig.now_ns).disks]
    for seed in range(10_000, 10_300):
        rig.store(chain(seed, RUN))
    after = [disk.written_bytes for disk in rig.service.status(rig.now_ns).disks]
    first, second = (late - early for early, late in zip(before, after, strict=True))
    assert 0.7 < first / second < 1.4


def test_prompts_with_one_beginning_lie_on_all_devices() -> None:
    rig = Disks(3)
    beginning = chain(1, RUN - 1)
    prompts = [beginning + chain(seed, 2) for seed in range(2, 62)]
    for keys in prompts:
        rig.store(keys)
    ends = Counter(rig.places(keys)[RUN - 1] for keys in prompts)
    assert min(ends[device] for device in range(3)) > 10


@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize("how", ["taken away", "fails as it runs"])
def test_without_one_device_the_prompts_of_all_others_are_found_whole(how: str, lost: int) -> None:
    rig = Disks(3)
    prompts = [chain(seed, RUN) for seed in range(60)]
    for keys in prompts:
        rig.store(keys)
    if how == "taken away":
        rig.unopened = {lost}
    client = rig.start_anew()
    if how == "fails as it runs":
        rig.fault, rig.faulty = "io", {lost}
        for keys in prompts:
            client.release(client.lookup(keys))
    found = [client.lookup(keys).chunks for keys in prompts]
    assert found.count(RUN) == sum(lost not in rig.places(keys) for keys in prompts) > 0.9 * 60 * 2 / 3


def test_a_run_goes_on_at_one_other_device_when_its_own_takes_no_more_writes() -> None:
    rig = Disks(3)
    keys = chain(1, RUN)
    rig.store(keys[: 2 * KEY_BYTES])
    (first,) = set(rig.places(keys[: 2 * KEY_BYTES]))
    assert rig.core.disk is not None
    rig.core.disk.devices[first].set_problem("8 reads or writes in a row failed")
    rig.store(keys)
    places = rig.places(keys)
    assert places[:2] == [first] * 2
    assert len({*places[2:]}) == 1
    assert first not in places[2:]


def test_runs_begin_where_the_days_bytes_are_not_used_up() -> None:
    rig = Disks(2, disk_daily_write_bytes=24 * 50 * EXTENT_BYTES)
    rig.store(keys := chain(1, 2 * RUN))
    spent = rig.places(keys)[0]
    assert rig.core.disk is not None
    budget = rig.core.disk.devices[spent].placement.budget
    budget.charge(budget.left_bytes(rig.now_ns), rig.now_ns)
    for seed in range(2, 8):
        rig.store(other := chain(seed, RUN))
        assert rig.places(other) == [1 - spent] * RUN


def test_a_drained_device_gives_whole_runs_to_the_others() -> None:
    rig = Disks(3)
    prompts = [chain(seed, RUN) for seed in range(30)]
    for keys in prompts:
        rig.store(keys)
    rig.start_anew()
    drain.begin(rig.core, 1)
    rig.wait_ms(3_000)
    places = [rig.places(keys) for keys in prompts]
    assert {device for each in places for device in each} == {0, 2}
    assert all(len(set(each)) == 1 for each in places)


def test_two_long_prompts_are_written_to_their_devices_at_the_same_time() -> None:
    """Otherwise one device would write and the others wait."""
    rig = Disks(2, disk_jobs_max=6, disk_run_tokens=1 << 20)
    rig.disk_works = False
    seeds = iter(range(100))
    while len(rig.under_way(Demote)) < 2 and (seed := next(seeds)) < 20:
        rig.store(chain(seed, 12))
    assert set(rig.under_way(Demote).values()) == {3}
    rig.disk_works = True
    rig.finish_disk()
    rig.wait_ms(500)
    stored = [chain(other, 12) for other in range(seed + 1)]
    assert all(-1 not in rig.places(keys) for keys in stored), "what was put aside is written later"


def test_runs_begin_at_a_device_that_is_not_busy_though_another_has_more_room() -> None:
    """A new device would write alone otherwise, until it is as full as the others."""
    rig = Disks(3, disk_jobs_max=6, disk_run_tokens=1 << 20)
    assert rig.core.disk is not None
    rig.core.disk.chunks.extents.let_write(2, may=False)
    for seed in range(100, 120):
        rig.store(chain(seed, 12))
    rig.core.disk.chunks.extents.let_write(2, may=True)
    rig.disk_works = False
    for seed in range(6):
        rig.store(chain(seed, 12))
    assert rig.under_way(Demote) == {0: 2, 1: 2, 2: 2}


def test_a_long_prompt_is_read_from_its_devices_at_the_same_time() -> None:
    rig = Disks(2, disk_jobs_max=6)
    rig.store(keys := chain(1, 5 * RUN))
    client = rig.start_anew()
    rig.disk_works = False
    assert client.lookup(keys).chunks == 5 * RUN
    assert [*rig.under_way(Promote).values()] == [3, 3]
    rig.disk_works = True
    rig.finish_disk()
    rig.wait_ms(100)
    assert client.lookup(keys).chunks_on_disk == 0
