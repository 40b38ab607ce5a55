"""Clearing a tenant: which namespaces that covers, and when the clear is durable."""

import os
from dataclasses import replace

import pytest

from kvserver.index import tags
from kvserver.service.holdings.accounts import Quota
from kvserver.service.state import clear_notes
from kvserver.transfer.native import Ledger, create_memfd
from kvserver.wire.admin import ClearNamespace, ClearTenant, TenantCleared
from kvserver.wire.messages import Clear, Cleared, GroupBlocks, Retrieved, Unregister, Unregistered
from kvserver.wire.orders import ForgetNotes
from tests.rigs.admin_rig import command
from tests.rigs.brain_lives import SPAN_BYTES, Life
from tests.rigs.brain_rig import STATE, Client, Rig, chain, ids, is_refusal
from tests.rigs.disk_quota_rig import tier_of
from tests.rigs.disk_rig import CHUNKS, DiskRig, fill, restart


def namespace(name: str) -> bytes:
    return name.encode() * 32


def stored(rig: Rig, name: str, tenant: str, chunks: int = CHUNKS) -> Client:
    """An engine of the tenant, with a prompt in its own namespace."""
    client = Client(rig, engine=name).register(namespace=namespace(name), tenant=tenant)
    client.store(prompt(name)[: 32 * chunks])
    return client


def prompt(name: str) -> bytes:
    return chain(ord(name), CHUNKS)


def found(rig: Rig, name: str, tenant: str) -> int:
    """Number of the prompt's chunks that another engine of the tenant finds."""
    client = Client(rig, engine=f"{name} later").register(namespace=namespace(name), tenant=tenant)
    return client.lookup(prompt(name), namespace(name)).chunks


def clear(rig: Rig, tenant: str) -> object:
    return command(rig, ClearTenant(tenant=tenant))


@pytest.mark.parametrize("quotas", [(), (Quota("chat", 4096, 0),)], ids=["no quotas", "quotas"])
def test_all_namespaces_of_a_tenant_go_and_nobody_elses(quotas: tuple[Quota, ...]) -> None:
    rig = Rig(tenants=quotas)
    for name, tenant, chunks in (("a", "chat", 1), ("b", "agents", 3), ("c", "chat", 2), ("d", "", 3)):
        stored(rig, name, tenant, chunks)
    assert clear(rig, "chat") == TenantCleared(1, 3, 2)
    assert [found(rig, name, tenant) for name, tenant in (("a", "chat"), ("c", "chat"))] == [0, 0]
    assert [found(rig, name, tenant) for name, tenant in (("b", "agents"), ("d", ""))] == [3, 3]
    assert clear(rig, "chat") == TenantCleared(1, 0, 2)
    assert clear(rig, "nobody") == TenantCleared(1, 0, 0)


def test_a_retrieve_under_way_ends_and_its_lease_is_over() -> None:
    rig = Rig()
    client = stored(rig, "a", "chat")
    lease = client.lookup(prompt("a"), namespace("a")).lease
    rig.movers_copy = False
    request = client.retrieving(lease, GroupBlocks(0, 0, ids(*range(3 * CHUNKS))))
    client.ask(request)
    assert clear(rig, "chat") == TenantCleared(1, CHUNKS, 1)
    rig.finish()
    assert isinstance(rig.answers[client.peer, request.id], Retrieved)
    assert (rig.facts()["leases"], rig.facts()["pins"], rig.facts()["used_bytes"]) == (0, 0, 0)


def test_whose_a_namespace_is_outlives_its_caches_and_brains() -> None:
    rig = DiskRig()
    stored(rig, "a", "chat")
    stored(rig, "b", "agents")
    restart(rig)
    assert clear(rig, "chat") == TenantCleared(1, CHUNKS, 1)
    restart(rig)
    assert (found(rig, "a", "chat"), found(rig, "b", "agents")) == (0, CHUNKS)


def test_whose_a_namespace_is_stands_in_the_ledger() -> None:
    descriptor = create_memfd("ledger", Ledger.file_bytes(SPAN_BYTES))
    first = Life(descriptor)
    stored(first, "a", "chat", 2)
    stored(first, "b", "agents", 1)
    second = Life(descriptor)
    assert clear(second, "chat") == TenantCleared(1, 2, 1)
    third = Life(descriptor)
    assert (found(third, "a", "chat"), found(third, "b", "agents")) == (0, 1)
    os.close(descriptor)


def test_it_is_answered_once_when_all_of_it_is_durable() -> None:
    rig = DiskRig()
    for name in "ab":
        stored(rig, name, "chat")
    rig.notes_answered = False
    assert clear(rig, "chat") is None
    assert len(rig.noting) == 2
    mover, noted = rig.noting.pop()
    rig.report(mover, noted)
    assert not any(isinstance(answer, TenantCleared) for answer in rig.answers.values())
    rig.answer_notes()
    assert TenantCleared(1, 2 * CHUNKS, 2) in rig.answers.values()
    rig.wait_ms(rig.bounds.job_ttl_ms + 1_000)


@pytest.mark.parametrize("silent", [False, True])
def test_what_no_disk_notes_is_said_once(silent: bool) -> None:
    rig = DiskRig()
    for name in "ab":
        stored(rig, name, "chat")
    rig.notes_kept, rig.notes_answered = False, not silent
    outcome = clear(rig, "chat")
    if silent:
        assert outcome is None
        rig.wait_ms(rig.bounds.job_ttl_ms + 1_000)
        rig.answer_notes()
        (outcome,) = [answer for answer in rig.answers.values() if getattr(answer, "code", "") == "disk-clear"]
    assert is_refusal(outcome, "device", "disk-clear", "in time" if silent else "not durable yet")
    assert (found(rig, "a", "chat"), found(rig, "b", "chat")) == (0, 0)


def test_what_has_no_place_in_the_index_is_cleared_on_disk() -> None:
    rig = DiskRig(namespaces_max=2)
    stored(rig, "a", "chat")
    stored(rig, "b", "agents")
    rig.bounds = replace(rig.bounds, namespaces_max=1)
    restart(rig)
    assert clear(rig, "chat") == TenantCleared(1, 0, 1)
    rig.bounds = replace(rig.bounds, namespaces_max=2)
    restart(rig)
    assert (found(rig, "a", "chat"), found(rig, "b", "agents")) == (0, CHUNKS)


@pytest.mark.parametrize("by_tenant", [False, True])
def test_a_clear_that_is_not_durable_is_not_said_to_be_by_the_next_one(by_tenant: bool) -> None:
    """The first clear removed the namespace from memory; on disk it is as it was."""
    rig = DiskRig()
    client = stored(rig, "a", "chat")
    assert isinstance(client.ask(Unregister(rig.number(), client.cache)), Unregistered)
    rig.notes_kept = False
    first = clear(rig, "chat") if by_tenant else client.ask(Clear(rig.number(), namespace("a")))
    assert is_refusal(first, "device", "disk-clear")
    assert is_refusal(clear(rig, "chat"), "device", "disk-clear")
    rig.notes_kept = True
    assert clear(rig, "nobody") == TenantCleared(1, 0, 0)
    assert clear(rig, "chat") == TenantCleared(1, 0, 1)
    restart(rig)
    assert found(rig, "a", "chat") == 0


@pytest.mark.parametrize("heir", ["", "agents"])
def test_what_only_records_are_left_of_is_cleared_on_disk(heir: str) -> None:
    """Its chunks were evicted and its engine left, so the index has forgotten it; another brain would find it again."""
    rig = DiskRig()
    client, other = stored(rig, "a", "chat"), Client(rig, engine="b").register(namespace=namespace("b"))
    fill(other)
    there, tier = dict(rig.devices), tier_of(rig)
    while tier.chunks.drop_any(tenant=0):
        pass
    assert isinstance(client.ask(Unregister(rig.number(), client.cache)), Unregistered)
    assert namespace("a") not in rig.core.chunks.spaces
    if heir:
        Client(rig, engine=heir).register(namespace=namespace("a"), tenant=heir)
    rig.devices = there
    assert clear(rig, "chat") == TenantCleared(1, 0, 1)
    restart(rig)
    assert found(rig, "a", "chat") == 0


def test_a_namespace_that_was_forgotten_with_its_note_is_nobodys() -> None:
    """Everything in a namespace without a note is void."""
    rig = DiskRig(namespaces_max=1, notes_max=0)
    client = stored(rig, "a", "chat")
    assert isinstance(client.ask(Unregister(rig.number(), client.cache)), Unregistered)
    stored(rig, "b", "agents")
    assert tier_of(rig).notes.left_out.keys() == {namespace("a")}
    rig.wait_ms(100)
    assert rig.forgotten == [namespace("a")]
    assert not tier_of(rig).notes.left_out
    assert clear(rig, "chat") == TenantCleared(1, 0, 0)


@pytest.mark.parametrize("what", ["tenant", "namespace", "prefix", "nothing"])
def test_a_clear_holds_also_where_no_device_could_remove_the_note_of_a_namespace(what: str) -> None:
    rig = DiskRig(namespaces_max=2, notes_max=0)
    for name in "ab":
        stored(rig, name, "chat")
    rig.bounds, rig.notes_kept = replace(rig.bounds, namespaces_max=1), False
    restart(rig)
    assert [order.namespaces for order in rig.orders if isinstance(order, ForgetNotes)] == [[namespace("a")]]
    rig.notes_kept = True
    if what == "tenant":
        assert clear(rig, "chat") == TenantCleared(1, CHUNKS, 2)
    elif what == "namespace":
        assert isinstance(command(rig, ClearNamespace(namespace=namespace("a"))), Cleared)
    elif what == "prefix":
        assert isinstance(command(rig, ClearNamespace(namespace=namespace("a"), key=prompt("a")[:32])), Cleared)
    rig.bounds = replace(rig.bounds, namespaces_max=2)
    restart(rig)
    assert found(rig, "a", "chat") == (CHUNKS if what == "nothing" else 0)


def test_what_was_cleared_before_it_was_found_and_has_no_place_is_not_promised_too_early() -> None:
    rig = DiskRig(namespaces_max=2)
    stored(rig, "a", "chat")
    stored(rig, "b", "agents")
    rig.bounds, rig.notes_kept = replace(rig.bounds, namespaces_max=1), False
    rig.service = rig.new_service()
    assert Client(rig).ask(Clear(rig.number(), namespace("a"))) is None
    rig.wait_ms(100)
    assert is_refusal(clear(rig, "chat"), "device", "disk-clear")


def test_what_a_device_has_that_could_not_be_opened_is_not_promised() -> None:
    rig = DiskRig(disk_devices=2)
    stored(rig, "a", "chat")
    rig.unopened = {1}
    restart(rig)
    assert is_refusal(clear(rig, "chat"), "device", "disk-clear", "could not be opened")
    assert found(rig, "a", "chat") == 0


def test_it_waits_until_it_is_known_what_is_on_disk() -> None:
    rig = DiskRig()
    stored(rig, "a", "chat")
    rig.service = rig.new_service()
    assert is_refusal(clear(rig, "chat"), "resource", "disk-recovering")


def test_too_many_clears_are_refused_before_anything_is_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clear_notes, "CLEARS_MAX", 1)
    rig = DiskRig()
    for name in "ab":
        stored(rig, name, "chat")
    assert is_refusal(clear(rig, "chat"), "resource", "clears")
    assert (found(rig, "a", "chat"), found(rig, "b", "chat")) == (CHUNKS, CHUNKS)


def test_a_namespace_of_more_tenants_than_are_counted_is_anybodys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tags, "TAGS_MAX", 2)
    rig = Rig()
    stored(rig, "a", "first")
    for tenant in ("second", "third"):
        assert clear(rig, tenant) == TenantCleared(1, 0, 0)
        Client(rig, engine=tenant).register(namespace=namespace("a"), tenant=tenant)
    assert clear(rig, "fourth") == TenantCleared(1, CHUNKS, 1)


@pytest.mark.parametrize("tenant", ["", "a\nb", "x" * 1000])
def test_names_that_no_cache_can_have_are_refused(tenant: str) -> None:
    rig = Rig()
    stored(rig, "a", "")
    assert is_refusal(clear(rig, tenant), "request", "name")
    assert found(rig, "a", "") == CHUNKS


def test_a_namespace_of_state_alone_is_cleared_with_its_marks() -> None:
    rig = Rig()
    client = Client(rig).register((STATE,), namespace=namespace("a"), tenant="chat")
    client.ask(client.storing(prompt("a"), GroupBlocks(0, CHUNKS - 1, ids(0))))
    assert clear(rig, "chat") == TenantCleared(1, CHUNKS, 1)
    assert rig.core.chunks.marks.places == {}
