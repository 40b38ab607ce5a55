"""A clear is done in pieces: no event forgets more than its share, and meanwhile no cleared chunk is found."""

from typing import Any

import pytest

from kvserver.index.space import Space
from kvserver.service.base.effects import GoOn as Ask
from kvserver.service.base.events import GoOn
from kvserver.service.holdings.accounts import Quota
from kvserver.tiers.slots import SLOT_ALIGN
from kvserver.wire.admin import ClearTenant
from kvserver.wire.messages import Clear, Cleared, GroupBlocks
from tests.rigs.admin_rig import command
from tests.rigs.brain_rig import NAMESPACE, SLAB_BYTES, Client, Rig, chain, ids, withdrawn
from tests.rigs.quota_rig import CHAT, GUESTS, WIDE, account, chunks_of, client_of, fill, quota, rig_with, stored

PIECE = 5
WORLDS: dict[str, dict[str, Any]] = {
    "lru": {},
    "arc": {"eviction_policy": "arc"},
    "quotas": {"tenants": (Quota("chat", 3 * SLOT_ALIGN), Quota("agents", 0, 99 * SLOT_ALIGN))},
}


def pieces(rig: Rig, since: int) -> list[int]:
    """Lets the service go on until it is idle; returns the slots withdrawn with each event, from effect `since` on."""
    went = [withdrawn(rig.effects[since:])]
    while any(isinstance(effect, Ask) for effect in rig.effects[since:]):
        since = len(rig.effects)
        rig.handle(GoOn())
        went.append(withdrawn(rig.effects[since:]))
    return went


@pytest.mark.parametrize("world", WORLDS)
def test_no_event_forgets_more_than_a_piece(world: str) -> None:
    rig = Rig(forget_chunks=PIECE, **WORLDS[world])
    client = Client(rig).register(tenant="chat")
    prompts = [chain(seed, 3) for seed in range(6)]
    for keys in prompts:
        client.store(keys)
    since = len(rig.effects)
    request = Clear(rig.number(), NAMESPACE)
    assert client.ask(request) is None, "most of it is still in the ledger"
    assert [client.lookup(keys).chunks for keys in prompts] == [0] * 6
    client.store(prompts[0])
    assert client.lookup(prompts[0]).chunks == 3, "the namespace is used again meanwhile"
    went = pieces(rig, since)
    assert sum(went) == 18
    assert max(went) <= PIECE
    assert rig.answers[client.peer, request.id] == Cleared(request.id, 18)
    assert rig.facts()["used_bytes"] == 3 * SLOT_ALIGN


def test_an_account_holds_what_has_not_gone_yet() -> None:
    rig = rig_with(quota("chat"), forget_chunks=PIECE)
    chat = client_of(rig, "chat", CHAT)
    fill(chat, 13)
    chat.ask(Clear(rig.number(), CHAT))
    held = []
    while chunks_of(rig, "chat"):
        held.append(chunks_of(rig, "chat"))
        rig.handle(GoOn())
    assert held == [8, 3]


def test_namespaces_of_a_tenant_share_the_piece() -> None:
    rig = rig_with(quota("chat"), forget_chunks=PIECE)
    for number in range(40, 46):
        fill(client_of(rig, "chat", bytes([number]) * 32), 3, seed=number)
    since = len(rig.effects)
    command(rig, ClearTenant("chat"))
    went = pieces(rig, since)
    assert (max(went), sum(went)) == (PIECE, 18)


def test_a_tenant_at_its_maximum_stores_in_place_of_what_it_cleared() -> None:
    rig = rig_with(quota("chat", most=12), forget_chunks=PIECE)
    old, new = client_of(rig, "chat", CHAT), client_of(rig, "chat", NAMESPACE)
    (living,) = fill(new, 3, seed=1)
    fill(old, 9, seed=2)
    old.ask(Clear(rig.number(), CHAT))
    evicted = account(rig, "chat").evicted_chunks
    for seed in range(3):  # nothing goes on between these
        keys = chain(seed, 3)
        assert new.ask(new.storing(keys, GroupBlocks(0, 0, ids(*range(9))))).chunks == 3
    assert new.lookup(living).chunks == 3
    assert account(rig, "chat").evicted_chunks == evicted == 0


def test_what_wants_slots_of_another_size_forgets_no_more_than_a_piece_and_one_for_each_slot() -> None:
    rig = Rig(forget_chunks=PIECE, arena_bytes=SLAB_BYTES * 2)
    client, wide = Client(rig).register(), Client(rig, engine="wide").register((WIDE,), namespace=CHAT)
    small = SLAB_BYTES * 2 // SLOT_ALIGN
    for seed in range(small):
        client.store(chain(seed, 1))
    since = len(rig.effects)
    client.ask(Clear(rig.number(), NAMESPACE))
    before = withdrawn(rig.effects[since:])
    wide.ask(wide.storing(chain(99, 3), GroupBlocks(0, 0, ids(0, 1, 2) + ids(0, 1, 2) + ids(0, 1, 2))))
    assert 0 < withdrawn(rig.effects[since:]) - before <= PIECE + 2 * 3
    assert sum(pieces(rig, since)) == small


def test_a_cleared_namespace_that_no_tenant_has_used_hinders_nobody() -> None:
    """An earlier brain left it without chunks. Its turn comes after that of another one."""
    rig = rig_with(quota("chat", most=12), forget_chunks=1)
    client = client_of(rig, "chat", CHAT)
    fill(client, 9)
    rig.core.chunks.add_space(Space(GUESTS, 7, rig.core.chunks.spaces[CHAT].geometry))
    for namespace in (CHAT, GUESTS):
        client.ask(Clear(rig.number(), namespace))
    assert stored(client_of(rig, "chat", NAMESPACE), chain(1, 12))[0] >= 3
