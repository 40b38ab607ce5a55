"""Quotas on disk: maximum and guarantee, held across devices, sizes and restarts."""

import pytest

from kvserver.index.eviction import REFUSED
from kvserver.service.holdings.accounts import Quota
from kvserver.wire.messages import Clear, GroupBlocks
from kvserver.wire.orders import TellRecords
from kvserver.wire.tenants import tag_of
from tests.rigs.brain_rig import Client, chain, ids, is_refusal, key
from tests.rigs.disk_quota_rig import (
    AGENTS,
    CHAT,
    EXTENTS,
    EXTENTS_A_SEGMENT,
    GUESTS,
    WIDE,
    account,
    chunks_of,
    client_of,
    hold_writes,
    kept,
    quota,
    resume_writes,
    rig_with,
    stored,
    tier_of,
)
from tests.rigs.disk_rig import CHUNKS, EXTENT_BYTES, fill, restart

# ---------------------------------------------------------------- maximum


def test_writes_in_flight_count_against_a_tenants_maximum() -> None:
    rig = rig_with(quota("chat", most=4))
    chat = client_of(rig, "chat", CHAT)
    rig.disk_works = False
    stored(chat, 2, seed=2)
    assert account(rig, "chat").reserved_bytes == 4 * EXTENT_BYTES
    assert account(rig, "chat").refused_slots > 0
    rig.finish_disk()
    assert chunks_of(rig, "chat") == 4


def test_a_failed_write_is_refunded_to_its_tenant() -> None:
    rig = rig_with(quota("chat", most=4))
    chat = client_of(rig, "chat", CHAT)
    rig.fault = "io"
    stored(chat, 1, seed=2)
    assert account(rig, "chat").taken_bytes == 0


def test_at_its_maximum_a_tenant_keeps_on_disk_what_it_used_later() -> None:
    """Otherwise chunks of a DRAM larger than the maximum would push each other out for ever."""
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


# ---------------------------------------------------------------- guarantee


def test_writes_in_flight_do_not_lower_a_guarantee() -> None:
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


def test_chunks_beyond_a_guarantee_on_disk_go_by_age_and_no_others() -> None:
    rig = rig_with(quota("agents", guaranteed=10))
    agents, chat = client_of(rig, "agents", AGENTS), client_of(rig, "chat", CHAT)
    stored(agents, 9, seed=1)
    stored(chat, 30, seed=2)
    assert (chunks_of(rig, "agents"), chunks_of(rig, "default")) == (10, EXTENTS - 10)
    assert account(rig, "agents").evicted_chunks == 17


def test_a_tenant_below_its_guarantee_on_disk_takes_room_from_those_above_theirs() -> None:
    """Also when all chunks of the others were used later."""
    rig = rig_with(quota("agents", guaranteed=9), quota("chat", guaranteed=EXTENTS - 12))
    agents, chat, guests = (client_of(rig, name, of) for name, of in (("agents", AGENTS), ("chat", CHAT), ("", GUESTS)))
    hold_writes(rig)
    old = stored(agents, 4, seed=1)
    resumed = stored(chat, 14, seed=2)
    tier = tier_of(rig)
    for keys in old:  # to be written after all the others
        for at in range(CHUNKS):
            rig.core.chunks.spaces[AGENTS].nodes[key(keys, at)].queued |= REFUSED
    resume_writes(rig)
    stored(guests, 1, seed=3, chunks=2)
    assert (chunks_of(rig, "chat"), chunks_of(rig, "default")) == (42, 2)
    assert tier.chunks.extents.bytes_used == EXTENTS * EXTENT_BYTES
    hold_writes(rig)
    for keys in old:
        node = rig.core.chunks.spaces[AGENTS].nodes[key(keys, CHUNKS - 1)]
        node.queued &= ~REFUSED
        rig.core.chunks.offer(rig.core.chunks.spaces[AGENTS], node)
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
        rig.wait_ms(100)  # a segment is emptied
        assert chunks_of(rig, "agents") >= 10
    assert chunks_of(rig, "agents") < 10 + 2 * EXTENTS_A_SEGMENT
    assert account(rig, "default").held_bytes > EXTENTS * EXTENT_BYTES // 2


def test_a_segment_is_held_against_a_guarantee_as_a_whole() -> None:
    """Each of its chunks alone is less than agents' excess over their guarantee; all of them are more."""
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


def test_index_eviction_that_frees_no_place_takes_nothing_out_of_dram() -> None:
    """Chunks that are also on disk would leave DRAM and still stay in the index, because they are guaranteed there."""
    rig = rig_with(quota("agents", guaranteed=6))
    agents, chat = client_of(rig, "agents", AGENTS), client_of(rig, "chat", CHAT)
    stored(agents, 2, seed=1)
    rig.core.chunks.chunks_max = rig.core.chunks.chunks
    assert chat.ask(chat.storing(chain(8, 1), GroupBlocks(0, 0, ids(0, 1, 2)))).why == "full"
    nodes = rig.core.chunks.spaces[AGENTS].nodes.values()
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
    """The new brain knows the namespace but has been told nothing more yet; agents' chunks on disk would be void."""
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


def test_a_lowered_maximum_takes_nothing_that_lives_while_a_clear_makes_enough_room() -> None:
    rig = rig_with(quota("agents", most=20), forget_chunks=1)
    cleared, living = client_of(rig, "agents", AGENTS), client_of(rig, "agents", CHAT)
    stored(cleared, 4, seed=1)
    prompts = stored(living, 2, seed=2)
    cleared.ask(Clear(rig.number(), AGENTS))
    assert account(rig, "agents").held_bytes > 2 * CHUNKS * EXTENT_BYTES, "its chunks go in pieces"
    account(rig, "agents").max_bytes = 2 * CHUNKS * EXTENT_BYTES
    rig.wait_ms(100)
    assert kept(rig, CHAT, prompts) == [CHUNKS] * 2


def test_a_namespace_may_be_forgotten_before_it_is_known_whose_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mover has named the namespace and none of its chunks yet, so it belongs to no tenant."""
    rig = rig_with(quota("agents", most=6), namespaces_max=1)
    stored(client_of(rig, "agents", AGENTS), 2, seed=1)
    obey, untold = rig._obey, []
    monkeypatch.setattr(
        rig, "_obey", lambda mover, order: untold.append(mover) if order == TellRecords() else obey(mover, order)
    )
    restart(rig)
    client_of(rig, "guests", GUESTS)
    rig.wait_ms(100)
    monkeypatch.undo()
    for mover in untold:
        obey(mover, TellRecords())
    rig.wait_ms(100)
    assert tier_of(rig).recovered
    assert list(rig.core.chunks.spaces) == [GUESTS]
