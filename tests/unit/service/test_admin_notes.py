"""Notes of cleared prefixes beside those of namespaces: which are forgotten, and that no clear is lost with them."""

from kvserver.tiers.prefix_notes import ClearedPrefix, prefix_note
from kvserver.wire.admin import ClearNamespace
from kvserver.wire.messages import Cleared
from tests.rigs.admin_rig import clear_prefix, command
from tests.rigs.brain_rig import NAMESPACE, Client, chain, key
from tests.rigs.disk_notes import had, names, namespace, written
from tests.rigs.disk_rig import CHUNKS, DiskRig, restart


def notes_of_prefixes(rig: DiskRig, keys: bytes) -> list[int]:
    """Positions of the prompt's chunks that have their own note."""
    there = {note.namespace for note in rig.notes}
    return [at for at in range(CHUNKS) if prefix_note(ClearedPrefix(NAMESPACE, key(keys, at))) in there]


def test_a_cleared_prefix_stays_cleared_when_notes_of_namespaces_are_forgotten() -> None:
    rig = DiskRig(namespaces_max=2, notes_max=0)
    client, keys = Client(rig).register(), chain(1, CHUNKS)
    client.store(keys)
    clear_prefix(rig, key(keys, 1))
    for name in "ab":
        had(rig, name)
    rig.wait_ms(100)
    assert names(rig.forgotten) == "ab"
    restart(rig)
    assert Client(rig).lookup(keys).chunks == 1


def test_notes_of_prefixes_push_out_none_of_namespaces() -> None:
    rig = DiskRig(namespaces_max=2, notes_max=1)
    client, keys = Client(rig).register(), chain(1, CHUNKS)
    client.store(keys)
    had(rig, "a")
    for at in (2, 1, 0):
        clear_prefix(rig, key(keys, at))
    rig.wait_ms(100)
    assert rig.forgotten == []


def test_notes_of_prefixes_go_when_their_namespace_was_cleared_later() -> None:
    rig = DiskRig(prefix_notes_kept=1)
    client, keys = Client(rig).register(), chain(1, CHUNKS)
    client.store(keys)
    clear_prefix(rig, key(keys, 2))
    clear_prefix(rig, key(keys, 1))
    rig.wait_ms(100)
    assert notes_of_prefixes(rig, keys) == [1, 2], "the namespace lives"
    rig.notes_answered = False
    assert command(rig, ClearNamespace(namespace=NAMESPACE)) is None
    rig.wait_ms(100)
    assert notes_of_prefixes(rig, keys) == [1, 2], "that it was cleared may not be durable"
    rig.notes_answered = True
    rig.answer_notes()
    client.store(keys)
    clear_prefix(rig, key(keys, 0))
    rig.wait_ms(100)
    assert notes_of_prefixes(rig, keys) == [0]
    restart(rig)
    assert Client(rig).lookup(keys).chunks == 0


def test_a_prefix_stays_cleared_when_a_mover_died_with_the_order_to_forget_its_namespace() -> None:
    rig = DiskRig(namespaces_max=2, notes_max=0, prefix_notes_kept=0)
    had(rig, "a")
    keys = chain(ord("a"), CHUNKS)
    prefix = ClearedPrefix(namespace("a"), key(keys, 1))
    assert isinstance(command(rig, ClearNamespace(namespace=prefix.namespace, key=prefix.key)), Cleared)
    rig.forgets_lost = 1
    for name in "bc":
        written(rig, name)
    rig.wait_ms(200)
    assert rig.forgotten == []
    rig.another_mover()
    rig.wait_ms(200)
    assert [*dict.fromkeys(rig.forgotten)] == [namespace("a"), prefix_note(prefix)], "the order is given again"
    restart(rig)
    found = Client(rig).register(namespace=namespace("a")).lookup(keys, namespace("a"))
    assert found.chunks == 0


def test_few_notes_of_prefixes_stay_whatever_they_say() -> None:
    """Forgetting a note makes chunks on absent devices void, so it is done seldom."""
    rig = DiskRig()
    client, keys = Client(rig).register(), chain(1, CHUNKS)
    client.store(keys)
    clear_prefix(rig, key(keys, 1))
    command(rig, ClearNamespace(namespace=NAMESPACE))
    rig.wait_ms(100)
    assert rig.forgotten == []


def test_a_cleared_prefix_counts_for_a_device_that_could_not_be_opened() -> None:
    """The unopened device may be the only one with the namespace and its note."""
    rig = DiskRig(disk_devices=2)
    client, keys = Client(rig).register(), chain(1, CHUNKS)
    client.store(keys)
    away, rig.devices, rig.notes, rig.unopened = (rig.devices, rig.notes), {}, [], {1}
    restart(rig)
    assert clear_prefix(rig, key(keys, 1)) == Cleared(1, 0)
    rig.devices, rig.notes, rig.unopened = away[0], away[1] + rig.notes, set()
    restart(rig)
    assert Client(rig).lookup(keys).chunks == 1
