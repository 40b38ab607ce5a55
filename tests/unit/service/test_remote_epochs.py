"""Another epoch in the store: what the brain does to its own copies, and what it keeps for the next brain."""

from kvserver.service.base.effects import PutNamespace
from kvserver.tiers.records import decode_document
from kvserver.wire.messages import Clear
from kvserver.wire.orders import ProbeRemote, ReadRemoteNote, RemoteNoteRead, WriteRemoteNote
from tests.rigs.brain_rig import NAMESPACE, chain
from tests.rigs.disk_rig import DiskRig
from tests.rigs.remote_rig import EPOCH, RemoteRig


class RemoteDiskRig(RemoteRig, DiskRig):
    """The same brain with disks."""


def cleared_elsewhere(rig: RemoteRig) -> None:
    """The store's note has another epoch when the brain reads it again."""
    rig.wait_ms(1_100)
    rig.report(rig.mover, RemoteNoteRead(rig.asked(ReadRemoteNote)[-1].job, "", "here", EPOCH + 1, b""))


def test_the_next_brain_learns_to_which_epoch_the_chunks_belong() -> None:
    rig = RemoteRig()

    def kept() -> list[int]:
        documents = [effect.document for effect in rig.effects if isinstance(effect, PutNamespace)]
        return [read.epoch for document in documents if (read := decode_document(document)) is not None]

    assert kept()[-1] == EPOCH
    cleared_elsewhere(rig)
    assert kept()[-1] == EPOCH + 1


def test_records_on_disk_are_void_when_another_server_has_cleared_the_namespace() -> None:
    rig = RemoteDiskRig()
    rig.client.store(chain(1, 3))
    rig.wait_ms(1_000)
    newest = max(record.generation for records in rig.written for record in records)
    cleared_elsewhere(rig)
    assert rig.notes[-1].namespace == NAMESPACE
    assert rig.notes[-1].void >= newest


def test_no_chunk_is_looked_for_between_a_clear_and_the_order_to_tell_the_store() -> None:
    """A note that is being read delays the order. A chunk that came meanwhile would outlive the Clear."""
    rig, keys = RemoteRig(), chain(1, 2)
    rig.wait_ms(1_100)
    rig.client.ask(Clear(rig.number(), NAMESPACE))
    assert rig.asked(WriteRemoteNote) == [], "the note is being read"
    found = rig.client.lookup(keys)
    assert found.coming == 0
    assert rig.asked(ProbeRemote) == []
    rig.report(rig.mover, RemoteNoteRead(rig.asked(ReadRemoteNote)[-1].job, "", "here", EPOCH, b""))
    rig.wait_ms(10)
    assert [order.namespace for order in rig.asked(WriteRemoteNote)] == [NAMESPACE]
