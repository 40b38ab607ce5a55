"""Announcements in objects whose names are guessed: turns, numbers, clocks that differ, and what is lost."""

from collections.abc import Callable, Sequence

import pytest
from obstore.store import MemoryStore

from kvserver.remote.announcement import pack, unpack
from kvserver.remote.objects import guessed_log
from kvserver.remote.objects.clouds import CloudObjects, Place
from kvserver.remote.objects.driver import Start
from kvserver.remote.objects.guessed_log import TURN_S, TURNS_READ, GuessedLog
from kvserver.remote.store import StoreError

FOLDER = "kv1/-/x/announced/"
EPOCH = 5


class Sized(CloudObjects):
    """Objects in memory. fails: what a call of that name raises. held: names that nobody can take now."""

    def __init__(self) -> None:
        super().__init__(Place("s3", "memory"), stand_in=MemoryStore())
        self.fails: dict[str, StoreError] = {}
        self.held: set[str] = set()
        self.after_remove: Callable[[], None] | None = None
        self.asked: list[int] = []

    def sizes(self, names: Sequence[str]) -> list[int | StoreError | None]:
        self.asked.append(len(names))
        found = self.starts(names, 1, within_s=9)
        return [one.bytes if isinstance(one, Start) else one for one in found]

    def create(self, name: str, pieces: Sequence[bytes | memoryview], *, within_s: float) -> bool:
        self._fail("create")
        return name not in self.held and super().create(name, pieces, within_s=within_s)

    def read(self, name: str, pieces: Sequence[tuple[int, memoryview]], *, within_s: float) -> bool:
        self._fail("read")
        return super().read(name, pieces, within_s=within_s)

    def remove(self, names: Sequence[str], *, within_s: float) -> None:
        self._fail("remove")
        super().remove(names, within_s=within_s)
        then, self.after_remove = self.after_remove, None
        if then is not None:
            then()

    def names(self) -> list[str]:
        return sorted(one.name for some in self.listed("kv1/", within_s=9) for one in some)

    def _fail(self, call: str) -> None:
        if call in self.fails:
            raise self.fails[call]


class Machine:
    """A server with a clock of its own."""

    def __init__(self, objects: Sized, now_s: float = 1000 * TURN_S, *, every_s: float = 0.0) -> None:
        self.now_s = now_s
        self.log = GuessedLog(objects, FOLDER, 9, every_s=every_s, clock=lambda: self.now_s)
        self.place: object = None

    def tells(self, *marks: int) -> None:
        self.log.append(EPOCH, pack(marks))

    def hears(self) -> list[int]:
        """All that it has not heard."""
        marks: list[int] = []
        while True:
            found = self.log.read(EPOCH, self.place)
            marks += unpack(found.batch)
            self.place = found.cursor
            if found.is_all:
                return marks


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> Sized:
    """However busy the machine is, no read is cut short because it took long."""
    monkeypatch.setattr(guessed_log, "READ_S_MAX", 3600.0)
    return Sized()


def test_servers_take_numbers_of_their_own_and_later_turns_are_read_after_earlier_ones(objects: Sized) -> None:
    one, other, reader = Machine(objects), Machine(objects), Machine(objects)
    one.tells(8)
    other.tells(12)
    one.tells(16)
    assert [name.rpartition("/")[2] for name in objects.names()] == ["000003e8.0000", "000003e8.0001"]
    assert reader.hears() == [8, 16, 12]
    for machine in (one, other, reader):
        machine.now_s += TURN_S
    other.tells(20)
    one.tells(24)
    assert reader.hears() == [20, 24]
    assert Machine(objects, reader.now_s).hears() == [8, 16, 12, 20, 24]


def test_a_clock_that_differs_by_a_turn_hides_nothing(objects: Sized) -> None:
    early, late, reader = Machine(objects), Machine(objects), Machine(objects)
    early.now_s -= TURN_S
    late.now_s += TURN_S
    assert reader.hears() == []
    early.tells(8)
    late.tells(12)
    assert reader.hears() == [8, 12]
    early.tells(16)
    late.tells(20)
    assert reader.hears() == [16, 20]


def test_a_server_that_begins_reads_a_day_and_later_only_turns_under_way(objects: Sized) -> None:
    Machine(objects).tells(8)
    begins = Machine(objects, (1000 + TURNS_READ) * TURN_S)
    assert begins.hears() == [8]
    first = sum(objects.asked)
    objects.asked.clear()
    assert begins.hears() == []
    assert sum(objects.asked) * 20 < first
    assert Machine(objects, (1001 + TURNS_READ) * TURN_S).hears() == []


def test_a_pause_of_months_and_a_clock_that_was_set_on_cost_a_day_of_names(objects: Sized) -> None:
    reader, other = Machine(objects), Machine(objects, 60_000 * TURN_S)
    assert reader.hears() == []
    first = sum(objects.asked)
    objects.asked.clear()
    reader.now_s = other.now_s
    other.tells(8)
    assert reader.hears() == [8]
    assert sum(objects.asked) < first + 100


def test_a_read_that_takes_long_ends_with_what_it_has_and_the_next_one_goes_on(
    objects: Sized, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other, reader = Machine(objects), Machine(objects), Machine(objects)
    one.tells(8)
    other.tells(12, 16)
    monkeypatch.setattr(guessed_log, "READ_S_MAX", -1.0)
    found = reader.log.read(EPOCH, None)
    first = unpack(found.batch)
    assert (sorted(first) in ([8], [12, 16]), found.is_all) == (True, False)
    reader.place = found.cursor
    assert sorted([*first, *reader.hears()]) == [8, 12, 16]


def test_a_clock_that_was_set_back_hides_nothing_that_comes_now(objects: Sized) -> None:
    one, reader = Machine(objects), Machine(objects)
    reader.now_s += 500 * TURN_S
    assert reader.hears() == []
    reader.now_s = one.now_s
    one.tells(8)
    assert reader.hears() == [8]
    one.tells(12)
    assert reader.hears() == [12]


def test_more_servers_than_are_asked_for_at_a_time_are_all_heard(objects: Sized) -> None:
    machines = [Machine(objects) for _ in range(19)]
    for number, machine in enumerate(machines):
        machine.tells(4 * number)
    assert sorted(Machine(objects).hears()) == [4 * number for number in range(19)]


def test_an_object_that_was_evicted_is_written_again_as_a_whole_and_hides_no_other(objects: Sized) -> None:
    one, other, reader = Machine(objects), Machine(objects), Machine(objects)
    one.tells(8)
    other.tells(12)
    objects.remove(objects.names()[:1], within_s=9)
    assert reader.hears() == [12]
    one.tells(16)
    assert reader.hears() == [8, 16]


def test_a_server_whose_object_was_evicted_leaves_the_one_that_another_has_put_in_its_place(objects: Sized) -> None:
    one, other = Machine(objects), Machine(objects)
    one.tells(8)
    objects.remove(objects.names(), within_s=9)
    other.tells(12)
    for mark in (16, 24, 32):
        one.tells(mark)
        other.tells(mark + 4)
    assert len(objects.names()) == 2
    assert sorted(Machine(objects).hears()) == [8, 12, 16, 20, 24, 28, 32, 36]


def test_a_number_that_another_server_takes_while_an_object_is_replaced_stays_with_that_server(objects: Sized) -> None:
    one, other = Machine(objects), Machine(objects)
    one.tells(8)
    objects.after_remove = lambda: other.tells(12)
    one.tells(16)
    other.tells(20)
    assert sorted(Machine(objects).hears()) == [8, 12, 16, 20]


def test_all_is_heard_of_an_object_that_another_server_has_put_in_the_place_of_one_that_was_read(
    objects: Sized,
) -> None:
    one, shorter, reader = Machine(objects), Machine(objects), Machine(objects)
    one.tells(8, 12, 16)
    assert reader.hears() == [8, 12, 16]
    objects.remove(objects.names(), within_s=9)
    shorter.tells(20, 24)
    assert reader.hears() == [20, 24]
    objects.remove(objects.names(), within_s=9)
    Machine(objects).tells(28, 32, 36, 40)
    assert reader.hears() == [28, 32, 36, 40]


def test_an_object_whose_write_has_no_end_is_followed_by_another(objects: Sized) -> None:
    """A store may hold a name for half a minute after a write whose begin it has not answered in time."""
    one = Machine(objects)
    one.tells(8)
    (held,) = objects.names()
    objects.remove([held], within_s=9)
    objects.held.add(held)
    one.tells(12)
    one.tells(16)
    assert held not in objects.names()
    assert Machine(objects).hears() == [8, 12, 16]


def test_what_could_not_be_written_waits_and_comes_later(objects: Sized) -> None:
    one, reader = Machine(objects), Machine(objects)
    for call in ("create", "read", "remove", "create"):
        objects.fails = {call: StoreError("remote-slow", "planted")}
        with pytest.raises(StoreError, match="planted"):
            one.tells(8)
        objects.fails = {}
        one.tells(12)
        assert reader.hears() == [8, 12]


def test_a_store_that_takes_no_writes_is_heard_all_the_same(objects: Sized) -> None:
    one, other = Machine(objects), Machine(objects)
    other.tells(8)
    objects.fails = {"create": StoreError("remote-full", "planted")}
    with pytest.raises(StoreError, match="planted"):
        one.tells(12)
    assert one.hears() == [8]
    objects.fails = {}
    assert one.hears() == [12], "it was written meanwhile"


def test_what_waits_is_bounded(objects: Sized, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guessed_log, "WAITING_BYTES_MAX", 80)
    one = Machine(objects)
    objects.fails = {"create": StoreError("remote-full", "planted")}
    for number in range(25):
        with pytest.raises(StoreError):
            one.tells(4 * number)
    objects.fails = {}
    one.tells(400)
    assert Machine(objects).hears() == [4 * number for number in range(20, 25)] + [400]


def test_a_full_object_is_followed_by_another_and_a_full_turn_is_an_error(
    objects: Sized, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guessed_log, "OBJECT_BYTES_MAX", guessed_log.WRITER_BYTES + 16)
    monkeypatch.setattr(guessed_log, "NUMBERS_MAX", 3)
    one = Machine(objects)
    for number in range(6):
        one.tells(4 * number)
    assert len(objects.names()) == 3
    assert Machine(objects).hears() == [0, 4, 8, 12, 16, 20]
    with pytest.raises(StoreError, match="3 announcements in 600 s"):
        one.tells(24)


def test_marks_wait_for_their_time_and_are_read_no_more_often(objects: Sized) -> None:
    one, reader = Machine(objects, every_s=3600), Machine(objects, every_s=3600)
    one.tells(8)
    one.tells(12)
    assert reader.hears() == [8]
    objects.asked.clear()
    assert reader.hears() == []
    assert objects.asked == []


def test_epochs_are_apart_and_are_dropped_alone(objects: Sized) -> None:
    one = Machine(objects)
    one.tells(8)
    one.log.append(6, pack([12]))
    one.log.drop(EPOCH)
    one.log.drop(7)
    assert Machine(objects).hears() == []
    assert list(unpack(one.log.read(6, None).batch)) == [12]


def test_a_store_that_does_not_answer_is_an_error_and_no_end(objects: Sized, monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(objects).tells(8)
    reader = Machine(objects)
    with monkeypatch.context() as patch:
        patch.setattr(objects, "sizes", lambda names: [StoreError("remote-slow", "planted")] * len(names))
        with pytest.raises(StoreError, match="planted"):
            reader.hears()
    assert reader.hears() == [8]
