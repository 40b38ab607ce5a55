"""ARC, the second eviction policy: which chunks it keeps, how it adapts, and which ghosts it remembers."""

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvserver.config.config import Config
from kvserver.errors import ConfigError
from kvserver.index.arc import Arc
from kvserver.index.space import Node, Space
from kvserver.sizing.options import SizingOptions
from kvserver.sizing.run import Size, run
from kvserver.tiers.slots import SLOT_ALIGN
from kvserver.transfer.layout import Geometry, GroupGeometry, PageShape
from kvserver.wire.messages import KEY_BYTES, Clear, GroupBlocks, RegionRun
from kvserver.wire.status import ArcStatus
from tests.rigs.brain_lives import Life, engine
from tests.rigs.brain_rig import FULL, NAMESPACE, SLAB_BYTES, Client, Rig, chain, ids
from tests.rigs.textbook_arc import TextbookArc

SLOTS = SLAB_BYTES // SLOT_ALIGN
"""Slots in an arena of one slab; a chunk of FULL takes one."""
LARGE = msgspec.structs.replace(FULL, regions=[RegionRun(0, 13, 1, 11 * 1400, 1400, 1390)], blocks=11)
"""A group with slots of two units."""


def arc_rig(policy: str = "arc", **bounds: Any) -> Rig:
    return Rig(**{"arena_bytes": SLAB_BYTES, "eviction_policy": policy, **bounds})


def arc_of(rig: Rig) -> ArcStatus:
    arc = rig.service.status(rig.now_ns).arc
    assert arc is not None
    return arc


def store(client: Client, *prompts: bytes) -> None:
    for prompt in prompts:
        client.rig.now_ns += 1_000_000
        client.store(prompt)


def ask(client: Client, *prompts: bytes, namespace: bytes = NAMESPACE) -> list[int]:
    """Number of chunks that each prompt hits."""
    chunks = []
    for prompt in prompts:
        client.rig.now_ns += 1_000_000
        found = client.lookup(prompt, namespace)
        client.release(found)
        chunks.append(found.chunks)
    return chunks


def prompts(seed0: int, count: int, chunks: int = 1) -> list[bytes]:
    return [chain(seed, chunks) for seed in range(seed0, seed0 + count)]


# ---------------------------------------------------------------- chunks that it keeps


@pytest.mark.parametrize(("policy", "kept"), [("lru", 0), ("arc", 3)])
def test_a_scan_does_not_evict_what_was_found_again(policy: str, kept: int) -> None:
    client = Client(arc_rig(policy)).register()
    agents = prompts(1, 3, chunks=3)
    store(client, *agents)
    assert ask(client, *agents) == [3, 3, 3]
    store(client, *prompts(100, 5 * SLOTS))
    assert ask(client, *agents) == [kept] * 3


def test_who_asks_for_the_tail_asks_for_the_whole_prefix() -> None:
    client = Client(arc_rig()).register()
    stem, asked, other = chain(1, 4), chain(2, 2), chain(3, 3)
    store(client, stem + asked, stem + other)
    ask(client, stem + asked)
    assert arc_of(client.rig).frequent_bytes == 6 * SLOT_ALIGN
    assert arc_of(client.rig).recent_bytes == 3 * SLOT_ALIGN
    store(client, *prompts(100, 2 * SLOTS))
    assert ask(client, stem + other, stem + asked) == [4, 6]


def test_a_parent_stays_as_long_as_a_chunk_below_it_that_may_not_go() -> None:
    client = Client(arc_rig()).register()
    leased, free = prompts(1, 2, chunks=4)
    store(client, leased, free)
    lease = client.lookup(leased)
    store(client, *prompts(100, 3 * SLOTS))
    assert ask(client, leased, free) == [4, 0]
    client.release(lease)


def test_the_other_half_gives_when_one_may_not() -> None:
    """All recent chunks are leased."""
    client = Client(arc_rig()).register()
    frequent, recent = prompts(1, 2, chunks=SLOTS // 2)
    store(client, frequent)
    ask(client, frequent)
    store(client, recent[: KEY_BYTES * 7])
    client.lookup(recent[: KEY_BYTES * 7])
    store(client, chain(9, 1), chain(10, 1))
    assert ask(client, frequent) == [SLOTS // 2]
    lease = client.lookup(chain(10, 1))
    assert lease.chunks == 1
    store(client, chain(11, 1))
    assert ask(client, frequent) == [SLOTS // 2 - 1]


def test_a_scan_with_slots_of_another_size_takes_no_slab_of_what_was_found_again() -> None:
    rig = arc_rig(arena_bytes=3 * SLAB_BYTES)
    agents = Client(rig).register()
    chat = Client(rig, engine="chat").register([LARGE], namespace=bytes(31) + b"\7", buffer_bytes=20_000)
    kept, once = prompts(1, 1, chunks=SLOTS)[0], prompts(50, SLOTS)
    store(agents, kept[: KEY_BYTES * 3], *once[:SLOTS])
    for chunks in (3, 6, 9, 12, 15):
        store(agents, kept[: KEY_BYTES * chunks])
        ask(agents, kept[: KEY_BYTES * chunks])
    store(chat, *prompts(200, 60))
    assert ask(agents, kept[: KEY_BYTES * 15]) == [15]


# ---------------------------------------------------------------- adaptation


def test_a_chunk_that_comes_back_after_its_eviction_moves_the_target_to_its_half() -> None:
    client = Client(arc_rig()).register()
    twice = prompts(1, 5)
    store(client, *twice)
    ask(client, *twice)
    store(client, *prompts(100, SLOTS))
    assert arc_of(client.rig).target_bytes == 0
    store(client, chain(100, 1))
    learnt = arc_of(client.rig)
    assert (learnt.recent_ghost_hits, learnt.target_bytes) == (1, SLOT_ALIGN)
    assert learnt.frequent_bytes == 6 * SLOT_ALIGN, "it was asked for twice"
    for seed in range(102, 110):  # each was evicted only a few stores ago
        store(client, chain(seed, 1))
    grown = arc_of(client.rig)
    assert grown.target_bytes > 5 * SLOT_ALIGN
    assert grown.frequent_ghosts > 0
    store(client, twice[0])
    assert arc_of(client.rig).frequent_ghost_hits == 1
    assert arc_of(client.rig).target_bytes < grown.target_bytes


@pytest.mark.parametrize("slots", [16 * 3, 16 * 11])
def test_prompts_of_one_chunk_hit_as_the_paper_says(tmp_path: Path, slots: int) -> None:
    """Loops, scans and favourites; every hit matches the textbook's."""
    rng = random.Random(slots)
    asked: list[str] = []
    for turn in range(12):
        asked += [f"favourite {int(rng.paretovariate(0.6)) % 400}" for _ in range(200)]
        asked += [f"once {turn} {number}" for number in range(rng.choice((0, 90)))]
        asked += [f"loop {number % (slots + turn)}" for number in range(150)]
    textbook = TextbookArc(slots, 64 * SLOT_ALIGN)
    hits, targets = 0, set()
    for key in asked:
        hits += textbook.ask(key)
        targets.add(textbook.target)
    (size,) = sized(asked, tmp_path, slots)
    assert size.server_tokens // 64 == hits
    assert len(targets) > 20


def sized(asked: list[str], tmp_path: Path, slots: int) -> list[Size]:
    path = tmp_path / "keys.jsonl"
    path.write_text("".join(f"{json.dumps({'keys': [key]})}\n" for key in asked))
    one = {"workers": 1, "in_flight": 1, "pool_tokens": 0, "blocks_per_chunk": 1, "block_tokens": 64}
    options = SizingOptions(
        trace=str(path), policy="arc", arena_bytes=(slots * 64 * SLOT_ALIGN,), token_bytes=SLOT_ALIGN, **one
    )
    return run(options, lambda _: None).sizes


@pytest.mark.parametrize(
    ("trace", "arena_bytes", "requests", "least", "most"),
    [
        ("mooncake", 25_600_000, 700, 1.0, 2.5),
        ("claude-code", 9_600_000, 300, 1.0, 3.0),
        ("claude-code", 32_000_000, 300, -1.0, 0.0),
    ],
)
def test_recorded_traffic_hits_more_where_memory_is_short_and_hardly_less_elsewhere(
    trace: str, arena_bytes: int, requests: int, least: float, most: float
) -> None:
    """docs/OPERATING.md has the whole traces."""
    rates = {}
    for policy in ("lru", "arc"):
        options = SizingOptions(
            trace=trace,
            policy=policy,
            arena_bytes=(arena_bytes,),
            requests=requests,
            token_bytes=64,
            blocks_per_chunk=8,
            pool_tokens=0,
            workers=1,
            in_flight=1,
        )
        sizing = run(options, lambda _: None)
        rates[policy] = 100 * sizing.sizes[0].server_tokens / sizing.prompt_tokens
    assert least <= rates["arc"] - rates["lru"] <= most, rates


# ---------------------------------------------------------------- ghosts


def test_ghosts_are_an_arena_of_chunks_at_most_and_no_more_than_the_index_holds() -> None:
    for bounds in ({}, {"chunks_max": SLOTS - 5}):
        client = Client(arc_rig(**bounds)).register()
        store(client, *prompts(1, SLOTS // 2))
        ask(client, *prompts(1, SLOTS // 2))
        for round_ in range(3):
            store(client, *prompts(100, 3 * SLOTS))
            ask(client, *prompts(100 + round_, 2 * SLOTS))
            arc = arc_of(client.rig)
            assert 0 < arc.recent_ghosts + arc.frequent_ghosts <= client.rig.bounds.chunks_max
            held_bytes = arc.recent_bytes + arc.frequent_bytes
            assert held_bytes + (arc.recent_ghosts + arc.frequent_ghosts) * SLOT_ALIGN <= 2 * SLAB_BYTES


def test_ghosts_of_what_was_found_again_are_no_more_than_the_index_holds() -> None:
    client = Client(arc_rig(chunks_max=SLOTS - 5)).register()
    for prompt in prompts(1, 3 * SLOTS):
        store(client, prompt)
        assert ask(client, prompt) == [1]
    arc = arc_of(client.rig)
    assert (arc.recent_ghosts, arc.frequent_ghosts) == (0, SLOTS - 5)


def test_a_cleared_namespace_leaves_no_ghosts_and_others_keep_theirs() -> None:
    rig = arc_rig()
    other = bytes(31) + b"\5"
    mine, theirs = Client(rig).register(), Client(rig, engine="other").register(namespace=other)
    store(mine, *prompts(1, 4))
    store(theirs, *prompts(1, 6))
    assert ask(mine, *prompts(1, 4)) == [1] * 4  # recent ghosts share their bound with the recent half
    assert ask(theirs, *prompts(1, 6), namespace=other) == [1] * 6
    store(mine, *prompts(11, 3))
    store(theirs, *prompts(11, 8))
    assert arc_of(rig).recent_ghosts == 5
    mine.ask(Clear(rig.number(), NAMESPACE))
    assert arc_of(rig).recent_ghosts == 2
    store(mine, *prompts(11, 3))
    assert arc_of(rig).recent_ghost_hits == 0
    theirs.ask(Clear(rig.number(), other))
    assert arc_of(rig).recent_ghosts == 0


def test_a_chunk_whose_copy_failed_is_no_ghost() -> None:
    rig = arc_rig()
    client = Client(rig).register()
    rig.movers_copy = False
    client.ask(client.storing(chain(1, 1), GroupBlocks(0, 0, ids(0, 1, 2))))
    rig.finish("failed", "io", "broken")
    assert arc_of(rig).recent_ghosts == 0
    assert arc_of(rig).recent_bytes == 0


def test_after_a_restart_all_is_recent_and_found(descriptor: int) -> None:
    first = engine(Life(descriptor, eviction_policy="arc"), FULL)
    store(first, *prompts(1, 4, chunks=3))
    assert ask(first, chain(1, 3)) == [3]
    again = Life(descriptor, eviction_policy="arc")
    assert arc_of(again) == ArcStatus(
        recent_bytes=12 * SLOT_ALIGN,
        frequent_bytes=0,
        target_bytes=0,
        recent_ghosts=0,
        frequent_ghosts=0,
        recent_ghost_hits=0,
        frequent_ghost_hits=0,
    )
    client = engine(again, FULL)
    assert ask(client, *prompts(1, 4, chunks=3)) == [3] * 4
    assert arc_of(again).frequent_bytes == 12 * SLOT_ALIGN


def test_the_policy_may_change_between_two_starts(descriptor: int) -> None:
    store(engine(Life(descriptor), FULL), *prompts(1, 4))
    store(engine(Life(descriptor, eviction_policy="arc"), FULL), *prompts(5, 4))
    assert ask(engine(Life(descriptor), FULL), *prompts(1, 8)) == [1] * 8


def test_an_order_from_which_nothing_is_taken_does_not_grow() -> None:
    """Recent chunks arrive, are hit, and are evicted from the other half; the recent half never gives."""
    space = Space(bytes(32), 0, Geometry(6, (GroupGeometry(3, "full", 0, 1),)))
    space.fix_part(0, PageShape((129,)), 387, SLOT_ALIGN)
    arc = Arc(1000 * SLOT_ALIGN, ghosts_max=1000)
    order = arc.add_space(space)
    arc.target_bytes = arc.capacity_bytes
    space_node(arc, space, 0)  # the coldest recent chunk: nothing before it expires
    for number in range(1, 5000):
        node = space_node(arc, space, number)
        arc.asked(space, node)
        victim = order.coldest()
        assert victim is node
        arc.count(space, node, -1)
        space.remove(node)
        assert len(order) < 300, number


def space_node(arc: Arc, space: Space, number: int) -> Node:
    node = space.add(number.to_bytes(KEY_BYTES, "big"), space.root, number, 0)
    node.present = node.in_dram = space.needed
    space.make_ready(node)
    arc.count(space, node, 1)
    arc.orders[space].offer(node)
    return node


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("other", [{"disk_paths": "/srv/cache"}, {"tenants": "agents=1MiB.."}])
def test_it_is_refused_beside_disks_and_quotas(other: dict[str, str]) -> None:
    Config(eviction_policy="arc")
    Config(**other)
    with pytest.raises(ConfigError) as caught:
        Config(eviction_policy="arc", **other)
    assert caught.value.code == "config-eviction"
    ((name, value),) = other.items()
    assert f"eviction_policy=arc with {name}={value!r}" in str(caught.value)


def test_a_sizing_with_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="policy='fifo' must be lru or arc"):
        SizingOptions(policy="fifo")
