"""What every kind of remote store must do (kvserver/remote/store.py)."""

import random
import threading
import time

import pytest

from kvserver.movers.remote_checks import sums_of
from kvserver.remote.announcement import pack, unpack
from kvserver.remote.chunk_value import encode
from kvserver.remote.store import Gone, Listed, Store
from tests.rigs.remote_chunks import NAMESPACE, head_of, name_of, payloads_of, targets_of
from tests.unit.remote.conftest import Opener

LARGE = (9, (8 << 20) + 3, 5001)
"""Sizes of shards of which one needs two fragments."""
SHARDS = 3


def read_whole(store: Store, seed: int, head: object) -> list[memoryview]:
    name = name_of(seed)
    (found,) = store.heads([name], SHARDS)
    assert found == head
    targets = targets_of(found)
    assert store.read(name, found, targets) in (None, sums_of(targets))
    return targets


@pytest.mark.parametrize("sizes", [(1,), (1, 4099, 70_001), LARGE])
def test_what_one_server_writes_another_reads(opener: Opener, sizes: tuple[int, ...]) -> None:
    name = name_of(7)
    head = head_of(name, sizes=sizes)
    assert opener().write(name, head, payloads_of(head))
    assert read_whole(opener(), 7, head) == payloads_of(head)


def test_heads_are_answered_in_their_order_and_what_is_not_there_is_a_miss(store: Store) -> None:
    there = [name_of(seed) for seed in (3, 1, 2)]
    for name in there:
        store.write(name, head_of(name), payloads_of(head_of(name)))
    asked = [there[0], name_of(9), there[1], name_of(8), there[2]]
    assert store.heads(asked, SHARDS) == [head_of(name) if name in there else None for name in asked]
    assert store.heads([], SHARDS) == []


@pytest.mark.parametrize("sizes", [(1, 4099), LARGE])
def test_the_second_of_two_writers_is_told_so_and_changes_nothing(opener: Opener, sizes: tuple[int, ...]) -> None:
    name = name_of(5)
    first, second = (head_of(name, write=write, sizes=sizes) for write in (11, 12))
    assert opener().write(name, first, payloads_of(first))
    assert not opener().write(name, second, payloads_of(second))
    assert read_whole(opener(), 5, first) == payloads_of(first)


@pytest.mark.parametrize("sizes", [(1, 4099), LARGE])
def test_of_many_writers_at_once_one_wins_with_all_its_bytes(opener: Opener, sizes: tuple[int, ...]) -> None:
    name = name_of(6)
    heads = [head_of(name, write=write, sizes=sizes) for write in range(1, 6)]
    stores = [opener() for _ in heads]
    begin = threading.Barrier(len(heads))
    won: list[int] = []

    def write(number: int) -> None:
        begin.wait()
        if stores[number].write(name, heads[number], payloads_of(heads[number])):
            won.append(number)

    writers = [threading.Thread(target=write, args=(number,)) for number in range(len(heads))]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(won) == 1
    winner = heads[won[0]]
    assert read_whole(opener(), 6, winner) == payloads_of(winner)


@pytest.mark.parametrize("sizes", [(1, 4099, 70_001), LARGE])
def test_shards_that_are_not_wanted_are_not_read(store: Store, sizes: tuple[int, ...]) -> None:
    name = name_of(4)
    head = head_of(name, sizes=sizes)
    store.write(name, head, payloads_of(head))
    targets = targets_of(head)
    wanted = [None, targets[1], None]
    assert store.read(name, head, wanted) in (None, sums_of(wanted))
    assert targets[1] == payloads_of(head)[1]
    assert targets[0] == targets_of(head)[0]


@pytest.mark.parametrize("sizes", [(1, 4099, 70_001), LARGE])
def test_a_head_does_not_read_the_payloads_of_another_write(store: Store, sizes: tuple[int, ...]) -> None:
    name = name_of(4)
    old, new = (head_of(name, write=write, sizes=sizes) for write in (1, 2))
    store.write(name, old, payloads_of(old))
    store.drop(name, old)
    assert store.write(name, new, payloads_of(new))
    with pytest.raises(Gone):
        store.read(name, old, targets_of(old))
    smaller = head_of(name, write=3, sizes=(1, 4096, 70_001))
    with pytest.raises(Gone):
        store.read(name, smaller, targets_of(smaller))


def test_a_chunk_that_was_dropped_is_a_miss_and_may_be_written_again(store: Store) -> None:
    name = name_of(4)
    for write, sizes in ((1, (1, 4099)), (2, LARGE), (3, (7,))):
        head = head_of(name, write=write, sizes=sizes)
        assert store.write(name, head, payloads_of(head))
        store.touch(name, head)
        store.drop(name, head)
        assert store.heads([name], SHARDS) == [None]
        with pytest.raises(Gone):
            store.read(name, head, targets_of(head))
        store.drop(name, None)
        store.touch(name, head)
        assert store.heads([name], SHARDS) == [None]


def test_tenants_namespaces_epochs_and_ranks_share_nothing(store: Store) -> None:
    name = name_of(4)
    others = [
        name_of(4, of=NAMESPACE._replace(tenant="team-7")),
        name_of(4, of=NAMESPACE._replace(namespace=bytes(32))),
        name_of(4, epoch=5),
        name_of(4, ranks="r0"),
    ]
    store.write(name, head_of(name), payloads_of(head_of(name)))
    assert store.heads(others, SHARDS) == [None] * len(others)
    for other in others:
        assert store.write(other, head_of(other), payloads_of(head_of(other)))


def test_a_note_is_made_once_and_replaced_whatever_was_there(opener: Opener) -> None:
    one, other = opener(), opener()
    names = [NAMESPACE, NAMESPACE._replace(tenant="team-7"), NAMESPACE._replace(namespace=bytes(32))]
    assert one.notes(names) == [None, None, None]
    assert one.make_note(names[1], b"first")
    assert not other.make_note(names[1], b"second")
    assert other.notes(names) == [None, b"first", None]
    other.replace_note(names[1], b"third")
    other.replace_note(names[0], bytes(range(256)))
    assert one.notes(names) == [bytes(range(256)), b"third", None]
    assert one.notes([]) == []


def test_of_many_who_make_a_note_at_once_one_does(opener: Opener) -> None:
    stores = [opener() for _ in range(6)]
    begin = threading.Barrier(len(stores))
    made: list[int] = []

    def make(number: int) -> None:
        begin.wait()
        if stores[number].make_note(NAMESPACE, b"note %d" % number):
            made.append(number)

    makers = [threading.Thread(target=make, args=(number,)) for number in range(len(stores))]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
    assert len(made) == 1
    assert stores[0].notes([NAMESPACE]) == [b"note %d" % made[0]]


def test_many_threads_read_and_write_their_own_chunks(store: Store) -> None:
    wrong: list[int] = []

    def live(seed: int) -> None:
        dice = random.Random(seed)
        for turn in range(20):
            name = name_of(1000 * seed + turn)
            head = head_of(name, write=turn, sizes=[dice.randrange(1, 30_000) for _ in range(SHARDS)])
            targets = targets_of(head)
            assert store.write(name, head, payloads_of(head))
            store.read(name, head, targets)
            if targets != payloads_of(head):
                wrong.append(seed)

    threads = [threading.Thread(target=live, args=(seed,)) for seed in range(1, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    last = [name_of(1000 * seed + 19) for seed in range(1, 8)]
    assert None not in store.heads(last, SHARDS)


def test_facts_name_the_kind_and_say_what_an_operator_should_change(store: Store) -> None:
    facts = store.facts()
    assert facts.kind in ("directory", "valkey", "s3", "az", "mooncake")
    assert facts.version
    # Of the others none is set up to make room by itself.
    assert bool(facts.evicts) == (facts.kind == "mooncake")
    assert bool(facts.warnings) == (facts.kind == "mooncake" or not facts.evicts)


def listed(store: Store) -> set[Listed]:
    return {value for some in store.values(NAMESPACE) for value in some}


def noted(store: Store, tenant: str) -> set[bytes]:
    found = [name for some in store.namespaces(tenant) for name in some]
    assert {name.tenant for name in found} <= {tenant}
    return {name.namespace for name in found}


@pytest.mark.usefixtures("lists")
def test_all_that_a_namespace_has_is_listed_with_its_bytes_and_nothing_of_another(opener: Opener) -> None:
    store = opener()
    names = [*(name_of(seed) for seed in range(1, 8)), name_of(8, epoch=3), name_of(9, ranks="r0")]
    heads = {name: head_of(name, sizes=LARGE if name == names[0] else (1, 4099)) for name in names}
    others = [
        name_of(4, of=NAMESPACE._replace(tenant="team-7")),
        name_of(4, of=NAMESPACE._replace(namespace=bytes(32))),
    ]
    for name in (*names, *others):
        head = heads.get(name, head_of(name))
        assert store.write(name, head, payloads_of(head))
    store.replace_note(NAMESPACE, b"note")
    found = listed(opener())
    assert {(value.epoch, value.key, value.ranks) for value in found} == {(n.epoch, n.key, n.ranks) for n in names}
    assert len([value for value in found if not value.fragment]) == len(names)
    assert sum(value.bytes for value in found) == sum(len(encode(h)) + h.payload_bytes for h in heads.values())


@pytest.mark.usefixtures("lists")
def test_a_list_tells_when_a_chunk_was_used_or_that_the_store_sees_to_it(store: Store) -> None:
    name = name_of(1)
    store.write(name, head_of(name), payloads_of(head_of(name)))
    (told,) = listed(store)
    assert told.used_s is None or abs(told.used_s - time.time()) < 3600
    assert (told.used_s is None) == (store.facts().kind == "valkey")


@pytest.mark.usefixtures("lists")
def test_values_that_were_listed_can_be_dropped_whatever_they_are_and_the_others_stay(opener: Opener) -> None:
    store = opener()
    old = [name_of(1, epoch=3), name_of(2, epoch=3, ranks="r0"), name_of(3, epoch=3)]
    heads = {name: head_of(name, sizes=LARGE if name == old[0] else (1, 4099)) for name in (*old, name_of(1))}
    for name, head in heads.items():
        assert store.write(name, head, payloads_of(head))
    values = listed(store)
    store.drop_listed(NAMESPACE, [value for value in values if value.epoch == 3])
    store.drop_listed(NAMESPACE, [])
    assert listed(opener()) == {value for value in values if value.epoch != 3}
    assert read_whole(store, 1, heads[name_of(1)]) == payloads_of(heads[name_of(1)])


@pytest.mark.usefixtures("lists")
def test_namespaces_with_a_note_are_listed_for_their_tenant(store: Store) -> None:
    for number in range(5):
        store.replace_note(NAMESPACE._replace(namespace=bytes([number] * 32)), b"note")
    store.replace_note(NAMESPACE._replace(tenant="team-7"), b"note")
    head = head_of(name_of(1))
    store.write(name_of(1), head, payloads_of(head))  # of a namespace without a note here
    assert noted(store, "-") == {bytes([number] * 32) for number in range(5)}
    assert noted(store, "team-7") == {NAMESPACE.namespace}
    assert noted(store, "team") == set()


def test_a_look_at_a_head_needs_no_fragments(store: Store) -> None:
    name = name_of(4)
    head = head_of(name, sizes=LARGE)
    assert store.look(name) is None
    store.write(name, head, payloads_of(head))
    assert store.look(name) == head
    assert store.look(name_of(4, epoch=5)) is None


def told_to(reader: Store, after: object = None, *, epoch: int = 5) -> tuple[list[int], object]:
    """All marks behind a place, and the place behind them."""
    marks: list[int] = []
    while True:
        found = reader.announced(name_of(1).of, epoch, after)
        marks += unpack(found.batch)
        after = found.cursor
        if found.is_all:
            return marks, after


def test_what_servers_announce_each_of_them_reads_once_in_the_order_of_its_writer(opener: Opener) -> None:
    one, other, reader, of = opener(), opener(), opener(), name_of(1).of
    assert told_to(reader) == ([], told_to(reader)[1]), "nothing was announced yet"
    one.announce(of, 5, pack([8, 13]))
    marks, place = told_to(reader)
    assert marks == [8, 13]
    other.announce(of, 5, pack([22]))
    one.announce(of, 5, pack([31, 8]))
    marks, place = told_to(reader, place)
    assert sorted(marks) == [8, 22, 31]
    assert marks.index(31) < marks.index(8)
    assert told_to(reader, place)[0] == []
    assert sorted(told_to(other)[0]) == [8, 8, 13, 22, 31], "who comes later reads all, and a server its own"


def test_announcements_of_namespaces_and_epochs_are_apart(store: Store) -> None:
    mine, other = name_of(1).of, name_of(2).of._replace(namespace=b"o" * 32)
    store.announce(mine, 5, pack([8]))
    store.announce(mine, 6, pack([12]))
    store.announce(other, 5, pack([16]))
    assert told_to(store)[0] == [8]
    assert told_to(store, epoch=6)[0] == [12]
    assert list(unpack(store.announced(other, 5, None).batch)) == [16]


def test_announcements_are_read_to_their_end_however_many_there_are(opener: Opener) -> None:
    one, reader, of = opener(), opener(), name_of(1).of
    marks = [4 * number for number in range(1, 200_001)]
    for at in range(0, len(marks), 50_000):
        one.announce(of, 5, pack(marks[at : at + 50_000]))
    for number in range(600):
        one.announce(of, 5, pack([4 * number]))
    found, _ = told_to(reader)
    assert found == [*marks, *(4 * number for number in range(600))]


def test_announcements_that_were_dropped_are_not_read_and_those_of_other_epochs_are(store: Store) -> None:
    for epoch in (5, 6):
        store.announce(name_of(1).of, epoch, pack([8]))
    store.drop_announced(name_of(1).of, 5)
    store.drop_announced(name_of(1).of, 7)
    assert (told_to(store)[0], told_to(store, epoch=6)[0]) == ([], [8])


@pytest.mark.usefixtures("lists")
def test_announcements_are_neither_chunks_nor_notes(store: Store) -> None:
    name = name_of(1)
    store.announce(name.of, name.epoch, pack([8]))
    assert [one for some in store.values(name.of) for one in some] == []
    assert [one for some in store.namespaces(name.of.tenant) for one in some] == []
    assert store.notes([name.of]) == [None]
