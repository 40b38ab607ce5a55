"""Lookups that nobody waits for: each is answered once, whatever becomes of the server, and leases go back unasked."""

import time
from pathlib import Path

import pytest
from client_rig import NAMESPACE, Rig, keys_of, rig
from fake_server import WAIT_S, until

from kvclient import RequestError
from kvclient.inquiries import INQUIRIES_MAX, Answered, Inquiries
from kvserver.wire import messages as wire


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
        assert (first.number, first.found.chunks, second.number, second.found) == (7, 2, 8, (0, None, ""))
        assert first.found.lease is not None
        assert (first.found.lease.chunks, first.found.lease.incarnation) == (2, 1)
        assert len(inquiries) == 0
        assert inquiries.take() == []


def test_who_has_nothing_else_to_do_waits_for_the_first(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        inquiries = held(at, 1)
        inquiries.wait(time.monotonic() + WAIT_S)  # for nothing
        inquiries.ask(1, NAMESPACE, keys_of(1))
        inquiries.wait(time.monotonic() + WAIT_S)
        assert [answer.found.chunks for answer in inquiries.take()] == [1]


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
        assert not [request for _, request in at.fake.requests if isinstance(request, wire.Release)]


def test_a_server_that_is_late_is_a_miss_and_is_asked_again_when_it_lives(tmp_path: Path) -> None:
    with rig(tmp_path, lookup_s=0.005) as at:
        inquiries = held(at, 1)
        at.fake.hold.add(wire.Lookup)
        inquiries.ask(1, NAMESPACE, keys_of(1))
        inquiries.ask(2, NAMESPACE, keys_of(1))
        assert [(answer.number, answer.found.why) for answer in answers(inquiries, 2)] == [
            (1, "timeout"),
            (2, "timeout"),
        ]
        at.fake.hold.clear()
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
        assert answer.found == (0, None, "connection-lost")
        until("the gate to shut", lambda: not at.client.connected)
        inquiries.ask(2, NAMESPACE, keys_of(1))
        (answer,) = inquiries.take()
        assert (answer.number, answer.found.chunks) == (2, 0)
        assert answer.found.why in ("connection-lost", "not-connected")


def test_no_more_are_in_flight_than_their_answers_have_room(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        inquiries = held(at, 1)
        at.fake.hold.add(wire.Lookup)
        for number in range(INQUIRIES_MAX + 1):
            inquiries.ask(number, NAMESPACE, keys_of(1))
        assert len(inquiries) == INQUIRIES_MAX
        assert inquiries.take() == [Answered(INQUIRIES_MAX, (0, None, "busy"))]  # type: ignore[arg-type]


def test_a_refusal_comes_with_its_answer_and_a_callers_mistake_at_once(tmp_path: Path) -> None:
    with rig(tmp_path) as at:
        inquiries = held(at, 1)
        at.fake.refuse[wire.Lookup] = ("request", "keys-chain")
        inquiries.ask(1, NAMESPACE, keys_of(1))
        (answer,) = answers(inquiries, 1)
        assert answer.found == (0, None, "keys-chain")
        assert isinstance(answer.refusal, RequestError)
        with pytest.raises(RequestError, match="namespace"):
            inquiries.ask(2, b"short", keys_of(1))
        inquiries.ask(3, NAMESPACE, b"")
        assert inquiries.take() == [Answered(3, (0, None, ""))]  # type: ignore[arg-type]
