"""Lookups without a waiting caller: each is answered once, whatever the server does; unwanted leases go back."""

import threading
import time
from pathlib import Path

import pytest

from kvclient import Found, Lease, RequestError
from kvclient.transport.inquiries import INQUIRIES_MAX, UNSENT_MAX, Answered, Inquiries
from kvserver.wire import messages as wire
from tests.rigs.client_rig import NAMESPACE, Rig, keys_of, rig
from tests.rigs.fake_server import WAIT_S, until


def answers(inquiries: Inquiries, count: int) -> list[Answered]:
    taken: list[Answered] = []
    until(f"{count} answers", lambda: taken.extend(inquiries.take()) or len(taken) >= count)
    assert len(taken) == count
    return taken


def held(at: Rig, *numbers: int) -> Inquiries:
    at.fake.stored[NAMESPACE] = {keys_of(number) for number in numbers}
    return at.client.inquiries()


def test_answers_come_when_they_are_taken_and_by_number(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        inquiries = held(at, 1, 2, 4)
        inquiries.ask(7, NAMESPACE, keys_of(1, 2, 3))
        inquiries.ask(8, NAMESPACE, keys_of(5))
        assert len(inquiries) == 2
        first, second = answers(inquiries, 2)
        assert (first.number, first.found.chunks, second.number, second.found) == (7, 2, 8, Found(0, None))
        assert first.found.lease is not None
        assert (first.found.lease.chunks, first.found.lease.incarnation) == (2, 1)
        assert len(inquiries) == 0
        assert inquiries.take() == []


def test_who_has_nothing_else_to_do_waits_for_the_first(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        inquiries = held(at, 1)
        inquiries.wait(time.monotonic() + WAIT_S)  # leases that nobody uses
        inquiries.ask(1, NAMESPACE, keys_of(1))
        inquiries.wait(time.monotonic() + WAIT_S)
        assert [answer.found.chunks for answer in inquiries.take()] == [1]


def test_who_waits_does_not_wait_for_the_others(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        inquiries = held(at, 1)
        at.fake.hold.add(wire.Lookup)
        for number in (1, 2):
            inquiries.ask(number, NAMESPACE, keys_of(1))
        at.fake.answer_as_usual(at.fake.wait_for(wire.Lookup, 2))
        inquiries.wait(time.monotonic() + WAIT_S)
        assert inquiries.ready
        assert len(inquiries) == 1
        assert [answer.number for answer in inquiries.take()] == [2]


def test_a_lease_is_counted_from_the_question(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        inquiries = held(at, 1)
        at.fake.hold.add(wire.Lookup)
        inquiries.ask(1, NAMESPACE, keys_of(1))
        asked_s = time.monotonic()
        at.fake.answer_as_usual(at.fake.wait_for(wire.Lookup))
        ((_, found, _),) = answers(inquiries, 1)
        assert found.lease is not None
        assert found.lease.expires_monotonic_s <= asked_s + at.fake.limits.lease_ttl_ms / 1000


def test_a_lookup_between_them_gets_its_own_answer(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        inquiries = held(at, 1, 2)
        inquiries.ask(1, NAMESPACE, keys_of(1))
        assert at.client.lookup(NAMESPACE, keys_of(1, 2)).chunks == 2
        assert [answer.found.chunks for answer in inquiries.take()] == [1]


def test_a_lease_goes_back_without_a_wait_and_by_the_lane(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        inquiries = held(at, 1)
        at.fake.hold.add(wire.Release)
        lease = at.lease()
        inquiries.release(lease)
        request = at.fake.wait_for(wire.Release)
        assert request.lease == lease.number
        at.fake.hold.clear()
        at.fake.answer(request, wire.Released(request.id))
        inquiries.ask(1, NAMESPACE, keys_of(1))
        assert [answer.found.chunks for answer in answers(inquiries, 1)] == [1]


def test_a_lease_of_an_earlier_life_is_not_given_back_to_the_next(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        inquiries, lease = held(at, 1), at.lease()
        at.restart()
        inquiries.release(lease)
        inquiries.ask(1, NAMESPACE, keys_of(1))
        answers(inquiries, 1)  # by the same lane, so what went before has come
        assert at.fake.count(wire.Release) == 0


def test_a_lease_goes_back_when_its_server_answers_again(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        inquiries, lease = held(at, 1), at.lease()
        at.fake.hold.add(wire.Status)
        at.client.lookup(NAMESPACE, keys_of(1), timeout_s=1e-9)  # late, as far as this client sees
        assert not at.client.connected
        inquiries.release(lease)
        assert inquiries.take() == []
        assert at.fake.count(wire.Release) == 0
        at.fake.hold.clear()
        at.fake.answer_as_usual(at.fake.wait_for(wire.Status))
        assert at.client.wait_connected(WAIT_S)
        inquiries.take()
        assert at.fake.wait_for(wire.Release).lease == lease.number
        inquiries.ask(1, NAMESPACE, keys_of(1))
        answers(inquiries, 1)  # by the same lane, so what went before has come
        assert at.fake.count(wire.Release) == 1


def test_a_server_that_is_late_is_a_miss_and_is_asked_again_when_it_lives(tmp_path: Path) -> None:
    with rig(tmp_path, lookup_s=0.005) as at:
        inquiries = held(at, 1)
        at.fake.hold |= {wire.Lookup, wire.Status}
        inquiries.ask(1, NAMESPACE, keys_of(1))
        inquiries.ask(2, NAMESPACE, keys_of(1))
        assert [(answer.number, answer.found.why) for answer in answers(inquiries, 2)] == [
            (1, "timeout"),
            (2, "timeout"),
        ]
        at.fake.hold.clear()
        at.fake.answer_as_usual(at.fake.wait_for(wire.Status))
        until("the gate to open", lambda: at.client.connected)
        assert at.client.counters.timeouts == 1


def test_what_was_asked_of_a_server_that_died_is_a_miss(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        inquiries = held(at, 1)
        at.fake.hold.add(wire.Lookup)
        inquiries.ask(1, NAMESPACE, keys_of(1))
        at.fake.wait_for(wire.Lookup)
        at.fake.stop()
        (answer,) = answers(inquiries, 1)
        assert answer.found == Found(0, None, "connection-lost")
        until("the gate to shut", lambda: not at.client.connected)
        inquiries.ask(2, NAMESPACE, keys_of(1))
        (answer,) = inquiries.take()
        assert (answer.number, answer.found.chunks) == (2, 0)
        assert answer.found.why in ("connection-lost", "not-connected")


@pytest.mark.parametrize("asked_first", [True, False])
def test_a_lane_that_closed_is_a_miss_and_is_opened_again(tmp_path: Path, asked_first: bool) -> None:
    with rig(tmp_path) as at:
        inquiries = held(at, 1)
        at.fake.hold.add(wire.Lookup)
        if asked_first:
            inquiries.ask(1, NAMESPACE, keys_of(1))
            at.fake.wait_for(wire.Lookup)
        at.fake.close_lanes()
        if not asked_first:
            inquiries.ask(1, NAMESPACE, keys_of(1))
        (answer,) = answers(inquiries, 1)
        assert answer.found == Found(0, None, "connection-lost")
        at.fake.hold.clear()
        at.fake.wait_for(wire.Lane, 2)
        assert at.client.wait_connected(WAIT_S)
        inquiries.ask(2, NAMESPACE, keys_of(1))
        assert [answer.found.chunks for answer in answers(inquiries, 1)] == [1]
        assert (at.client.counters.trips, at.client.counters.timeouts) == (1, 0)


def test_a_session_that_the_server_forgot_is_a_miss_and_not_asked_by_again(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        inquiries = held(at, 1)
        at.fake.refuse[wire.Lookup] = ("request", "session-unknown")
        inquiries.ask(1, NAMESPACE, keys_of(1))
        (answer,) = answers(inquiries, 1)
        assert (answer.found, answer.refusal) == (Found(0, None, "session-unknown"), None)
        assert at.client.counters.trips == 1


def test_a_reply_of_another_kind_is_a_miss_and_the_end_of_its_lane(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        inquiries = held(at, 1)
        at.fake.hold.add(wire.Lookup)
        inquiries.ask(1, NAMESPACE, keys_of(1))
        request = at.fake.wait_for(wire.Lookup)
        at.fake.answer(request, wire.Released(request.id))
        (answer,) = answers(inquiries, 1)
        assert answer.found == Found(0, None, "frame")
        assert at.client.counters.trips == 1


def test_a_burst_of_long_prompts_waits_for_a_server_that_reads_a_moment_later(tmp_path: Path) -> None:
    """The burst overflows the socket: all lookups are still sent, in order, and so are the releases after them."""
    with rig(tmp_path) as at:
        reads = threading.Event()
        at.fake.before[wire.Lookup] = lambda _: reads.wait(WAIT_S)
        longest = range(1, at.fake.limits.chunks_max + 1)
        inquiries, lease = held(at, *longest), Lease(7, 1, 1, 0.0)
        for number in range(INQUIRIES_MAX):
            inquiries.ask(number, NAMESPACE, keys_of(*longest))
        inquiries.release(lease)
        assert len(inquiries) == INQUIRIES_MAX
        assert at.fake.count(wire.Lookup) <= 1
        reads.set()
        found = answers(inquiries, INQUIRIES_MAX)
        assert [(answer.number, answer.found.chunks) for answer in found] == [
            (number, len(longest)) for number in range(INQUIRIES_MAX)
        ]
        until("the release", lambda: inquiries.take() or at.fake.count(wire.Release))
        assert (at.client.counters.trips, at.client.counters.timeouts) == (0, 0)


def test_a_question_that_waits_for_room_is_not_late_while_the_server_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler polls once per step, and a step may take longer than a lookup may."""
    with rig(tmp_path, lookup_s=0.1) as at:
        reads = threading.Event()
        at.fake.before[wire.Lookup] = lambda _: reads.wait(WAIT_S)
        longest = range(1, at.fake.limits.chunks_max + 1)
        inquiries = held(at, *longest)

        def sent() -> int:
            return INQUIRIES_MAX - len(inquiries._unsent)

        def all_answered() -> None:
            until("what was sent to be read", lambda: at.fake.count(wire.Lookup) == sent())
            at.fake._do(lambda: None)  # by then it has been answered, too

        for number in range(INQUIRIES_MAX):
            inquiries.ask(number, NAMESPACE, keys_of(*longest))
        found_room = sent()
        assert 0 < found_room < INQUIRIES_MAX
        reads.set()
        all_answered()
        late_s = max(asked.due_s for asked in inquiries._asked.values())
        until("all to be late", lambda: time.monotonic() > late_s)
        inquiries._timeout_s = WAIT_S
        reads.clear()
        found = inquiries.take()  # lookups sent now have no answer yet
        assert len(found) == found_room
        assert sent() > found_room
        reads.set()
        link = at.client._gate.link
        assert link is not None
        take = link.lane.take
        monkeypatch.setattr(link.lane, "take", lambda due_s: all_answered() or take(due_s))
        found += answers(inquiries, INQUIRIES_MAX - found_room)  # lookups sent from now on are answered at once
        assert {answer.found.why for answer in found} == {""}
        assert (at.client.counters.trips, at.client.counters.timeouts) == (0, 0)


def test_what_waits_for_room_is_not_sent_to_the_next_server(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        reads = threading.Event()
        at.fake.before[wire.Lookup] = lambda _: reads.wait(WAIT_S)
        longest = keys_of(*range(1, at.fake.limits.chunks_max + 1))
        inquiries = held(at, 1)
        for number in range(INQUIRIES_MAX):
            inquiries.ask(number, NAMESPACE, longest)
        reads.set()
        at.restart()
        before = at.fake.count(wire.Lookup)
        assert {answer.found.why for answer in answers(inquiries, INQUIRIES_MAX)} == {"connection-lost"}
        inquiries.ask(999, NAMESPACE, keys_of(1))
        assert [answer.found.chunks for answer in answers(inquiries, 1)] == [1]
        assert at.fake.count(wire.Lookup) == before + 1


def test_leases_that_wait_for_room_are_bounded_and_the_rest_expires(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        reads = threading.Event()
        at.fake.before[wire.Lookup] = lambda _: reads.wait(WAIT_S)
        longest = keys_of(*range(1, at.fake.limits.chunks_max + 1))
        inquiries = held(at, 1)
        for number in range(INQUIRIES_MAX):
            inquiries.ask(number, NAMESPACE, longest)
        for number in range(1, 2 * UNSENT_MAX):
            inquiries.release(Lease(number, 1, 1, 0.0))
        reads.set()
        answers(inquiries, INQUIRIES_MAX)
        inquiries.ask(999, NAMESPACE, keys_of(1))
        answers(inquiries, 1)  # by the same lane, so what went before has come
        assert 0 < at.fake.count(wire.Release) < UNSENT_MAX


def test_leases_that_wait_for_their_server_are_bounded_and_the_oldest_expire(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        inquiries = held(at, 1)
        at.fake.hold.add(wire.Status)
        at.client.lookup(NAMESPACE, keys_of(1), timeout_s=1e-9)  # late, as far as this client sees
        for number in range(1, UNSENT_MAX + 8):
            inquiries.release(Lease(number, 1, 1, 0.0))
        at.fake.hold.clear()
        at.fake.answer_as_usual(at.fake.wait_for(wire.Status))
        assert at.client.wait_connected(WAIT_S)
        inquiries.ask(1, NAMESPACE, keys_of(1))
        answers(inquiries, 1)
        until("the releases", lambda: inquiries.take() or at.fake.count(wire.Release) >= UNSENT_MAX)
        assert at.fake.count(wire.Release) == UNSENT_MAX


def test_no_more_are_in_flight_than_their_answers_have_room(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        inquiries = held(at, 1)
        at.fake.hold.add(wire.Lookup)
        for number in range(INQUIRIES_MAX + 1):
            inquiries.ask(number, NAMESPACE, keys_of(1))
        assert len(inquiries) == INQUIRIES_MAX
        assert inquiries.take() == [Answered(INQUIRIES_MAX, Found(0, None, "busy"))]


def test_a_refusal_comes_with_its_answer_and_a_callers_mistake_at_once(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        inquiries = held(at, 1)
        at.fake.refuse[wire.Lookup] = ("request", "keys-chain")
        inquiries.ask(1, NAMESPACE, keys_of(1))
        (answer,) = answers(inquiries, 1)
        assert answer.found == Found(0, None, "keys-chain")
        assert isinstance(answer.refusal, RequestError)
        with pytest.raises(RequestError, match="namespace"):
            inquiries.ask(2, b"short", keys_of(1))
        inquiries.ask(3, NAMESPACE, b"")
        assert inquiries.take() == [Answered(3, Found(0, None, ""))]
