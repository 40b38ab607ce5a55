"""Another epoch in the store: what the brain does to its own copies, and what it keeps for the next brain."""

import random
from typing import Any, Literal

import msgspec
import pytest

from kvserver.config.remotes import NAME_CHARS_MAX, REMOTES_MAX, parse
from kvserver.remote import namespace_note
from kvserver.remote.chunk_value import NamespaceName
from kvserver.remote.namespace_note import NOTE_BYTES_MAX, NamespaceNote
from kvserver.service.base.effects import Log, PutNamespace
from kvserver.service.base.events import ArenaGrew, Tick
from kvserver.service.operators import clear_namespaces
from kvserver.service.service import Service
from kvserver.tiers.records import DOCUMENT_BYTES_MAX, decode_document, encode_document
from kvserver.wire.messages import REGION_RUNS_MAX, Clear, GroupSpec, RegionRun, Registered
from kvserver.wire.orders import (
    ProbeRemote,
    ReadRemoteNote,
    RemoteIs,
    RemoteNoteRead,
    RemoteNoteWritten,
    WriteRemoteNote,
)
from tests.rigs.brain_rig import CHUNK_TOKENS, NAMESPACE, SLAB_BYTES, Client, Rig, chain
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


def test_the_largest_document_has_room_for_the_epochs_of_all_stores_and_for_their_notes() -> None:
    """The ledger takes no longer one. A note that is read in part counts as damaged, so servers replace it."""
    names = [str(number).rjust(NAME_CHARS_MAX, "n") for number in range(REMOTES_MAX)]
    rig = Rig(remotes=parse(" ".join(f"{name}=file:///{name}" for name in names)))
    client, page_bytes = Client(rig), 5

    def is_taken(shard: int, runs: int, descriptor: int) -> bool:
        spans = [RegionRun(0, page_bytes * at, 1, 0, 0, page_bytes) for at in range(runs)]
        group = GroupSpec(CHUNK_TOKENS, 1, "full", 0, 6, shard, 1, 0, spans)
        given: dict[str, Any] = {"descriptors": [descriptor], "buffer_bytes": page_bytes * REGION_RUNS_MAX}
        return isinstance(client.ask(client.registration([group], name=f"{shard}", **given)), Registered)

    assert all(is_taken(shard, REGION_RUNS_MAX, client.offer()) for shard in range(5))
    descriptor = client.offer()
    assert next(runs for runs in range(1500, 0, -1) if is_taken(5, runs, descriptor)) > 1000
    for _ in range(2):
        rig.handle(Tick())
    last = (1 << 64) - 1
    for order, tier in zip(
        [one for one in rig.orders if isinstance(one, ReadRemoteNote)], rig.core.remotes, strict=True
    ):
        assert tier.mover is not None
        rig.report(tier.mover.number, RemoteNoteRead(order.job, "", "here", last, b""))
    documents = [effect.document for effect in rig.effects if isinstance(effect, PutNamespace)]
    assert NAMESPACE in rig.core.chunks.spaces
    assert len(rig.core.chunks.spaces[NAMESPACE].epochs) == REMOTES_MAX
    assert max(map(len, documents)) <= DOCUMENT_BYTES_MAX
    note = namespace_note.encode(NamespaceNote(last, documents[-1]), NamespaceName("-", NAMESPACE))
    assert len(note) <= NOTE_BYTES_MAX


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


def test_a_store_that_contradicts_itself_about_a_note_is_asked_once_a_second_and_named() -> None:
    """It has no note when it is asked, and has one when it is to be made. It was asked again at each tick."""
    rig, answered = RemoteRig(), 1
    for _ in range(200):
        rig.wait_ms(50)
        for read in rig.asked(ReadRemoteNote)[answered:]:
            answered += 1
            rig.report(rig.mover, RemoteNoteRead(read.job, "", "absent", 0, b""))
            rig.report(rig.mover, RemoteNoteWritten(rig.asked(WriteRemoteNote)[-1].job, "", False))
    assert 10 <= answered <= 13
    assert rig.core.counters.remote_failures == {("note", "contradiction"): answered - 2}
    assert rig.core.remotes[0].counts.failures == {("note", "contradiction"): answered - 2}
    events = [effect.event for effect in rig.effects if isinstance(effect, Log)]
    assert events.count("remote note contradictory") == 1


@pytest.mark.parametrize("state", ["absent", "damaged"])
def test_a_store_that_does_not_keep_notes_is_named_and_costs_our_own_copies_a_few_times(
    state: Literal["absent", "damaged"],
) -> None:
    rig, answered = RemoteRig(), 1
    for _ in range(200):
        rig.wait_ms(50)
        for read in rig.asked(ReadRemoteNote)[answered:]:
            answered += 1
            writes = len(rig.asked(WriteRemoteNote))
            rig.report(rig.mover, RemoteNoteRead(read.job, "", state, 0, b""))
            for write in rig.asked(WriteRemoteNote)[writes:]:
                rig.report(rig.mover, RemoteNoteWritten(write.job, "", True))
    events = [effect.event for effect in rig.effects if isinstance(effect, Log)]
    assert events.count("namespace cleared elsewhere") == 3, "at once, after 2 s and after 4 s more"
    assert answered > 3 * 3
    assert events.count("remote note contradictory") == 2
    ((named, count),) = rig.core.counters.remote_failures.items()
    assert named == ("note", "contradiction")
    assert 4 <= count < answered


@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_note_that_the_store_does_not_give_or_take_is_counted(kind: str) -> None:
    rig = RemoteRig()
    rig.wait_ms(1_100)
    read = rig.asked(ReadRemoteNote)[-1]
    if kind == "read":
        rig.report(rig.mover, RemoteNoteRead(read.job, "remote-denied", "absent", 0, b""))
    else:
        rig.report(rig.mover, RemoteNoteRead(read.job, "", "absent", 0, b""))
        rig.report(rig.mover, RemoteNoteWritten(rig.asked(WriteRemoteNote)[-1].job, "remote-denied", True))
    assert rig.core.counters.remote_failures == {("note", "remote-denied"): 1}


def test_a_namespace_that_is_cleared_again_and_again_while_its_store_is_away_has_no_more_callers_than_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each that waits is looked at in every event."""
    monkeypatch.setattr(clear_namespaces, "CLEARS_MAX", 5)
    rig = RemoteRig()
    rig.report(rig.mover, RemoteIs("away", []))
    codes = [getattr(rig.client.ask(Clear(rig.number(), NAMESPACE)), "code", "") for _ in range(9)]
    assert codes == [""] * 5 + ["clears"] * 4
    assert len(rig.core.clears.waiting) == 5
    rig.wait_ms(rig.bounds.job_ttl_ms + 1_000)
    assert rig.core.clears.waiting == []
    assert rig.core.remotes[0].clears_owed == 1
    assert getattr(rig.client.ask(Clear(rig.number(), NAMESPACE)), "code", "") == "", "there is room again"
