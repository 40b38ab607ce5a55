"""Eviction for a slot of another size: it costs about a slab of chunks, not half of the cache."""

import msgspec
import pytest

from kvserver.service.holdings import eviction
from kvserver.service.holdings.eviction import VAIN_PRICE_MAX
from kvserver.tiers.slots import SLOT_ALIGN
from kvserver.wire.messages import GroupBlocks, Lookup, RegionRun
from tests.rigs.brain_rig import ARENA_BYTES, FULL, NAMESPACE, SLAB_BYTES, STATE, Client, Rig, chain, ids, key

SLOTS_A_SLAB = SLAB_BYTES // SLOT_ALIGN
LARGE_STATE = msgspec.structs.replace(STATE, regions=[RegionRun(0, 3600, 1, 0, 4200, 4200)], blocks=1)
"""A state group whose slots are two units; those of FULL are one."""
STATES_A_SLAB = SLOTS_A_SLAB // 2
PROMPTS, CHUNKS = 30, 8
COMPLETE = (3, 7, 11, 15, 19, 23, 27, 29)
"""Prompts with a state after their last chunk, which makes them servable.

Each slab has a chunk of one of them when all prompts grow together."""
assert PROMPTS * CHUNKS + len(COMPLETE) * 2 == ARENA_BYTES // SLOT_ALIGN
assert len(COMPLETE) == STATES_A_SLAB


def filled(*, interleaved: bool) -> tuple[Rig, Client, list[bytes]]:
    """A brain whose arena is full: one slab of states, all others of FULL. The complete prompts were used last.

    interleaved: all prompts grow together, so that each slab has chunks of many of them."""
    rig = Rig()
    client = Client(rig).register([FULL, LARGE_STATE], buffer_bytes=9000)
    prompts = [chain(seed, CHUNKS) for seed in range(PROMPTS)]
    by_prompt = [(prompt, chunk) for prompt in range(PROMPTS) for chunk in range(CHUNKS)]
    for prompt, chunk in sorted(by_prompt, key=lambda at: at[1]) if interleaved else by_prompt:
        store(client, prompts[prompt], chunk, state=chunk == CHUNKS - 1 and prompt in COMPLETE)
        rig.now_ns += 1_000_000
    assert rig.facts()["used_bytes"] == ARENA_BYTES
    for prompt in COMPLETE:
        client.release(client.lookup(prompts[prompt]))
    return rig, client, prompts


def store(client: Client, keys: bytes, chunk: int, *, state: bool) -> None:
    groups = [GroupBlocks(0, 3 * chunk, ids(0, 1, 2))] + [GroupBlocks(1, chunk, ids(0))] * state
    request = client.storing(key(keys, chunk), *groups)
    parent = key(keys, chunk - 1) if chunk else b""
    reply = client.ask(msgspec.structs.replace(request, first_chunk=chunk, parent=parent))
    assert (reply.chunks, reply.why) == (1, ""), reply


def store_with_state(client: Client, seed: int) -> tuple[int, str]:
    """Stores a prompt of one chunk; returns (chunks, why) of the reply."""
    reply = client.ask(client.storing(chain(seed, 1), GroupBlocks(0, 0, ids(0, 1, 2)), GroupBlocks(1, 0, ids(0))))
    return reply.chunks, reply.why


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_slot_of_another_size_of_the_same_namespace_costs_about_a_slab(interleaved: bool) -> None:
    rig, client, _ = filled(interleaved=interleaved)
    assert store_with_state(client, 99) == (1, "")
    gone = rig.service.counters.evictions
    assert SLOTS_A_SLAB <= gone <= 2 * SLOTS_A_SLAB + 1, f"{gone} of {PROMPTS * CHUNKS} chunks went for two slots"


def test_the_slab_that_would_cost_the_fewest_chunks_stays_when_they_are_warm() -> None:
    """The last slab holds only tails, so no slab would cost fewer chunks."""
    rig, client, prompts = filled(interleaved=True)
    rig.now_ns += 1_000_000_000
    warm = [prompt for prompt in COMPLETE if PROMPTS - SLOTS_A_SLAB < prompt < PROMPTS - 6]
    for prompt in warm:
        client.release(client.lookup(prompts[prompt]))
    assert store_with_state(client, 99) == (1, "")
    assert [client.lookup(prompts[prompt]).chunks for prompt in warm] == [CHUNKS] * 3
    assert rig.service.counters.evictions <= 3 * SLOTS_A_SLAB


def test_the_slots_that_came_free_with_it_cost_nothing() -> None:
    rig, client, _ = filled(interleaved=True)
    assert store_with_state(client, 99) == (1, "")
    gone = rig.service.counters.evictions
    for seed in range(100, 100 + STATES_A_SLAB - 1):
        assert store_with_state(client, seed) == (1, "")
    assert rig.service.counters.evictions == gone


@pytest.mark.parametrize("leased", [COMPLETE[:2], COMPLETE[2:5]])
def test_a_slab_with_a_leased_chunk_is_not_emptied(leased: tuple[int, ...]) -> None:
    rig, client, prompts = filled(interleaved=True)
    for prompt in leased:
        client.lookup(prompts[prompt])
    assert store_with_state(client, 99) == (1, "")
    assert rig.service.counters.evictions <= (1 + VAIN_PRICE_MAX) * SLOTS_A_SLAB
    assert all(client.lookup(prompts[prompt]).chunks == CHUNKS for prompt in leased)


def test_when_every_slab_has_a_leased_chunk_one_with_a_slot_of_that_size_goes() -> None:
    rig, client, prompts = filled(interleaved=True)
    *leased, free = COMPLETE
    for prompt in leased:
        client.lookup(prompts[prompt])
    client.lookup(prompts[free][: -len(key(prompts[free], 0))])
    assert store_with_state(client, 99) == (1, "")
    assert rig.service.counters.evictions <= SLOTS_A_SLAB + CHUNKS
    assert all(client.lookup(prompts[prompt]).chunks == CHUNKS for prompt in leased)


def test_when_whole_chains_hang_on_every_slab_that_could_go_one_with_a_slot_of_that_size_goes() -> None:
    """All slabs but two have a leased chunk, and those two hold the heads of prompts."""
    rig, client, prompts = filled(interleaved=True)
    for prompt in (19, 29):
        client.lookup(prompts[prompt])
    assert store_with_state(client, 99) == (1, "")
    assert rig.service.counters.evictions <= SLOTS_A_SLAB + 1 + CHUNKS


def test_when_everything_that_could_help_is_leased_the_store_says_full_after_a_slab_in_vain() -> None:
    rig, client, prompts = filled(interleaved=True)
    for prompt in COMPLETE:
        client.lookup(prompts[prompt])
    assert store_with_state(client, 99) == (0, "full")
    assert rig.service.counters.evictions == SLOTS_A_SLAB + 1
    assert all(client.lookup(prompts[prompt]).chunks == CHUNKS for prompt in COMPLETE)


def test_a_slab_on_which_most_of_the_cache_hangs_is_left_alone() -> None:
    """All prompts hang below one shared chunk.

    Its slab has no fewer chunks than others, and would cost the whole cache."""
    rig = Rig()
    client = Client(rig).register([FULL, LARGE_STATE], buffer_bytes=9000)
    shared = chain(7, 1)
    store(client, shared, 0, state=False)
    for seed in range(1, ARENA_BYTES // SLOT_ALIGN):
        store(client, shared + chain(1000 + seed, 1), 1, state=False)
        rig.now_ns += 1_000_000
    assert rig.facts()["used_bytes"] == ARENA_BYTES
    assert store_with_state(client, 99) == (1, "")
    assert rig.service.counters.evictions <= 2 * SLOTS_A_SLAB
    store(client, shared + chain(1, 2), 1, state=False)
    assert rig.service.counters.evictions <= 2 * SLOTS_A_SLAB


# ---------------------------------------------------------------- two namespaces


OTHER = bytes(range(32))
LARGE_FULL = msgspec.structs.replace(LARGE_STATE, kind="full")


def two_namespaces(*, interleaved: bool) -> tuple[Rig, Client, Client, list[bytes]]:
    """An arena full of one namespace, and a client of another one with larger slots, which has nothing yet."""
    rig = Rig()
    client = Client(rig).register([FULL])
    newcomer = Client(rig, engine="newcomer").register([LARGE_FULL], buffer_bytes=9000, namespace=OTHER)
    prompts = [chain(seed, CHUNKS) for seed in range(ARENA_BYTES // SLOT_ALIGN // CHUNKS)]
    by_prompt = [(prompt, chunk) for prompt in range(len(prompts)) for chunk in range(CHUNKS)]
    for prompt, chunk in sorted(by_prompt, key=lambda at: at[1]) if interleaved else by_prompt:
        store(client, prompts[prompt], chunk, state=False)
        rig.now_ns += 1_000_000
    assert rig.facts()["used_bytes"] == ARENA_BYTES
    return rig, client, newcomer, prompts


def store_large(client: Client, seed: int) -> tuple[int, str]:
    reply = client.ask(client.storing(chain(seed, 1), GroupBlocks(0, 0, ids(0))))
    return reply.chunks, reply.why


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_namespace_that_has_nothing_yet_gets_a_slab_of_another(interleaved: bool) -> None:
    rig, _, newcomer, _ = two_namespaces(interleaved=interleaved)
    assert store_large(newcomer, 99) == (1, "")
    assert rig.service.counters.evictions <= VAIN_PRICE_MAX * SLOTS_A_SLAB


def test_a_namespace_that_has_nothing_yet_takes_nothing_when_every_slab_has_a_leased_chunk() -> None:
    rig, client, newcomer, prompts = two_namespaces(interleaved=True)
    for prompt in range(0, len(prompts), SLOTS_A_SLAB):
        assert client.lookup(prompts[prompt]).chunks == CHUNKS
    assert store_large(newcomer, 99) == (0, "full")
    assert rig.service.counters.evictions == 0


@pytest.mark.parametrize(("interleaved", "least", "most"), [(False, 1, 1), (True, 2, 15)])
def test_when_every_slab_costs_too_much_the_coldest_go_until_one_is_empty(
    interleaved: bool, least: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eviction, "VAIN_PRICE_MAX", 0)
    rig, client, newcomer, prompts = two_namespaces(interleaved=interleaved)
    client.lookup(prompts[-1])
    assert store_large(newcomer, 99) == (1, "")
    assert least * SLOTS_A_SLAB <= rig.service.counters.evictions <= most * SLOTS_A_SLAB
    assert client.lookup(prompts[-1]).chunks == CHUNKS


@pytest.mark.parametrize("wanted_min", [1, 2, 3], ids=["leased", "leased whole", "more than is held"])
def test_a_prompt_that_is_asked_for_stays_with_or_without_a_lease(wanted_min: int) -> None:
    """A lookup counts as use, also when the engine holds the prompt in its own memory and wants no lease."""
    rig = Rig()
    client = Client(rig).register([FULL])
    prompts = [chain(seed, 2) for seed in range(ARENA_BYTES // SLOT_ALIGN // 2)]
    for keys in prompts:
        client.store(keys)
        rig.now_ns += 1_000_000
    found = client.ask(Lookup(rig.number(), NAMESPACE, prompts[0] + chain(998, 1), wanted_min))
    assert (found.chunks, found.lease != 0) == (2, wanted_min < 3)
    if found.lease:
        client.release(found)
    client.store(chain(999, 2))
    assert [client.lookup(keys).chunks for keys in prompts[:3]] == [2, 0, 2]
