"""A large subtree is cut off at once and forgotten in pieces. Meanwhile nothing of it is found, written or kept."""

from typing import Any

import pytest

from kvserver.service.base.effects import GoOn as Ask
from kvserver.service.base.effects import Tell
from kvserver.service.base.events import ArenaGrew, GoOn
from kvserver.service.holdings.accounts import Quota
from kvserver.service.operators.commands import COMMAND_ID
from kvserver.service.requests import mismatches
from kvserver.tiers.slots import SLOT_ALIGN
from kvserver.wire.admin import ClearNamespace, DrainServer, Pin
from kvserver.wire.kv_events import ChunksRemoved
from kvserver.wire.messages import ALL_RIGHT, Clear, Cleared, Drain, GroupBlocks, Retrieved, Store, Stored
from kvserver.wire.orders import Demote, Done, FoundRecords, Promote
from tests.rigs.admin_rig import clear_prefix, command
from tests.rigs.brain_lives import Life
from tests.rigs.brain_rig import KEY_BYTES, NAMESPACE, SLAB_BYTES, Client, Rig, chain, ids, key, withdrawn
from tests.rigs.disk_rig import EXTENT_BYTES, DiskRig
from tests.rigs.quota_rig import AGENTS, CHAT, client_of, quota, rig_with, stored

PIECE = 2
BRANCHES = 7
HEAD, TAIL = 2, 3
BELOW = 1 + BRANCHES * TAIL
"""Chunks at and below the second chunk of the head."""
WORLDS: dict[str, dict[str, Any]] = {
    "lru": {},
    "arc": {"eviction_policy": "arc"},
    "quotas": {"tenants": (Quota("chat", 3 * SLOT_ALIGN), Quota("agents", 0, 99 * SLOT_ALIGN))},
    "events": {"kv_events": True},
}


def prompts(head: int = 1) -> list[bytes]:
    """Prompts that share two chunks."""
    return [chain(head, HEAD) + chain(100 * head + branch, TAIL) for branch in range(BRANCHES)]


def store_all(client: Client, every: list[bytes]) -> None:
    for keys in every:
        client.store(keys)


def go_on(rig: Rig, most: int = 1000) -> int:
    """Lets the service go on, at most so often. Returns how often it did."""
    for times in range(most):
        if not any(isinstance(effect, Ask) for effect in rig.effects):
            return times
        rig.effects = []
        rig.handle(GoOn())
    return most


def clear_half(rig: Rig, keys: bytes) -> int:
    """Clears the prefix that ends in the second chunk of these keys. Returns the operator's peer."""
    assert clear_prefix(rig, key(keys, 1)) is None, "it is answered when all of it has gone"
    return rig._last


def answer(rig: Rig, peer: int) -> Any:
    return next((reply for (asker, _), reply in rig.answers.items() if asker == peer), None)


@pytest.mark.parametrize("world", WORLDS)
def test_no_event_forgets_more_than_a_piece_and_nothing_is_found_meanwhile(world: str) -> None:
    rig = Rig(forget_chunks=PIECE, **WORLDS[world])
    client, every = Client(rig).register(tenant="chat"), prompts()
    store_all(client, every)
    rig.effects = []
    operator = clear_half(rig, every[0])
    went = []
    while True:
        assert [client.lookup(keys).chunks for keys in every] == [1] * BRANCHES
        went.append(withdrawn(rig.effects))
        if not any(isinstance(effect, Ask) for effect in rig.effects):
            break
        rig.effects = []
        rig.handle(GoOn())
    assert sum(went) == BELOW
    assert max(went) <= 2 * PIECE
    assert answer(rig, operator) == Cleared(COMMAND_ID, BELOW)
    assert rig.facts()["used_bytes"] == SLOT_ALIGN
    assert rig.facts()["chunks"] == 1


def test_a_small_subtree_goes_in_one_event() -> None:
    rig = Rig(forget_chunks=BELOW)
    client, every = Client(rig).register(), prompts()
    store_all(client, every)
    assert clear_prefix(rig, key(every[0], 1)) == Cleared(COMMAND_ID, BELOW)
    assert not any(isinstance(effect, Ask) for effect in rig.effects)
    assert rig.facts()["chunks"] == 1


@pytest.mark.parametrize("pieces", range(0, 22, 3))
def test_the_same_prompts_are_stored_again_meanwhile(pieces: int) -> None:
    rig = Rig(forget_chunks=PIECE)
    client, every = Client(rig).register(), prompts()
    store_all(client, every)
    operator = clear_half(rig, every[0])
    go_on(rig, pieces)
    store_all(client, every[2:5])
    assert [client.lookup(keys).chunks for keys in every] == [2, 2, 5, 5, 5, 2, 2]
    go_on(rig)
    assert [client.lookup(keys).chunks for keys in every] == [2, 2, 5, 5, 5, 2, 2]
    assert answer(rig, operator) == Cleared(COMMAND_ID, BELOW)
    assert rig.facts()["chunks"] == HEAD + 3 * TAIL


def test_what_goes_on_behind_a_cut_chunk_is_not_stored() -> None:
    rig = Rig(forget_chunks=PIECE)
    client, every = Client(rig).register(), prompts()
    store_all(client, every)
    clear_half(rig, every[0])
    more = Store(rig.number(), client.cache, 5, 1, 10_000, 5, every[0][-KEY_BYTES:], chain(9, 1), [blocks(5, 1)])
    assert client.ask(more) == Stored(more.id, 0, 0, 0, "parent-absent")


def blocks(first_chunk: int, chunks: int) -> GroupBlocks:
    return GroupBlocks(0, 3 * first_chunk, ids(*range(3 * chunks)))


@pytest.mark.parametrize("pieces", [0, 1, 5, 99])
def test_a_store_in_flight_does_not_say_that_it_holds_what_was_cut_off(pieces: int) -> None:
    rig = Rig(forget_chunks=PIECE)
    client, every = Client(rig).register(), prompts()
    store_all(client, every)
    rig.movers_copy = False
    longer = every[3] + chain(9, 2)
    request = client.storing(longer, blocks(0, 7))
    assert client.ask(request) is None
    clear_half(rig, every[0])
    go_on(rig, pieces)
    rig.finish()
    reply = rig.answers[client.peer, request.id]
    assert (reply.chunks, reply.why) == (1, "discarded")
    go_on(rig)
    assert client.lookup(longer).chunks == 1
    assert rig.facts()["used_bytes"] == SLOT_ALIGN


@pytest.mark.parametrize("pieces", [0, 1, 5, 99])
def test_a_retrieve_in_flight_keeps_its_chunks_and_no_others(pieces: int) -> None:
    rig = Rig(forget_chunks=PIECE)
    client, every = Client(rig).register(), prompts()
    store_all(client, every)
    rig.movers_copy = False
    request = client.retrieving(client.lookup(every[2]).lease, blocks(0, 5), more=True)
    client.ask(request)
    operator = clear_half(rig, every[0])
    assert rig.facts()["leases"] == 0, "its lease is over, although more was to come"
    go_on(rig)
    assert rig.facts()["used_bytes"] == 5 * SLOT_ALIGN
    assert answer(rig, operator) == Cleared(COMMAND_ID, BELOW), "nobody finds any of it"
    rig.finish()
    assert rig.answers[client.peer, request.id] == Retrieved(request.id, 7, ALL_RIGHT)
    assert rig.facts()["used_bytes"] == SLOT_ALIGN
    assert rig.facts()["pins"] == 0


def test_a_retrieve_that_ends_before_the_walk_comes_leaves_nothing() -> None:
    rig = Rig(forget_chunks=PIECE)
    client, every = Client(rig).register(), prompts()
    store_all(client, every)
    rig.movers_copy = False
    for keys in every:
        client.ask(client.retrieving(client.lookup(keys).lease, blocks(0, 5)))
    clear_half(rig, every[0])
    rig.finish()
    go_on(rig)
    assert rig.facts()["used_bytes"] == SLOT_ALIGN


def test_a_cut_above_another_one_takes_what_the_first_hung_on() -> None:
    rig = Rig(forget_chunks=1)
    client, every = Client(rig).register(), prompts()
    store_all(client, every)
    rig.movers_copy = False
    client.ask(client.retrieving(client.lookup(every[2]).lease, blocks(0, 5)))
    inner = clear_prefix(rig, key(every[2], 3))
    first = rig._last
    outer = clear_prefix(rig, key(every[2], 0))
    second = rig._last
    assert (inner, outer) == (None, None)
    assert [client.lookup(keys).chunks for keys in every] == [0] * BRANCHES
    go_on(rig)
    assert (answer(rig, first), answer(rig, second)) == (Cleared(COMMAND_ID, 2), Cleared(COMMAND_ID, BELOW + 1 - 2))
    assert rig.facts()["used_bytes"] == 5 * SLOT_ALIGN
    rig.finish()
    assert rig.facts()["used_bytes"] == 0


def test_a_cut_below_another_one_cuts_nothing_and_is_answered_when_that_is_done() -> None:
    rig = Rig(forget_chunks=PIECE)
    client, every = Client(rig).register(), prompts()
    store_all(client, every)
    clear_half(rig, every[0])
    assert clear_prefix(rig, key(every[2], 3)) is None
    inner = rig._last
    go_on(rig)
    assert answer(rig, inner) == Cleared(COMMAND_ID, 0)
    assert rig.facts()["chunks"] == 1


def test_what_was_stored_again_is_cut_off_again() -> None:
    rig = Rig(forget_chunks=PIECE)
    client, every = Client(rig).register(), prompts()
    store_all(client, every)
    for _ in range(3):
        clear_half(rig, every[0])
        go_on(rig, 2)
        store_all(client, every)
        assert [client.lookup(keys).chunks for keys in every] == [5] * BRANCHES
    go_on(rig)
    assert rig.facts()["chunks"] == 1 + BELOW


@pytest.mark.parametrize("pieces", [0, 3, 9])
def test_the_namespace_is_cleared_meanwhile(pieces: int) -> None:
    rig = Rig(forget_chunks=PIECE)
    client, every = Client(rig).register(), prompts()
    store_all(client, every)
    store_all(client, prompts(2))
    rig.movers_copy = False
    client.ask(client.retrieving(client.lookup(every[2]).lease, blocks(0, 5)))
    prefix = clear_half(rig, every[0])
    go_on(rig, pieces)
    request = Clear(rig.number(), NAMESPACE)
    assert client.ask(request) is None
    rig.movers_copy = True
    under_way, rig.copies = rig.copies, []
    store_all(client, every[:2])
    go_on(rig)
    assert isinstance(answer(rig, prefix), Cleared)
    assert isinstance(rig.answers[client.peer, request.id], Cleared)
    rig.copies = under_way
    rig.finish()
    assert rig.facts()["chunks"] == HEAD + 2 * TAIL
    assert [client.lookup(keys).chunks for keys in every] == [5, 5, *[2] * 5]


@pytest.mark.parametrize("pieces", range(0, 23, 2))
def test_the_next_brain_finds_nothing_of_a_cut_in_the_midst(descriptor: int, pieces: int) -> None:
    rig: Rig = Life(descriptor, forget_chunks=1)
    client, every = Client(rig).register(), prompts()[:3]
    store_all(client, every)
    clear_prefix(rig, key(every[0], 1))
    go_on(rig, pieces)
    rig = Life(descriptor, forget_chunks=1)
    client = Client(rig).register()
    assert [client.lookup(keys).chunks for keys in every] == [1] * 3
    assert rig.facts()["chunks"] == 1


def test_holds_end_and_new_ones_are_refused() -> None:
    rig = Rig(forget_chunks=PIECE)
    client, every = Client(rig).register(), prompts()
    store_all(client, every)
    held = command(rig, Pin(namespace=NAMESPACE, keys=every[2], ttl_ms=99_000))
    assert held.chunks == 5
    clear_half(rig, every[0])
    assert rig.service.status(rig.now_ns).holds == []
    assert command(rig, Pin(namespace=NAMESPACE, keys=key(every[2], 4), ttl_ms=99_000)).code == "key-unknown"


def test_subscribers_are_told_of_each_chunk_once() -> None:
    rig = Rig(forget_chunks=PIECE, kv_events=True)
    client, every = Client(rig).register(), prompts()
    store_all(client, every)
    told: list[bytes] = []
    rig.effects = []
    clear_half(rig, every[0])
    while rig.effects:
        effects, rig.effects = rig.effects, []
        events = [event for effect in effects if isinstance(effect, Tell) for event in effect.events]
        assert all(isinstance(event, ChunksRemoved) for event in events)
        told += [each for event in events for each in event.keys]
        assert len(events) <= 1
        if any(isinstance(effect, Ask) for effect in effects):
            rig.handle(GoOn())
    assert sorted(told) == sorted({key(keys, place) for keys in every for place in range(1, 5)})


def test_a_mismatch_cuts_in_pieces_too() -> None:
    rig = Rig(forget_chunks=PIECE)
    client, every = Client(rig).register(), prompts()
    store_all(client, every)
    rig.movers_copy = False
    request = client.retrieving(client.lookup(every[2]).lease, blocks(0, 5))
    client.ask(request)
    mover, order = rig.copies.pop()
    rig.report(mover, Done(order.job, "failed", 7, 1, "digest", "rig", order.mode, b"", (1,)))
    assert rig.answers[client.peer, request.id] == Retrieved(request.id, 0, 1)
    assert [client.lookup(keys).chunks for keys in every] == [1] * BRANCHES
    assert go_on(rig) > BELOW // (2 * PIECE)
    assert rig.facts()["chunks"] == 1


def test_the_server_is_drained_after_the_last_piece() -> None:
    rig = DiskRig(forget_chunks=PIECE)
    client, every = Client(rig).register(), prompts()
    rig.disk_works = False
    store_all(client, every)
    clear_prefix(rig, key(every[0], 1))
    command(rig, DrainServer())
    rig.disk_works = True
    rig._work()
    rig.wait_ms(200)
    assert rig.service.status(rig.now_ns).drain_waits == "clears"
    go_on(rig)
    rig._work()
    rig.wait_ms(200)
    status = rig.service.status(rig.now_ns)
    assert (status.drain, status.drain_left) == ("drained", {})


def test_nothing_that_was_cut_off_is_written_to_disk() -> None:
    rig = DiskRig(forget_chunks=1)
    client, every = Client(rig).register(), prompts()
    rig.disk_works = False
    store_all(client, every)
    clear_prefix(rig, key(every[0], 0))
    ordered = len(rig.orders)
    rig.wait_ms(500)
    assert not [order for order in rig.orders[ordered:] if isinstance(order, Demote)]


def test_a_lookup_says_that_it_is_gone() -> None:
    rig = Rig(forget_chunks=PIECE)
    client, every = Client(rig).register(), prompts()
    store_all(client, every)
    clear_half(rig, every[0])
    client.lookup(every[0])
    assert rig.service.counters.lookup_ends["gone"] == 1
    client.store(chain(1, HEAD))
    assert client.lookup(every[0]).chunks == HEAD
    assert rig.service.counters.lookup_ends["gone"] == 2, "also what has not gone yet"


def test_arc_does_not_remember_what_was_cut_off() -> None:
    rig = Rig(forget_chunks=1, arena_bytes=2 * SLAB_BYTES, eviction_policy="arc")
    client, deep = Client(rig).register(), chain(1, 30)
    client.store(deep)
    clear_prefix(rig, key(deep, 0))
    client.store(chain(2, 8))
    assert rig.service.counters.evictions, "what was cut off makes room by its turn too"
    arc = rig.service.status(rig.now_ns).arc
    assert arc is not None
    assert (arc.recent_ghosts, arc.frequent_ghosts) == (0, 0)


def test_a_guarantee_does_not_count_what_was_cut_off() -> None:
    rig = rig_with(quota("chat", 4), forget_chunks=1, arena_bytes=2 * SLAB_BYTES)
    chat, agents = client_of(rig, "chat", CHAT), client_of(rig, "agents", AGENTS)
    living, deep = chain(1, 4), chain(2, 26)
    chat.store(living)
    rig.now_ns += 1_000_000
    chat.store(deep)
    command(rig, ClearNamespace(namespace=CHAT, key=key(deep, 0)))
    stored(agents, chain(3, 8))
    assert chat.lookup(living, CHAT).chunks == 4
    go_on(rig)
    assert stored(agents, chain(3, 8)) == (8, "")
    assert chat.lookup(living, CHAT).chunks == 4


@pytest.mark.parametrize("arena_slabs", [1, 4])
def test_a_device_that_is_drained_meanwhile_moves_nothing_of_it(arena_slabs: int) -> None:
    """A record that is written after the clear would be newer than its note."""
    rig = DiskRig(forget_chunks=1, disk_devices=2, disk_run_tokens=6, arena_bytes=arena_slabs * SLAB_BYTES)
    client, every = Client(rig).register(), prompts()
    store_all(client, every)
    rig.wait_ms(100)
    clear_prefix(rig, key(every[0], 0))
    ordered = len(rig.orders)
    client.ask(Drain(rig.number(), 0))
    rig.wait_ms(500)
    assert not [order for order in rig.orders[ordered:] if isinstance(order, Demote | Promote)]
    go_on(rig)
    rig.wait_ms(500)
    assert rig.service.status(rig.now_ns).disks[0].drain == "drained"


def test_what_waits_for_its_move_when_it_is_cut_off_does_not_move() -> None:
    day_bytes = 24 * 20 * EXTENT_BYTES
    rig = DiskRig(forget_chunks=1, disk_devices=2, disk_run_tokens=6 * 99, disk_daily_write_bytes=day_bytes)
    client, every = Client(rig).register(), prompts()
    store_all(client, every)
    rig.wait_ms(100)
    fullest = max((0, 1), key=[device for device, _ in rig.devices].count)
    client.ask(Drain(rig.number(), 1 - fullest))
    rig.wait_ms(100)
    assert rig.service.status(rig.now_ns).disks[1 - fullest].drain_waits == "budget"
    clear_prefix(rig, key(every[0], 0))
    ordered = len(rig.orders)
    rig.now_ns += 9 * 3600 * 1_000_000_000
    rig.wait_ms(500)
    assert not [order for order in rig.orders[ordered:] if isinstance(order, Demote | Promote)]


def test_several_cuts_of_one_event_share_what_it_may_forget() -> None:
    rig = Rig(forget_chunks=PIECE)
    client, heads = Client(rig).register(), range(1, 5)
    for head in heads:
        store_all(client, prompts(head))
    space = rig.core.chunks.spaces[NAMESPACE]
    before = rig.facts()["chunks"]
    wrong = [(space, space.nodes[key(chain(head, HEAD), 0)], 0) for head in heads]
    mismatches.in_scrub(rig.core, wrong, rig.now_ns)
    assert before - rig.facts()["chunks"] <= PIECE
    assert not any(client.lookup(keys).chunks for head in heads for keys in prompts(head))
    go_on(rig)
    assert rig.facts()["chunks"] == 0


@pytest.mark.parametrize("pieces", [0, 4, 99])
@pytest.mark.parametrize("has_top", [True, False])
def test_what_lies_on_disk_is_taken_in_beside_what_was_cut_off(pieces: int, has_top: bool) -> None:
    """The disks are still read when a wrong chunk is found in DRAM. Its record, and those behind it, may be right.
    Without it nothing leads to those."""
    rig = DiskRig(forget_chunks=1)
    every = prompts()
    store_all(Client(rig).register(), every)
    rig.wait_ms(100)
    top = key(every[0], 1)
    rig.devices = {at: record for at, record in rig.devices.items() if has_top or record.key != top}
    rig.tells = False
    rig.service = rig.new_service()
    rig.handle(ArenaGrew(rig.bounds.arena_bytes // SLAB_BYTES, ""))
    rig.wait_ms(100)
    client = Client(rig).register()
    store_all(client, every)
    space = rig.core.chunks.spaces[NAMESPACE]
    mismatches.in_scrub(rig.core, [(space, space.nodes[top], 0)], rig.now_ns)
    rig.wait_ms(50)
    assert [client.lookup(keys).chunks for keys in every] == [1] * BRANCHES
    go_on(rig, pieces)
    rig.tells = True
    disk = next(mover.mover for mover in rig.service.status(rig.now_ns).movers if mover.device == "disk")
    rig.report(disk, FoundRecords(rig.telling.next(5)))
    found = 5 if has_top else 1
    assert [client.lookup(keys).chunks for keys in every] == [found] * BRANCHES
    go_on(rig)
    assert [client.lookup(keys).chunks for keys in every] == [found] * BRANCHES
    assert rig.facts()["chunks"] == (1 + BELOW if has_top else 1)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_lease_whose_keys_are_no_chain_ends_with_its_last_chunk(place: int) -> None:
    rig = Rig(forget_chunks=PIECE)
    client, keys = Client(rig).register(), chain(1, 9)
    client.store(keys)
    assert client.lookup(key(keys, 0) + bytes(KEY_BYTES) + key(keys, 2)).chunks == 3
    clear_prefix(rig, key(keys, place))
    assert rig.facts()["leases"] == 0


def test_leases_on_other_prompts_stay() -> None:
    rig = Rig(forget_chunks=PIECE)
    client, every = Client(rig).register(), prompts()
    store_all(client, every)
    rig.movers_copy = False
    leases = [client.lookup(keys).lease for keys in every]
    for lease in leases[::2]:
        client.ask(client.retrieving(lease, blocks(0, 5), more=True))  # all its keys are compared
    clear_prefix(rig, key(every[2], 2))
    clear_prefix(rig, key(every[3], 3))
    assert sorted(rig.core.leases) == sorted(set(leases) - {leases[2], leases[3]})
