"""A brain with a remote store that tells it of chunks."""

from kvserver.remote.announcement import Kind, mark_of, pack, unpack
from kvserver.wire.orders import (
    AnnounceRemote,
    ListenRemote,
    ProbeRemote,
    ReadRemoteNote,
    RemoteEnded,
    RemoteHeard,
    RemoteNoteRead,
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
        self.listened, self.notes, self.taken, self.answered, self.tried = 0, 1, 0, 0, 0
        self.hear(*told, is_all=is_all)
        if is_all:
            self.client.lookup(chain(7777, CHUNKS))  # the first one is tried in any case
            self.has(chain(7777, CHUNKS))
            self.tried = 1

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

    def sought(self) -> list[ProbeRemote]:
        """Probes but the first one."""
        return self.asked(ProbeRemote)[self.tried :]

    def probes(self) -> int:
        return len(self.sought())
