"""Several remote stores: which one is asked, what happens when it does not bring, what goes where, and Clear."""

import random

import pytest

from kvserver.remote.announcement import GONE, STORED, WRITTEN
from kvserver.remote.chunk_value import decode
from kvserver.remote.epoch_lease import LEASE_S
from kvserver.service.base.effects import PutNamespace
from kvserver.service.base.events import ArenaGrew, MoverGone
from kvserver.service.remote import writes
from kvserver.service.remote.reads import ABSENT_MS
from kvserver.service.remote.writes import LEFT_OUT_MS
from kvserver.service.requests.pursuits import LEFT_MS
from kvserver.service.service import Service
from kvserver.service.state.remote_tier import MEASURED_NS
from kvserver.tiers.records import decode_document
from kvserver.wire.explanation import decode_explanations
from kvserver.wire.messages import KEY_BYTES, Clear, Cleared, Error, Explain
from kvserver.wire.orders import Cancel, FetchRemote, ProbeRemote, RemoteEnded, RemoteIs, RemoteProbed, WriteRemoteNote
from tests.rigs.brain_rig import CHUNK_TOKENS, NAMESPACE, SLAB_BYTES, Client, chain, key
from tests.rigs.several_rig import SUM, SeveralRig

CHUNKS = 5
KEYS = chain(1, CHUNKS)


# ---------------------------------------------------------------- which one is asked


@pytest.mark.parametrize(
    ("rates", "first"),
    [
        ({}, "near"),
        ({"near": 10**9, "far": 10**8}, "near"),
        ({"near": 10**8, "far": 10**9}, "far"),
        ({"near": 10**9}, "far"),
        ({"far": 10**9}, "near"),
    ],
    ids=["none measured", "near faster", "far faster", "far unknown", "near unknown"],
)
def test_the_store_that_reads_faster_is_asked_alone_and_before_it_one_that_was_not_measured(
    rates: dict[str, int], first: str
) -> None:
    rig = SeveralRig()
    rig.measured(**rates)
    assert rig.client.lookup(KEYS).coming == CHUNKS
    assert {name: rig.probes(name) for name in ("near", "far")} == {"near": [], "far": [], first: [KEYS]}
    assert rig.client.lookup(KEYS).coming == CHUNKS
    assert len(rig.probes("near") + rig.probes("far")) == 1, "one probe for what is asked for twice"


def test_a_store_that_answers_late_counts_as_slower() -> None:
    rig, other = SeveralRig(), chain(2, CHUNKS)
    rig.measured(near=10**9, far=9 * 10**8)
    rig.client.lookup(KEYS)
    rig.wait_ms(250)
    rig.has("near", KEYS)
    assert rig.client.lookup(other).coming == CHUNKS
    assert (rig.probes("near"), rig.probes("far")) == ([KEYS], [other])


def test_a_store_that_has_much_to_read_counts_as_slower() -> None:
    rig, other = SeveralRig(), chain(2, CHUNKS)
    rig.measured(near=10**9, far=9 * 10**8)
    rig.client.lookup(KEYS)
    rig.has("near", KEYS, *range(CHUNKS))
    assert rig.fetches("near")
    rig.client.lookup(other)
    assert rig.probes("far") == [other]


def test_a_store_from_which_nothing_was_read_for_long_counts_as_one_that_was_not_measured() -> None:
    rig = SeveralRig()
    rig.client.lookup(KEYS)
    rig.brings("near", KEYS, 0, 1)
    rig.measured(near=10**6)
    near = rig.store("near")
    assert near.seconds_for(10**6, rig.now_ns + MEASURED_NS) > 0.0
    assert near.seconds_for(10**6, rig.now_ns + MEASURED_NS + 1) == 0.0


@pytest.mark.parametrize("stalls", ["probe", "reads"])
def test_a_store_that_was_left_goes_behind_until_ten_minutes_have_passed(stalls: str) -> None:
    """It is never measured, because nothing of it arrives."""
    rig = SeveralRig()
    rig.measured(far=10**9)
    first = []
    for seed in range(10, 16):
        keys = chain(seed, CHUNKS)
        for name in ("near", "far"):
            rig.tells(name, keys, (0, WRITTEN))
        probes = len(rig.probes("near"))
        rig.client.lookup(keys)
        first.append("near" if len(rig.probes("near")) > probes else "far")
        if first[-1] == "near":
            if stalls == "reads":
                rig.has("near", keys, *range(CHUNKS))
            rig.wait_ms(rig.bounds.remote_patience_ms)
            rig.client.lookup(keys)
        rig.brings("far", keys, *range(CHUNKS))
        assert rig.client.lookup(keys).chunks == CHUNKS
    assert first == ["near", *["far"] * 5]
    near = rig.store("near")
    assert not near.reads.measured
    assert near.tried_ns is not None
    assert near.seconds_for(1, near.tried_ns + MEASURED_NS) >= rig.bounds.remote_patience_ms / 1e3
    assert near.seconds_for(1, near.tried_ns + MEASURED_NS + 1) == 0.0


def test_a_store_whose_chunks_are_too_small_to_measure_goes_first_once() -> None:
    rig = SeveralRig()
    rig.measured(far=10**9)
    for seed in range(10, 13):
        rig.client.lookup(chain(seed, CHUNKS))
        rig.brings("near" if seed == 10 else "far", chain(seed, CHUNKS), *range(CHUNKS))
    assert not rig.store("near").reads.measured
    assert (len(rig.probes("near")), len(rig.probes("far"))) == (1, 2)


def test_the_answer_to_a_new_measurement_counts_alone() -> None:
    """A store that was slow ten minutes ago is as fast as it is now."""
    rig, near = SeveralRig(), chain(2, CHUNKS)
    rig.client.lookup(KEYS)
    rig.wait_ms(250)
    rig.has("near", KEYS)
    store = rig.store("near")
    assert store.answer_s == 0.25
    store.tried_ns = rig.now_ns - MEASURED_NS - 1
    rig.tells("near", near, (0, WRITTEN))
    rig.client.lookup(near)
    rig.wait_ms(50)
    rig.has("near", near)
    assert store.answer_s == 0.05


def test_a_store_that_is_said_to_have_the_chunk_is_asked_before_a_faster_one() -> None:
    rig = SeveralRig()
    rig.measured(near=10**9, far=10**7)
    rig.tells("far", KEYS, (0, WRITTEN))
    rig.client.lookup(KEYS)
    assert (rig.probes("near"), rig.probes("far")) == ([], [KEYS])


def test_a_chunk_that_no_store_is_said_to_have_is_tried_in_one_and_then_looked_for_in_none() -> None:
    rig = SeveralRig()
    for name in ("near", "far"):
        rig.tells(name, KEYS, (0, STORED))
    for seed in range(2, 8):
        rig.client.lookup(chain(seed, CHUNKS))
    assert (len(rig.probes("near")), len(rig.probes("far"))) == (1, 1), "each tries its first one"
    counters = rig.service.counters  # they are counted after the replies
    assert rig.store("near").counts.plain["unannounced"] == 4
    assert rig.store("far").counts.plain["unannounced"] == 4
    assert counters.remote_unannounced == 4, "a lookup for which no store was asked counts once"


# ---------------------------------------------------------------- the next one


def test_what_one_store_does_not_have_is_asked_of_the_other_and_of_neither_again() -> None:
    rig = SeveralRig()
    assert rig.client.lookup(KEYS).coming == CHUNKS
    rig.brings("near", KEYS, 0, 1)
    found = rig.client.lookup(KEYS)
    assert (found.chunks, found.coming) == (2, 3)
    assert rig.probes("far") == [KEYS[2 * KEY_BYTES :]]
    rig.brings("far", KEYS, 2, 3)
    found = rig.client.lookup(KEYS)
    assert (found.chunks, found.coming) == (4, 1)
    assert rig.probes("near") == [KEYS, KEYS[4 * KEY_BYTES :]]
    rig.has("near", KEYS)
    found = rig.client.lookup(KEYS)
    assert (found.chunks, found.coming) == (4, 0)
    assert len(rig.probes("near") + rig.probes("far")) == 3
    assert (rig.store("near").counts.plain["reads"], rig.store("far").counts.plain["reads"]) == (2, 2)
    assert rig.core.counters.remote_reads == 4


def stop_answering(rig: SeveralRig, how: str) -> None:
    """The store near cannot be used from now on."""
    match how:
        case "not open":
            rig.report(rig.mover("near"), RemoteIs("it is not mounted", []))
        case "left alone":
            rig.report(rig.mover("near"), RemoteIs("", ["10.0.0.7:6379"]))
        case "no mover":
            rig.handle(MoverGone(rig.mover("near"), "signal 9"))
        case "no note":
            rig.silent.add("near")
            rig.wait_ms(int(LEASE_S * 1000) + 500)
        case "clear owed":
            rig.silent.add("near")
            rig.store("near").owe_clear(NAMESPACE, None, rig.core.fresh_epoch)


@pytest.mark.parametrize("how", ["not open", "left alone", "no mover", "no note", "clear owed"])
def test_a_store_that_cannot_be_used_leaves_all_to_the_other(how: str) -> None:
    rig = SeveralRig()
    stop_answering(rig, how)
    assert rig.client.lookup(KEYS).coming == CHUNKS
    assert rig.probes("far") == [KEYS]
    rig.brings("far", KEYS, *range(CHUNKS))
    assert rig.client.lookup(KEYS).chunks == CHUNKS


@pytest.mark.parametrize("fault", ["remote-slow", "remote-down", "left-alone", "cancelled"])
def test_a_probe_that_fails_is_one_for_the_other_store(fault: str) -> None:
    rig = SeveralRig()
    rig.client.lookup(KEYS)
    (probe,) = rig.asked("near", ProbeRemote)
    rig.report(rig.mover("near"), RemoteProbed(probe.job, [b""] * CHUNKS, [fault] * CHUNKS, 1))
    assert rig.client.lookup(KEYS).coming == CHUNKS
    assert rig.probes("far") == [KEYS]
    assert rig.store("near").counts.failures == {("probe", fault): 1}
    assert rig.store("far").counts.failures == {}


@pytest.mark.parametrize("fault", ["remote-slow", "gone", "digest"])
def test_a_chunk_that_one_store_cannot_give_comes_from_the_other(fault: str) -> None:
    rig = SeveralRig()
    rig.client.lookup(KEYS)
    rig.has("near", KEYS, 0, 1, 2)
    first, second, third = rig.fetches("near")
    rig.report(rig.mover("near"), RemoteEnded(second.job, fault, 1))
    for order in (first, third):
        rig.report(rig.mover("near"), RemoteEnded(order.job, "", 1, SUM))
    assert rig.client.lookup(KEYS).chunks == 1
    assert rig.probes("far") == [KEYS[KEY_BYTES:]]
    rig.brings("far", KEYS, 1, 2, 3, 4)
    assert rig.client.lookup(KEYS).chunks == CHUNKS


@pytest.mark.parametrize("tokens_min", [0, 3 * CHUNK_TOKENS])
def test_a_store_whose_prefix_is_too_short_leaves_it_to_the_other(tokens_min: int) -> None:
    rig = SeveralRig(tokens_min=tokens_min)
    rig.client.lookup(KEYS)
    rig.has("near", KEYS, 0, 1)
    assert bool(rig.fetches("near")) == (not tokens_min)
    if tokens_min:
        assert rig.client.lookup(KEYS).coming == CHUNKS
        assert rig.probes("far") == [KEYS]


def test_a_store_that_does_not_answer_in_time_is_left_for_the_other_in_the_same_lookup() -> None:
    rig = SeveralRig()
    rig.client.lookup(KEYS)
    rig.wait_ms(rig.bounds.remote_patience_ms)
    assert rig.client.lookup(KEYS).coming == CHUNKS
    (late,) = rig.asked("near", ProbeRemote)
    assert (rig.asked("near", Cancel), rig.probes("far")) == ([Cancel(late.job)], [KEYS])
    rig.has("near", KEYS, *range(CHUNKS))
    assert rig.asked("near", FetchRemote) == [], "an answer that comes too late begins nothing"
    rig.brings("far", KEYS, *range(CHUNKS))
    assert rig.client.lookup(KEYS).chunks == CHUNKS


def test_reads_that_come_too_late_keep_their_slots_until_they_end_and_bring_nothing() -> None:
    rig = SeveralRig()
    rig.client.lookup(KEYS)
    rig.has("near", KEYS, *range(CHUNKS))
    late = rig.fetches("near")
    rig.report(rig.mover("near"), RemoteEnded(late[0].job, "", 1, SUM))
    rig.wait_ms(rig.bounds.remote_patience_ms)
    found = rig.client.lookup(KEYS)
    assert (found.chunks, found.coming) == (1, CHUNKS - 1)
    assert rig.asked("near", Cancel) == [Cancel(order.job) for order in late[1:]]
    assert rig.probes("far") == [KEYS[KEY_BYTES:]]
    rig.has("far", KEYS, *range(1, CHUNKS))
    now = rig.fetches("far")
    assert not {order.slots for order in now} & {order.slots for order in late}
    for order in late[1:]:
        rig.report(rig.mover("near"), RemoteEnded(order.job, "", 1, SUM))
    assert rig.client.lookup(KEYS).chunks == 1, "late bytes are not those that are waited for"
    part = rig.core.chunks.spaces[NAMESPACE].parts[0]
    assert rig.store("near").counts.plain["reads"] == rig.core.counters.remote_reads == 1
    assert rig.store("near").counts.plain["read_bytes"] == rig.core.counters.remote_read_bytes == part.payload_bytes
    for order in now:
        rig.report(rig.mover("far"), RemoteEnded(order.job, "", 1, SUM))
    assert rig.client.lookup(KEYS).chunks == CHUNKS
    assert not rig.core.chunks.orphans


def test_a_store_that_is_left_in_the_middle_of_a_prompt_is_not_asked_again_for_the_rest() -> None:
    rig = SeveralRig()
    rig.client.lookup(KEYS)
    rig.has("near", KEYS, *range(CHUNKS))
    rig.report(rig.mover("near"), RemoteEnded(rig.fetches("near")[0].job, "", 1, SUM))
    rig.wait_ms(rig.bounds.remote_patience_ms)
    rig.client.lookup(KEYS)
    rig.has("far", KEYS)
    found = rig.client.lookup(KEYS)
    assert (found.chunks, found.coming) == (1, 0)
    assert (len(rig.probes("near")), len(rig.probes("far"))) == (1, 1)


def test_a_store_that_is_slow_is_given_up_for_none_that_cannot_be_used() -> None:
    rig = SeveralRig()
    rig.client.lookup(KEYS)
    rig.has("near", KEYS, *range(CHUNKS))
    rig.report(rig.mover("far"), RemoteIs("it is not mounted", []))
    rig.wait_ms(rig.bounds.remote_patience_ms)
    assert rig.client.lookup(KEYS).coming == 0
    assert rig.asked("near", Cancel) == []
    for order in rig.fetches("near"):
        rig.report(rig.mover("near"), RemoteEnded(order.job, "", 1, SUM))
    assert rig.client.lookup(KEYS).chunks == CHUNKS


def test_a_store_that_is_slow_is_not_given_up_for_one_that_is_said_to_have_nothing() -> None:
    rig = SeveralRig()
    rig.tells("near", KEYS, (0, WRITTEN))
    rig.tells("far", KEYS)
    rig.client.lookup(KEYS)
    rig.has("near", KEYS, *range(CHUNKS))
    rig.wait_ms(rig.bounds.remote_patience_ms)
    assert rig.client.lookup(KEYS).coming == 0
    assert (rig.asked("near", Cancel), rig.probes("far")) == ([], [])
    for order in rig.fetches("near"):
        rig.report(rig.mover("near"), RemoteEnded(order.job, "", 1, SUM))
    assert rig.client.lookup(KEYS).chunks == CHUNKS


def test_a_store_that_was_left_is_asked_after_one_that_may_have_the_chunks_and_is_not_left_for_it_again() -> None:
    """Its reads would be thrown away again and again."""
    rig = SeveralRig()
    rig.tells("near", KEYS, (0, WRITTEN))
    rig.client.lookup(KEYS)
    rig.has("near", KEYS, *range(CHUNKS))
    rig.wait_ms(rig.bounds.remote_patience_ms)
    assert rig.client.lookup(KEYS).coming == CHUNKS
    rig.has("far", KEYS)
    for order in rig.fetches("near"):
        rig.report(rig.mover("near"), RemoteEnded(order.job, "", 1, SUM))
    rig.wait_ms(max(LEFT_MS, ABSENT_MS))
    assert rig.client.lookup(KEYS).coming == CHUNKS
    assert (rig.probes("near"), rig.probes("far")) == ([KEYS], [KEYS, KEYS])
    rig.has("far", KEYS)
    assert rig.client.lookup(KEYS).coming == CHUNKS
    rig.has("near", KEYS, *range(CHUNKS))
    left = len(rig.asked("near", Cancel))
    rig.wait_ms(rig.bounds.remote_patience_ms)
    assert rig.client.lookup(KEYS).coming == 0
    assert len(rig.asked("near", Cancel)) == left
    for order in rig.fetches("near"):
        rig.report(rig.mover("near"), RemoteEnded(order.job, "", 1, SUM))
    assert rig.client.lookup(KEYS).chunks == CHUNKS


def test_two_stores_that_do_not_answer_are_asked_once_each_until_a_pause_is_over() -> None:
    rig = SeveralRig()
    for _ in range(10):
        rig.client.lookup(KEYS)
        rig.wait_ms(rig.bounds.remote_patience_ms // 2)
    assert len(rig.probes("near")) == len(rig.probes("far")) == 1
    assert rig.client.lookup(KEYS).coming == 0
    rig.wait_ms(max(LEFT_MS, ABSENT_MS))
    assert rig.client.lookup(KEYS).coming == CHUNKS


# ---------------------------------------------------------------- what goes where


@pytest.mark.parametrize(
    ("near", "far", "after_store", "after_use"),
    [
        ("through", "through", "near far", ""),
        ("through", "reuse", "near", "far"),
        ("never", "through", "far", ""),
        ("reuse", "never", "", "near"),
    ],
)
def test_each_store_is_written_as_its_own_policy_says(near: str, far: str, after_store: str, after_use: str) -> None:
    rig = SeveralRig(near=f"write={near}", far=f"write={far}")
    every = list(range(CHUNKS))
    rig.client.store(KEYS)
    assert [name for name in ("near", "far") if rig.writes(name, KEYS) == every] == after_store.split()
    rig.client.lookup(KEYS)
    assert [name for name in ("near", "far") if rig.writes(name, KEYS) == every] == after_use.split()
    rig.client.lookup(KEYS)
    assert rig.writes("near", KEYS) == rig.writes("far", KEYS) == []


def test_what_came_from_one_store_is_written_to_no_other() -> None:
    rig = SeveralRig(near="write=through", far="write=through")
    rig.client.lookup(KEYS)
    rig.brings("near", KEYS, 0, 1, 2)
    for _ in range(3):
        assert rig.client.lookup(KEYS[: 3 * KEY_BYTES]).chunks == 3
        assert rig.writes("near", KEYS) == rig.writes("far", KEYS) == []


def test_what_one_store_has_from_before_a_clear_is_not_in_the_other_after_it() -> None:
    """Another server clears. This one has read the new note of near, and believes the old one of far."""
    rig = SeveralRig(near="write=through", far="write=through")
    rig.epochs["near"] = 177
    rig.wait_ms(1_100)
    epochs = [tier.epoch_of(rig.core.chunks.spaces[NAMESPACE], rig.now_ns) for tier in rig.core.remotes]
    assert epochs == [177, 78]
    rig.client.lookup(KEYS)
    rig.has("near", KEYS)
    rig.client.lookup(KEYS)
    rig.brings("far", KEYS, 0, 1, 2)
    rig.epochs["far"] = 178
    assert rig.client.lookup(KEYS).chunks == 3
    assert rig.writes("near", KEYS) == []
    rig.wait_ms(1_100)
    assert rig.client.lookup(KEYS).chunks == 0


def test_what_came_from_a_store_that_has_lost_it_meanwhile_is_written_to_no_other() -> None:
    rig = SeveralRig(near="write=through", far="write=through")
    rig.tells("near", KEYS, (0, WRITTEN), (1, WRITTEN), (2, WRITTEN))
    rig.tells("far", KEYS)
    rig.client.lookup(KEYS)
    rig.brings("near", KEYS, 0, 1, 2)
    rig.tells("near", KEYS, (0, GONE), (1, GONE), (2, GONE))
    assert not rig.store("near").may_have(rig.core.chunks.spaces[NAMESPACE], key(KEYS, 0), rig.now_ns)
    rig.client.lookup(KEYS)
    assert rig.writes("far", KEYS) == []


def test_what_continues_a_chunk_that_is_not_written_is_not_written_either_unless_the_store_has_that_chunk() -> None:
    rig = SeveralRig(near="write=through", far="write=through")
    rig.client.lookup(KEYS)
    rig.brings("near", KEYS, 0, 1)
    rig.client.store(KEYS)
    assert (rig.writes("near", KEYS), rig.writes("far", KEYS)) == ([2, 3, 4], [])
    rig.tells("far", KEYS, (0, WRITTEN), (1, WRITTEN))
    rig.client.lookup(KEYS)
    assert rig.writes("far", KEYS) == [], "it is not looked at again at once"
    rig.wait_ms(LEFT_OUT_MS)
    rig.client.lookup(KEYS)
    assert (rig.writes("near", KEYS), rig.writes("far", KEYS)) == ([], [2, 3, 4])


def test_prefixes_that_came_from_another_store_keep_no_others_from_being_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their chunks are not walked at each use, so the steps of a turn are left for other prefixes."""
    rig, own = SeveralRig(near="write=through", far="write=through"), chain(2, 3)
    rig.client.lookup(KEYS)
    rig.brings("near", KEYS, *range(CHUNKS))
    rig.client.lookup(KEYS)
    assert rig.writes("far", KEYS) == []
    monkeypatch.setattr(writes, "STEPS_MAX", 9)
    for _ in range(3):
        rig.client.lookup(KEYS)
    assert list(rig.store("far").used), "no turn has come between"
    rig.client.store(own)
    assert rig.writes("far", own) == [0, 1, 2]


def test_a_chunk_that_an_engine_stored_goes_to_both_although_one_of_them_is_said_to_have_it() -> None:
    rig = SeveralRig(near="write=through", far="write=through")
    rig.tells("near", KEYS, (0, WRITTEN))
    rig.client.store(KEYS)
    assert (rig.writes("near", KEYS), rig.writes("far", KEYS)) == ([1, 2, 3, 4], [0, 1, 2, 3, 4])


def restarted(rig: SeveralRig) -> None:
    """Another brain, which has the chunks of the first one, and does not know from where they came."""
    records = b"".join(effect.records for effect in rig.effects if hasattr(effect, "records"))
    documents = {effect.number: effect.document for effect in rig.effects if isinstance(effect, PutNamespace)}
    rig.service = Service(rig.bounds, random.Random(8).randbytes, documents=list(documents.items()), records=records)
    rig.handle(ArenaGrew(rig.bounds.arena_bytes // SLAB_BYTES, ""))
    rig.client = Client(rig).register()
    rig.told.clear()
    rig.pass_ticks()


def test_after_a_restart_a_chunk_that_another_store_may_have_is_not_written() -> None:
    rig = SeveralRig(near="write=through", far="write=through")
    rig.client.store(KEYS)
    restarted(rig)
    assert rig.client.lookup(KEYS).chunks == CHUNKS
    assert rig.writes("near", KEYS) == rig.writes("far", KEYS) == [], "neither store has told what it has"
    rig.tells("near", KEYS, (0, WRITTEN), (1, WRITTEN))
    rig.tells("far", KEYS)
    rig.wait_ms(LEFT_OUT_MS)
    rig.tells("near", KEYS)
    rig.tells("far", KEYS)
    rig.client.lookup(KEYS)
    assert (rig.writes("near", KEYS), rig.writes("far", KEYS)) == ([2, 3, 4], [])


# ---------------------------------------------------------------- Clear


def test_a_clear_is_answered_when_every_store_knows_of_it() -> None:
    rig = SeveralRig()
    rig.client.store(KEYS)
    rig.silent = {"far"}
    request = Clear(rig.number(), NAMESPACE)
    assert rig.client.ask(request) is None
    rig.wait_ms(200)
    assert rig.epochs["near"] != 77
    assert (rig.client.peer, request.id) not in rig.answers
    (order,) = rig.asked("far", WriteRemoteNote)
    rig.silent = set()
    rig._obey(rig.mover("far"), order)
    rig.wait_ms(100)
    assert rig.answers[rig.client.peer, request.id] == Cleared(request.id, CHUNKS)
    assert len({77, 78, *rig.epochs.values()}) == 4


def test_a_clear_that_one_store_does_not_confirm_is_refused_and_names_it_and_the_other_is_used() -> None:
    rig = SeveralRig()
    rig.silent = {"far"}
    request = Clear(rig.number(), NAMESPACE)
    rig.client.ask(request)
    rig.wait_ms(1_000)
    assert rig.client.lookup(KEYS).coming == CHUNKS
    assert (rig.probes("near"), rig.probes("far")) == ([KEYS], [])
    rig.wait_ms(rig.bounds.job_ttl_ms)
    answer = rig.answers[rig.client.peer, request.id]
    assert isinstance(answer, Error)
    assert answer.code == "remote-clear"
    assert "the remote store far has not confirmed it" in answer.message
    assert [tier.clears_owed for tier in rig.core.remotes] == [0, 1]


def test_a_namespace_that_was_cleared_in_one_store_leaves_dram_and_the_other_store_is_used_on() -> None:
    rig = SeveralRig()
    rig.client.store(KEYS)
    rig.epochs["far"] = 178
    rig.wait_ms(1_100)
    assert rig.client.lookup(KEYS).chunks == 0
    near, far = (tier.epoch_of(rig.core.chunks.spaces[NAMESPACE], rig.now_ns) for tier in rig.core.remotes)
    assert (near, far) == (77, 178)


def test_a_read_counts_by_the_note_of_its_own_store() -> None:
    """The note of the other one is not known any more."""
    rig = SeveralRig()
    rig.client.lookup(KEYS)
    rig.has("near", KEYS, 0, 1)
    first, second = rig.fetches("near")
    rig.silent = {"far"}
    rig.wait_ms(int(LEASE_S * 1000) + 500)
    rig.report(rig.mover("near"), RemoteEnded(first.job, "", 1, SUM))
    assert rig.client.lookup(KEYS).chunks == 1
    rig.silent = {"near"}
    rig.wait_ms(int(LEASE_S * 1000) + 500)
    rig.report(rig.mover("near"), RemoteEnded(second.job, "", 1, SUM))
    assert rig.client.lookup(KEYS).chunks == 1
    assert rig.store("near").counts.failures == {("read", "stale"): 1}


def kept(rig: SeveralRig) -> dict[str, int]:
    """The epochs that the next brain finds."""
    document = [effect.document for effect in rig.effects if isinstance(effect, PutNamespace)][-1]
    decoded = decode_document(document)
    assert decoded is not None
    assert decoded.epoch is None
    return decoded.epochs


def test_the_next_brain_knows_the_epoch_of_each_store_and_notices_a_clear_in_any() -> None:
    rig = SeveralRig()
    rig.client.store(KEYS)
    assert kept(rig) == {"near": 77, "far": 78}
    restarted(rig)
    assert rig.client.lookup(KEYS).chunks == CHUNKS
    rig.epochs["far"] = 178
    restarted(rig)
    assert rig.client.lookup(KEYS).chunks == 0
    rig.wait_ms(1_100)
    assert kept(rig) == {"near": 77, "far": 178}


def test_a_store_that_was_not_named_before_may_have_been_cleared_so_chunks_go() -> None:
    rig = SeveralRig()
    rig.client.store(KEYS)
    near, far = rig.bounds.remotes
    rig.bounds = rig.core.bounds.__class__(
        **{name: getattr(rig.bounds, name) for name in rig.bounds.__slots__ if name != "remotes"},
        remotes=(near, far._replace(name="other")),
    )
    rig.epochs["other"] = 79
    restarted(rig)
    assert rig.client.lookup(KEYS).chunks == 0


# ---------------------------------------------------------------- what is told


def test_explain_says_it_of_each_store() -> None:
    rig = SeveralRig()
    rig.client.lookup(KEYS)
    rig.report(rig.mover("far"), RemoteIs("it is not mounted", []))
    (found,) = decode_explanations(rig.client.ask(Explain(rig.number(), NAMESPACE, KEYS)).document)
    assert (found.remote, found.remotes) == ("", {"near": ("probing", 0.0), "far": ("unusable", 0.0)})


def test_status_has_both_with_what_each_of_them_moved() -> None:
    rig = SeveralRig(near="write=through")
    rig.client.store(KEYS)
    rig.writes("near", KEYS)
    rig.report(rig.mover("far"), RemoteIs("it is not mounted", []))
    status = rig.service.status(rig.now_ns)
    assert [(remote.name, remote.usable, remote.counted["writes"]) for remote in status.remotes] == [
        ("near", True, CHUNKS),
        ("far", False, 0),
    ]
    assert {mover.device for mover in status.movers} >= {"remote:near", "remote:far"}
    assert "the remote store far is not used: it is not mounted" in status.warnings
    assert status.counters["remote_writes"] == CHUNKS


def test_a_chunk_with_other_bytes_is_counted_for_its_store() -> None:
    rig = SeveralRig()
    rig.client.lookup(KEYS)
    rig.has("near", KEYS, 0)
    (fetch,) = rig.fetches("near")
    assert decode(fetch.head).key == key(KEYS, 0)
    rig.report(rig.mover("near"), RemoteEnded(fetch.job, "digest", 1))
    found = {device: n for (tier, device, _), n in rig.core.counters.digest_mismatches.items() if tier == "remote"}
    assert found == {"near": 1, "far": 0}
