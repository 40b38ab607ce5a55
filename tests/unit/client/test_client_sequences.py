"""A scheduler's memory of its sequences: it asks once while the answer holds, and no lease is lost or kept."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvclient import Found, Sequences
from kvclient.sequences import LEASE_SPARE_S
from kvserver.wire import messages as wire
from tests.rigs.client_rig import NAMESPACE, Rig, keys_of, rig
from tests.rigs.fake_server import until

WHOLE, HALF, NONE = keys_of(1, 2), keys_of(1, 2, 7, 8), keys_of(9)


@dataclass
class Clock:
    """The memory's clock. Leases end by the real one, which does not get there in a test."""

    now_s: float

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Desk:
    at: Rig
    sequences: Sequences
    clock: Clock

    def asked(self) -> int:
        return self.at.fake.count(wire.Lookup)

    def released(self) -> list[int]:
        return [request.lease for _, request in self.at.fake.requests if isinstance(request, wire.Release)]


@contextmanager
def desk(tmp_path: Path, sequences_max: int = 5) -> Iterator[Desk]:
    with rig(tmp_path) as at:
        lease = at.lease(2)
        at.client.release(lease)
        at.fake.requests.clear()
        clock = Clock(lease.expires_monotonic_s - 30.0)
        yield Desk(at, Sequences(at.client, moment_s=0.5, sequences_max=sequences_max, clock_s=clock), clock)


def test_a_whole_hit_is_asked_for_once_until_its_lease_is_about_to_end(tmp_path: Path) -> None:
    with desk(tmp_path) as d:
        found = d.sequences.lookup("a", NAMESPACE, WHOLE)
        assert found.lease is not None
        for _ in range(100):
            assert d.sequences.lookup("a", NAMESPACE, WHOLE) is found
        assert d.asked() == 1
        d.clock.now_s = found.lease.expires_monotonic_s - LEASE_SPARE_S
        again = d.sequences.lookup("a", NAMESPACE, WHOLE)
        assert again.lease is not None
        assert again.lease.number != found.lease.number
        assert (d.asked(), d.released()) == (2, [found.lease.number])


@pytest.mark.parametrize(("keys", "chunks"), [(NONE, 0), (HALF, 2)])
def test_what_is_missing_is_believed_for_a_moment(tmp_path: Path, keys: bytes, chunks: int) -> None:
    with desk(tmp_path) as d:
        assert d.sequences.lookup("a", NAMESPACE, keys).chunks == chunks
        d.clock.now_s += 0.49
        d.at.fake.stored[NAMESPACE] |= {keys[at : at + 32] for at in range(0, len(keys), 32)}
        assert d.sequences.lookup("a", NAMESPACE, keys).chunks == chunks
        assert d.asked() == 1
        d.clock.now_s += 0.02
        assert d.sequences.lookup("a", NAMESPACE, keys).chunks == len(keys) // 32
        assert d.asked() == 2
        assert len(d.released()) == (1 if chunks else 0), "the shorter lease was given back"


def test_the_lease_is_released_only_after_the_new_one_was_granted(tmp_path: Path) -> None:
    with desk(tmp_path) as d:
        d.sequences.lookup("a", NAMESPACE, HALF)
        d.clock.now_s += 1
        d.sequences.lookup("a", NAMESPACE, HALF)
        order = [type(request) for _, request in d.at.fake.requests]
        assert order == [wire.Lookup, wire.Lookup, wire.Release]


def test_another_question_is_asked(tmp_path: Path) -> None:
    with desk(tmp_path) as d:
        d.sequences.lookup("a", NAMESPACE, WHOLE)
        assert d.sequences.lookup("a", NAMESPACE, WHOLE[:32]).chunks == 1
        assert d.sequences.lookup("a", bytes(32), WHOLE[:32]).chunks == 0
        d.sequences.lookup("b", NAMESPACE, WHOLE)
        d.sequences.lookup("b", NAMESPACE, WHOLE, chunks_wanted_min=2)
        assert d.asked() == 5
        assert len(d.released()) == 3


def test_a_taken_lease_is_the_callers_and_a_forgotten_one_goes_back(tmp_path: Path) -> None:
    with desk(tmp_path) as d:
        first, second = (d.sequences.lookup(name, NAMESPACE, WHOLE) for name in ("a", "b"))
        assert d.sequences.take("a") == first.lease
        assert d.sequences.take("a") is None
        d.sequences.forget("a")
        assert d.released() == []
        d.sequences.forget("b")
        d.sequences.forget("never seen")
        assert second.lease is not None
        assert d.released() == [second.lease.number]
        assert len(d.sequences) == 0


def test_sequences_are_bounded_and_the_first_goes_first(tmp_path: Path) -> None:
    with desk(tmp_path, sequences_max=3) as d:
        found = [d.sequences.lookup(number, NAMESPACE, WHOLE) for number in range(5)]
        assert len(d.sequences) == 3
        assert d.released() == [answer.lease.number for answer in found[:2] if answer.lease is not None]


def test_what_an_earlier_server_promised_is_asked_again_and_no_answer_is_remembered(tmp_path: Path) -> None:
    with desk(tmp_path) as d:
        found = d.sequences.lookup("a", NAMESPACE, WHOLE)
        d.at.fake.stop()
        until("the client to notice", lambda: not d.at.client.connected)
        assert d.sequences.lookup("a", NAMESPACE, WHOLE).why
        assert len(d.sequences) == 0
        d.at.restart()
        again = d.sequences.lookup("a", NAMESPACE, WHOLE)
        assert again.lease is not None
        assert found.lease is not None
        assert again.lease.incarnation != found.lease.incarnation
        assert d.released() == [], "a lease of an earlier server names nothing in this one"


def test_a_prompt_without_a_whole_chunk_is_never_asked_for(tmp_path: Path) -> None:
    with desk(tmp_path) as d:
        assert d.sequences.lookup("a", NAMESPACE, b"") == Found(0, None, "")
        assert d.asked() == 0
