"""What a server makes of announcements: which chunks it looks for, which it writes, and what it tells."""

from kvserver.remote.announcement import GONE, STORED, WRITTEN, Kind, mark_of, pack, unpack
from kvserver.service.base.events import MoverGone
from kvserver.service.state.announcements import DOUBTED_MS, HEARD_MS, TRIED_EVERY
from kvserver.wire.messages import KEY_BYTES
from kvserver.wire.orders import (
    AnnounceRemote,
    ListenRemote,
    ProbeRemote,
    PutRemote,
    ReadRemoteNote,
    RemoteEnded,
    RemoteHeard,
    RemoteNoteRead,
    RemoteProbed,
)
from tests.rigs.brain_rig import NAMESPACE, chain, key
from tests.rigs.remote_rig import EPOCH, RemoteRig

CHUNKS = 5
KEYS = chain(1, CHUNKS)


def mark(chunk: int, kind: Kind, keys: bytes = KEYS) -> int:
    return mark_of(NAMESPACE, EPOCH, key(keys, chunk)) | kind


class Announcing(RemoteRig):
    """A brain whose store has announcements."""

    def __init__(self, *told: int, is_all: bool = True, **options: object) -> None:
        """told: what the store answers when the brain listens for the first time."""
        super().__init__(**options)
        self.listened, self.notes, self.taken, self.answered = 0, 1, 0, 0
        self.hear(*told, is_all=is_all)

    def hear(self, *told: int, fault: str = "", is_all: bool = True) -> None:
        """The store answers with these marks when the brain listens next."""
        while len(listens := self.asked(ListenRemote)) == self.listened:
            self.pass_time(self.bounds.remote_listen_ms)
        self.listened = len(listens)
        assert (listens[-1].namespace, listens[-1].epoch) == (NAMESPACE, EPOCH)
        self.report(self.mover, RemoteHeard(listens[-1].job, fault, pack(told), is_all))

    def pass_time(self, ms: int) -> None:
        """Time in which the namespace's note is read again and again."""
        for _ in range(0, ms, 400):
            self.wait_ms(min(400, ms))
            for note in self.asked(ReadRemoteNote)[self.notes :]:
                self.report(self.mover, RemoteNoteRead(note.job, "", "here", EPOCH, b""))
            self.notes = len(self.asked(ReadRemoteNote))

    def told(self) -> list[int]:
        """All marks that the brain has told, after it had the time to."""
        for _ in range(3):
            self.pass_time(self.bounds.remote_tell_ms)
            for order in self.asked(AnnounceRemote)[self.taken :]:
                self.report(self.mover, RemoteEnded(order.job, "", 1))
            self.taken = len(self.asked(AnnounceRemote))
        return [one for order in self.asked(AnnounceRemote) for one in unpack(order.marks)]

    def probes(self) -> int:
        return len(self.asked(ProbeRemote))


def test_a_chunk_of_which_nobody_has_told_is_not_looked_for() -> None:
    rig = Announcing()
    assert rig.client.lookup(KEYS).coming == 0
    assert rig.probes() == 0


def test_a_chunk_that_was_told_to_be_written_is_looked_for_and_what_follows_it_too() -> None:
    rig = Announcing(mark(0, STORED), mark(0, WRITTEN))
    assert rig.client.lookup(KEYS).coming == CHUNKS
    (probe,) = rig.asked(ProbeRemote)
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
    for seed in range(2, TRIED_EVERY + 1):
        rig.client.lookup(chain(seed, CHUNKS))
    assert rig.probes() == 0
    last = chain(TRIED_EVERY + 1, CHUNKS)
    rig.client.lookup(last)
    assert rig.probes() == 1
    rig.has(last, 0)
    rig.client.lookup(chain(TRIED_EVERY + 2, CHUNKS))
    assert rig.probes() == 2, "nobody told of the last one, so others may be there, too"
    for _ in range(DOUBTED_MS // 400):
        rig.pass_time(400)
        if len(rig.asked(ListenRemote)) > rig.listened:
            rig.hear()
    rig.client.lookup(chain(TRIED_EVERY + 3, CHUNKS))
    assert rig.probes() == 2


def test_of_a_thousand_lookups_that_miss_fewer_than_ten_ask_the_store() -> None:
    rig = Announcing()
    for seed in range(2, 1002):
        assert rig.client.lookup(chain(seed, CHUNKS)).chunks == 0
        for probe in rig.asked(ProbeRemote)[rig.answered :]:
            rig.report(rig.mover, RemoteProbed(probe.job, [b""] * CHUNKS, [], 1))
        rig.answered = rig.probes()
    assert 0 < rig.probes() < 10


def test_a_miss_that_was_tried_makes_nothing_doubtful() -> None:
    rig = Announcing()
    for seed in range(2, TRIED_EVERY + 2):
        rig.client.lookup(chain(seed, CHUNKS))
    rig.has(KEYS)
    rig.client.lookup(chain(TRIED_EVERY + 2, CHUNKS))
    assert rig.probes() == 1


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
