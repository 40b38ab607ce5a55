"""Clear across machines: 5 s after it was answered, no server uses what was there before, also one that is cut off."""

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as some

from kvserver.remote import namespace_note
from kvserver.remote.chunk_value import NamespaceName
from kvserver.remote.epoch_lease import LEASE_S, READ_EVERY_S, WRITE_AGAIN_S_MAX, EpochLease
from kvserver.remote.namespace_note import NOTE_BYTES_MAX, NamespaceNote

EVENTS = 4000
OF = NamespaceName("team-7", bytes(range(32)))


@given(some.integers(0, (1 << 64) - 1), some.binary(max_size=300))
def test_a_note_is_read_as_it_was_written_and_every_change_of_it_is_noticed(epoch: int, document: bytes) -> None:
    note = NamespaceNote(epoch, document)
    packed = namespace_note.encode(note, OF)
    assert namespace_note.decode(packed, OF) == note
    for place in range(len(packed)):
        assert namespace_note.decode(packed[:place] + bytes([packed[place] ^ 4]) + packed[place + 1 :], OF) is None
        assert namespace_note.decode(packed[:place], OF) is None


@pytest.mark.parametrize("epoch", [-1, -(1 << 63)])
def test_an_epoch_below_zero_is_no_note(epoch: int) -> None:
    """The brain makes marks of an epoch, and such a one has no bytes."""
    assert namespace_note.decode(namespace_note.encode(NamespaceNote(epoch, b""), OF), OF) is None


def test_a_note_that_no_report_has_room_for_is_no_note() -> None:
    around = len(namespace_note.encode(NamespaceNote(9, bytes(1 << 15)), OF)) - (1 << 15)
    most = NamespaceNote(9, bytes(NOTE_BYTES_MAX - around))
    assert namespace_note.decode(namespace_note.encode(most, OF), OF) == most
    more = NamespaceNote(9, bytes(NOTE_BYTES_MAX - around + 1))
    assert namespace_note.decode(namespace_note.encode(more, OF), OF) is None


def test_what_is_no_note_is_none() -> None:
    assert all(namespace_note.decode(value, OF) is None for value in (None, b"", b"x", bytes(40)))


def test_a_note_of_another_namespace_or_tenant_is_no_note() -> None:
    packed = namespace_note.encode(NamespaceNote(9, b"what it is"), OF)
    for other in (OF._replace(namespace=bytes(31) + b"1"), OF._replace(tenant="team-8"), OF._replace(tenant="-")):
        assert namespace_note.decode(packed, other) is None


class Store:
    """The note of one namespace. Each epoch ever given out is another one."""

    def __init__(self, dice: random.Random) -> None:
        self.note: NamespaceNote | None = None
        self.is_damaged = False
        self.ended: dict[int, float] = {}
        """Epoch that a Clear, or the loss of its note, ended -> since when nobody may use it."""
        self._dice = dice

    def fresh(self) -> int:
        return self._dice.getrandbits(64)

    def replace(self, epoch: int) -> None:
        self.note, self.is_damaged = NamespaceNote(epoch, b""), False

    def make(self, epoch: int) -> bool:
        if self.note is not None or self.is_damaged:
            return False
        self.replace(epoch)
        return True


class Server:
    """One server: its lease, its own copies, and at most one call under way, beside its Clears."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.cleared: set[int]
        """Epochs that a Clear of its own has ended in this life: it does not use them, not even for 5 s."""
        self.copies: int | None = None
        """The epoch under which its own copies were stored; None if it has none."""
        self.is_cut_off = False
        self.life = 0
        self.restart()

    def restart(self) -> None:
        """Also the server's machine may go, with all its copies."""
        self.life += 1
        self.cleared = set()
        self.is_busy = False
        if self.world.dice.random() < 0.3:
            self.copies = None
        self.lease = EpochLease(last_seen=self.copies, fresh=self.world.store.fresh)

    def use(self) -> None:
        """Serves what the store has, stores chunks of its own, and holds both against what was promised."""
        now_s = self.world.now_s
        epoch = self.lease.epoch(now_s)
        if epoch is None:
            self.world.seen["not used"] += 1
            return
        assert now_s < self.world.store.ended.get(epoch, float("inf")), "what was cleared is used"
        assert epoch not in self.cleared, "what this server itself has cleared is used"
        assert self.copies in (None, epoch), "copies of before are kept beside another epoch"
        self.copies = epoch
        self.world.seen["used"] += 1

    def read(self) -> None:
        if self.is_busy or not self.lease.wants_read(self.world.now_s):
            return
        began_s = self.world.now_s

        def answer() -> Callable[[], None]:
            note, is_damaged = self.world.store.note, self.world.store.is_damaged

            def told() -> None:
                self.go_on(self.lease.was_read(note, is_damaged=is_damaged, began_s=began_s))

            return told

        self.call(answer)

    def go_on(self, step: str) -> None:
        if step == "drop-local":
            life, lease = self.life, self.lease

            def dropped() -> None:
                if self.life == life:
                    self.copies = None
                    lease.dropped_local()
                    self.world.seen["dropped"] += 1

            self.world.later(self.world.dice.expovariate(3), dropped)
        elif step:
            self.write_fresh(step)

    def write_fresh(self, step: str) -> None:
        began_s, epoch = self.world.now_s, self.lease.fresh_epoch()

        def answer() -> Callable[[], None]:
            store = self.world.store
            before = store.note
            is_first = True
            if step == "make":
                is_first = store.make(epoch)
            else:
                store.replace(epoch)
            if is_first and before is not None:
                self.world.ends(before.epoch)
            return lambda: self.go_on(self.lease.was_made(epoch, is_first=is_first, began_s=began_s))

        self.call(answer)

    def clear(self) -> None:
        began_s, epoch = self.world.now_s, self.lease.clear_begins()
        self.copies = None
        life, lease = self.life, self.lease
        before: list[int] = []

        def effect() -> None:
            note = self.world.store.note
            before.extend([note.epoch] if note is not None else [])
            self.world.store.replace(epoch)

        def end(is_done: bool) -> None:
            if is_done:
                for old in before:
                    self.world.ends(old)
                    if self.life == life:
                        self.cleared.add(old)
                self.world.seen["cleared"] += 1
            if self.life == life:
                lease.clear_ended(epoch, began_s=began_s, now_s=self.world.now_s, is_done=is_done)

        effect_s, end_s = sorted(self.world.pause_s() for _ in range(2))
        reaches, answers = (not self.is_cut_off and self.world.dice.random() < 0.8 for _ in range(2))
        if reaches:
            self.world.later(effect_s, effect)
        self.world.later(end_s, lambda: end(reaches and answers))

    def call(self, answer: Callable[[], Callable[[], None]]) -> None:
        """A call that reaches the store after a while, and whose answer comes after another; or never."""
        self.is_busy = True
        life = self.life
        there_s, back_s = sorted(self.world.pause_s() for _ in range(2))
        told: list[Callable[[], None]] = []
        if not self.is_cut_off and (self.world.is_calm or self.world.dice.random() < 0.9):
            self.world.later(there_s, lambda: told.append(answer()))

        def ends() -> None:
            if self.life != life:
                return
            self.is_busy = False
            if told and not self.is_cut_off:
                told[0]()

        self.world.later(back_s, ends)


class World:
    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.now_s = 0.0
        self.seen: Counter[str] = Counter()
        self.store = Store(self.dice)
        self._numbers = itertools.count()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self.servers = [Server(self) for _ in range(self.dice.randrange(1, 5))]
        self._clears = self.dice.choice((1, 2, 15))
        self.is_calm = False

    def pause_s(self) -> float:
        """Half of a call's time: usually a second in all, seldom more than its lease."""
        return 0.01 if self.is_calm else self.dice.expovariate(2)

    def later(self, after_s: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now_s + after_s, next(self._numbers), do))

    def ends(self, epoch: int) -> None:
        """Nobody may use that epoch from now + LEASE_S on."""
        self.store.ended.setdefault(epoch, self.now_s + LEASE_S)

    def run(self) -> None:
        for _ in range(EVENTS):
            self.later(self.dice.expovariate(20), self.happens)
            while self._queue and self.dice.random() < 0.9:
                self.now_s, _, do = heapq.heappop(self._queue)
                do()
                for server in self.servers:
                    server.use()

    def calm_down(self) -> None:
        """Nothing happens any more but reads. In the end all servers use the store again, with one epoch."""
        self.is_calm = True
        for server in self.servers:
            server.is_cut_off = False
        for _ in range(400):
            for server in self.servers:
                self.later(0.1, server.read)
            until_s = self.now_s + 0.1
            while self._queue and self._queue[0][0] <= until_s:
                self.now_s, _, do = heapq.heappop(self._queue)
                do()
            self.now_s = until_s
        assert self.store.note is not None
        assert {server.lease.epoch(self.now_s) for server in self.servers} == {self.store.note.epoch}

    def happens(self) -> None:
        if self.is_calm:
            return
        server = self.dice.choice(self.servers)
        what = self.dice.choices(
            ("read", "clear", "cut", "restart", "evict", "damage"), (60, self._clears, 3, 1, 0.5, 0.5)
        )[0]
        match what:
            case "read":
                server.read()
            case "clear":
                server.clear()
            case "cut":
                server.is_cut_off = not server.is_cut_off
            case "restart":
                server.restart()
            case "evict" if self.store.note is not None:
                self.store.note = None
            case "damage" if self.store.note is not None:
                self.store.note, self.store.is_damaged = None, True


@pytest.mark.parametrize("seed", range(40))
def test_nothing_of_before_a_clear_is_used_5_s_after_it(seed: int) -> None:
    world = World(seed)
    world.run()
    assert world.seen["used"] > 100
    assert world.seen["cleared"] > 5
    assert world.seen["not used"] > 0
    world.calm_down()


def test_a_server_that_is_not_answered_stops_using_the_store_when_its_lease_ends() -> None:
    lease = EpochLease(last_seen=None, fresh=lambda: 1)
    assert lease.wants_read(0.0)
    lease.was_read(NamespaceNote(7, b""), is_damaged=False, began_s=0.0)
    assert lease.epoch(LEASE_S - 0.1) == 7
    assert lease.epoch(LEASE_S) is None


def test_a_note_is_read_once_a_second_and_at_once_after_a_clear() -> None:
    lease = EpochLease(last_seen=None, fresh=lambda: 9)
    times = [now / 10 for now in range(100) if lease.wants_read(now / 10)]
    assert len(times) == int(10 / READ_EVERY_S)
    epoch = lease.clear_begins()
    assert not lease.wants_read(50.0)
    lease.clear_ended(epoch, began_s=50.0, now_s=50.1, is_done=True)
    assert lease.epoch(50.2) == 9
    assert lease.wants_read(50.2)


def test_a_read_that_began_before_a_clear_of_our_own_does_not_bring_the_old_epoch_back() -> None:
    lease = EpochLease(last_seen=None, fresh=lambda: 9)
    lease.was_read(NamespaceNote(7, b""), is_damaged=False, began_s=0.0)
    epoch = lease.clear_begins()
    lease.clear_ended(epoch, began_s=1.0, now_s=1.2, is_done=True)
    assert lease.was_read(NamespaceNote(7, b""), is_damaged=False, began_s=0.9) == ""
    assert lease.epoch(1.3) == 9


def test_another_epoch_is_used_only_after_our_own_copies_are_dropped() -> None:
    lease = EpochLease(last_seen=7, fresh=lambda: 9)
    assert lease.was_read(NamespaceNote(8, b""), is_damaged=False, began_s=0.0) == "drop-local"
    assert lease.epoch(0.1) is None
    assert lease.seen == 7
    lease.dropped_local()
    assert lease.epoch(0.2) == 8


def test_answers_that_come_while_a_clear_of_our_own_is_under_way_do_not_count() -> None:
    lease = EpochLease(last_seen=7, fresh=lambda: 9)
    epoch = lease.clear_begins()
    assert lease.was_read(NamespaceNote(8, b""), is_damaged=False, began_s=1.0) == ""
    assert lease.was_made(6, is_first=True, began_s=1.0) == ""
    assert lease.epoch(1.1) is None
    lease.clear_ended(epoch, began_s=0.9, now_s=1.2, is_done=True)
    assert lease.epoch(1.3) == 9


def test_after_a_clear_that_failed_nothing_is_used_until_the_note_is_read() -> None:
    lease = EpochLease(last_seen=None, fresh=lambda: 9)
    lease.was_read(NamespaceNote(7, b""), is_damaged=False, began_s=0.0)
    lease.clear_ended(lease.clear_begins(), began_s=0.1, now_s=0.2, is_done=False)
    assert lease.epoch(0.3) is None
    assert lease.wants_read(0.3)
    lease.was_read(NamespaceNote(7, b""), is_damaged=False, began_s=0.3)
    assert lease.epoch(0.4) == 7


def test_who_comes_second_in_making_a_note_reads_it_and_uses_nothing_before() -> None:
    lease = EpochLease(last_seen=None, fresh=lambda: 9)
    assert lease.wants_read(0.0)
    assert lease.was_read(None, is_damaged=False, began_s=0.0) == "make"
    lease.was_made(lease.fresh_epoch(), is_first=False, began_s=0.1)
    assert lease.epoch(0.2) is None
    assert lease.wants_read(0.2)


def test_the_drop_of_our_own_copies_ends_after_a_clear_of_our_own_without_effect() -> None:
    lease = EpochLease(last_seen=7, fresh=lambda: 9)
    assert lease.was_read(NamespaceNote(8, b""), is_damaged=False, began_s=0.0) == "drop-local"
    epoch = lease.clear_begins()
    lease.clear_ended(epoch, began_s=0.2, now_s=0.3, is_done=True)
    lease.dropped_local()
    assert lease.epoch(0.4) == 9


def test_a_store_that_contradicts_itself_about_a_note_is_asked_no_more_often_than_one_that_fails() -> None:
    """The first time another server may have been first, so the note is read at once."""
    lease, now_s, reads = EpochLease(last_seen=None, fresh=lambda: 5), 100.0, []
    while now_s < 100.0 + 20 * READ_EVERY_S:
        if lease.wants_read(now_s):
            reads.append(now_s)
            assert lease.was_read(None, is_damaged=False, began_s=now_s) == "make"
            assert lease.was_made(5, is_first=False, began_s=now_s) == ""
        now_s += READ_EVERY_S / 8
    assert reads[1] - reads[0] < READ_EVERY_S, "a race is over at once"
    assert all(later - earlier >= READ_EVERY_S for earlier, later in itertools.pairwise(reads[1:]))
    assert lease.contradictions == len(reads) >= 20
    assert lease.was_read(NamespaceNote(6, b""), is_damaged=False, began_s=now_s) == ""
    assert (lease.epoch(now_s), lease.contradictions) == (6, 0)


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_store_that_takes_notes_and_does_not_keep_them_costs_our_own_copies_less_and_less_often(
    is_damaged: bool,
) -> None:
    """Each note that is written is another epoch. Such a store had them dropped each second."""
    epochs = itertools.count(1)
    lease, now_s, drops = EpochLease(last_seen=0, fresh=lambda: next(epochs)), 0.0, []
    while now_s < 4.5 * WRITE_AGAIN_S_MAX:
        assert lease.wants_read(now_s)
        if step := lease.was_read(None, is_damaged=is_damaged, began_s=now_s):
            assert step == ("replace" if is_damaged else "make")
            assert lease.was_made(lease.fresh_epoch(), is_first=True, began_s=now_s) == "drop-local"
            lease.dropped_local()
            drops.append(now_s)
        assert (lease.epoch(now_s) is None) == (now_s >= drops[-1] + LEASE_S), "nothing of it is used for longer"
        now_s += READ_EVERY_S
    assert [later - earlier for earlier, later in itertools.pairwise(drops)] == [2, 4, 8, *[WRITE_AGAIN_S_MAX] * 3]
    assert lease.was_read(NamespaceNote(len(drops), b""), is_damaged=False, began_s=now_s) == ""
    assert lease.contradictions == 0
    assert lease.was_read(None, is_damaged=is_damaged, began_s=now_s + 1), "one that was there, and is lost, is written"
