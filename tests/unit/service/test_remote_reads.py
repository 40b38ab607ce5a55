"""Which heads of a remote store a server takes, and how long a lookup says that more may come."""

import dataclasses
import struct

import pytest

from kvserver.index.space import Space
from kvserver.remote.chunk_value import Head, Shard, decode, encode
from kvserver.service.base.effects import Tell
from kvserver.service.base.events import Tick
from kvserver.service.remote.reads import ABSENT_MS, groups_of
from kvserver.service.state.core import MILLISECOND_NS
from kvserver.tiers.placement import RATE_HOLDS_NS
from kvserver.tiers.records import NO_PARENT
from kvserver.tiers.slots import slot_bytes_for
from kvserver.transfer.layout import Geometry, GroupGeometry
from kvserver.wire.explanation import decode_explanations
from kvserver.wire.kv_events import ChunksStored, KvEvent
from kvserver.wire.messages import KEY_BYTES, Explain
from kvserver.wire.orders import (
    FetchRemote,
    ProbeRemote,
    RemoteEnded,
    RemoteIs,
    RemoteProbed,
)
from tests.rigs.brain_rig import CHUNK_TOKENS, NAMESPACE, Client, Rig, chain, key
from tests.rigs.remote_rig import EPOCH, RemoteRig

SIZES = {(0, 0): 7001, (0, 1): 7003, (1, 0): 901}
"""(group, shard) -> bytes. Group 0 is full, group 1 a window."""
NUMBER = struct.Struct("<Q")


def space() -> Space:
    groups = (GroupGeometry(4, "full", 0, 2), GroupGeometry(4, "window", 24, 1))
    found = Space(b"n" * 32, 0, Geometry(12, groups))
    for index, size in enumerate(SIZES.values()):
        found.fix_part(index, ((1, size),), size, slot_bytes_for(size))
    return found


def head(*shards: tuple[int, int, int]) -> Head:
    told = tuple(Shard(group, shard, size, 5) for group, shard, size in shards)
    return Head(b"n" * 32, b"k" * 32, NO_PARENT, EPOCH, 3, 0, told)


FULL = ((0, 0, 7001), (0, 1, 7003))


@pytest.mark.parametrize(
    ("shards", "groups"),
    [
        (FULL, 0b01),
        ((*FULL, (1, 0, 901)), 0b11),
        (FULL[:1], None),
        (((1, 0, 901),), None),
        ((FULL[0], (0, 1, 7002)), None),
        ((*FULL, (2, 0, 901)), None),
        ((*FULL, (1, 1, 901)), None),
        ((*FULL, FULL[0]), None),
    ],
    ids=["full", "whole", "a shard less", "window alone", "size", "group", "shard", "twice"],
)
def test_a_head_is_taken_only_with_the_shards_of_its_namespace(
    shards: tuple[tuple[int, int, int], ...], groups: int | None
) -> None:
    assert groups_of(space(), head(*shards)) == groups


def test_a_rank_loads_one_shard_of_each_group() -> None:
    assert space().rank_bytes(0b01) == slot_bytes_for(7001)
    assert space().rank_bytes(0b11) == slot_bytes_for(7001) + slot_bytes_for(901)


def test_a_lookup_is_answered_before_the_store_is_and_says_how_much_may_come() -> None:
    rig, keys = RemoteRig(), chain(1, 5)
    rig.client.store(keys[: 2 * KEY_BYTES])
    found = rig.client.lookup(keys)
    assert (found.chunks, found.coming) == (2, 3)
    assert [order.keys for order in rig.asked(ProbeRemote)] == [keys[2 * KEY_BYTES :]]
    assert rig.client.lookup(keys).coming == 3
    assert len(rig.asked(ProbeRemote)) == 1, "one probe for what is asked for twice"


def test_nothing_is_said_to_come_after_a_while_without_progress() -> None:
    rig, keys = RemoteRig(), chain(1, 5)
    assert rig.client.lookup(keys).coming == 5
    rig.wait_ms(rig.bounds.remote_patience_ms)
    assert rig.client.lookup(keys).coming == 0
    rig.has(keys, 0, 1, 2)
    assert rig.client.lookup(keys).coming == 3, "an answer is progress"


def test_only_chunks_before_the_first_gap_are_read() -> None:
    rig, keys = RemoteRig(), chain(1, 5)
    rig.client.lookup(keys)
    rig.has(keys, 0, 1, 3, 4)
    assert [decode(order.head).key for order in rig.asked(FetchRemote)] == [key(keys, 0), key(keys, 1)]


def test_what_has_arrived_is_found_and_what_failed_is_not() -> None:
    rig, keys = RemoteRig(), chain(1, 3)
    rig.client.lookup(keys)
    rig.has(keys, 0, 1, 2)
    first, second, third = rig.asked(FetchRemote)
    assert rig.client.lookup(keys).chunks == 0
    rig.report(rig.mover, RemoteEnded(third.job, "", 1, NUMBER.pack(7)))
    assert rig.client.lookup(keys).chunks == 0, "a chunk without those before it"
    rig.report(rig.mover, RemoteEnded(first.job, "", 1, NUMBER.pack(9)))
    assert rig.client.lookup(keys).chunks == 1
    rig.report(rig.mover, RemoteEnded(second.job, "gone", 1))
    found = rig.client.lookup(keys)
    assert (found.chunks, found.coming) == (1, 0)


def test_a_chunk_that_is_not_there_is_not_asked_for_again_at_once() -> None:
    rig, keys = RemoteRig(), chain(1, 3)
    rig.client.lookup(keys)
    rig.has(keys)
    assert rig.client.lookup(keys).coming == 0
    assert len(rig.asked(ProbeRemote)) == 1
    rig.wait_ms(ABSENT_MS)
    assert rig.client.lookup(keys).coming == 3
    assert len(rig.asked(ProbeRemote)) == 2


def test_a_prefix_that_would_bring_too_few_tokens_is_computed() -> None:
    rig, keys = RemoteRig(tokens_min=4 * CHUNK_TOKENS), chain(1, 5)
    assert rig.client.lookup(keys[: 3 * KEY_BYTES]).coming == 0
    assert not rig.asked(ProbeRemote)
    assert rig.client.lookup(keys).coming == 5
    rig.has(keys, 0, 1, 2)
    assert not rig.asked(FetchRemote)
    assert_nobody_waits(rig, keys)


def assert_nobody_waits(rig: RemoteRig, keys: bytes) -> None:
    """Who asks again for what the server does not want computes it. After a while the store is asked again."""
    probes = len(rig.asked(ProbeRemote))
    assert rig.client.lookup(keys).coming == 0
    assert len(rig.asked(ProbeRemote)) == probes
    rig.wait_ms(ABSENT_MS)
    assert rig.client.lookup(keys).coming > 0
    assert len(rig.asked(ProbeRemote)) == probes + 1


def test_a_prefix_that_is_computed_faster_than_read_is_computed() -> None:
    rig, keys = RemoteRig(), chain(1, 5)
    rig.core.bounds = dataclasses.replace(rig.core.bounds, recompute_tokens_per_s=10**9)
    rig.core.remotes[0].reads.began(0)
    rig.core.remotes[0].reads.ended(2 << 20, 10**9)
    assert rig.client.lookup(keys).coming == 5
    rig.has(keys, 0, 1, 2, 3, 4)
    assert not rig.asked(FetchRemote)
    assert_nobody_waits(rig, keys)


def measured(rig: RemoteRig, *, read_ms: int, load_ms: int = 0, age_ns: int = 0) -> None:
    """The times that five chunks take from the store, and from DRAM to the engine. Computing them takes 100 ms."""
    space = rig.core.chunks.spaces[NAMESPACE]
    count = 5 * space.parts[0].payload_bytes
    times = (2 << 20) // count + 1  # too few bytes are not measured
    ended_ns = rig.now_ns - age_ns
    rig.core.remotes[0].reads.began(ended_ns - times * read_ms * MILLISECOND_NS)
    rig.core.remotes[0].reads.ended(times * count, ended_ns)
    loaded = 5 * space.rank_bytes(space.needed)
    rig.core.loads.ended(times * loaded, times * load_ms * MILLISECOND_NS)
    rig.core.bounds = dataclasses.replace(rig.core.bounds, recompute_tokens_per_s=50 * space.geometry.chunk_tokens)
    rig.handle(Tick())


@pytest.mark.parametrize(("load_ms", "is_read"), [(0, True), (30, True), (90, False)])
def test_what_is_compared_with_computing_includes_the_load(load_ms: int, is_read: bool) -> None:
    rig, keys = RemoteRig(), chain(1, 5)
    measured(rig, read_ms=60, load_ms=load_ms)
    assert rig.client.lookup(keys).coming == 5
    rig.has(keys, 0, 1, 2, 3, 4)
    assert bool(rig.asked(FetchRemote)) == is_read


@pytest.mark.parametrize("is_old", [False, True])
def test_a_store_that_was_slow_is_measured_again_after_a_minute(is_old: bool) -> None:
    rig, keys = RemoteRig(), chain(1, 5)
    measured(rig, read_ms=200, age_ns=RATE_HOLDS_NS + 1 if is_old else RATE_HOLDS_NS - MILLISECOND_NS)
    assert rig.client.lookup(keys).coming == 5
    rig.has(keys, 0, 1, 2, 3, 4)
    assert bool(rig.asked(FetchRemote)) == is_old


def test_a_rate_that_is_old_lets_one_prompt_through() -> None:
    rig, prompts = RemoteRig(), [chain(seed, 5) for seed in (1, 2, 3)]
    measured(rig, read_ms=200, age_ns=RATE_HOLDS_NS + 1)
    for keys in prompts:
        assert rig.client.lookup(keys).coming == 5
        rig.has(keys, 0, 1, 2, 3, 4)
    assert len(rig.asked(FetchRemote)) == 5


def test_a_prefix_for_which_there_is_no_room_is_computed() -> None:
    rig, keys = RemoteRig(), chain(1, 5)
    rig.core.chunks.chunks_max = 0
    assert rig.client.lookup(keys).coming == 5
    rig.has(keys, 0, 1, 2, 3, 4)
    assert not rig.asked(FetchRemote)
    assert_nobody_waits(rig, keys)


@pytest.mark.parametrize("part", ["parent", "epoch", "namespace"])
def test_a_head_of_something_else_is_not_read(part: str) -> None:
    rig, keys = RemoteRig(), chain(1, 2)
    rig.client.lookup(keys)
    probe = rig.asked(ProbeRemote)[-1]
    size = rig.core.chunks.spaces[NAMESPACE].parts[0].payload_bytes
    right = Head(NAMESPACE, key(keys, 0), NO_PARENT, EPOCH, 3, 0, (Shard(0, 0, size, 5),))
    wrong = right._replace(**{part: EPOCH + 1 if part == "epoch" else b"x" * 32})
    rig.report(rig.mover, RemoteProbed(probe.job, [encode(wrong), b""], [], 1))
    assert not rig.asked(FetchRemote)
    rig.wait_ms(ABSENT_MS)
    assert rig.client.lookup(keys).coming == 0, "it is left alone for longer than what was absent"


# ---------------------------------------------------------------- what is told of it


def explained(rig: RemoteRig, keys: bytes) -> tuple[str, float]:
    document = rig.client.ask(Explain(rig.number(), NAMESPACE, keys)).document
    (found,) = decode_explanations(document)
    return found.remote, found.remote_s


def test_explain_says_how_far_the_store_is_with_a_missed_chunk() -> None:
    rig, keys = RemoteRig(), chain(1, 3)
    assert explained(rig, keys) == ("unasked", 0.0)
    rig.client.lookup(keys)
    assert explained(rig, keys) == ("probing", 0.0)
    rig.has(keys, 0, 1)
    assert explained(rig, keys) == ("reading", 0.0)
    fetch, _ = rig.asked(FetchRemote)
    rig.report(rig.mover, RemoteEnded(fetch.job, "digest", 1))
    assert explained(rig, keys) == ("aside", 60.0)
    rig.wait_ms(500)
    assert explained(rig, keys) == ("aside", 59.5)
    assert explained(rig, key(keys, 2)) == ("aside", 1.5), "it was not there"


def test_explain_says_what_keeps_a_namespace_from_the_store() -> None:
    rig, keys = RemoteRig(), chain(1, 1)
    rig.core.remotes[0].owe_clear(NAMESPACE, None, rig.core.fresh_epoch)
    assert explained(rig, keys)[0] == "clear-owed"
    rig.core.remotes[0].epochs[NAMESPACE].taken()
    rig.wait_ms(6_000)
    assert explained(rig, keys)[0] == "unknown"
    rig.report(rig.mover, RemoteIs("it is not mounted", []))
    assert explained(rig, keys)[0] == "unusable"
    assert explained(rig, b"")[0] == ""


def test_without_a_store_explain_says_nothing_of_one() -> None:
    client = Client(Rig()).register()
    (found,) = decode_explanations(client.ask(Explain(1, NAMESPACE, chain(1, 1))).document)
    assert found.remote == ""


def test_a_chunk_from_the_store_is_told_to_subscribers_as_any_other_in_dram() -> None:
    """Nothing is told of chunks that the store alone has: this server may never read them."""
    rig, keys = RemoteRig(kv_events=True), chain(1, 3)

    def told() -> list[KvEvent]:
        return [event for effect in rig.effects if isinstance(effect, Tell) for event in effect.events][1:]

    rig.client.lookup(keys)
    rig.has(keys, 0, 1)
    first, second = rig.asked(FetchRemote)
    assert told() == [], "nothing after that it has begun"
    rig.report(rig.mover, RemoteEnded(first.job, "", 1, NUMBER.pack(9)))
    assert told() == [ChunksStored(NAMESPACE, "dram", b"", [key(keys, 0)], CHUNK_TOKENS)]
    rig.report(rig.mover, RemoteEnded(second.job, "", 1, NUMBER.pack(9)))
    assert told()[1:] == [ChunksStored(NAMESPACE, "dram", key(keys, 0), [key(keys, 1)], CHUNK_TOKENS)]
