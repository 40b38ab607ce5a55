"""A drained device: where its chunks go, which are lost for want of a place, and that it stays out of use."""

from dataclasses import replace

import pytest

from kvserver.service.base.events import ArenaGrew
from kvserver.wire.messages import Drain, Draining, GroupBlocks, Retrieved
from kvserver.wire.status import DiskStatus
from tests.rigs.brain_rig import SLAB_BYTES, Client, chain, ids, is_refusal, key
from tests.rigs.disk_rig import CHUNKS, PROMPTS_OF_ARENA, DiskRig, fill

PROMPTS = 40
"""Twice as many prompts as the arena holds."""


def filled(rig: DiskRig, prompts: int = PROMPTS) -> Client:
    """Stores that many prompts, all of them on disk; the first of them have left DRAM."""
    client = Client(rig).register()
    fill(client, first=0, prompts=prompts)
    return client


def restart(rig: DiskRig) -> None:
    """Starts another brain, after a restart of the machine: DRAM is empty."""
    rig.service = rig.new_service()
    rig.copies.clear()
    rig.moving.clear()
    rig.handle(ArenaGrew(rig.bounds.arena_bytes // SLAB_BYTES, ""))


def drain(client: Client, device: int = 0) -> None:
    assert isinstance(client.ask(Drain(client.rig.number(), device)), Draining)


def disk(rig: DiskRig, device: int = 0) -> DiskStatus:
    return rig.service.status(rig.now_ns).disks[device]


def found(client: Client, prompts: int = PROMPTS) -> int:
    """Number of chunks of all prompts that lookups find; each lease is given back."""
    total = 0
    for seed in range(prompts):
        lookup = client.lookup(chain(seed, CHUNKS))
        total += lookup.chunks
        if lookup.lease:
            client.release(lookup)
    return total


def test_a_drained_device_is_empty_and_every_chunk_is_still_found() -> None:
    rig = DiskRig(disk_devices=2)
    client = filled(rig)
    there = disk(rig).used_bytes
    assert there
    drain(client)
    rig.wait_ms(3_000)
    assert (disk(rig).used_bytes, disk(rig).drain) == (0, "drained")
    assert disk(rig, 1).used_bytes == PROMPTS * CHUNKS * 4096
    assert rig.service.counters.disk_drained == {"moved": there // 4096, "kept": 0, "given-up": 0}
    assert found(client) == PROMPTS * CHUNKS
    assert {device for device, _ in rig.devices} == {1}


def test_what_was_moved_is_found_by_another_brain_and_read_from_its_new_device() -> None:
    rig = DiskRig(disk_devices=2)
    drain(filled(rig))
    rig.wait_ms(3_000)
    restart(rig)
    rig.wait_ms(200)
    client = Client(rig).register()
    assert disk(rig).drain == "drained"
    for seed in range(PROMPTS):
        lookup = client.lookup(chain(seed, CHUNKS))
        blocks = GroupBlocks(0, 0, ids(*range(3 * CHUNKS)))
        assert isinstance(client.ask(client.retrieving(lookup.lease, blocks)), Retrieved)
    assert {record.device for records in rig.read[-CHUNKS * PROMPTS_OF_ARENA :] for record in records} == {1}


def test_a_brain_that_begins_in_the_middle_goes_on_with_it() -> None:
    rig = DiskRig(disk_devices=2)
    client = filled(rig)
    rig.disk_works = False
    drain(client)
    rig.wait_ms(50)
    assert disk(rig).drain == "draining"
    rig.disk_works = True
    restart(rig)
    rig.wait_ms(3_000)
    assert disk(rig).drain == "drained"
    assert found(Client(rig).register()) == PROMPTS * CHUNKS


def test_nothing_is_written_to_a_device_that_is_drained() -> None:
    rig = DiskRig(disk_devices=2)
    client = Client(rig).register()
    drain(client)
    fill(client, prompts=PROMPTS)
    assert rig.written
    assert {record.device for records in rig.written for record in records} == {1}


def test_without_another_device_chunks_stay_in_dram_as_far_as_it_has_room() -> None:
    rig = DiskRig()
    client = filled(rig)
    drain(client)
    rig.wait_ms(6_000)
    ends = rig.service.counters.disk_drained
    assert disk(rig).drain == "drained"
    assert ends["moved"] == 0
    assert ends["kept"] >= (PROMPTS_OF_ARENA - 1) * CHUNKS
    assert ends["kept"] + ends["given-up"] == PROMPTS * CHUNKS
    assert found(client) == ends["kept"]


def test_a_chunk_that_a_lease_keeps_waits_for_it_and_is_not_given_up() -> None:
    rig = DiskRig(disk_job_ms=60_000)
    client = filled(rig)
    rig.disk_works = False
    lease = client.lookup(chain(0, CHUNKS))
    assert lease.chunks_on_disk == CHUNKS
    drain(client)
    rig.wait_ms(1_000)
    assert disk(rig).drain == "draining"
    rig.disk_works = True
    rig.finish_disk()
    reply = client.ask(client.retrieving(lease.lease, GroupBlocks(0, 0, ids(*range(3 * CHUNKS)))))
    assert isinstance(reply, Retrieved)
    rig.wait_ms(6_000)
    assert disk(rig).drain == "drained"


def test_moves_stay_within_the_day_of_the_device_that_takes_them() -> None:
    rig = DiskRig(disk_devices=2, disk_daily_write_bytes=24 * 45 * 4096)
    client = filled(rig, prompts=20)
    drain(client)
    rig.wait_ms(2_000)
    assert (disk(rig).drain, disk(rig).drain_waits) == ("draining", "budget")
    rig.now_ns += 3600 * 1_000_000_000
    rig.wait_ms(3_000)
    assert disk(rig).drain == "drained"
    assert rig.service.counters.disk_drained["given-up"] == 0


def test_a_drain_does_not_wait_for_a_budget_that_never_allows_its_chunks() -> None:
    """The budget was lowered at a restart. They are given up, as chunks without a place are."""
    rig = DiskRig(disk_devices=2)
    filled(rig)
    rig.bounds = replace(rig.bounds, disk_daily_write_bytes=24 * 4095)
    restart(rig)
    rig.wait_ms(100)
    there = disk(rig).used_bytes // 4096
    drain(Client(rig).register())
    rig.wait_ms(60_000, step_ms=500)
    assert disk(rig).drain == "drained"
    ended = rig.service.counters.disk_drained
    assert ended["moved"] == 0
    assert ended["given-up"] + ended["kept"] >= there > 0


def test_a_device_that_fails_what_is_moved_to_it_costs_nothing_that_dram_can_keep() -> None:
    rig = DiskRig(disk_devices=2)
    client = filled(rig, prompts=PROMPTS_OF_ARENA // 2)
    rig.fault = "io"
    drain(client)
    rig.wait_ms(6_000)
    assert disk(rig).drain == "drained"
    assert rig.service.counters.disk_faults["io"] >= 8
    assert found(client, PROMPTS_OF_ARENA // 2) == PROMPTS_OF_ARENA // 2 * CHUNKS


def test_a_full_device_takes_what_is_warmer_than_its_coldest() -> None:
    rig = DiskRig(disk_devices=2, disk_device_bytes=15 * 20 << 10)
    client = filled(rig)
    drain(client)
    rig.wait_ms(6_000)
    assert disk(rig).drain == "drained"
    assert disk(rig, 1).used_bytes == 15 * 4 * 4096
    assert client.lookup(chain(PROMPTS - 1, CHUNKS)).chunks == CHUNKS


def test_drain_is_idempotent_and_says_which_devices_there_are() -> None:
    rig = DiskRig(disk_devices=2)
    client = filled(rig)
    for device in (-1, 2):
        assert is_refusal(client.ask(Drain(rig.number(), device)), "request", "disk-device")
    drain(client)
    drain(client)
    rig.wait_ms(3_000)
    drain(client)
    assert disk(rig).drain == "drained"


def test_a_device_that_is_not_open_is_neither_drained_nor_erased() -> None:
    """It looks empty, but its chunks were written by others, or by ourselves with another configuration."""
    rig = DiskRig(disk_devices=2)
    filled(rig)
    rig.unopened = {1}
    restart(rig)
    rig.wait_ms(100)
    client = Client(rig).register()
    refusal = client.ask(Drain(rig.number(), 1))
    assert is_refusal(refusal, "device", "disk-not-open")
    rig.wait_ms(3_000)
    assert (disk(rig, 1).drain, rig.drains) == ("", {})
    drain(client, 0)


@pytest.mark.parametrize("drains", [{}, {1: "draining"}])
def test_a_device_that_only_a_later_mover_could_open_is_not_erased_before_it_was_read(drains: dict) -> None:  # type: ignore[type-arg]
    rig = DiskRig(disk_devices=2)
    filled(rig)
    rig.drains, rig.unopened = dict(drains), {1}
    restart(rig)
    rig.wait_ms(100)
    rig.unopened = set()
    rig.another_mover()
    refusal = Client(rig).register().ask(Drain(rig.number(), 1))
    assert is_refusal(refusal, "device", "disk-not-open", "start the server anew")
    rig.wait_ms(9_000)
    assert rig.drains == drains
    restart(rig)
    rig.wait_ms(9_000)
    assert disk(rig, 1).drain == ("drained" if drains else "")


def test_a_device_that_was_listed_by_a_mover_that_died_is_not_erased_before_another_has_read_it() -> None:
    """The next mover could not open it when it listed the records of the others."""
    rig = DiskRig(disk_devices=2)
    filled(rig)
    rig.tells = False
    restart(rig)
    rig.wait_ms(100)
    rig.unopened, rig.tells = {1}, True
    rig.another_mover()
    rig.wait_ms(100)
    rig.unopened = set()
    rig.tell_devices()
    refusal = Client(rig).register().ask(Drain(rig.number(), 1))
    assert is_refusal(refusal, "device", "disk-not-open", "start the server anew")


def test_a_drain_whose_device_cannot_be_opened_any_more_waits_for_it() -> None:
    rig = DiskRig(disk_devices=2)
    filled(rig)
    rig.drains, rig.unopened = {1: "draining"}, {1}
    restart(rig)
    rig.wait_ms(90_000, step_ms=500)
    assert (disk(rig, 1).drain, disk(rig, 1).drain_waits, rig.kills) == ("draining", "store", 0)
    assert is_refusal(Client(rig).register().ask(Drain(rig.number(), 1)), "device", "disk-not-open")
    rig.unopened = set()
    restart(rig)
    rig.wait_ms(9_000)
    assert disk(rig, 1).drain == "drained"


def test_without_a_disk_tier_there_is_nothing_to_drain() -> None:
    rig = DiskRig(disk_devices=0)
    assert is_refusal(Client(rig).ask(Drain(rig.number(), 0)), "request", "disk-device")


@pytest.mark.parametrize("jobs_max", [1, 32])
def test_a_device_that_was_drained_takes_nothing_after_its_mover_has_died(jobs_max: int) -> None:
    rig = DiskRig(disk_devices=2, disk_job_ms=500, disk_jobs_max=jobs_max)
    client = filled(rig, prompts=3)
    drain(client)
    rig.wait_ms(3_000)
    rig.disk_works = False
    fill(client, first=500, prompts=1)
    rig.wait_ms(1_000)
    assert rig.kills == 1
    rig.moving.clear()
    rig.disk_works = True
    before = len(rig.written)
    rig.wait_ms(3_000)
    fill(client, first=600, prompts=PROMPTS)
    assert {record.device for records in rig.written[before:] for record in records} == {1}


def test_the_head_of_a_warm_chain_is_worth_as_much_as_its_tail() -> None:
    """A lookup touches the tail alone; the chunks above it must not give way to prompts stored in between."""
    rig = DiskRig(disk_devices=2, disk_device_bytes=15 * 20 << 10)
    client, warm = Client(rig).register(), [chain(9_000 + seed, CHUNKS) for seed in range(4)]
    for keys in warm:
        client.store(keys)
    for first in range(0, 40, 4):
        fill(client, first=first, prompts=4)
        for keys in warm:
            client.release(client.lookup(keys))
    heads = [record.device for record in rig.devices.values() if record.key in {key(keys, 0) for keys in warm}]
    assert 0 in heads
    drain(client)
    rig.wait_ms(6_000)
    assert disk(rig).drain == "drained"
    moved = {record.key for record in rig.devices.values()}
    assert moved >= {key(keys, chunk) for keys in warm for chunk in range(CHUNKS)}
