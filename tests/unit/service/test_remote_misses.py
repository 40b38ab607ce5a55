"""Misses that no store is asked for: how long what was settled of them holds, and how they are counted."""

import pytest

from kvserver.remote.announcement import STORED, WRITTEN, KnownChunks, pack
from kvserver.service.base.events import MoverGone
from kvserver.service.state import remote_tier
from kvserver.service.state.announcements import HEARD_MS, MILLISECOND_NS, Announcements
from kvserver.wire.messages import Clear
from kvserver.wire.orders import ListenRemote, ReadRemoteNote, RemoteHeard, RemoteNoteRead
from tests.rigs.announcing_rig import CHUNKS, KEYS, Announcing, mark
from tests.rigs.brain_rig import NAMESPACE, chain
from tests.rigs.remote_rig import EPOCH, RemoteRig
from tests.rigs.several_rig import SeveralRig


def unannounced(rig: RemoteRig | SeveralRig) -> int:
    return rig.service.counters.remote_unannounced


def misses(rig: RemoteRig | SeveralRig, *seeds: int) -> None:
    """Looks up prompts that nobody has."""
    for seed in seeds:
        assert rig.client.lookup(chain(seed, CHUNKS)).coming == 0


def test_a_miss_is_counted_for_the_store_after_its_reply() -> None:
    rig = Announcing()
    before = unannounced(rig)
    misses(rig, 2)
    assert rig.core.counters.remote_unannounced == before, "the reply is out, and nobody has waited for the counting"
    rig.service.lookup_took(1000)
    assert rig.core.counters.remote_unannounced == before + 1
    assert rig.core.remotes[0].counts.plain["unannounced"] == before + 1


def test_a_miss_is_passed_over_as_unannounced_until_the_epoch_counts_no_more() -> None:
    rig = Announcing()
    misses(rig, 2)
    before = unannounced(rig)
    until_ns = int(rig.core.remotes[0].epochs[NAMESPACE].lease.until_s * 1e9)
    rig.now_ns = until_ns - 1
    misses(rig, 3)
    assert unannounced(rig) == before + 1
    rig.now_ns = until_ns
    misses(rig, 4)
    assert unannounced(rig) == before + 1, "nobody knows whether an announcement would count"


def test_announcements_are_believed_until_a_try_is_due_and_until_they_are_too_old() -> None:
    announcements = Announcements()
    announcements.listen_begins(EPOCH, 0)
    announcements.heard(EPOCH, 1000, is_all=True)
    assert announcements.believed_until_ns(EPOCH, 1000) == 0, "the first one is tried"
    announcements.tries(1000)
    old_ns = 1000 + HEARD_MS * MILLISECOND_NS
    assert announcements.believed_until_ns(EPOCH, 1000) == old_ns
    announcements.heard(EPOCH, try_ns := announcements.try_at_ns - 1, is_all=True)
    assert announcements.believed_until_ns(EPOCH, try_ns) == try_ns + 1
    assert announcements.believed_until_ns(EPOCH + 1, try_ns) == 0, "of another epoch nothing was heard"


def test_no_miss_is_passed_over_any_more_once_more_was_told_than_can_be_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_tier, "KnownChunks", lambda: KnownChunks(4))
    rig = Announcing()
    while len(listens := rig.asked(ListenRemote)) == rig.listened:
        rig.pass_time(rig.bounds.remote_listen_ms)
    misses(rig, 2)
    told = [4 * number + WRITTEN for number in range(1, 6)]
    rig.report(rig.mover, RemoteHeard(listens[-1].job, "", pack(told), True))
    assert rig.client.lookup(KEYS).coming == CHUNKS, "what was forgotten may have told of it"


def test_after_a_clear_here_no_miss_is_passed_over_as_unannounced_and_none_is_looked_for() -> None:
    rig = Announcing(mark(0, WRITTEN))
    misses(rig, 2)
    before = unannounced(rig)
    rig.ask(rig.client.peer, Clear(rig.number(), NAMESPACE))
    misses(rig, 1, 3)
    assert (rig.probes(), unannounced(rig)) == (0, before)


def test_when_its_mover_has_ended_a_miss_is_not_passed_over_as_unannounced() -> None:
    rig = Announcing()
    misses(rig, 2)
    before = unannounced(rig)
    rig.handle(MoverGone(rig.mover, "signal 9"))
    misses(rig, 3)
    assert unannounced(rig) == before, "the next mover reads from the beginning what was told"


def test_once_the_epoch_is_known_again_an_announced_chunk_is_looked_for_at_once() -> None:
    rig = Announcing(mark(0, WRITTEN))
    rig.now_ns = int(rig.core.remotes[0].epochs[NAMESPACE].lease.until_s * 1e9)
    assert rig.client.lookup(KEYS).coming == 0, "whether its epoch counts is not known"
    rig.wait_ms(1)
    note = rig.asked(ReadRemoteNote)[-1]
    rig.report(rig.mover, RemoteNoteRead(note.job, "", "here", EPOCH, b""))
    assert rig.client.lookup(KEYS).coming == CHUNKS


def test_a_store_whose_epoch_is_unknown_keeps_no_miss_from_being_passed_over_by_another() -> None:
    rig = SeveralRig()
    for name in ("near", "far"):
        rig.tells(name, KEYS, (0, STORED))
    for seed in (2, 3):
        rig.client.lookup(chain(seed, CHUNKS))
    assert (len(rig.probes("near")), len(rig.probes("far"))) == (1, 1), "each tries its first one"
    misses(rig, 4)
    before = unannounced(rig)
    counted = {name: rig.store(name).counts.plain["unannounced"] for name in ("near", "far")}
    until_ns = int(rig.store("near").epochs[NAMESPACE].lease.until_s * 1e9)
    rig.silent.add("near")
    while rig.now_ns < until_ns:
        rig.wait_ms(50)
    misses(rig, 5, 6)
    assert unannounced(rig) == before + 2
    after = {name: rig.store(name).counts.plain["unannounced"] for name in ("near", "far")}
    assert after == {"near": counted["near"], "far": counted["far"] + 2}
