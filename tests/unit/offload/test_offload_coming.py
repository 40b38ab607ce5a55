"""Requests wait while chunks come from a remote store, for a bounded time, and lose no lease by it."""

from kvclient.values import Found, Lease
from tests.rigs.offload_rig import CHUNK, Desk

TOKENS = 7 * CHUNK + 5
WAIT_S = 0.9
PAUSE_S = 0.05


def desk(**options: object) -> Desk:
    return Desk(coming_wait_s=WAIT_S, coming_pause_s=PAUSE_S, **options)


def answer(at: Desk, chunks: int, coming: int) -> Lease | None:
    """Answers the one lookup that is asked."""
    order = at.lookup()
    lease = None
    if chunks >= max(1, order.chunks_wanted_min):
        at.leases += 1
        lease = Lease(at.leases, chunks, 7, at.now_s + 30.0, 0)
    at.offload.found(order.number, Found(chunks, lease, "", coming))
    return lease


def asks(at: Desk) -> bool:
    """Whether match() asks the server now; the request waits in any case."""
    assert at.match(tokens=TOKENS) is None
    return at.offload.is_asking("r")


def test_a_request_waits_until_all_that_comes_has_come() -> None:
    at = desk()
    at.begin(tokens=TOKENS)
    assert asks(at)
    for held in (0, 2, 5):
        answer(at, held, coming=7 - held)
        at.now_s += PAUSE_S
        assert asks(at)
    answer(at, 7, coming=0)
    assert at.match(tokens=TOKENS) == 7 * CHUNK


def test_a_request_asks_again_only_after_a_pause() -> None:
    at = desk()
    at.begin(tokens=TOKENS)
    assert asks(at)
    answer(at, 0, coming=7)
    assert asks(at)
    answer(at, 0, coming=7)
    at.now_s += PAUSE_S / 3
    assert not asks(at)
    assert at.offload.awaits_more("r", at.now_s)
    at.now_s += PAUSE_S
    assert asks(at)


def test_what_is_there_when_the_time_is_over_is_used() -> None:
    at = desk()
    at.begin(tokens=TOKENS)
    assert asks(at)
    answer(at, 0, coming=7)
    assert asks(at)
    answer(at, 3, coming=4)
    at.now_s += WAIT_S
    assert not at.offload.awaits_more("r", at.now_s)
    assert at.match(tokens=TOKENS) == 3 * CHUNK


def test_without_a_wait_a_request_takes_what_is_there() -> None:
    at = Desk()
    at.begin(tokens=TOKENS)
    assert asks(at)
    answer(at, 2, coming=5)
    assert at.match(tokens=TOKENS) == 2 * CHUNK


def test_a_request_does_not_wait_for_what_its_engine_has() -> None:
    at = desk()
    at.begin(tokens=TOKENS)
    assert at.match(tokens=TOKENS, hbm=7 * CHUNK) == 0 or at.offload.is_asking("r")
    for order in at.offload.take_lookups():
        at.offload.found(order.number, Found(2, None, "", 3))
    assert at.match(tokens=TOKENS, hbm=6 * CHUNK) == 0


def test_leases_of_answers_that_were_not_used_go_back() -> None:
    at = desk()
    at.begin(tokens=TOKENS)
    assert asks(at)
    first = answer(at, 2, coming=5)
    at.now_s += PAUSE_S
    assert asks(at)
    second = answer(at, 7, coming=0)
    assert at.match(tokens=TOKENS) == 7 * CHUNK
    assert at.offload.take_releases() == [first]
    at.offload.finish("r")
    assert at.offload.take_releases() == [second]


def test_a_request_that_is_aborted_while_it_waits_gives_its_lease_back() -> None:
    at = desk()
    at.begin(tokens=TOKENS)
    assert asks(at)
    lease = answer(at, 2, coming=5)
    at.now_s += PAUSE_S / 2
    asks(at)
    at.offload.finish("r")
    assert lease in at.offload.take_releases()
