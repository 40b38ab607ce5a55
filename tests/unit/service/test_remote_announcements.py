"""What a server makes of announcements: which chunks it looks for, which it writes, and what it tells."""

import msgspec
import pytest

from kvserver.remote.announcement import GONE, STORED, WRITTEN, KnownChunks, pack
from kvserver.service.base.events import MoverGone
from kvserver.service.remote.announcements import CATCHING_UP_MAX, REFUSED_MS
from kvserver.service.state import remote_tier
from kvserver.service.state.announcements import DOUBTED_MS, HEARD_MS, TRIED_EVERY, TRIES_APART_MS
from kvserver.wire.messages import KEY_BYTES
from kvserver.wire.orders import (
    FetchRemote,
    ListenRemote,
    PutRemote,
    ReadRemoteNote,
    RemoteEnded,
    RemoteHeard,
    RemoteNoteRead,
    RemoteProbed,
)
from tests.rigs.announcing_rig import CHUNKS, KEYS, Announcing, mark
from tests.rigs.brain_rig import CHUNK_TOKENS, FULL, Client, chain
from tests.rigs.remote_rig import EPOCH, RemoteRig


def test_a_chunk_of_which_nobody_has_told_is_not_looked_for() -> None:
    rig = Announcing()
    assert rig.client.lookup(KEYS).coming == 0
    assert rig.probes() == 0


def test_a_chunk_that_was_told_to_be_written_is_looked_for_and_what_follows_it_too() -> None:
    rig = Announcing(mark(0, STORED), mark(0, WRITTEN))
    assert rig.client.lookup(KEYS).coming == CHUNKS
    (probe,) = rig.sought()
    assert probe.keys == KEYS


def test_a_chunk_that_is_only_stored_elsewhere_or_gone_is_not_looked_for() -> None:
    rig = Announcing(mark(0, STORED))
    rig.client.lookup(KEYS)
    rig.hear(mark(0, WRITTEN), mark(0, GONE))
    rig.client.lookup(KEYS)
    assert rig.probes() == 0


def test_the_first_chunk_that_is_missing_decides() -> None:
    rig = Announcing(mark(0, WRITTEN), mark(3, WRITTEN))
    rig.client.store(KEYS[: 2 * KEY_BYTES])
    assert rig.client.lookup(KEYS).coming == 0, "of chunk 2 nobody has told"
    rig.client.store(KEYS[: 3 * KEY_BYTES])
    assert rig.client.lookup(KEYS).coming == 2


def test_before_all_was_heard_every_chunk_is_looked_for() -> None:
    for rig in (RemoteRig(), Announcing(mark(4, WRITTEN), is_all=False)):
        assert rig.client.lookup(KEYS).coming == CHUNKS


def test_a_long_log_is_read_on_at_once() -> None:
    rig = Announcing()
    listens = len(rig.asked(ListenRemote))
    rig.pass_time(rig.bounds.remote_listen_ms)
    rig.report(rig.mover, RemoteHeard(rig.asked(ListenRemote)[-1].job, "", pack([mark(4, WRITTEN)]), is_all=False))
    rig.wait_ms(1)
    assert len(rig.asked(ListenRemote)) == listens + 2


def test_when_nothing_is_heard_any_more_every_chunk_is_looked_for_again() -> None:
    rig = Announcing()
    for _ in range(2 * HEARD_MS // rig.bounds.remote_listen_ms):
        rig.hear(fault="remote-down")
    assert rig.client.lookup(KEYS).coming == CHUNKS


def test_after_a_clear_elsewhere_every_chunk_is_looked_for_until_the_new_log_was_read() -> None:
    """The mover answers what the brain asked before, which says nothing of the new epoch."""
    rig = Announcing()
    rig.wait_ms(1000)
    old = rig.asked(ListenRemote)[-1]
    rig.report(rig.mover, RemoteNoteRead(rig.asked(ReadRemoteNote)[-1].job, "", "here", EPOCH + 1, b""))
    assert rig.client.lookup(KEYS).coming == CHUNKS
    rig.report(rig.mover, RemoteHeard(old.job, "", b"", is_all=True))
    rig.wait_ms(rig.bounds.remote_listen_ms)
    assert rig.asked(ListenRemote)[-1].epoch == EPOCH + 1
    assert rig.client.lookup(chain(2, CHUNKS)).coming == CHUNKS
    rig.report(rig.mover, RemoteHeard(rig.asked(ListenRemote)[-1].job, "", b"", is_all=True))
    assert rig.client.lookup(chain(3, CHUNKS)).coming == 0


def test_every_chunk_is_looked_for_until_all_announcements_were_read() -> None:
    rig = Announcing(mark(4, WRITTEN), is_all=False)
    for seed in (2, 3, 4):
        assert rig.client.lookup(chain(seed, CHUNKS)).coming == CHUNKS
    rig.hear()
    assert rig.client.lookup(chain(5, CHUNKS)).coming == CHUNKS, "one is tried all the same"
    assert rig.client.lookup(chain(6, CHUNKS)).coming == 0


def test_after_its_mover_has_ended_every_chunk_is_looked_for_until_all_was_heard() -> None:
    rig = Announcing()
    rig.handle(MoverGone(rig.mover, "signal 9"))
    rig.wait_ms(rig.bounds.disk_restart_ms)
    rig.meet_mover()
    rig.pass_time(400)
    assert rig.client.lookup(KEYS).coming == CHUNKS
    rig.hear()
    assert rig.client.lookup(chain(2, CHUNKS)).coming == 0


def test_some_chunks_are_tried_all_the_same_and_one_that_is_there_makes_all_doubtful() -> None:
    rig = Announcing()
    rig.pass_time(TRIES_APART_MS)
    for seed in range(2, TRIED_EVERY + 1):
        rig.client.lookup(chain(seed, CHUNKS))
    assert rig.probes() == 0
    last = chain(TRIED_EVERY + 1, CHUNKS)
    rig.client.lookup(last)
    assert rig.probes() == 1
    rig.has(last, 0)
    rig.report(rig.mover, RemoteEnded(rig.asked(FetchRemote)[-1].job, "remote-slow", 1))
    rig.client.lookup(chain(TRIED_EVERY + 2, CHUNKS))
    assert rig.probes() == 2, "nobody told of the last one, so others may be there, too"
    rig.has(chain(TRIED_EVERY + 2, CHUNKS))
    assert rig.told() == [mark(0, WRITTEN, last)]
    for _ in range(DOUBTED_MS // 400 + 5):
        rig.pass_time(400)
        if len(rig.asked(ListenRemote)) > rig.listened:
            rig.hear()
    rig.client.lookup(chain(TRIED_EVERY + 3, CHUNKS))
    assert rig.probes() == 3, "after ten minutes one is tried in any case"
    rig.has(chain(TRIED_EVERY + 3, CHUNKS))
    rig.client.lookup(chain(TRIED_EVERY + 4, CHUNKS))
    assert rig.probes() == 3


def test_of_a_thousand_lookups_that_miss_fewer_than_ten_ask_the_store() -> None:
    rig = Announcing()
    for seed in range(2, 1002):
        assert rig.client.lookup(chain(seed, CHUNKS)).chunks == 0
        for probe in rig.sought()[rig.answered :]:
            rig.report(rig.mover, RemoteProbed(probe.job, [b""] * CHUNKS, [], 1))
        rig.answered = rig.probes()
        rig.pass_time(3)
    assert 0 < rig.probes() < 10


def test_however_many_lookups_miss_one_in_a_second_is_tried() -> None:
    rig = Announcing()
    for seed in range(2, 3 * TRIED_EVERY):
        rig.client.lookup(chain(seed, CHUNKS))
    assert rig.probes() == 0, "the first one was tried in this second"
    rig.pass_time(TRIES_APART_MS)
    for seed in range(3 * TRIED_EVERY, 6 * TRIED_EVERY):
        rig.client.lookup(chain(seed, CHUNKS))
    assert rig.probes() == 1


def test_a_miss_that_was_tried_makes_nothing_doubtful() -> None:
    rig = Announcing()
    rig.pass_time(TRIES_APART_MS)
    for seed in range(2, TRIED_EVERY + 2):
        rig.client.lookup(chain(seed, CHUNKS))
    assert rig.probes() == 1
    rig.has(chain(TRIED_EVERY + 1, CHUNKS))
    rig.client.lookup(chain(TRIED_EVERY + 2, CHUNKS))
    assert rig.probes() == 1


def test_a_lookup_that_never_asks_uses_up_no_try() -> None:
    """Short prompts between long ones, of which fewer tokens than tokens_min could come."""
    rig = Announcing(tokens_min=3 * CHUNK_TOKENS)
    rig.pass_time(TRIES_APART_MS)
    for seed in range(2, 2 * TRIED_EVERY + 4, 2):
        rig.client.lookup(chain(seed, CHUNKS))
        rig.client.lookup(chain(seed + 1, 1))
    assert rig.probes() == 1


def test_chunks_that_are_found_before_they_are_told_of_make_nothing_doubtful() -> None:
    """Their marks are on their way."""
    rig = Announcing(mark(0, WRITTEN))
    rig.client.lookup(KEYS)
    rig.has(KEYS, 0, 1, 2)
    rig.client.lookup(chain(2, CHUNKS))
    assert rig.probes() == 1
    assert rig.told()[-2:] == [mark(1, WRITTEN), mark(2, WRITTEN)]


def test_a_chunk_that_was_asked_for_too_early_is_asked_for_again_once_it_is_told_of() -> None:
    rig = Announcing(is_all=False)
    rig.client.lookup(KEYS)
    rig.has(KEYS)
    assert rig.client.lookup(KEYS).coming == 0
    rig.hear(mark(0, STORED), is_all=False)
    assert rig.client.lookup(KEYS).coming == 0
    rig.hear(mark(0, WRITTEN), is_all=False)
    assert rig.client.lookup(KEYS).coming == CHUNKS
    rig.has(KEYS)
    assert rig.client.lookup(KEYS).coming == 0, "it was told, and is not there"


def test_a_chunk_whose_node_did_not_answer_is_not_asked_for_sooner_because_it_is_told_of() -> None:
    rig = Announcing(mark(0, WRITTEN))
    rig.client.lookup(KEYS)
    rig.report(rig.mover, RemoteProbed(rig.sought()[-1].job, [b""] * CHUNKS, ["remote-slow"] * CHUNKS, 1))
    rig.hear(mark(0, WRITTEN))
    assert rig.client.lookup(KEYS).coming == 0


def test_more_than_can_be_known_makes_all_doubtful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_tier, "KnownChunks", lambda: KnownChunks(4))
    rig = Announcing(*(4 * number + WRITTEN for number in range(1, 6)))
    rig.client.lookup(KEYS)
    assert rig.probes() == 1


def test_a_chain_that_the_store_has_lost_is_written_again_with_one_use() -> None:
    rig = Announcing(*(mark(chunk, WRITTEN) for chunk in range(CHUNKS)), write="through")
    rig.client.lookup(KEYS)
    rig.has(KEYS)
    assert rig.told() == [mark(chunk, GONE) for chunk in range(CHUNKS)]
    rig.client.store(KEYS)
    rig.pass_time(400)
    assert len(rig.asked(PutRemote)) == CHUNKS


@pytest.mark.parametrize("fault", ["gone", "digest"])
def test_a_chunk_that_is_lost_between_probe_and_read_is_told_to_be_gone(fault: str) -> None:
    rig = Announcing(mark(0, WRITTEN))
    rig.client.lookup(KEYS)
    rig.has(KEYS, 0)
    (fetch,) = rig.asked(FetchRemote)
    rig.report(rig.mover, RemoteEnded(fetch.job, fault, 1))
    assert rig.told()[-1] == mark(0, GONE)


def test_a_probe_that_ends_after_its_namespace_is_gone_does_nothing() -> None:
    rig, other = Announcing(mark(0, WRITTEN)), bytes(range(50, 82))
    second = Client(rig, engine="second")
    second.register(namespace=other)
    rig.pass_time(100)
    rig.client.lookup(KEYS)
    rig.core.remotes[0].remote = rig.core.remotes[0].remote._replace(read_bytes_in_flight=1)
    rig.has(KEYS, *range(CHUNKS))
    assert second.lookup(chain(9, CHUNKS), namespace=other).coming == CHUNKS
    probe = rig.sought()[-1]
    rig.worker_gone(max(rig.core.sessions))
    rig.wait_ms(50)
    rig.report(rig.mover, RemoteProbed(probe.job, [b""] * CHUNKS, [], 1))
    assert rig.client.lookup(KEYS).coming == CHUNKS


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_chunk_that_several_ranks_store_is_stored_once(ranks: int) -> None:
    """The second rank's part is no second use."""
    rig = Announcing()
    space = bytes(range(60, 92))
    clients = [
        Client(rig, engine="wide", ranks=ranks, rank=rank).register(
            [msgspec.structs.replace(FULL, shards=ranks, shard=rank)], namespace=space
        )
        for rank in range(ranks)
    ]
    rig.pass_time(100)
    for client in clients:
        client.store(KEYS)
    rig.pass_time(400)
    assert rig.asked(PutRemote) == []
    assert [one & 3 for one in rig.told()].count(STORED) == CHUNKS


def test_a_log_that_cannot_be_read_is_left_alone_for_a_while() -> None:
    rig = Announcing()
    rig.hear(fault="remote-denied")
    asked = len(rig.asked(ListenRemote))
    rig.pass_time(REFUSED_MS - 2_000)
    assert len(rig.asked(ListenRemote)) == asked
    rig.pass_time(3_000)
    assert len(rig.asked(ListenRemote)) == asked + 1


def test_only_some_namespaces_read_a_long_log_at_a_time() -> None:
    rig = Announcing()
    for number in range(5):
        Client(rig, engine=f"engine {number}").register(namespace=bytes([70 + number] * 32))
    rig.pass_time(200)
    under_way = [order.namespace for order in rig.asked(ListenRemote) if order.namespace[0] >= 70]
    assert len(under_way) == CATCHING_UP_MAX


def test_what_is_stored_written_and_found_gone_is_told_once() -> None:
    rig = Announcing(write="through")
    rig.client.store(KEYS[: 2 * KEY_BYTES])
    rig.pass_time(400)
    for order in rig.asked(PutRemote):
        rig.report(rig.mover, RemoteEnded(order.job, "existed", 1))
    assert rig.told() == [mark(0, STORED), mark(1, STORED), mark(0, WRITTEN), mark(1, WRITTEN)]
    rig.hear(mark(2, WRITTEN))
    rig.client.lookup(KEYS)
    rig.has(KEYS)
    assert rig.told()[4:] == [mark(2, GONE)]
    rig.client.lookup(KEYS)
    assert rig.probes() == 1


def test_a_server_that_writes_nothing_tells_nothing() -> None:
    rig = Announcing(write="never")
    rig.client.store(KEYS)
    assert rig.told() == []


def test_a_chunk_that_was_stored_anywhere_before_is_written_with_those_before_it() -> None:
    rig = Announcing(mark(2, STORED))
    rig.client.store(KEYS)
    rig.pass_time(400)
    assert len(rig.asked(PutRemote)) == 3


def test_a_chunk_that_is_told_to_be_in_the_store_is_not_written_again() -> None:
    rig = Announcing(*(mark(chunk, STORED) for chunk in range(CHUNKS)), mark(1, WRITTEN), mark(4, WRITTEN))
    rig.client.store(KEYS)
    rig.pass_time(400)
    assert len(rig.asked(PutRemote)) == 3


def test_a_chunk_that_is_gone_from_the_store_is_written_when_it_is_stored_again() -> None:
    rig = Announcing(mark(0, WRITTEN), mark(0, GONE))
    rig.client.store(KEYS)
    rig.pass_time(400)
    assert len(rig.asked(PutRemote)) == 1
