"""The notes of namespaces on devices: their content, their number, and which are sent again."""

import msgspec
import pytest

from kvserver.service.base.events import MoverGone
from kvserver.service.state import clear_notes
from kvserver.wire.messages import Clear, Cleared, GroupBlocks
from kvserver.wire.orders import ForgetNotes, Note, NotesForgotten
from tests.rigs.brain_rig import FULL, NAMESPACE, Client, chain, ids, is_refusal
from tests.rigs.disk_notes import had, names, namespace, written
from tests.rigs.disk_rig import CHUNKS, DiskRig, restart


def test_only_so_many_notes_of_departed_namespaces_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clear_notes, "FORGOTTEN_AT_ONCE", 2)
    rig = DiskRig(namespaces_max=2, notes_max=3)
    living = written(rig, "l")
    for name in "abc":
        had(rig, name)
    rig.wait_ms(100)
    assert rig.forgotten == []
    had(rig, "d")
    rig.wait_ms(100)
    assert names(rig.forgotten) == "ab"
    (order,) = [order for order in rig.orders if isinstance(order, ForgetNotes)]
    assert order.void >= max(record.generation for records in rig.written for record in records)
    restart(rig)
    assert (
        Client(rig).register(namespace=namespace("l")).lookup(chain(ord("l"), CHUNKS), namespace("l")).chunks == CHUNKS
    )
    assert living.cache


def test_a_namespace_that_comes_back_after_its_note_was_forgotten_has_nothing_of_before() -> None:
    """An absent device may hold records of it that were cleared."""
    rig = DiskRig(namespaces_max=2, notes_max=0)
    for name in "ab":
        had(rig, name)
    rig.wait_ms(100)
    assert names(rig.forgotten) == "ab"
    before = max(record.generation for records in rig.written for record in records)
    client = written(rig, "a")
    (again,) = [note for note in rig.notes if note.namespace == namespace("a")]
    assert again.void >= before
    assert again.document
    restart(rig)
    assert client.peer
    assert (
        Client(rig).register(namespace=namespace("a")).lookup(chain(ord("a"), CHUNKS), namespace("a")).chunks == CHUNKS
    )


def test_a_clear_holds_for_a_namespace_whose_note_no_device_could_remove() -> None:
    rig = DiskRig(namespaces_max=2, notes_max=0)
    for name in "ab":
        had(rig, name)
    rig.notes_kept = False
    rig.wait_ms(100)
    assert any(isinstance(order, ForgetNotes) for order in rig.orders)
    rig.notes_kept = True
    assert isinstance(Client(rig).ask(Clear(rig.number(), namespace("a"))), Cleared)
    restart(rig)
    engine = Client(rig).register(namespace=namespace("a"))
    assert engine.lookup(chain(ord("a"), CHUNKS), namespace("a")).chunks == 0


def test_notes_that_no_device_could_remove_are_removed_once_a_device_has_written_one() -> None:
    rig = DiskRig(namespaces_max=2, notes_max=0)
    for name in "ab":
        had(rig, name)
    rig.notes_kept = False
    rig.wait_ms(300)
    assert len([order for order in rig.orders if isinstance(order, ForgetNotes)]) == 1
    rig.notes_kept = True
    written(rig, "c")
    rig.wait_ms(100)
    assert names(rig.forgotten) == "ab"


def test_a_note_that_was_written_again_while_it_was_removed_stays() -> None:
    rig = DiskRig(namespaces_max=2, notes_max=0)
    rig.forgets_lost = 1
    for name in "ab":
        had(rig, name)
    rig.wait_ms(100)
    (order,) = [order for order in rig.orders if isinstance(order, ForgetNotes)]
    assert names(order.namespaces) == "ab"
    client = written(rig, "a")
    (mover,) = (mover.mover for mover in rig.service.status(rig.now_ns).movers if mover.device == "disk")
    rig.report(mover, NotesForgotten(order.namespaces, kept=True))
    assert isinstance(client.ask(Clear(rig.number(), namespace("a"))), Cleared)
    restart(rig)
    engine = Client(rig).register(namespace=namespace("a"))
    assert engine.lookup(chain(ord("a"), CHUNKS), namespace("a")).chunks == 0


def test_another_mover_is_told_only_what_may_not_be_durable() -> None:
    rig = DiskRig(disk_restart_ms=1_000)
    written(rig, "a")
    rig.notes_answered = False
    client = written(rig, "b")
    clear = Clear(rig.number(), namespace("b"))
    assert client.ask(clear) is None
    (mover,) = (mover.mover for mover in rig.service.status(rig.now_ns).movers if mover.device == "disk")
    rig.noting.clear()
    told = len(rig.orders)
    rig.handle(MoverGone(mover, "signal 9"))
    rig.wait_ms(1_200)
    assert names([order.namespace for order in rig.orders[told:] if isinstance(order, Note)]) == "b"
    rig.answer_notes()
    assert isinstance(rig.answers[client.peer, clear.id], Cleared)


def test_the_note_of_an_earlier_clear_does_not_make_a_later_one_durable() -> None:
    rig = DiskRig(disk_restart_ms=1_000)
    client = written(rig, "a")
    rig.notes_answered = False
    clears = [Clear(rig.number(), namespace("a")) for _ in range(2)]
    for clear in clears:
        assert client.ask(clear) is None
        client.store(chain(ord("b"), CHUNKS))
    first, later = [(mover, noted) for mover, noted in rig.noting if noted.namespace == namespace("a")][:2]
    rig.report(*first)
    assert isinstance(rig.answers[client.peer, clears[0].id], Cleared)
    rig.noting.clear()
    told = len(rig.orders)
    rig.handle(MoverGone(first[0], "signal 9"))
    rig.wait_ms(1_200)
    again = [order.void for order in rig.orders[told:] if isinstance(order, Note) and order.namespace == namespace("a")]
    assert again == [later[1].void]
    rig.answer_notes()
    assert isinstance(rig.answers[client.peer, clears[1].id], Cleared)


def test_a_mover_that_says_that_no_device_kept_a_note_has_answered() -> None:
    rig = DiskRig(disk_job_ms=500)
    client = written(rig, "a")
    rig.notes_kept = False
    assert is_refusal(client.ask(Clear(rig.number(), namespace("a"))), "device", "disk-clear")
    before = [(mover.mover, mover.state) for mover in rig.service.status(rig.now_ns).movers]
    rig.wait_ms(1_700)
    assert [(mover.mover, mover.state) for mover in rig.service.status(rig.now_ns).movers] == before


def test_a_namespace_of_which_a_rank_is_missing_keeps_the_document_that_there_is() -> None:
    """Without the shapes of all shards a start would find none of its chunks."""
    rig = DiskRig()
    halves = [msgspec.structs.replace(FULL, shards=2, shard=shard, writers=1) for shard in (0, 1)]
    ranks = [Client(rig, ranks=2, rank=rank).register([halves[rank]]) for rank in (0, 1)]
    keys = chain(1, CHUNKS)
    for client in ranks:
        client.ask(client.storing(keys, GroupBlocks(0, 0, ids(*range(3 * CHUNKS)))))
    (note,) = rig.notes
    assert note.document
    assert isinstance(ranks[0].ask(Clear(rig.number(), NAMESPACE)), Cleared)
    restart(rig)
    alone = Client(rig, ranks=2, rank=0).register([halves[0]])
    assert isinstance(alone.ask(Clear(rig.number(), NAMESPACE)), Cleared)
    assert [note.document for note in rig.notes] == [rig.notes[0].document, rig.notes[0].document, b""]


def test_a_clear_counts_for_a_device_that_could_not_be_opened() -> None:
    """Its content is unknown, so the other devices note the clear in any case."""
    rig = DiskRig(disk_devices=2)
    client = Client(rig).register()
    assert isinstance(client.ask(Clear(rig.number(), namespace("x"))), Cleared)
    assert rig.notes == [], "both are open, and have no records of it"
    rig.unopened = {1}
    restart(rig)
    client = Client(rig).register()
    assert isinstance(client.ask(Clear(rig.number(), namespace("x"))), Cleared)
    assert names([note.namespace for note in rig.notes]) == "x"
    rig.notes_kept = False
    assert is_refusal(client.ask(Clear(rig.number(), namespace("y"))), "device", "disk-clear")


def test_a_clear_counts_for_a_device_that_a_later_mover_could_open() -> None:
    """The device's content was told to no brain, so the others note the clear; otherwise a restart would undo it."""
    rig = DiskRig(disk_devices=2)
    written(rig, "a")
    away, notes, rig.devices, rig.notes, rig.unopened = rig.devices, rig.notes, {}, [], {1}
    restart(rig)
    rig.devices, rig.unopened = {(1, at): record._replace(device=1) for (_, at), record in away.items()}, set()
    rig.another_mover()
    client = Client(rig).register()
    assert isinstance(client.ask(Clear(rig.number(), namespace("a"))), Cleared)
    rig.notes = [*notes, *rig.notes]
    restart(rig)
    engine = Client(rig).register(namespace=namespace("a"))
    assert engine.lookup(chain(ord("a"), CHUNKS), namespace("a")).chunks == 0


def test_a_drained_device_has_nothing_that_is_not_known() -> None:
    rig = DiskRig(disk_devices=2)
    rig.drains[1] = "drained"
    restart(rig)
    assert isinstance(Client(rig).register().ask(Clear(rig.number(), namespace("x"))), Cleared)
    assert rig.notes == []
