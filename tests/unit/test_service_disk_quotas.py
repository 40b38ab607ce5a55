"""Quotas on disk: the rules are those of the arena, held across devices, sizes, drains and restarts."""

import dataclasses
from typing import Any

import msgspec
import pytest
from brain_rig import FULL, STATE, Client, chain, ids, is_refusal, key
from disk_rig import CHUNKS, EXTENT_BYTES, SEGMENT_BYTES, DiskRig, fill, restart

from kvserver.index.eviction import REFUSED
from kvserver.metrics import render
from kvserver.overview import overview
from kvserver.service import disk
from kvserver.service.accounts import Account, Quota
from kvserver.service.disk_chunks import DiskChunks
from kvserver.service.state import DiskTier
from kvserver.tiers.slots import SlotPool
from kvserver.wire.admin import Pin
from kvserver.wire.messages import KEY_BYTES, Drain, GroupBlocks, RegionRun
from kvserver.wire.orders import TellRecords
from kvserver.wire.tenants import tag_of
from tests.unit.admin_rig import command

AGENTS, CHAT, GUESTS = (bytes([number]) * 32 for number in (3, 5, 7))
SEGMENTS, EXTENTS_A_SEGMENT = 11, 4
EXTENTS = SEGMENTS * EXTENTS_A_SEGMENT
WIDE = msgspec.structs.replace(FULL, regions=[RegionRun(0, 3, 1, 0, 1601, 1601)], blocks=3)
"""Two units a chunk."""
FOREVER_NS = 1 << 62


def quota(tenant: str, guaranteed: int = 0, most: int = 0) -> Quota:
    """On disk, in chunks of FULL."""
    return Quota(tenant, 0, 0, guaranteed * EXTENT_BYTES, most * EXTENT_BYTES)


def rig_with(*quotas: Quota, **bounds: Any) -> DiskRig:
    return DiskRig(**{"tenants": quotas, "disk_device_bytes": SEGMENTS * SEGMENT_BYTES, **bounds})


def client_of(rig: DiskRig, tenant: str, namespace: bytes, groups: tuple = (FULL,)) -> Client:
    client = Client(rig, engine=f"engine of {tenant or 'nobody'} {namespace[0]}")
    return client.register(groups, namespace=namespace, tenant=tenant)


def tier_of(rig: DiskRig) -> DiskTier:
    tier = rig.service._core.disk
    assert tier is not None
    return tier


def account(rig: DiskRig, name: str) -> Account:
    accounts = tier_of(rig).chunks.accounts
    assert accounts is not None
    return next(account for account in accounts.all() if account.name == name)


def chunks_of(rig: DiskRig, name: str) -> int:
    """On disk."""
    assert account(rig, name).reserved_bytes == 0
    return account(rig, name).held_bytes // EXTENT_BYTES


def stored(client: Client, prompts: int, seed: int, chunks: int = CHUNKS) -> list[bytes]:
    """Prompts that are written as soon as they may."""
    made = []
    for number in range(prompts):
        client.rig.now_ns += 1_000_000
        made.append(chain(seed * 1000 + number, chunks))
        client.store(made[-1])
    return made


def kept(rig: DiskRig, namespace: bytes, prompts: list[bytes]) -> list[int]:
    """Chunks of each prompt that are on disk."""
    nodes = rig.service._core.chunks.spaces[namespace].nodes
    return [
        sum(1 for at in range(len(keys) // KEY_BYTES) if (node := nodes.get(key(keys, at))) and node.on_disk)
        for keys in prompts
    ]


def hold_writes(rig: DiskRig) -> None:
    tier_of(rig).wait_until_ns = FOREVER_NS


def resume_writes(rig: DiskRig) -> None:
    tier_of(rig).wait_until_ns = 0
    rig.wait_ms(50)


def empty_dram(client: Client) -> None:
    """Whatever is in DRAM leaves it; nothing more is written."""
    hold_writes(client.rig)  # type: ignore[arg-type]
    fill(client, first=90_000, prompts=30)


# ---------------------------------------------------------------- maximum


def test_a_tenant_at_its_maximum_on_disk_makes_room_among_its_own_coldest_chunks() -> None:
    rig = rig_with(quota("chat", most=7))
    agents, chat = client_of(rig, "agents", AGENTS), client_of(rig, "chat", CHAT)
    oldest = stored(agents, 3, seed=1)
    prompts = stored(chat, 5, seed=2)
    assert chunks_of(rig, "chat") == 7
    assert kept(rig, AGENTS, oldest) == [3, 3, 3]
    assert kept(rig, CHAT, prompts) == [0, 0, 1, 3, 3]
    assert account(rig, "chat").evicted_chunks == 8
    assert account(rig, "default").evicted_chunks == 0


def test_a_maximum_counts_all_devices_together() -> None:
    rig = rig_with(quota("chat", most=7), disk_devices=3)
    chat = client_of(rig, "chat", CHAT)
    prompts = stored(chat, 9, seed=2)
    used = [device.used_bytes // EXTENT_BYTES for device in rig.service.status(rig.now_ns).disks]
    assert sum(used) == chunks_of(rig, "chat") == 7
    assert min(used) > 0, used
    assert kept(rig, CHAT, prompts)[-2:] == [3, 3]


def test_what_is_being_written_counts_against_a_maximum() -> None:
    rig = rig_with(quota("chat", most=4))
    chat = client_of(rig, "chat", CHAT)
    rig.disk_works = False
    stored(chat, 2, seed=2)
    assert account(rig, "chat").reserved_bytes == 4 * EXTENT_BYTES
    assert account(rig, "chat").refused_slots > 0
    rig.finish_disk()
    assert chunks_of(rig, "chat") == 4


def test_what_could_not_be_written_is_refunded() -> None:
    rig = rig_with(quota("chat", most=4))
    chat = client_of(rig, "chat", CHAT)
    rig.fault = "io"
    stored(chat, 1, seed=2)
    assert account(rig, "chat").taken_bytes == 0


def test_at_its_maximum_a_tenant_keeps_on_disk_what_it_used_later() -> None:
    """Else chunks of a DRAM that holds more than the maximum would push each other out for ever."""
    rig = rig_with(quota("chat", most=3))
    chat = client_of(rig, "chat", CHAT)
    [warm] = stored(chat, 1, seed=2)
    hold_writes(rig)
    [cold] = stored(chat, 1, seed=3)
    rig.now_ns += 1_000_000
    chat.release(chat.lookup(warm, CHAT))
    written = len(rig.written)
    resume_writes(rig)
    assert (kept(rig, CHAT, [warm, cold]), len(rig.written)) == ([3, 0], written)
    assert account(rig, "chat").refused_slots == 1


def test_a_chunk_that_is_more_than_its_tenants_maximum_pushes_nothing_out_in_vain() -> None:
    rig = rig_with(Quota("chat", 0, 0, 0, EXTENT_BYTES + 4096 - 1))
    narrow, wide = client_of(rig, "chat", CHAT), client_of(rig, "chat", GUESTS, (WIDE,))
    [keys] = stored(narrow, 1, seed=2, chunks=1)
    wide.ask(wide.storing(chain(7, 1), GroupBlocks(0, 0, ids(0, 1, 2))))
    rig.wait_ms(200)
    assert kept(rig, CHAT, [keys]) == [1]
    assert [records[0].namespace for records in rig.written] == [CHAT]
    assert account(rig, "chat").refused_slots == 0
    fill(client_of(rig, "agents", AGENTS))
    assert rig.service.counters.disk_refused["shape"] == 1


def test_a_maximum_that_was_lowered_while_the_brain_was_away_is_reached_step_by_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(disk, "OVER_MAXIMUM_AT_ONCE", 4)
    rig = rig_with(quota("chat", guaranteed=3, most=20))
    prompts = stored(client_of(rig, "chat", CHAT), 7, seed=2)
    others = stored(client_of(rig, "agents", AGENTS), 2, seed=3)
    assert chunks_of(rig, "chat") == 20
    rig.bounds = dataclasses.replace(rig.bounds, tenants=(quota("chat", most=7),))
    rig.service = rig.new_service()
    rig.wait_ms(50)
    left = [chunks_of(rig, "chat")]
    for _ in range(4):
        rig.wait_ms(50)
        left.append(chunks_of(rig, "chat"))
    assert left == [20, 16, 12, 8, 7], "and no further"
    assert kept(rig, CHAT, prompts) == [0, 0, 0, 0, 1, 3, 3], "what was written first goes first"
    assert kept(rig, AGENTS, others) == [3, 3]


# ---------------------------------------------------------------- guarantee


def test_nobody_takes_from_disk_what_another_was_guaranteed() -> None:
    rig = rig_with(quota("agents", guaranteed=20))
    agents, chat = client_of(rig, "agents", AGENTS), client_of(rig, "chat", CHAT)
    prompts = stored(agents, 6, seed=1)
    stored(chat, 30, seed=2)
    assert kept(rig, AGENTS, prompts) == [3] * 6
    assert chunks_of(rig, "default") == EXTENTS - 18


def test_what_is_being_written_makes_room_for_nobody_below_a_guarantee() -> None:
    rig = rig_with(quota("agents", guaranteed=6))
    agents, chat = client_of(rig, "agents", AGENTS), client_of(rig, "chat", CHAT)
    prompts = stored(agents, 2, seed=1)
    stored(chat, 11, seed=2)
    stored(chat, 1, seed=5, chunks=2)
    rig.disk_works = False
    stored(agents, 1, seed=3)
    assert account(rig, "agents").reserved_bytes == 3 * EXTENT_BYTES
    stored(chat, 2, seed=4)
    assert kept(rig, AGENTS, prompts) == [3, 3]


def test_what_exceeds_a_guarantee_on_disk_goes_by_its_age_and_no_further() -> None:
    rig = rig_with(quota("agents", guaranteed=10))
    agents, chat = client_of(rig, "agents", AGENTS), client_of(rig, "chat", CHAT)
    stored(agents, 9, seed=1)
    stored(chat, 30, seed=2)
    assert (chunks_of(rig, "agents"), chunks_of(rig, "default")) == (10, EXTENTS - 10)
    assert account(rig, "agents").evicted_chunks == 17


def test_who_has_less_on_disk_than_its_guarantee_takes_from_those_who_have_more() -> None:
    """Also when all that the others have was used later."""
    rig = rig_with(quota("agents", guaranteed=9), quota("chat", guaranteed=EXTENTS - 12))
    agents, chat, guests = (client_of(rig, name, of) for name, of in (("agents", AGENTS), ("chat", CHAT), ("", GUESTS)))
    hold_writes(rig)
    old = stored(agents, 4, seed=1)
    resumed = stored(chat, 14, seed=2)
    tier = tier_of(rig)
    for keys in old:  # to be written after all the others
        for at in range(CHUNKS):
            rig.service._core.chunks.spaces[AGENTS].nodes[key(keys, at)].queued |= REFUSED
    resume_writes(rig)
    stored(guests, 1, seed=3, chunks=2)
    assert (chunks_of(rig, "chat"), chunks_of(rig, "default")) == (42, 2)
    assert tier.chunks.extents.bytes_used == EXTENTS * EXTENT_BYTES
    hold_writes(rig)
    for keys in old:
        node = rig.service._core.chunks.spaces[AGENTS].nodes[key(keys, CHUNKS - 1)]
        node.queued &= ~REFUSED
        rig.service._core.chunks.offer(rig.service._core.chunks.spaces[AGENTS], node)
    resume_writes(rig)
    assert chunks_of(rig, "agents") == 9, "and beyond its guarantee it has nothing that is warmer"
    assert chunks_of(rig, "chat") >= EXTENTS - 12
    assert sum(kept(rig, CHAT, resumed)) == chunks_of(rig, "chat")


def test_below_its_guarantee_a_tenant_gives_its_own_where_others_have_nothing_to_give() -> None:
    rig = rig_with(quota("agents", guaranteed=EXTENTS))
    agents, chat = client_of(rig, "agents", AGENTS), client_of(rig, "chat", CHAT)
    first = stored(agents, 1, seed=1)
    others = stored(chat, 13, seed=2) + stored(chat, 1, seed=3, chunks=2)
    assert all(chat.lookup(keys, CHAT).lease for keys in others)
    later = stored(agents, 1, seed=4, chunks=2)
    assert (chunks_of(rig, "agents"), chunks_of(rig, "default")) == (3, EXTENTS - 3)
    assert (kept(rig, AGENTS, first), kept(rig, AGENTS, later)) == ([1], [2])


def test_a_guarantee_on_disk_holds_when_another_size_wants_segments() -> None:
    rig = rig_with(quota("agents", guaranteed=10))
    agents, chat = client_of(rig, "agents", AGENTS), client_of(rig, "chat", CHAT, (WIDE,))
    stored(agents, 15, seed=1)
    assert chunks_of(rig, "agents") == EXTENTS
    for seed in range(EXTENTS):
        rig.now_ns += 1_000_000
        chat.ask(chat.storing(chain(7000 + seed, 1), GroupBlocks(0, 0, ids(0, 1, 2))))
        assert chunks_of(rig, "agents") >= 10
    assert chunks_of(rig, "agents") < 10 + 2 * EXTENTS_A_SEGMENT
    assert account(rig, "default").held_bytes > EXTENTS * EXTENT_BYTES // 2


def test_a_segment_is_held_against_a_guarantee_as_a_whole() -> None:
    """Each of its chunks is less than what agents have above theirs; all of them are more."""
    rig = rig_with(quota("agents", guaranteed=5))
    stored(client_of(rig, "agents", AGENTS), 2, seed=1)
    room = tier_of(rig).chunks.room
    pool = room.extents.pools[0]
    fullest = max((pool.slab_owners(segment) for segment in range(pool.slabs_total)), key=len)
    assert len(fullest) == EXTENTS_A_SEGMENT
    wanted = room.wanted(0, 2 * EXTENT_BYTES, rig.now_ns + 1, tag_of("chat"))
    assert room.closure(fullest, wanted, chunks_max=99) is None
    account(rig, "agents").guaranteed_bytes = 0
    assert len(room.closure(fullest, wanted, chunks_max=99) or ()) == 6, "with what hangs on them"


def test_a_full_index_takes_nothing_from_disk_that_was_guaranteed() -> None:
    """Chunks of agents are on disk alone, which is what goes first for room in the index, for others' stores."""
    rig = rig_with(quota("agents", guaranteed=6), disk_device_bytes=200 * SEGMENT_BYTES)
    agents, chat = client_of(rig, "agents", AGENTS), client_of(rig, "chat", CHAT)
    prompts = stored(agents, 2, seed=1)
    empty_dram(chat)
    rig.service._core.chunks.chunks_max = rig.service._core.chunks.chunks
    fill(chat, first=50_000, prompts=30)
    assert kept(rig, AGENTS, prompts) == [3, 3]
    fill(agents, first=60_000, prompts=1)
    assert sum(kept(rig, AGENTS, prompts)) < 6, "for its own stores what it used longest ago goes"


def test_room_in_the_index_empties_no_dram_in_vain() -> None:
    """What is on disk as well would leave DRAM and stay in the index, since it is guaranteed there."""
    rig = rig_with(quota("agents", guaranteed=6))
    agents, chat = client_of(rig, "agents", AGENTS), client_of(rig, "chat", CHAT)
    stored(agents, 2, seed=1)
    rig.service._core.chunks.chunks_max = rig.service._core.chunks.chunks
    assert chat.ask(chat.storing(chain(8, 1), GroupBlocks(0, 0, ids(0, 1, 2)))).why == "full"
    nodes = rig.service._core.chunks.spaces[AGENTS].nodes.values()
    assert [(node.in_dram, node.on_disk) for node in nodes] == [(1, 1)] * 6


def test_a_tenant_without_room_on_disk_holds_up_no_others_writes() -> None:
    rig = rig_with(quota("chat", most=3))
    agents, chat = client_of(rig, "agents", AGENTS), client_of(rig, "chat", CHAT)
    stored(chat, 8, seed=2)  # the cold ones are to be written again, and there is no room for them
    prompts = stored(agents, 5, seed=1)
    rig.now_ns += 2_000_000
    stored(chat, 1, seed=3)
    assert kept(rig, AGENTS, prompts) == [3] * 5
    assert account(rig, "chat").refused_slots > 0


def test_a_namespace_is_not_forgotten_below_a_guarantee_on_disk() -> None:
    rig = rig_with(quota("agents", guaranteed=6), namespaces_max=2)
    agents, chat = client_of(rig, "agents", AGENTS), client_of(rig, "chat", CHAT)
    prompts = stored(agents, 2, seed=1)
    rig.worker_gone(1)
    guests = Client(rig, engine="guests")
    assert is_refusal(guests.ask(guests.registration(namespace=GUESTS)), "resource", "namespaces")
    assert kept(rig, AGENTS, prompts) == [3, 3]
    assert chat.cache
    rig.worker_gone(2)
    client_of(rig, "guests", GUESTS)
    assert kept(rig, AGENTS, prompts) == [3, 3]


def test_no_namespace_is_forgotten_while_it_is_not_known_what_is_guaranteed_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another brain knows the namespace, and is told nothing more yet; what agents have on disk would be void."""
    rig = rig_with(quota("agents", guaranteed=6), namespaces_max=1)
    prompts = stored(client_of(rig, "agents", AGENTS), 2, seed=1)
    rig.worker_gone(1)
    obey, untold = rig._obey, []
    monkeypatch.setattr(
        rig, "_obey", lambda mover, order: untold.append(mover) if order == TellRecords() else obey(mover, order)
    )
    restart(rig)
    guests = Client(rig, engine="guests")
    assert is_refusal(guests.ask(guests.registration(namespace=GUESTS)), "resource", "namespaces")
    assert not tier_of(rig).recovered
    monkeypatch.undo()
    for mover in untold:
        obey(mover, TellRecords())
    assert kept(rig, AGENTS, prompts) == [3, 3]


# ---------------------------------------------------------------- both tiers


def hybrid_with_a_state_in_dram(rig: DiskRig, client: Client) -> bytes:
    """A chunk of which the full group is on disk alone, and the state in DRAM alone."""
    keys = chain(1, 1)
    client.ask(client.storing(keys, GroupBlocks(0, 0, ids(0, 1, 2))))
    fill(client_of(rig, "", GUESTS), first=70_000, prompts=30)
    hold_writes(rig)
    client.ask(client.storing(keys, GroupBlocks(0, 0, ids(0, 1, 2)), GroupBlocks(1, 0, ids(0))))
    node = rig.service._core.chunks.spaces[AGENTS].nodes[keys]
    assert (node.on_disk, node.in_dram) == (0b01, 0b10)
    account_in_dram(rig).guaranteed_bytes = EXTENT_BYTES
    return keys


def account_in_dram(rig: DiskRig) -> Account:
    """Of agents."""
    accounts = rig.service._core.chunks.accounts
    assert accounts is not None
    return accounts.of(tag_of("agents"))


def test_room_in_the_index_is_not_made_of_what_has_something_in_dram_before_what_is_colder() -> None:
    """A chunk of which a state is in DRAM is not on disk alone (seed 434606)."""
    rig = rig_with(Quota("agents"), disk_device_bytes=200 * SEGMENT_BYTES)
    agents, chat = client_of(rig, "agents", AGENTS, (FULL, STATE)), client_of(rig, "chat", CHAT)
    keys = hybrid_with_a_state_in_dram(rig, agents)
    account_in_dram(rig).guaranteed_bytes = 0
    core = rig.service._core
    core.chunks.clear(core.chunks.spaces[GUESTS], "cleared")
    stored(chat, 2, seed=6)
    warm = core.chunks.spaces[AGENTS].nodes[keys]
    warm.used = rig.now_ns + 1
    core.chunks.chunks_max = core.chunks.chunks
    stored(chat, 1, seed=7, chunks=1)
    assert core.chunks.spaces[AGENTS].nodes.get(keys) is warm
    assert warm.in_dram == 0b10


def test_room_in_the_index_takes_nothing_out_of_dram_that_was_guaranteed() -> None:
    rig = rig_with(Quota("agents"), disk_device_bytes=200 * SEGMENT_BYTES)
    agents, chat = client_of(rig, "agents", AGENTS, (FULL, STATE)), client_of(rig, "chat", CHAT)
    keys = hybrid_with_a_state_in_dram(rig, agents)
    core = rig.service._core
    for space in list(core.chunks.spaces.values()):
        if space.digest not in (AGENTS, CHAT):
            core.chunks.clear(space, "cleared")
    core.chunks.chunks_max = core.chunks.chunks
    assert chat.ask(chat.storing(chain(8, 1), GroupBlocks(0, 0, ids(0, 1, 2)))).why == "full"
    assert core.chunks.spaces[AGENTS].nodes[keys].in_dram == 0b10


def test_room_on_disk_takes_nothing_out_of_dram_that_was_guaranteed() -> None:
    """The full group on disk would go for another tenant's write, and with it a state that is guaranteed in DRAM."""
    rig = rig_with(Quota("agents"), disk_device_bytes=25 * SEGMENT_BYTES)
    agents, chat = client_of(rig, "agents", AGENTS, (FULL, STATE)), client_of(rig, "chat", CHAT)
    keys = hybrid_with_a_state_in_dram(rig, agents)
    resume_writes(rig)
    stored(chat, 40, seed=5)
    node = rig.service._core.chunks.spaces[AGENTS].nodes.get(keys)
    assert node is not None
    assert node.in_dram & 0b10


# ---------------------------------------------------------------- devices


def test_a_drained_devices_chunks_stay_charged_until_they_are_gone_from_it() -> None:
    rig = rig_with(quota("chat", most=9 + 7), disk_devices=2)
    chat = client_of(rig, "chat", CHAT)
    prompts = stored(chat, 3, seed=2)
    before = [device.used_bytes for device in rig.service.status(rig.now_ns).disks]
    assert min(before) > 0
    chat.ask(Drain(rig.number(), 0))
    rig.wait_ms(2_000)
    assert [device.used_bytes for device in rig.service.status(rig.now_ns).disks] == [0, sum(before)]
    assert chunks_of(rig, "chat") == 9
    assert kept(rig, CHAT, prompts) == [3, 3, 3]


def test_a_drain_at_a_maximum_costs_its_tenant_the_coldest_and_no_other_anything() -> None:
    rig = rig_with(quota("chat", most=9), disk_devices=2)
    chat, agents = client_of(rig, "chat", CHAT), client_of(rig, "agents", AGENTS)
    others = stored(agents, 3, seed=1)
    prompts = stored(chat, 3, seed=2)
    assert chunks_of(rig, "chat") == 9
    chat.ask(Drain(rig.number(), 0))
    rig.wait_ms(3_000)
    assert rig.service.status(rig.now_ns).disks[0].used_bytes == 0
    assert kept(rig, AGENTS, others) == [3, 3, 3]
    assert chunks_of(rig, "chat") == sum(kept(rig, CHAT, prompts)) >= 9 - 8
    assert kept(rig, CHAT, prompts)[-1] == 3


def test_what_lies_on_a_device_that_takes_no_writes_is_still_charged() -> None:
    rig = rig_with(quota("chat", most=9))
    chat = client_of(rig, "chat", CHAT)
    stored(chat, 2, seed=2)
    tier_of(rig).set_problem(0, "8 reads or writes in a row failed")
    stored(chat, 2, seed=3)
    assert chunks_of(rig, "chat") == 6


def test_a_restarted_brain_charges_what_is_found_on_disk() -> None:
    rig = rig_with(quota("agents", guaranteed=3), quota("chat", most=7))
    stored(client_of(rig, "agents", AGENTS), 2, seed=1)
    stored(client_of(rig, "chat", CHAT), 4, seed=2)
    stored(client_of(rig, "guests", GUESTS), 1, seed=3)
    before = {name: chunks_of(rig, name) for name in ("agents", "chat", "default")}
    assert before == {"agents": 6, "chat": 7, "default": 3}
    restart(rig)
    assert {name: chunks_of(rig, name) for name in before} == before


# ---------------------------------------------------------------- less than a chunk in DRAM


def test_a_tenant_that_may_not_have_a_chunk_in_dram_is_refused_at_once() -> None:
    rig = rig_with(Quota("chat", 0, EXTENT_BYTES))
    chat = Client(rig, engine="chat")
    before = rig.facts()
    refused = chat.ask(chat.registration((WIDE,), namespace=CHAT, tenant="chat", descriptors=[chat.offer()]))
    assert is_refusal(refused, "resource", "tenant-size", "a chunk takes 8192 bytes", "'chat' may hold 4096")
    assert rig.facts() == {**before, "descriptors": before["descriptors"] + 1}
    client_of(rig, "chat", GUESTS)


def test_what_no_slot_could_ever_hold_for_its_tenant_is_not_offered_from_disk() -> None:
    """Its maximum was lowered while the brain was away. A read of it would wait until every deadline."""
    rig = rig_with(quota("chat", guaranteed=1))
    wide = client_of(rig, "chat", CHAT, (WIDE,))
    keys = chain(7, 1)
    wide.ask(wide.storing(keys, GroupBlocks(0, 0, ids(0, 1, 2))))
    empty_dram(client_of(rig, "", GUESTS))
    narrow = client_of(rig, "chat", AGENTS)
    rig.service._core.chunks.accounts.of_space(rig.service._core.chunks.spaces[CHAT]).max_bytes = EXTENT_BYTES  # type: ignore[union-attr]
    reads, declined = len(rig.read), rig.service.counters.lookup_ends["declined"]
    found = narrow.lookup(keys, CHAT)
    assert (found.chunks, found.lease) == (0, 0)
    assert rig.service.counters.lookup_ends["declined"] == declined + 1
    assert len(rig.read) == reads
    assert is_refusal(command(rig, Pin(namespace=CHAT, keys=keys, ttl_ms=5_000)), "resource", "tenant-size")


# ---------------------------------------------------------------- what is shown


def test_status_and_metrics_show_what_each_tenant_has_on_disk() -> None:
    rig = rig_with(quota("agents", guaranteed=2), quota("chat", guaranteed=1, most=4))
    stored(client_of(rig, "chat", CHAT), 2, seed=2)
    stored(client_of(rig, "guests", GUESTS), 1, seed=3)
    rig.disk_works = False
    stored(client_of(rig, "agents", AGENTS), 1, seed=1, chunks=2)
    status = rig.service.status(rig.now_ns)
    shown = {
        row.tenant: (row.disk_held_bytes, row.disk_reserved_bytes, row.disk_evicted_chunks, row.disk_max_bytes)
        for row in status.tenants
    }
    assert shown == {
        "agents": (0, 2 * EXTENT_BYTES, 0, 0),
        "chat": (4 * EXTENT_BYTES, 0, 2, 4 * EXTENT_BYTES),
        "default": (3 * EXTENT_BYTES, 0, 0, 0),
    }
    text = render(status, rig.service.counters, 0.0).decode()
    assert f'kvserver_tenant_disk_bytes{{state="reserved",tenant="agents"}} {2 * EXTENT_BYTES:.1f}' in text
    assert f'kvserver_tenant_disk_bytes{{state="guaranteed",tenant="chat"}} {EXTENT_BYTES:.1f}' in text
    assert 'kvserver_tenant_disk_evicted_chunks_total{tenant="chat"} 2.0' in text
    refused = account(rig, "chat").refused_slots
    assert f'kvserver_tenant_disk_refused_extents_total{{tenant="chat"}} {refused:.1f}' in text
    lines = [line.split()[:2] for line in overview(status)]
    assert ["chat", "16KiB"] in lines


def test_without_quotas_nothing_on_disk_is_counted_by_tenant() -> None:
    rig = DiskRig()
    chunks: DiskChunks = tier_of(rig).chunks
    assert chunks.accounts is None
    assert [type(pool) for pool in chunks.extents.pools] == [SlotPool]
