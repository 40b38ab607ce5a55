"""Lookups that are asked again while a remote store brings more: until when, what holds meanwhile, and whose lease
goes back."""

import pytest

from kvclient.offload.lookups import ASK_AGAIN_S
from kvclient.offload.values import Options
from kvserver.errors import RequestError
from tests.rigs.offload_rig import BLOCK, CHUNK, FULL, Desk, table

WAIT_S = 0.7
TOKENS = 5 * CHUNK + 1


def waiting(*, found: int, coming: int, **options: object) -> Desk:
    """A desk whose request has an answer after which more is coming. match() has not seen it."""
    desk = Desk(**{"coming_wait_s": WAIT_S, **options})  # type: ignore[arg-type]
    desk.begin(tokens=TOKENS)
    assert desk.match(tokens=TOKENS) is None
    desk.answer(found, coming=coming)
    return desk


def ask_again(desk: Desk, *, hbm: int = 0) -> None:
    """Let the pause pass after which the request asks again."""
    assert desk.match(tokens=TOKENS, hbm=hbm) is None
    assert desk.offload.take_lookups() == []
    desk.now_s += ASK_AGAIN_S
    assert desk.match(tokens=TOKENS, hbm=hbm) is None


def test_a_prompt_asks_again_until_nothing_more_comes() -> None:
    desk = waiting(found=1, coming=3)
    for found, coming in ((2, 2), (3, 1), (4, 0)):
        ask_again(desk)
        desk.answer(found, coming=coming)
    assert desk.match(tokens=TOKENS) == 4 * CHUNK
    assert desk.offload.take_lookups() == []


def test_what_stops_coming_is_not_waited_for() -> None:
    desk = waiting(found=2, coming=3)
    ask_again(desk)
    desk.answer(2)
    assert desk.match(tokens=TOKENS) == 2 * CHUNK


def test_there_is_a_pause_before_each_question_however_often_the_engine_matches() -> None:
    desk = waiting(found=0, coming=5)
    for _ in range(3):
        assert desk.match(tokens=TOKENS) is None
        desk.now_s += ASK_AGAIN_S * 0.3
    assert desk.offload.take_lookups() == []
    desk.now_s += ASK_AGAIN_S * 0.2
    assert desk.match(tokens=TOKENS) is None
    order = desk.lookup()
    desk.now_s += 3 * ASK_AGAIN_S
    assert desk.match(tokens=TOKENS) is None
    assert desk.offload.take_lookups() == [], "one question at a time"
    desk.answer(0, order=order, coming=5)
    assert desk.match(tokens=TOKENS) is None
    assert not desk.offload.is_asking("r"), "a slow server is not asked at once: an idle engine would wait without end"


def test_when_the_time_is_over_what_is_there_is_used() -> None:
    desk = waiting(found=2, coming=3)
    asked = 1
    until_s = desk.now_s + WAIT_S
    while desk.now_s + ASK_AGAIN_S < until_s:
        ask_again(desk)
        desk.answer(2, coming=3)
        asked += 1
    desk.now_s = until_s
    assert desk.match(tokens=TOKENS) == 2 * CHUNK
    assert desk.offload.take_lookups() == []
    assert asked == desk.offload.statistics.lookups <= 1 + WAIT_S / ASK_AGAIN_S


def test_a_question_on_its_way_when_the_time_ends_is_the_last() -> None:
    desk = waiting(found=2, coming=3)
    desk.now_s += WAIT_S - ASK_AGAIN_S - 0.001
    ask_again(desk)
    desk.now_s += 0.002
    assert desk.match(tokens=TOKENS) is None
    desk.answer(3, coming=2)
    assert desk.match(tokens=TOKENS) == 3 * CHUNK
    assert desk.offload.take_lookups() == []


def test_nothing_that_is_there_when_the_time_is_over_is_a_miss() -> None:
    desk = waiting(found=0, coming=5)
    desk.now_s += WAIT_S
    assert desk.match(tokens=TOKENS) == 0
    desk.now_s += desk.options.moment_s
    assert desk.match(tokens=TOKENS) == 0, "what was said stands while it is asked for anew"
    desk.answer(0, coming=5)
    assert desk.match(tokens=TOKENS) == 0


def test_a_question_without_an_answer_is_a_miss_after_the_deadline() -> None:
    desk = waiting(found=2, coming=3)
    ask_again(desk)
    desk.now_s += desk.options.lookup_deadline_s
    assert desk.match(tokens=TOKENS) == 0
    assert desk.offload.statistics.lookups_late == 1
    assert len(desk.offload.take_releases()) == 1
    late = desk.answer(5)
    assert desk.offload.take_releases() == [late]


def test_without_a_time_nobody_waits() -> None:
    desk = waiting(found=2, coming=3, coming_wait_s=0.0)
    assert desk.match(tokens=TOKENS) == 2 * CHUNK
    assert desk.offload.take_lookups() == []


def test_a_negative_time_is_refused() -> None:
    with pytest.raises(RequestError, match="coming_wait_s=-1 must not be negative"):
        Options(chunk_tokens=CHUNK, groups=(FULL,), coming_wait_s=-1)


@pytest.mark.parametrize(
    ("found", "coming", "hbm", "offered"),
    [
        (1, 2, 4 * CHUNK, 0),  # the engine itself has more
        (5, 1, 0, 5 * CHUNK),  # the prompt has no more
        (1, 4, CHUNK + 1, 0),  # no load begins inside a block
        (2, 1, 2 * CHUNK + BLOCK, 0),  # fewer tokens than are worth a load
    ],
)
def test_what_would_not_help_is_not_waited_for(found: int, coming: int, hbm: int, offered: int) -> None:
    desk = Desk(coming_wait_s=WAIT_S, retrieve_tokens_min=BLOCK * 2 + 1)
    desk.begin(tokens=TOKENS)
    desk.match(tokens=TOKENS, hbm=hbm)
    desk.answer(found, coming=coming)
    assert desk.match(tokens=TOKENS, hbm=hbm) == offered


def test_a_prompt_that_must_compute_itself_does_not_wait() -> None:
    desk = Desk(coming_wait_s=WAIT_S)
    desk.begin(tokens=TOKENS, reads=False)
    desk.match(tokens=TOKENS)
    desk.answer(1, coming=4)
    assert desk.match(tokens=TOKENS) == 0


# ---------------------------------------------------------------- time


def test_the_time_counts_from_the_first_question_even_if_it_was_asked_ahead() -> None:
    desk = Desk(coming_wait_s=WAIT_S, moment_s=2 * WAIT_S)
    desk.begin(tokens=TOKENS)
    desk.offload.ask("r", desk.now_s)
    desk.answer(2, coming=3)
    desk.now_s += WAIT_S
    assert desk.match(tokens=TOKENS) == 2 * CHUNK


def test_a_preempted_prompt_gets_no_more_time() -> None:
    desk = waiting(found=0, coming=5)
    assert desk.match(tokens=TOKENS) is None
    desk.offload.admitted("r", hbm_tokens=0)
    desk.offload.preempted("r")
    desk.now_s += WAIT_S
    assert desk.match(tokens=TOKENS) is None
    desk.answer(2, coming=3)
    assert desk.match(tokens=TOKENS) == 2 * CHUNK


def test_an_aborted_prompt_forgets_its_time_and_its_answer() -> None:
    desk = waiting(found=2, coming=3)
    assert desk.match(tokens=TOKENS) is None
    desk.offload.finish("r")
    desk.now_s += WAIT_S
    desk.begin(tokens=TOKENS)
    assert desk.match(tokens=TOKENS) is None
    desk.answer(1, coming=4)
    ask_again(desk)
    desk.answer(5)
    assert desk.match(tokens=TOKENS) == 5 * CHUNK


# ---------------------------------------------------------------- leases


def test_a_lease_is_kept_until_the_next_answer_and_then_goes_back() -> None:
    desk = Desk(coming_wait_s=WAIT_S)
    desk.begin(tokens=TOKENS)
    desk.match(tokens=TOKENS)
    first = desk.answer(2, coming=3)
    ask_again(desk)
    assert desk.offload.take_releases() == [], "what was found must not go meanwhile"
    last = desk.answer(5)
    assert desk.offload.take_releases() == [first]
    assert desk.match(tokens=TOKENS) == 5 * CHUNK
    order = desk.offload.allocated("r", hbm_tokens=0, tables=[table(16)])
    assert order is not None
    assert order.lease == last
    assert desk.offload.take_releases() == []


@pytest.mark.parametrize("end", ["finish", "admitted"])
def test_the_leases_of_a_prompt_that_stops_waiting_go_back(end: str) -> None:
    desk = Desk(coming_wait_s=WAIT_S)
    desk.begin(tokens=TOKENS)
    desk.match(tokens=TOKENS)
    first = desk.answer(2, coming=3)
    ask_again(desk)
    order = desk.lookup()
    if end == "finish":
        desk.offload.finish("r")
    else:
        desk.offload.admitted("r", hbm_tokens=0)
    last = desk.answer(4, order=order, coming=1)
    assert desk.offload.take_releases() == [first, last]
    assert not desk.offload.busy()


def test_a_lost_server_ends_the_wait_and_its_lease_goes_back() -> None:
    desk = Desk(coming_wait_s=WAIT_S)
    desk.begin(tokens=TOKENS)
    desk.match(tokens=TOKENS)
    lease = desk.answer(2, coming=3)
    assert desk.match(tokens=TOKENS) is None
    desk.offload.leases_lost()
    assert desk.match(tokens=TOKENS) is None
    desk.answer(0, why="connection-lost")
    assert desk.match(tokens=TOKENS) == 0
    assert desk.offload.take_releases() == [lease]
