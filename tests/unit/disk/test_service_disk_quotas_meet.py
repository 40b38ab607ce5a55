"""Quotas on disk together with quotas in DRAM, devices that leave, and the figures shown."""

from kvserver.brain.http.metrics import render
from kvserver.cli.status_text import overview
from kvserver.service.holdings.accounts import Account, Quota
from kvserver.service.holdings.disk_chunks import DiskChunks
from kvserver.tiers.slots import SlotPool
from kvserver.wire.admin import Pin
from kvserver.wire.messages import Drain, GroupBlocks
from kvserver.wire.tenants import tag_of
from tests.rigs.admin_rig import command
from tests.rigs.brain_rig import FULL, STATE, Client, chain, ids, is_refusal
from tests.rigs.disk_quota_rig import (
    AGENTS,
    CHAT,
    GUESTS,
    WIDE,
    account,
    chunks_of,
    client_of,
    empty_dram,
    hold_writes,
    kept,
    quota,
    resume_writes,
    rig_with,
    stored,
    tier_of,
)
from tests.rigs.disk_rig import EXTENT_BYTES, SEGMENT_BYTES, DiskRig, fill

# ---------------------------------------------------------------- both tiers


def hybrid_with_a_state_in_dram(rig: DiskRig, client: Client) -> bytes:
    """Stores a chunk whose full group is on disk alone and whose state is in DRAM alone; returns its key."""
    keys = chain(1, 1)
    client.ask(client.storing(keys, GroupBlocks(0, 0, ids(0, 1, 2))))
    fill(client_of(rig, "", GUESTS), first=70_000, prompts=30)
    hold_writes(rig)
    client.ask(client.storing(keys, GroupBlocks(0, 0, ids(0, 1, 2)), GroupBlocks(1, 0, ids(0))))
    node = rig.core.chunks.spaces[AGENTS].nodes[keys]
    assert (node.on_disk, node.in_dram) == (0b01, 0b10)
    account_in_dram(rig).guaranteed_bytes = EXTENT_BYTES
    return keys


def account_in_dram(rig: DiskRig) -> Account:
    """The DRAM account of agents."""
    accounts = rig.core.chunks.accounts
    assert accounts is not None
    return accounts.of(tag_of("agents"))


def test_index_eviction_prefers_a_colder_chunk_over_one_with_shards_in_dram() -> None:
    """A chunk with a state in DRAM is not on disk alone (seed 434606)."""
    rig = rig_with(Quota("agents"), disk_device_bytes=200 * SEGMENT_BYTES)
    agents, chat = client_of(rig, "agents", AGENTS, (FULL, STATE)), client_of(rig, "chat", CHAT)
    keys = hybrid_with_a_state_in_dram(rig, agents)
    account_in_dram(rig).guaranteed_bytes = 0
    core = rig.core
    core.chunks.clear(core.chunks.spaces[GUESTS], "cleared")
    core.chunks.forget_some()
    stored(chat, 2, seed=6)
    warm = core.chunks.spaces[AGENTS].nodes[keys]
    warm.used = rig.now_ns + 1
    core.chunks.chunks_max = core.chunks.chunks
    stored(chat, 1, seed=7, chunks=1)
    assert core.chunks.spaces[AGENTS].nodes.get(keys) is warm
    assert warm.in_dram == 0b10


def test_eviction_on_disk_leaves_guaranteed_chunks_in_dram() -> None:
    """The full group on disk would go for another tenant's write, and with it a state that is guaranteed in DRAM."""
    rig = rig_with(Quota("agents"), disk_device_bytes=25 * SEGMENT_BYTES)
    agents, chat = client_of(rig, "agents", AGENTS, (FULL, STATE)), client_of(rig, "chat", CHAT)
    keys = hybrid_with_a_state_in_dram(rig, agents)
    resume_writes(rig)
    stored(chat, 40, seed=5)
    node = rig.core.chunks.spaces[AGENTS].nodes.get(keys)
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


def test_chunks_on_a_read_only_device_are_still_charged() -> None:
    rig = rig_with(quota("chat", most=9))
    chat = client_of(rig, "chat", CHAT)
    stored(chat, 2, seed=2)
    tier_of(rig).devices[0].set_problem("8 reads or writes in a row failed")
    stored(chat, 2, seed=3)
    assert chunks_of(rig, "chat") == 6


# ---------------------------------------------------------------- less than a chunk in DRAM


def test_a_tenant_that_may_not_have_a_chunk_in_dram_is_refused_at_once() -> None:
    rig = rig_with(Quota("chat", 0, EXTENT_BYTES))
    chat = Client(rig, engine="chat")
    before = rig.facts()
    refused = chat.ask(chat.registration((WIDE,), namespace=CHAT, tenant="chat", descriptors=[chat.offer()]))
    assert is_refusal(refused, "resource", "tenant-size", "a chunk takes 8192 bytes", "'chat' may hold 4096")
    assert rig.facts() == {**before, "descriptors": before["descriptors"] + 1}
    client_of(rig, "chat", GUESTS)


def test_a_chunk_larger_than_its_tenants_maximum_in_dram_is_not_offered_from_disk() -> None:
    """The tenant's maximum was lowered while the brain was away, so a read could only wait for its deadline."""
    rig = rig_with(quota("chat", guaranteed=1))
    wide = client_of(rig, "chat", CHAT, (WIDE,))
    keys = chain(7, 1)
    wide.ask(wide.storing(keys, GroupBlocks(0, 0, ids(0, 1, 2))))
    empty_dram(client_of(rig, "", GUESTS))
    narrow = client_of(rig, "chat", AGENTS)
    rig.core.chunks.accounts.of_space(rig.core.chunks.spaces[CHAT]).max_bytes = EXTENT_BYTES  # type: ignore[union-attr]
    reads, declined = len(rig.read), rig.service.counters.lookup_ends["declined"]
    found = narrow.lookup(keys, CHAT)
    assert (found.chunks, found.lease) == (0, 0)
    assert rig.service.counters.lookup_ends["declined"] == declined + 1
    assert len(rig.read) == reads
    assert is_refusal(command(rig, Pin(namespace=CHAT, keys=keys, ttl_ms=5_000)), "resource", "tenant-size")


# ---------------------------------------------------------------- figures shown


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
