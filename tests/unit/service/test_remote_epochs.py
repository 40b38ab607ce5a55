"""Another epoch in the store: what the brain does to its own copies, and what it keeps for the next brain."""

import random

import msgspec
import pytest

from kvserver.service.base.effects import PutNamespace
from kvserver.service.base.events import ArenaGrew
from kvserver.service.service import Service
from kvserver.tiers.records import decode_document, encode_document
from kvserver.wire.messages import Clear
from kvserver.wire.orders import ProbeRemote, ReadRemoteNote, RemoteNoteRead, WriteRemoteNote
from tests.rigs.brain_rig import NAMESPACE, SLAB_BYTES, Client, chain
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


def another_brain(rig: RemoteDiskRig, documents: list[tuple[int, bytes]], *, is_registered: bool) -> None:
    """The next brain, which has the ledger's documents of namespaces and no chunk in DRAM. is_registered: an engine has
    registered the namespace before the disk is read."""
    rig.service = Service(rig.bounds, random.Random(8).randbytes, documents=documents)
    rig.copies.clear()
    rig.handle(ArenaGrew(rig.bounds.arena_bytes // SLAB_BYTES, ""))
    if is_registered:
        rig.client = Client(rig).register()
    rig.meet_mover()


def epoch_of(document: bytes) -> int | None:
    decoded = decode_document(document)
    assert decoded is not None
    return decoded.epoch


@pytest.mark.parametrize("is_registered", [False, True])
def test_a_brain_learns_from_the_disk_to_which_epoch_its_records_belong(is_registered: bool) -> None:
    """Otherwise nobody would notice that the namespace was cleared elsewhere while this server was away."""
    rig = RemoteDiskRig()
    rig.client.store(chain(1, 3))
    rig.wait_ms(1_000)
    newest = max(record.generation for records in rig.written for record in records)
    another_brain(rig, [], is_registered=is_registered)
    rig.report(rig.mover, RemoteNoteRead(rig.asked(ReadRemoteNote)[-1].job, "", "here", EPOCH + 1, b""))
    assert rig.notes[-1].namespace == NAMESPACE
    assert rig.notes[-1].void >= newest


def test_a_device_whose_note_has_an_older_epoch_gets_the_note_again() -> None:
    """The brain died between the two. Otherwise the next one would take its own chunks for cleared."""
    rig = RemoteDiskRig()
    rig.client.store(chain(1, 3))
    rig.wait_ms(1_000)
    (number, document) = next((e.number, e.document) for e in reversed(rig.effects) if isinstance(e, PutNamespace))
    (note,) = rig.notes
    older = encode_document(msgspec.structs.replace(decode_document(document), epoch=EPOCH - 1))
    rig.notes = [msgspec.structs.replace(note, document=older)]
    another_brain(rig, [(number, document)], is_registered=False)
    assert epoch_of(rig.notes[-1].document) == EPOCH


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
