"""Prompts that an engine of one server computes and an engine of another one awaits, through a store between them."""

import pytest

from kvserver.cli.explain import sentences
from kvserver.remote.announcement import COMES, FORETOLD_BITS, GONE, KIND_BITS, WRITTEN, foretold, mark_of
from kvserver.service.base.events import MoverGone
from kvserver.wire.explanation import decode_explanations
from kvserver.wire.messages import KEY_BYTES, Explain, Release, Retrieved
from kvserver.wire.orders import AnnounceRemote, FetchRemote, ListenRemote, ProbeRemote, PutRemote
from tests.rigs.brain_rig import CHUNK_TOKENS, NAMESPACE, chain, is_refusal, key
from tests.rigs.fleet_rig import Fleet, Machine
from tests.rigs.pledge_scene import CHUNKS, KEYS

HEARD_MS = 1_000
"""Within it each server has told what it has to tell, and has heard what the other one told."""


def word(chunk: int, *, comes: bool = True, keys: bytes = KEYS, epoch: int = 77) -> int:
    return foretold(mark_of(NAMESPACE, epoch, key(keys, chunk)), comes=comes)


def words(fleet: Fleet) -> list[int]:
    """What was foretold or taken back, in this order."""
    return [mark for mark in fleet.store.log if not mark & KIND_BITS]


def is_written(fleet: Fleet) -> list[bool]:
    return [key(KEYS, chunk) in fleet.store.heads for chunk in range(CHUNKS)]


def believes(fleet: Fleet, keys: bytes = KEYS) -> int:
    """How many chunks of a prompt the second server promises to who may wait. The wait is given up."""
    found = fleet.second.await_(keys)
    fleet.second.other.ask(Release(fleet.second.rig.number(), found.lease))
    fleet.second.rig.pass_ms(50)
    return found.awaited


# ---------------------------------------------------------------- who computes


def test_what_is_pledged_is_told_at_once_and_what_is_stored_is_written_at_once() -> None:
    fleet = Fleet()
    fleet.first.pledge()
    fleet.pass_ms(HEARD_MS)
    assert words(fleet) == [word(chunk) for chunk in range(CHUNKS)]
    assert is_written(fleet) == [False] * CHUNKS
    for chunk in range(CHUNKS):
        fleet.first.store(chunk, chunk + 1)
        fleet.first.rig.pass_ms(100)
        assert is_written(fleet) == [at <= chunk for at in range(CHUNKS)]
    assert len(words(fleet)) == CHUNKS, "nothing came late, so nothing was told again"


@pytest.mark.parametrize("write", ["reuse", "through"])
def test_without_the_setting_nothing_is_foretold(write: str) -> None:
    fleet = Fleet(f"&write={write}")
    fleet.first.store(0, 2)
    fleet.first.pledge()
    fleet.pass_ms(HEARD_MS)
    fleet.first.store(2, CHUNKS)
    fleet.pass_ms(HEARD_MS)
    assert not words(fleet)
    assert is_written(fleet) == [write == "through"] * CHUNKS, "it is written as ever"
    assert not believes(fleet)


def test_what_was_held_before_the_pledge_is_foretold_and_written_too() -> None:
    fleet = Fleet()
    fleet.first.store(0, 2)
    fleet.pass_ms(HEARD_MS)
    assert is_written(fleet) == [False] * CHUNKS
    fleet.first.rig.holds.add(PutRemote)
    fleet.first.pledge()
    fleet.pass_ms(HEARD_MS)
    assert words(fleet) == [word(chunk) for chunk in range(CHUNKS)]
    fleet.first.rig.holds.clear()
    fleet.pass_ms(HEARD_MS)
    assert is_written(fleet) == [True, True, False, False, False]


def test_what_the_store_has_is_not_foretold() -> None:
    fleet = Fleet("&pledged=write&write=through")
    fleet.first.store(0, 2)
    fleet.pass_ms(HEARD_MS)
    fleet.first.pledge()
    fleet.pass_ms(HEARD_MS)
    assert words(fleet) == [word(chunk) for chunk in range(2, CHUNKS)]


def test_what_comes_no_more_is_taken_back_and_what_was_stored_before_is_written() -> None:
    fleet = Fleet()
    pledge = fleet.first.pledge().pledge
    fleet.pass_ms(HEARD_MS)
    fleet.first.rig.holds.add(PutRemote)
    fleet.first.store(0, 2)
    fleet.first.unpledge(pledge)
    fleet.pass_ms(HEARD_MS)
    assert words(fleet)[CHUNKS:] == [word(chunk, comes=False) for chunk in range(2, CHUNKS)]
    assert believes(fleet) == 2
    fleet.first.rig.holds.clear()
    fleet.pass_ms(HEARD_MS)
    assert is_written(fleet) == [True, True, False, False, False]
    assert len(words(fleet)) == 2 * CHUNKS - 2
    assert not fleet.first.rig.core.remotes[0].foretellings.rows


def test_what_comes_with_another_prompt_is_not_taken_back() -> None:
    """Two prompts go on from one that was held."""
    fleet = Fleet()
    fleet.first.store(0, 2)
    fleet.first.rig.holds.add(PutRemote)
    other = KEYS[: 2 * KEY_BYTES] + chain(9, 2)
    pledge = fleet.first.pledge().pledge
    fleet.first.pledge(other)
    fleet.pass_ms(HEARD_MS)
    fleet.first.unpledge(pledge)
    fleet.pass_ms(HEARD_MS)
    assert believes(fleet, other) == 4
    assert believes(fleet) == 2


def test_what_cannot_be_written_is_taken_back() -> None:
    fleet = Fleet()
    fleet.first.pledge()
    fleet.pass_ms(HEARD_MS)
    fleet.store.refuses.add(PutRemote)
    fleet.first.store(0, 2)
    fleet.pass_ms(HEARD_MS)
    assert words(fleet)[CHUNKS:] == [word(chunk, comes=False) for chunk in range(CHUNKS)]
    assert not believes(fleet)


def test_what_is_not_written_in_time_is_taken_back() -> None:
    """The store takes it slowly, or the mover hangs."""
    fleet = Fleet(pledge_patience_ms=3_000)
    fleet.first.pledge()
    fleet.pass_ms(HEARD_MS)
    fleet.first.rig.holds.add(PutRemote)
    fleet.first.store(0, CHUNKS)
    fleet.pass_ms(2_000)
    assert len(words(fleet)) == CHUNKS
    fleet.pass_ms(2_000)
    assert words(fleet)[CHUNKS:] == [word(chunk, comes=False) for chunk in range(CHUNKS)]


def test_a_prompt_whose_beginning_is_not_to_be_written_is_not_foretold() -> None:
    """The store had it and lost it. Chunks that this server holds are not written again there."""
    fleet = Fleet("&pledged=write&write=through")
    fleet.first.store(0, 2)
    fleet.pass_ms(HEARD_MS)
    fleet.store.log += [mark_of(NAMESPACE, 77, key(KEYS, chunk)) | GONE for chunk in range(2)]
    fleet.pass_ms(HEARD_MS)
    fleet.first.pledge()
    fleet.pass_ms(HEARD_MS)
    assert not words(fleet)


def test_nobody_awaits_what_lies_behind_a_chunk_that_the_store_has_lost() -> None:
    fleet = Fleet("&pledged=write&write=through")
    fleet.first.store(0, 2)
    fleet.pass_ms(HEARD_MS)
    fleet.store.log.append(mark_of(NAMESPACE, 77, key(KEYS, 0)) | GONE)
    fleet.pass_ms(HEARD_MS)
    fleet.first.pledge()
    fleet.pass_ms(HEARD_MS)
    assert not believes(fleet)


def test_what_others_said_is_there_is_taken_back_when_the_engine_does_not_store_it() -> None:
    """The store has lost a chunk of which a mark says that it is there. No server writes it."""
    fleet = Fleet()
    pledge = fleet.first.pledge().pledge
    fleet.pass_ms(HEARD_MS)
    found = fleet.second.await_()
    last = fleet.second.retrieve(found.lease, CHUNKS - 1, CHUNKS)
    fleet.store.log.append(mark_of(NAMESPACE, 77, key(KEYS, CHUNKS - 1)) | WRITTEN)
    fleet.first.store(0, CHUNKS - 1)
    fleet.pass_ms(HEARD_MS)
    assert words(fleet) == [word(chunk) for chunk in range(CHUNKS)]
    assert fleet.second.answer(last) is None, "the engine computes it all the same"
    fleet.first.unpledge(pledge)
    fleet.pass_ms(HEARD_MS)
    assert words(fleet)[CHUNKS:] == [word(CHUNKS - 1, comes=False)]
    assert is_refusal(fleet.second.answer(last), "device", "not-coming")


def test_what_is_stored_and_not_written_because_others_said_that_it_is_there_is_taken_back() -> None:
    fleet = Fleet()
    fleet.first.pledge()
    fleet.pass_ms(HEARD_MS)
    found = fleet.second.await_()
    last = fleet.second.retrieve(found.lease, CHUNKS - 1, CHUNKS)
    fleet.store.log.append(mark_of(NAMESPACE, 77, key(KEYS, CHUNKS - 1)) | WRITTEN)
    fleet.first.rig.pass_ms(HEARD_MS)
    fleet.first.store(0, CHUNKS)
    fleet.pass_ms(HEARD_MS)
    assert is_written(fleet) == [True] * (CHUNKS - 1) + [False]
    assert words(fleet)[CHUNKS:] == [word(CHUNKS - 1, comes=False)]
    assert is_refusal(fleet.second.answer(last), "device", "not-coming")


def test_what_the_store_is_found_to_have_lost_is_written_when_the_engine_stores_it() -> None:
    """The mark is older than the pledge. Whoever awaits the chunk finds that it is gone."""
    fleet = Fleet()
    fleet.store.log.append(mark_of(NAMESPACE, 77, key(KEYS, CHUNKS - 1)) | WRITTEN)
    fleet.pass_ms(HEARD_MS)
    fleet.first.pledge()
    fleet.pass_ms(HEARD_MS)
    found = fleet.second.await_()
    assert found.awaited == CHUNKS
    whole = fleet.second.retrieve(found.lease, 0, CHUNKS, more=False)
    fleet.first.store(0, CHUNKS - 1)
    fleet.pass_ms(HEARD_MS)
    fleet.first.store(CHUNKS - 1, CHUNKS)
    fleet.pass_ms(3 * HEARD_MS)
    assert is_written(fleet) == [True] * CHUNKS
    assert isinstance(fleet.second.answer(whole), Retrieved)
    assert words(fleet) == [word(chunk) for chunk in range(CHUNKS)]


def test_what_another_server_writes_meanwhile_is_read() -> None:
    """Two servers compute a prompt. One of them takes back what it need not write."""
    fleet = Fleet()
    fleet.first.pledge()
    fleet.pass_ms(HEARD_MS)
    found = fleet.second.await_()
    whole = fleet.second.retrieve(found.lease, 0, CHUNKS, more=False)
    fleet.first.store(0, 1)
    fleet.pass_ms(HEARD_MS)
    other = Machine(fleet.store, "&pledged=write&write=through")
    other.store(0, CHUNKS)
    other.rig.pass_ms(HEARD_MS)
    fleet.first.rig.pass_ms(HEARD_MS)
    fleet.first.store(1, CHUNKS)
    fleet.first.rig.pass_ms(HEARD_MS)
    assert words(fleet)[CHUNKS:] == [word(chunk, comes=False) for chunk in range(1, CHUNKS)]
    fleet.pass_ms(HEARD_MS)
    assert isinstance(fleet.second.answer(whole), Retrieved)


def test_a_prompt_for_which_there_is_too_little_room_is_foretold_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvserver.service.requests.foretold.FORETELLING_MAX", 3)
    fleet = Fleet()
    fleet.first.pledge()
    fleet.pass_ms(HEARD_MS)
    fleet.first.store(0, CHUNKS)
    fleet.pass_ms(HEARD_MS)
    assert words(fleet) == [word(chunk) for chunk in range(3)]
    assert is_written(fleet) == [True] * 3 + [False] * 2
    assert not fleet.first.rig.core.remotes[0].foretellings.rows


def test_what_takes_long_is_told_again() -> None:
    fleet = Fleet(remote_foretold_ms=3_000, pledge_patience_ms=60_000)
    fleet.first.pledge()
    fleet.pass_ms(900)
    assert len(words(fleet)) == CHUNKS
    fleet.pass_ms(1_000)
    assert len(words(fleet)) == 2 * CHUNKS
    fleet.first.store(0, CHUNKS - 1)
    fleet.pass_ms(1_000)
    assert words(fleet)[2 * CHUNKS :] == [word(CHUNKS - 1)], "only what has not come"
    for _ in range(10):
        assert believes(fleet) >= 1, "it is believed all the time"
        fleet.pass_ms(1_000)


@pytest.mark.parametrize("is_open", [False, True])
def test_what_is_told_again_while_the_store_takes_nothing_leaves_room_for_what_has_come(
    monkeypatch: pytest.MonkeyPatch, is_open: bool
) -> None:
    monkeypatch.setattr("kvserver.service.state.announcements.UNTOLD_MAX", 30)
    fleet = Fleet("&pledged=write&write=reuse", remote_foretold_ms=3_000, pledge_patience_ms=60_000)
    fleet.first.pledge()
    fleet.pass_ms(HEARD_MS)
    if is_open:
        fleet.first.rig.holds |= {AnnounceRemote, PutRemote}
    else:
        fleet.first.rig.store_is("away")
    fleet.first.rig.pass_ms(30_000)
    waits = fleet.first.rig.core.remotes[0].epochs[NAMESPACE].announcements.untold
    assert len(waits) < 30 // 2 + CHUNKS, "it was told again and again to nobody"
    fleet.first.rig.holds.clear()
    fleet.first.rig.store_is("")
    fleet.pass_ms(HEARD_MS)
    told = len(words(fleet))
    fleet.pass_ms(2_000)
    assert len(words(fleet)) > told, "it is told again as before"
    fleet.first.store(0, CHUNKS)
    fleet.pass_ms(HEARD_MS)
    assert is_written(fleet) == [True] * CHUNKS


def test_a_clear_ends_what_is_foretold_without_a_word() -> None:
    """Chunks of another epoch are not looked for."""
    fleet = Fleet()
    fleet.first.pledge()
    fleet.pass_ms(HEARD_MS)
    fleet.store.epoch = 78
    fleet.pass_ms(7_000)
    assert not fleet.first.rig.core.remotes[0].foretellings.rows
    assert len(words(fleet)) == CHUNKS


# ---------------------------------------------------------------- who awaits


def test_the_other_server_reads_each_chunk_when_it_is_written() -> None:
    fleet = Fleet()
    fleet.first.pledge()
    fleet.pass_ms(HEARD_MS)
    found = fleet.second.await_()
    assert (found.chunks, found.awaited, found.producer) == (0, CHUNKS, "remote")
    parts = [fleet.second.retrieve(found.lease, chunk, chunk + 1, more=chunk + 1 < CHUNKS) for chunk in range(CHUNKS)]
    for chunk in range(CHUNKS):
        fleet.pass_ms(300)
        assert [fleet.second.answer(part) for part in parts[chunk:]] == [None] * (CHUNKS - chunk)
        fleet.first.store(chunk, chunk + 1)
        fleet.pass_ms(300)
        assert isinstance(fleet.second.answer(parts[chunk]), Retrieved)
    assert fleet.second.ended() == {"stored": 1}
    fleet.second.check_nothing_is_left()
    assert fleet.second.pinned == 0


def test_chunks_that_were_written_before_come_with_those_that_are_foretold() -> None:
    fleet = Fleet("&pledged=write&write=through")
    fleet.first.store(0, 2)
    fleet.first.pledge()
    fleet.pass_ms(HEARD_MS)
    assert is_written(fleet) == [True, True, False, False, False]
    found = fleet.second.await_()
    assert (found.chunks, found.awaited) == (0, CHUNKS)
    whole = fleet.second.retrieve(found.lease, 0, CHUNKS, more=False)
    fleet.pass_ms(HEARD_MS)
    assert len(fleet.second.rig.done[FetchRemote]) == 2
    fleet.first.store(2, CHUNKS)
    fleet.pass_ms(HEARD_MS)
    assert isinstance(fleet.second.answer(whole), Retrieved)


def test_what_is_only_in_the_store_is_looked_for_as_ever() -> None:
    """Who asks again is promised what has arrived (decision 0016)."""
    fleet = Fleet("&pledged=write&write=through")
    fleet.first.store(0, CHUNKS)
    fleet.pass_ms(HEARD_MS)
    found = fleet.second.await_()
    assert (found.awaited, found.coming, found.lease) == (0, CHUNKS, 0)


def test_a_lookup_that_may_not_wait_is_told_nothing() -> None:
    fleet = Fleet()
    fleet.first.pledge()
    fleet.pass_ms(HEARD_MS)
    found = fleet.second.other.lookup(KEYS)
    assert (found.chunks, found.lease) == (0, 0)
    assert not fleet.second.rig.core.pledges


def test_a_word_that_is_taken_back_ends_the_wait_when_all_before_has_come() -> None:
    fleet = Fleet()
    pledge = fleet.first.pledge().pledge
    fleet.pass_ms(HEARD_MS)
    found = fleet.second.await_()
    parts = [fleet.second.retrieve(found.lease, chunk, chunk + 1) for chunk in range(CHUNKS)]
    fleet.first.rig.holds.add(PutRemote)
    fleet.first.store(0, 2)
    fleet.first.unpledge(pledge)
    fleet.pass_ms(HEARD_MS)
    assert fleet.second.answer(parts[1]) is None
    fleet.first.rig.holds.clear()
    fleet.pass_ms(HEARD_MS)
    assert [isinstance(fleet.second.answer(part), Retrieved) for part in parts[:2]] == [True, True]
    for part in parts[2:]:
        assert is_refusal(fleet.second.answer(part), "device", "not-coming", "took its word back")
    assert fleet.second.ended() == {"withdrawn": 1}


def test_a_server_that_falls_silent_is_waited_for_no_longer_than_the_patience() -> None:
    fleet = Fleet(pledge_patience_ms=3_000)
    fleet.first.pledge()
    fleet.pass_ms(HEARD_MS)
    found = fleet.second.await_()
    part = fleet.second.retrieve(found.lease, 0, 1, deadline_ms=100_000)
    fleet.second.rig.pass_ms(2_900)
    assert fleet.second.answer(part) is None
    fleet.second.rig.pass_ms(200)
    assert is_refusal(fleet.second.answer(part), "device", "not-coming", "no progress")
    assert not believes(fleet), "it was believed once, and so are others not made to wait for it"


def test_a_server_that_falls_silent_is_believed_for_a_bounded_time() -> None:
    fleet = Fleet(remote_foretold_ms=6_000, pledge_patience_ms=60_000)
    fleet.first.pledge()
    fleet.pass_ms(HEARD_MS)
    found = fleet.second.await_()
    part = fleet.second.retrieve(found.lease, 0, 1, deadline_ms=100_000)
    fleet.second.rig.pass_ms(4_500)
    assert fleet.second.answer(part) is None
    assert fleet.second.await_().awaited == CHUNKS
    fleet.second.rig.pass_ms(1_600)
    assert is_refusal(fleet.second.answer(part), "device", "not-coming", "not heard")
    assert fleet.second.ended() == {"silent": 1}
    assert not believes(fleet)


def test_words_of_unknown_age_are_not_believed() -> None:
    """A server that reads a log for the first time, or after a pause, does not know when a word was given."""
    fleet = Fleet(pledge_patience_ms=60_000)
    fleet.first.pledge()
    fleet.first.rig.pass_ms(500)
    late = Fleet(pledge_patience_ms=60_000)
    late.store.log += fleet.store.log
    late.second.rig.core.remotes[0].epochs[NAMESPACE].announcements.mover_ended()
    late.pass_ms(HEARD_MS)
    assert not believes(late)
    late.store.log += fleet.store.log
    late.pass_ms(HEARD_MS)
    assert believes(late) == CHUNKS


def test_what_was_told_during_a_pause_counts_from_its_beginning() -> None:
    fleet = Fleet(remote_foretold_ms=6_000, pledge_patience_ms=60_000)
    fleet.second.rig.holds.add(ListenRemote)
    fleet.store.log += [word(chunk) for chunk in range(CHUNKS)]
    fleet.second.rig.pass_ms(4_000)
    fleet.second.rig.holds.clear()
    fleet.second.rig.pass_ms(1_000)
    assert believes(fleet) == CHUNKS
    fleet.second.rig.pass_ms(1_500)
    assert not believes(fleet), "it may have been told 6 s ago"


def test_a_store_that_cannot_be_used_ends_the_wait_at_once() -> None:
    fleet = Fleet()
    fleet.first.pledge()
    fleet.pass_ms(HEARD_MS)
    found = fleet.second.await_()
    part = fleet.second.retrieve(found.lease, 0, 1)
    fleet.second.rig.store_is("it is not mounted")
    fleet.second.rig.pass_ms(50)
    assert is_refusal(fleet.second.answer(part), "device", "not-coming", "store")
    assert not believes(fleet)


def test_a_mover_that_dies_ends_the_wait() -> None:
    fleet = Fleet()
    fleet.first.pledge()
    fleet.pass_ms(HEARD_MS)
    found = fleet.second.await_()
    part = fleet.second.retrieve(found.lease, 0, 1)
    mover = fleet.second.rig.core.remotes[0].mover
    assert mover is not None
    fleet.second.rig.handle(MoverGone(mover.number, "signal 9"))
    fleet.second.rig.pass_ms(50)
    assert is_refusal(fleet.second.answer(part), "device", "not-coming")


@pytest.mark.parametrize("fails", [FetchRemote, ProbeRemote, None])
def test_a_chunk_that_was_written_and_cannot_be_read_ends_the_wait(fails: type | None) -> None:
    fleet = Fleet()
    fleet.first.pledge()
    fleet.pass_ms(HEARD_MS)
    found = fleet.second.await_()
    parts = [fleet.second.retrieve(found.lease, chunk, chunk + 1) for chunk in range(2)]
    fleet.first.store(0, 1)
    fleet.pass_ms(HEARD_MS)
    assert isinstance(fleet.second.answer(parts[0]), Retrieved)
    if fails is not None:
        fleet.store.refuses.add(fails)
        fleet.first.store(1, 2)
    else:  # somebody told that it is there, it is not, and nobody tells that it comes
        fleet.store.log += [word(1, comes=False), mark_of(NAMESPACE, 77, key(KEYS, 1)) | WRITTEN]
    fleet.pass_ms(HEARD_MS)
    assert is_refusal(fleet.second.answer(parts[1]), "device", "not-coming")
    assert isinstance(fleet.second.answer(fleet.second.retrieve(found.lease, 0, 1)), Retrieved), "what came is used"


def test_a_chunk_that_the_store_had_lost_is_waited_for() -> None:
    """An old mark says that it is there. The engine of the first server computes it, because it is not."""
    fleet = Fleet()
    fleet.store.log.append(mark_of(NAMESPACE, 77, key(KEYS, 0)) | WRITTEN)
    fleet.second.rig.pass_ms(HEARD_MS)
    fleet.store.log += [word(chunk) for chunk in range(CHUNKS)]
    fleet.second.rig.pass_ms(HEARD_MS)
    found = fleet.second.await_()
    assert found.awaited == CHUNKS
    part = fleet.second.retrieve(found.lease, 0, 1)
    fleet.second.rig.pass_ms(HEARD_MS)
    assert len(fleet.second.rig.done[ProbeRemote]) >= 1
    assert fleet.second.answer(part) is None, "it may still come"


def test_a_clear_elsewhere_ends_the_wait() -> None:
    fleet = Fleet()
    fleet.first.pledge()
    fleet.pass_ms(HEARD_MS)
    found = fleet.second.await_()
    part = fleet.second.retrieve(found.lease, 0, 1)
    fleet.store.epoch = 78
    fleet.second.rig.pass_ms(1_500)
    assert is_refusal(fleet.second.answer(part), "device", "not-coming")
    assert not believes(fleet)


def test_nothing_is_read_when_nobody_waits_any_more() -> None:
    fleet = Fleet()
    fleet.first.pledge()
    fleet.pass_ms(HEARD_MS)
    found = fleet.second.await_()
    fleet.second.other.ask(Release(fleet.second.rig.number(), found.lease))
    fleet.first.store(0, CHUNKS)
    fleet.pass_ms(HEARD_MS)
    assert not fleet.second.rig.done[FetchRemote]
    assert not fleet.second.rig.core.pledges


@pytest.mark.parametrize("lost", [False, True])
def test_no_server_awaits_its_own_word(lost: bool) -> None:
    """An engine that was killed comes back, and its prompts come again before the server has heard what it told."""
    fleet = Fleet(pledge_patience_ms=60_000)
    rig = fleet.first.rig
    rig.holds.add(ListenRemote)
    pledge = fleet.first.pledge().pledge
    rig.pass_ms(500)
    if lost:
        fleet.store.refuses.add(AnnounceRemote)
    fleet.first.unpledge(pledge)
    rig.pass_ms(500)
    if not lost:
        del fleet.store.log[-CHUNKS:]
    rig.holds.clear()
    rig.pass_ms(1_000)
    assert words(fleet) == [word(chunk) for chunk in range(CHUNKS)]
    assert not fleet.first.await_().awaited


def test_an_engine_here_that_computes_it_is_awaited_rather_than_another_server() -> None:
    fleet = Fleet()
    fleet.first.pledge()
    fleet.pass_ms(HEARD_MS)
    fleet.second.pledge()
    found = fleet.second.await_()
    assert (found.awaited, found.producer) == (CHUNKS, "producer")
    assert not fleet.second.await_(by=fleet.second.producer).awaited, "nor does it await others for what it computes"


def test_a_chunk_that_an_engine_here_stores_counts_as_well() -> None:
    fleet = Fleet()
    fleet.first.pledge()
    fleet.pass_ms(HEARD_MS)
    found = fleet.second.await_()
    whole = fleet.second.retrieve(found.lease, 0, CHUNKS, more=False)
    fleet.second.store(0, CHUNKS)
    assert isinstance(fleet.second.answer(whole), Retrieved)


def test_news_are_read_sooner_while_somebody_waits_for_them() -> None:
    fleet = Fleet()
    listens = fleet.second.rig.done[ListenRemote]
    fleet.second.await_()
    before = len(listens)
    fleet.pass_ms(HEARD_MS)
    assert len(listens) - before <= 3, "nobody foretells anything"
    fleet.first.pledge(chain(2, CHUNKS))
    fleet.pass_ms(HEARD_MS)
    before = len(listens)
    for _ in range(10):
        fleet.second.await_()
        fleet.pass_ms(50)
    assert len(listens) - before >= 9, "somebody does, and an engine asks again and again"
    fleet.pass_ms(HEARD_MS)
    before = len(listens)
    fleet.second.await_(chain(2, CHUNKS))
    fleet.pass_ms(HEARD_MS)
    assert len(listens) - before >= 15, "it awaits, so the server reads by itself"


def test_a_pause_after_a_failure_is_kept_although_somebody_waits() -> None:
    fleet = Fleet()
    fleet.first.pledge(chain(2, CHUNKS))
    fleet.pass_ms(HEARD_MS)
    fleet.store.refuses.add(ListenRemote)
    fleet.pass_ms(HEARD_MS)
    before = len(fleet.second.rig.done[ListenRemote])
    for _ in range(20):
        fleet.second.await_()
        fleet.pass_ms(50)
    assert len(fleet.second.rig.done[ListenRemote]) - before <= 1


def test_explain_says_that_another_server_computes_it() -> None:
    fleet = Fleet()
    fleet.first.pledge()
    fleet.pass_ms(HEARD_MS)
    fleet.second.await_()
    reply = fleet.second.other.ask(Explain(fleet.second.rig.number(), NAMESPACE, KEYS))
    (found,) = decode_explanations(reply.document)
    assert "engine of another server (by the store remote) computes it now" in "\n".join(sentences(found))


def test_too_little_is_not_waited_for() -> None:
    fleet = Fleet()
    (tier,) = fleet.second.rig.core.remotes
    tier.remote = tier.remote._replace(tokens_min=CHUNKS * CHUNK_TOKENS)
    fleet.first.pledge()
    fleet.first.pledge(chain(2, CHUNKS - 1))
    fleet.pass_ms(HEARD_MS)
    assert believes(fleet) == CHUNKS
    assert not believes(fleet, chain(2, CHUNKS - 1))


def test_each_chunk_is_read_although_it_brings_few_tokens_alone() -> None:
    fleet = Fleet()
    (tier,) = fleet.second.rig.core.remotes
    tier.remote = tier.remote._replace(tokens_min=CHUNKS * CHUNK_TOKENS)
    fleet.first.pledge()
    fleet.pass_ms(HEARD_MS)
    found = fleet.second.await_()
    part = fleet.second.retrieve(found.lease, 0, 1)
    fleet.first.store(0, 1)
    fleet.pass_ms(HEARD_MS)
    assert isinstance(fleet.second.answer(part), Retrieved)


def test_the_words_of_others_take_no_more_room_than_those_of_one_engine() -> None:
    fleet = Fleet(pledges_total_max=2)
    for seed in range(3, 7):
        fleet.store.log += [word(chunk, keys=chain(seed, CHUNKS)) for chunk in range(CHUNKS)]
    fleet.pass_ms(HEARD_MS)
    promised = [fleet.second.await_(chain(seed, CHUNKS)).awaited for seed in range(3, 7)]
    assert promised == [CHUNKS, 0, 0, 0], "three quarters of two are one"


def test_a_word_for_a_part_of_a_prompt_promises_that_part() -> None:
    fleet = Fleet()
    fleet.store.log += [word(chunk) for chunk in (0, 1, 3, 4)]
    fleet.pass_ms(HEARD_MS)
    assert believes(fleet) == 2
    assert believes(fleet, KEYS[:KEY_BYTES]) == 1


def test_releases_that_do_not_know_these_words_take_them_for_nothing() -> None:
    """They keep the kind of a mark in its lowest two bits, and 0 is none of theirs."""
    for chunk in range(CHUNKS):
        for comes in (True, False):
            assert not word(chunk, comes=comes) & KIND_BITS
    assert word(0) & ~FORETOLD_BITS == word(0, comes=False) & ~FORETOLD_BITS
    assert word(0) ^ word(0, comes=False) == COMES
