"""Quotas: a tenant takes no more than its maximum, keeps its guarantee, and finds no chunks of another tenant."""

import dataclasses
import random

import msgspec
import pytest

from kvserver.brain.http.metrics import render
from kvserver.cli.status_text import overview
from kvserver.service.base.effects import Publish, PutNamespace
from kvserver.service.holdings import eviction
from kvserver.service.service import Service
from kvserver.tiers.slots import SLOT_ALIGN
from kvserver.wire.admin import Pin, Unpin
from kvserver.wire.messages import Clear, GroupBlocks
from tests.rigs.admin_rig import command
from tests.rigs.brain_rig import FULL, Client, Rig, chain, ids, is_refusal
from tests.rigs.quota_rig import (
    AGENTS,
    CHAT,
    GUESTS,
    SLOTS,
    WIDE,
    account,
    chunks_of,
    client_of,
    fill,
    quota,
    rig_with,
    stored,
)

# ---------------------------------------------------------------- maximum


def test_a_tenants_leased_chunks_at_its_maximum_refuse_its_stores() -> None:
    rig = rig_with(quota("chat", most=3))
    chat = client_of(rig, "chat", CHAT)
    held, new = chain(1, 3), chain(2, 2)
    chat.store(held)
    lease = chat.lookup(held, CHAT)
    assert stored(chat, new) == (0, "full")
    assert account(rig, "chat").refused_slots == 1
    chat.release(lease)
    assert stored(chat, new) == (2, "")
    assert chunks_of(rig, "chat") == 3


def test_pinned_chunks_are_charged_to_their_tenant_and_stay() -> None:
    rig = rig_with(quota("chat", most=3))
    chat = client_of(rig, "chat", CHAT)
    held, new = chain(1, 3), chain(2, 2)
    chat.store(held)
    hold = command(rig, Pin(namespace=CHAT, keys=held, ttl_ms=5_000)).hold
    assert stored(chat, new) == (0, "full")
    command(rig, Unpin(hold=hold))
    assert stored(chat, new) == (2, "")
    assert chunks_of(rig, "chat") == 3


def test_a_copy_of_a_worker_that_died_is_charged_until_it_has_ended() -> None:
    rig = rig_with(quota("chat", most=4))
    chat = client_of(rig, "chat", CHAT)
    rig.movers_copy = False
    chat.ask(chat.storing(chain(1, 3), GroupBlocks(0, 0, ids(*range(9)))))
    rig.wait_ms(rig.bounds.reserve_ttl_ms + 50)
    assert account(rig, "chat").reserved_bytes == 3 * SLOT_ALIGN
    rig.finish("failed", "io", "the mover says so")
    assert account(rig, "chat").taken_bytes == 0


def test_a_maximum_that_was_lowered_is_reached_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "OWN_CHUNKS_MAX", 4)
    rig = rig_with(quota("chat", most=20))
    chat = client_of(rig, "chat", CHAT)
    fill(chat, 20)
    account(rig, "chat").max_bytes = 10 * SLOT_ALIGN
    held = []
    for seed in range(4):
        held.append((stored(chat, chain(80 + seed, 1)), chunks_of(rig, "chat")))
    assert held == [((0, "full"), 16), ((0, "full"), 12), ((1, ""), 10), ((1, ""), 10)]


# ---------------------------------------------------------------- guarantee


def test_chunks_beyond_a_guarantee_go_by_age_and_no_others() -> None:
    rig = rig_with(quota("agents", guaranteed=100))
    agents, chat = client_of(rig, "agents", AGENTS), client_of(rig, "chat", CHAT)
    fill(agents, 190)
    fill(chat, SLOTS)
    assert chunks_of(rig, "agents") == 100
    assert chunks_of(rig, "default") == SLOTS - 100


def test_a_tenant_below_its_guarantee_takes_room_from_those_above_theirs() -> None:
    """Also when its own chunks were used longest ago."""
    rig = rig_with(quota("agents", guaranteed=100))
    agents, chat = client_of(rig, "agents", AGENTS), client_of(rig, "chat", CHAT)
    first = fill(agents, 9)
    fill(chat, SLOTS - 9)
    fill(agents, 91, seed=2)
    assert chunks_of(rig, "agents") == 100
    assert [agents.lookup(keys, AGENTS).chunks for keys in first] == [3, 3, 3]
    fill(agents, 7, seed=3)
    assert chunks_of(rig, "agents") == 107, "beyond its guarantee the coldest goes, whose ever it is"


def test_a_tenant_evicts_its_own_guaranteed_chunks_when_nobody_elses_may_go() -> None:
    rig = rig_with(quota("agents", guaranteed=100))
    agents, chat = client_of(rig, "agents", AGENTS), client_of(rig, "chat", CHAT)
    fill(agents, 6)
    leases = [chat.lookup(keys, CHAT) for keys in fill(chat, SLOTS - 6)]
    assert all(lease.lease for lease in leases)
    assert stored(agents, chain(9, 2)) == (2, "")
    assert chunks_of(rig, "agents") == 6


def test_a_namespace_is_not_forgotten_below_a_guarantee() -> None:
    rig = rig_with(quota("agents", guaranteed=8), namespaces_max=2)
    agents, chat = client_of(rig, "agents", AGENTS), client_of(rig, "chat", CHAT)
    kept = fill(agents, 8)
    rig.worker_gone(1)
    guests = Client(rig, engine="guests")
    assert is_refusal(guests.ask(guests.registration(namespace=GUESTS)), "resource", "namespaces")
    again = client_of(rig, "agents", AGENTS)
    assert sum(again.lookup(keys, AGENTS).chunks for keys in kept) == 8
    rig.worker_gone(2)
    assert chat.cache
    client_of(rig, "guests", GUESTS)


def test_a_namespace_with_a_store_below_a_guarantee_is_not_forgotten() -> None:
    """One of two shards is there; its worker has gone, so no cache uses the namespace."""
    rig = rig_with(quota("agents", guaranteed=8), namespaces_max=2)
    client_of(rig, "", CHAT)
    ranks = [Client(rig, engine="two", ranks=2, rank=rank) for rank in range(2)]
    for rank, client in enumerate(ranks):
        groups = [msgspec.structs.replace(FULL, shards=2, shard=rank)]
        client.register(groups, namespace=AGENTS, tenant="agents")
    ranks[0].ask(ranks[0].storing(chain(1, 1), GroupBlocks(0, 0, ids(0, 1, 2))))
    for client in ranks:
        rig.peer_gone(client.local)
    assert account(rig, "agents").reserved_bytes > 0
    guests = Client(rig, engine="guests")
    assert is_refusal(guests.ask(guests.registration(namespace=GUESTS)), "resource", "namespaces")
    rig.wait_ms(60_000)
    client_of(rig, "", GUESTS)


def test_chunks_cleared_while_they_are_read_count_for_no_guarantee() -> None:
    rig = rig_with(quota("agents", guaranteed=3))
    agents, cleared = client_of(rig, "agents", AGENTS), client_of(rig, "agents", GUESTS)
    [kept], [read] = fill(agents, 3), fill(cleared, 3, seed=2)
    chat = client_of(rig, "chat", CHAT)
    fill(chat, SLOTS - 6, seed=5)
    rig.movers_copy = False
    found = cleared.lookup(read, GUESTS)
    cleared.ask(cleared.retrieving(found.lease, GroupBlocks(0, 0, ids(*range(9)))))
    cleared.ask(Clear(rig.number(), GUESTS))
    assert account(rig, "agents").held_bytes == 6 * SLOT_ALIGN
    chat.ask(chat.storing(chain(9, 3), GroupBlocks(0, 0, ids(*range(9)))))
    assert agents.lookup(kept, AGENTS).chunks == 3


def test_the_last_chunk_above_a_guarantee_stays_when_it_is_larger_than_the_rest() -> None:
    rig = rig_with(quota("agents", guaranteed=3))
    agents, chat = client_of(rig, "agents", AGENTS, (WIDE,)), client_of(rig, "chat", CHAT)
    for seed in range(2):
        agents.ask(agents.storing(chain(40 + seed, 1), GroupBlocks(0, 0, ids(0, 1, 2))))
    fill(chat, SLOTS)
    assert account(rig, "agents").held_bytes == 4 * SLOT_ALIGN, "two units are more than the one above three"


# ---------------------------------------------------------------- visibility


def test_tags_without_a_quota_share_an_account_and_may_share_a_namespace() -> None:
    rig = rig_with(quota("agents"))
    one, two = client_of(rig, "", CHAT), client_of(rig, "guests", CHAT)
    one.store(chain(1, 2))
    assert two.lookup(chain(1, 2), CHAT).chunks == 2


def test_without_quotas_tags_are_labels() -> None:
    rig = Rig()
    one, two = client_of(rig, "agents", AGENTS), client_of(rig, "chat", AGENTS)
    one.store(chain(1, 3))
    assert two.lookup(chain(1, 3), AGENTS).chunks == 3
    assert rig.core.chunks.accounts is None


def test_an_empty_namespace_that_nobody_uses_may_change_hands() -> None:
    rig = rig_with(quota("agents"), quota("chat"))
    agents = client_of(rig, "agents", AGENTS)
    agents.store(chain(1, 3))
    rig.worker_gone(1)
    chat = Client(rig, engine="chat")
    assert is_refusal(chat.ask(chat.registration(namespace=AGENTS, tenant="chat")), "request", "tenant")
    chat.ask(Clear(rig.number(), AGENTS))
    chat.register(namespace=AGENTS, tenant="chat")
    chat.store(chain(2, 2))
    assert (chunks_of(rig, "agents"), chunks_of(rig, "chat")) == (0, 2)


# ---------------------------------------------------------------- figures shown


def test_status_and_metrics_show_each_tenant_that_has_a_quota_and_the_others() -> None:
    rig = rig_with(quota("agents", guaranteed=2), quota("chat", guaranteed=1, most=3))
    fill(client_of(rig, "chat", CHAT), 7)
    fill(client_of(rig, "guests", GUESTS), 5)
    rig.movers_copy = False
    agents = client_of(rig, "agents", AGENTS)
    agents.ask(agents.storing(chain(1, 2), GroupBlocks(0, 0, ids(*range(6)))))
    status = rig.service.status(rig.now_ns)
    shown = {row.tenant: (row.held_bytes, row.reserved_bytes, row.evicted_chunks) for row in status.tenants}
    assert shown == {
        "agents": (0, 2 * SLOT_ALIGN, 0),
        "chat": (3 * SLOT_ALIGN, 0, 4),
        "default": (5 * SLOT_ALIGN, 0, 0),
    }
    text = render(status, rig.service.counters, 0.0).decode()
    assert f'kvserver_tenant_bytes{{state="reserved",tenant="agents"}} {2 * SLOT_ALIGN:.1f}' in text
    assert f'kvserver_tenant_bytes{{state="max",tenant="chat"}} {3 * SLOT_ALIGN:.1f}' in text
    assert 'kvserver_tenant_evicted_chunks_total{tenant="chat"} 4.0' in text
    assert 'tenant="guests"' not in text, "only what the configuration names is a label"
    assert any(line.split()[:2] == ["chat", "12KiB"] for line in overview(status))


def test_a_restarted_brain_charges_what_the_ledger_holds_and_a_namespace_has_one_account() -> None:
    """The first brain had no quotas, so two tenants could share a namespace."""
    rig = Rig()
    one, two = client_of(rig, "agents", AGENTS), client_of(rig, "chat", AGENTS)
    one.store(chain(1, 3))
    two.store(chain(2, 2))
    core = rig.core
    documents = [(effect.number, effect.document) for effect in rig.effects if isinstance(effect, PutNamespace)]
    records = b"".join(effect.records for effect in rig.effects if isinstance(effect, Publish))
    bounds = dataclasses.replace(rig.bounds, tenants=(quota("agents", guaranteed=1), quota("chat")))
    service = Service(bounds, random.Random(9).randbytes, documents=documents, records=records)
    service.check()
    assert core.chunks.chunks == 5
    rows = {row.tenant: row.held_bytes for row in service.status(0).tenants}
    assert rows == {"agents": 3 * SLOT_ALIGN, "chat": 0, "default": 0}, "what was found first decides; the rest goes"
    assert service._core.chunks.chunks == 3
