"""The brain's choice of writes to disk: which chunks, when, and in which order."""

import pytest

from kvserver.wire.messages import KEY_BYTES, GroupBlocks
from tests.rigs.brain_rig import FULL, STATE, Client, chain, ids, key
from tests.rigs.disk_rig import CHUNKS, PROMPTS_OF_ARENA, SEGMENT_BYTES, DiskRig, fill


def test_a_chain_is_written_head_first() -> None:
    rig = DiskRig()
    client, keys = Client(rig).register(), chain(1, CHUNKS)
    client.store(keys)
    assert rig.keys_written() == [key(keys, chunk) for chunk in range(CHUNKS)]


def test_a_child_is_not_written_when_its_parent_could_not_be() -> None:
    rig = DiskRig(disk_jobs_max=1)
    rig.disk_works, rig.fault = False, "io"
    client, keys = Client(rig).register(), chain(1, CHUNKS)
    client.store(keys)
    rig.disk_works = True
    rig.finish_disk()
    assert set(rig.keys_written()) == {key(keys, 0)}


def test_nothing_is_written_while_enough_of_dram_is_free() -> None:
    rig = DiskRig(disk_write_through=False, disk_clean_percent=25)
    client = Client(rig).register()
    fill(client, prompts=12)
    assert rig.written == []
    fill(client, first=2000, prompts=10)
    assert rig.written != []


def test_clean_chunks_that_are_warm_do_not_stand_for_those_that_go_next() -> None:
    rig = DiskRig(disk_write_through=False, disk_clean_percent=50)
    client = Client(rig).register()
    fill(client)
    prompts = {seed: chain(seed, CHUNKS) for seed in range(1000, 1000 + PROMPTS_OF_ARENA + 3)}
    clean = {seed for seed, keys in prompts.items() if keys[-KEY_BYTES:] in rig.keys_written()}
    dirty = prompts.keys() - clean
    assert min(len(clean), len(dirty)) > 6
    for seed in sorted(clean):  # from now on the clean ones are the warmest of DRAM
        rig.now_ns += 1_000_000
        client.release(client.lookup(prompts[seed]))
    fill(client, first=2000, prompts=6)
    assert [seed for seed in sorted(dirty) if client.lookup(prompts[seed]).chunks < CHUNKS] == []


def test_two_chains_do_not_push_each_other_off_a_device_that_is_too_small_for_both() -> None:
    """Their heads are older than their tails, which were asked for since."""
    rig = DiskRig(disk_device_bytes=SEGMENT_BYTES)
    client, prompts = Client(rig).register(), [chain(seed, CHUNKS) for seed in (1, 2)]
    for keys in prompts:
        client.store(keys)
        rig.now_ns += 1_000_000
    for prompt, chunks in ((1, 1), (0, 3), (1, 3), (0, 3), (1, 2)):
        rig.now_ns += 1_000_000
        client.release(client.lookup(prompts[prompt][: chunks * KEY_BYTES]))
    rig.wait_ms(2_000)
    settled = len(rig.written)
    rig.wait_ms(2_000)
    assert len(rig.written) == settled


def test_a_read_only_device_does_not_hold_up_writes_to_the_others() -> None:
    """A chunk lies on one device, so a part added to it has no other place."""
    rig = DiskRig(disk_devices=2)
    client, keys = Client(rig).register([FULL, STATE]), chain(1, 1)
    blocks = GroupBlocks(0, 0, ids(0, 1, 2))
    client.ask(client.storing(keys, blocks))
    tier = rig.core.disk
    assert tier is not None
    (written,) = rig.written
    tier.devices[written[0].device].set_problem("8 reads or writes in a row failed")
    client.ask(client.storing(keys, blocks, GroupBlocks(1, 0, ids(3))))
    other = chain(2, 1)
    client.ask(client.storing(other, blocks))
    rig.wait_ms(500)
    assert rig.keys_written() == [keys, other]


@pytest.mark.parametrize("broken", [0, 1])
def test_only_the_device_that_fails_again_and_again_takes_no_more_writes(broken: int) -> None:
    rig = DiskRig(disk_devices=2, disk_jobs_max=1)
    rig.fault, rig.faulty = "io", {broken}
    fill(Client(rig).register())
    shown = rig.service.status(rig.now_ns).disks
    assert [disk.takes_writes for disk in shown] == [device != broken for device in (0, 1)]
    assert "in a row failed" in shown[broken].problem
    written = [records[0].device for records in rig.written]
    assert written.count(1 - broken) > written.count(broken) > 0


def test_a_chunk_for_which_too_little_goes_does_not_push_it_off_again_and_again() -> None:
    """A device of four extents: older chunks would free one extent, the chunk needs two, and the others are younger."""
    rig = DiskRig(disk_device_bytes=SEGMENT_BYTES, disk_jobs_max=1)
    small, large = Client(rig), Client(rig, engine="another")
    small.register()
    large.register(groups=(FULL, FULL), namespace=bytes(32))
    *young, older, wide = (chain(seed, 1) for seed in range(6))
    for keys in young:
        rig.now_ns += 1_000_000
        small.store(keys)
    rig.wait_ms(100)
    assert len(rig.written) == 4
    rig.disk_works = False
    rig.now_ns += 1_000_000
    small.store(older)
    rig.now_ns += 1_000_000
    large.ask(large.storing(wide, GroupBlocks(0, 0, ids(0, 1, 2)), GroupBlocks(1, 0, ids(0, 1, 2))))
    for keys in young:
        rig.now_ns += 1_000_000
        small.release(small.lookup(keys))
    rig.disk_works = True
    rig.finish_disk()
    rig.wait_ms(2_000)
    settled = len(rig.written)
    rig.wait_ms(2_000)
    assert len(rig.written) == settled
