"""Prompts that another engine computes: how long a request waits for them, with blocks or without, what it pledges
itself, and when it takes that back."""

import pytest

from kvclient import PledgeResult, RetrieveResult
from kvclient.offload.lookups import AWAIT_AGAIN_MAX_S, AWAIT_AGAIN_S, AWAIT_AGAIN_SHARE
from kvclient.offload.values import Group, Options, PledgeOrder, RetrieveEnd, RetrieveOrder, Side
from kvserver.errors import RequestError
from tests.rigs.offload_rig import BLOCK, CHUNK, FULL, Desk, keys_of, span, table

WAIT_S = 3.0
CHUNKS = 5
TOKENS = CHUNKS * CHUNK + 1


def desk(**options: object) -> Desk:
    return Desk(**{"await_others": True, "await_wait_s": WAIT_S, **options})  # type: ignore[arg-type]


def waiting(*, found: int, awaited: int, **options: object) -> Desk:
    """A desk whose request was told that another engine computes what follows."""
    at = desk(**options)
    at.begin(tokens=TOKENS)
    assert at.match(tokens=TOKENS) is None
    at.answer(found, awaited=awaited)
    return at


def ask_again(at: Desk) -> None:
    assert at.match(tokens=TOKENS) is None
    assert at.offload.take_lookups() == []
    at.now_s += max(AWAIT_AGAIN_S, (at.now_s - 1000.0) / AWAIT_AGAIN_SHARE)
    assert at.match(tokens=TOKENS) is None


def pledged(at: Desk, number: int = 7, held: int = 0) -> PledgeOrder:
    """Answers the one new pledge. held: chunks that the server has."""
    (new,), over = at.offload.take_pledges()
    assert over == []
    at.offload.pledged(new.request, PledgeResult(number, held, len(new.keys) // 32 - held, 7))
    return new


def taken_back(at: Desk) -> list[int]:
    new, over = at.offload.take_pledges()
    assert new == []
    return [result.number for result in over]


def test_a_prompt_waits_without_blocks_until_all_of_it_is_stored() -> None:
    at = waiting(found=0, awaited=5)
    for found in (1, 3, 4):
        ask_again(at)
        at.answer(found, awaited=5 - found)
    ask_again(at)
    at.answer(5)
    assert at.match(tokens=TOKENS) == 5 * CHUNK
    order = at.offload.allocated("r", hbm_tokens=0, tables=[table(16)])
    assert order is not None
    assert order.lease.awaited == 0


def test_a_prompt_that_another_engine_computes_is_not_asked_for_as_often_as_one_from_a_remote_store() -> None:
    at = waiting(found=0, awaited=CHUNKS)
    assert at.match(tokens=TOKENS) is None
    at.now_s += AWAIT_AGAIN_S - 0.001
    assert at.match(tokens=TOKENS) is None
    assert at.offload.take_lookups() == []


def test_a_request_that_reads_nothing_waits_for_nobody() -> None:
    at = desk()
    at.offload.begin("r", tokens=TOKENS, keys=keys_of(CHUNKS), reads=False)
    at.match(tokens=TOKENS)
    (order,) = at.offload.take_lookups()
    assert not order.may_wait


def test_a_producer_that_ends_is_not_waited_for() -> None:
    at = waiting(found=1, awaited=4)
    ask_again(at)
    at.answer(2)
    assert at.match(tokens=TOKENS) == 2 * CHUNK


def test_when_the_time_is_over_what_is_there_is_used() -> None:
    at = waiting(found=2, awaited=3)
    at.now_s += WAIT_S
    assert at.match(tokens=TOKENS) == 2 * CHUNK
    assert at.offload.take_lookups() == []


def test_the_time_counts_from_a_lookup_ahead_though_the_engine_had_no_room_until_now() -> None:
    at = desk()
    at.begin(tokens=TOKENS)
    at.offload.ask("r", at.now_s)
    at.answer(2, awaited=3)
    at.now_s += WAIT_S
    assert at.match(tokens=TOKENS) is None, "its answer is old"
    at.answer(2, awaited=3)
    assert at.match(tokens=TOKENS) == 2 * CHUNK
    assert not at.offload.awaits_more("r", at.now_s)


def test_nothing_that_is_there_when_the_time_is_over_is_computed_and_pledged() -> None:
    at = waiting(found=0, awaited=5)
    at.now_s += WAIT_S
    assert at.match(tokens=TOKENS) == 0
    at.offload.admitted("r", hbm_tokens=0)
    at.stored(tokens=CHUNK)
    assert pledged(at).keys == keys_of(CHUNKS)
    assert len(at.offload.take_releases()) == 1


def test_the_wait_for_another_engine_has_a_time_of_its_own() -> None:
    at = waiting(found=2, awaited=3, coming_wait_s=0.5)
    at.now_s += 1.0
    assert at.match(tokens=TOKENS) is None
    assert at.offload.awaits_more("r", at.now_s)
    at = desk(coming_wait_s=0.5)
    at.begin(tokens=TOKENS)
    at.match(tokens=TOKENS)
    at.answer(2, coming=3)
    at.now_s += 1.0
    assert at.match(tokens=TOKENS) == 2 * CHUNK


def test_without_the_option_no_lookup_may_wait_and_nothing_is_pledged() -> None:
    at = Desk()
    at.begin(tokens=TOKENS)
    at.match(tokens=TOKENS)
    order = at.lookup()
    assert not order.may_wait
    at.answer(0, order=order)
    at.match(tokens=TOKENS)
    at.offload.admitted("r", hbm_tokens=0)
    at.stored(tokens=2 * CHUNK)
    assert at.offload.take_pledges() == ([], [])


def test_a_request_is_pledged_once_when_it_is_computed_and_not_before() -> None:
    at = desk()
    at.begin(tokens=TOKENS)
    assert at.match(tokens=TOKENS) is None
    order = at.lookup()
    assert order.may_wait
    at.answer(1, order=order)
    assert at.match(tokens=TOKENS) == CHUNK
    assert at.offload.take_pledges() == ([], []), "it waits for its blocks"
    retrieve = at.offload.allocated("r", hbm_tokens=0, tables=[table(16)])
    assert retrieve is not None
    assert not at.offload.computed("r", 0, at.now_s)
    assert at.offload.take_pledges() == ([], []), "it waits for its retrieve"
    at.retrieve_ends(retrieve)
    at.stored(tokens=2 * CHUNK)
    assert pledged(at, held=1) == PledgeOrder("r", keys_of(CHUNKS))
    at.stored(tokens=3 * CHUNK)
    assert at.offload.take_pledges() == ([], [])


def test_what_the_server_holds_is_not_worth_a_pledge() -> None:
    at = desk(retrieve_tokens_min=2 * CHUNK)
    at.admit(tokens=TOKENS, found=4, hbm=4 * CHUNK)
    at.stored(tokens=5 * CHUNK)
    assert at.offload.take_pledges() == ([], [])


def test_output_is_not_pledged() -> None:
    at = desk()
    at.begin(tokens=2 * CHUNK + 5)
    at.match(tokens=2 * CHUNK + 5)
    at.answer(0)
    at.match(tokens=2 * CHUNK + 5)
    at.offload.admitted("r", hbm_tokens=0)
    at.offload.extend("r", keys_of(4)[2 * 32 :])
    at.stored(tokens=CHUNK)
    assert pledged(at).keys == keys_of(2)


@pytest.mark.parametrize("how", ["aborted", "preempted", "matched again", "renamed"])
def test_a_pledge_is_taken_back_when_its_prompt_is_not_computed_on(how: str) -> None:
    at = desk()
    at.admit(tokens=TOKENS)
    at.stored(tokens=2 * CHUNK)
    if how == "renamed":
        (new,), _ = at.offload.take_pledges()
        at.offload.finish("r")
        at.offload.pledged(new.request, PledgeResult(7, 0, 5, 7))
    else:
        pledged(at)
    match how:
        case "aborted":
            at.offload.finish("r")
        case "preempted":
            at.offload.lost_blocks("r")
            at.offload.lost_blocks("r")
        case "matched again":
            at.match(tokens=TOKENS)
    assert taken_back(at) == [7]
    assert taken_back(at) == []


def test_a_preempted_request_is_pledged_again_when_it_is_computed_again() -> None:
    at = desk()
    at.admit(tokens=TOKENS)
    at.stored(tokens=CHUNK)
    pledged(at)
    at.offload.lost_blocks("r")
    assert taken_back(at) == [7]
    at.match(tokens=TOKENS)
    for order in at.offload.take_lookups():
        at.answer(0, order=order)
    at.match(tokens=TOKENS)
    at.offload.admitted("r", hbm_tokens=0)
    at.stored(tokens=CHUNK)
    pledged(at, number=8)
    assert taken_back(at) == [], "the server does not hold yet what is under way to it"
    at.offload.finish("r")
    assert taken_back(at) == [8]


@pytest.mark.parametrize("how", ["finish", "lost_blocks"])
def test_a_request_that_ends_in_the_step_of_its_pledge_pledges_nothing(how: str) -> None:
    at = desk()
    at.admit(tokens=TOKENS)
    at.stored(tokens=CHUNK)
    getattr(at.offload, how)("r")
    assert at.offload.take_pledges() == ([], [])


def test_a_finished_request_whose_last_stores_are_under_way_keeps_its_word() -> None:
    at = desk()
    at.admit(tokens=TOKENS)
    at.stored(tokens=CHUNK)
    pledged(at)
    at.stored(tokens=TOKENS)
    at.offload.finish("r")
    assert taken_back(at) == []


@pytest.mark.parametrize("computed", [2, CHUNKS])
def test_a_store_that_leaves_a_gap_takes_the_pledge_back_because_nothing_follows(computed: int) -> None:
    at = desk()
    at.admit(tokens=TOKENS)
    order = at.stored(tokens=computed * CHUNK)
    assert order is not None
    pledged(at)
    at.store_ends(order, chunks=1, why="discarded")
    assert taken_back(at) == [7]
    assert at.stored(tokens=TOKENS) is None
    assert at.offload.take_pledges() == ([], [])
    at.offload.finish("r")
    assert taken_back(at) == []


def test_a_prompt_is_pledged_once_it_is_known_what_the_server_holds() -> None:
    at = desk()
    at.begin(tokens=TOKENS)
    assert at.match(tokens=TOKENS, hbm=TOKENS - 1) == 0
    at.offload.admitted("r", hbm_tokens=TOKENS - 1)
    at.stored(tokens=CHUNK)
    assert at.offload.take_pledges() == ([], [])
    at.answer(2)
    at.stored(tokens=CHUNK)
    pledged(at, held=2)


@pytest.mark.parametrize("why", ["busy", "late"])
def test_a_short_store_that_leaves_no_gap_keeps_the_pledge(why: str) -> None:
    at = desk()
    at.admit(tokens=TOKENS)
    order = at.stored(tokens=2 * CHUNK)
    assert order is not None
    pledged(at)
    at.store_ends(order, chunks=1, why=why)
    assert taken_back(at) == []


def test_a_request_that_waits_again_before_its_pledge_is_answered_takes_it_back() -> None:
    at = desk()
    at.admit(tokens=TOKENS)
    at.stored(tokens=CHUNK)
    (new,), _ = at.offload.take_pledges()
    at.match(tokens=TOKENS)
    at.offload.pledged(new.request, PledgeResult(7, 0, 5, 7))
    assert taken_back(at) == [7]


def test_nothing_is_pledged_while_the_server_cannot_be_asked() -> None:
    at = desk()
    at.admit(tokens=TOKENS)
    at.offload.set_unavailable("no-namespace")
    at.stored(tokens=CHUNK)
    assert at.offload.take_pledges() == ([], [])


def test_a_pledge_that_the_server_did_not_take_is_not_taken_back() -> None:
    at = desk()
    at.admit(tokens=TOKENS)
    at.stored(tokens=CHUNK)
    (new,), _ = at.offload.take_pledges()
    at.offload.pledged(new.request, PledgeResult(0, 0, 0))
    at.offload.finish("r")
    assert taken_back(at) == []


def test_a_pledge_on_chunks_that_the_server_has_lost_since_is_taken_back() -> None:
    at = desk()
    at.admit(tokens=TOKENS, found=2, hbm=2 * CHUNK)
    at.stored(tokens=3 * CHUNK)
    (new,), _ = at.offload.take_pledges()
    at.offload.pledged(new.request, PledgeResult(7, 1, 4, 7))
    assert taken_back(at) == [7], "chunk 1 is not stored again"


def test_an_engine_that_only_loads_waits_and_pledges_nothing() -> None:
    at = waiting(found=0, awaited=5, stores=False)
    ask_again(at)
    at.answer(0)
    assert at.match(tokens=TOKENS) == 0
    at.offload.admitted("r", hbm_tokens=0)
    at.stored(tokens=2 * CHUNK)
    assert at.offload.take_pledges() == ([], [])


@pytest.mark.parametrize("name", ["await_wait_s", "await_producer_s"])
def test_a_negative_wait_is_refused(name: str) -> None:
    with pytest.raises(RequestError, match=f"{name}=-1 must not be negative"):
        Options(chunk_tokens=CHUNK, groups=(FULL,), **{name: -1})  # type: ignore[arg-type]


# ---------------------------------------------------------------- producers and consumers


PRODUCER_S = 0.7


def expecting(*, found: int = 0, tokens: int = TOKENS, **options: object) -> Desk:
    """A desk that waits for nobody, but for the producer of its request, which has not come yet."""
    at = desk(await_others=False, await_producer_s=PRODUCER_S, **options)
    at.begin(tokens=tokens, side="consumer")
    assert at.match(tokens=tokens) is None
    at.answer(found)
    return at


def answered_again(at: Desk, found: int, awaited: int = 0) -> None:
    ask_again(at)
    at.answer(found, awaited=awaited)


def test_a_consumer_that_comes_before_its_producer_waits_for_the_pledge_and_then_for_all_of_it() -> None:
    at = expecting()
    at.now_s += PRODUCER_S / 2
    answered_again(at, 0)
    assert at.offload.awaits_more("r", at.now_s)
    answered_again(at, 0, awaited=5)
    assert at.match(tokens=TOKENS) is None
    at.now_s += 2 * PRODUCER_S
    assert at.match(tokens=TOKENS) is None, "its producer has the longer time now"
    at.answer(2, awaited=3)
    answered_again(at, 5)
    assert at.match(tokens=TOKENS) == 5 * CHUNK
    assert not at.offload.awaits_more("r", at.now_s)


def test_a_producer_that_never_comes_is_waited_for_no_longer_than_its_bound() -> None:
    at = expecting(found=2)
    at.now_s += 0.9 * PRODUCER_S
    answered_again(at, 2)
    at.now_s += 0.2 * PRODUCER_S
    assert at.match(tokens=TOKENS) == 2 * CHUNK
    assert not at.offload.awaits_more("r", at.now_s)


def test_each_chunk_that_comes_without_a_pledge_is_a_sign_of_the_producer_up_to_the_whole_wait() -> None:
    at = expecting()
    for found in (1, 2, 3, 4):
        assert at.match(tokens=TOKENS) is None
        at.now_s += 0.9 * PRODUCER_S
        assert at.match(tokens=TOKENS) is None
        at.answer(found)
    assert at.match(tokens=TOKENS) is None
    assert at.now_s > 1000.0 + 3 * PRODUCER_S
    at.now_s = 1000.0 + WAIT_S
    assert at.match(tokens=TOKENS) is None, "its last answer is old"
    at.answer(4)
    assert at.match(tokens=TOKENS) == 4 * CHUNK


@pytest.mark.parametrize("found", [0, 3])
def test_a_consumer_whose_producer_broke_its_word_goes_on_at_once(found: int) -> None:
    at = expecting()
    answered_again(at, 0, awaited=4)
    answered_again(at, found)
    assert at.match(tokens=TOKENS) == found * CHUNK


def test_a_pledge_of_a_part_that_was_kept_is_a_sign_too() -> None:
    at = expecting()
    answered_again(at, 0, awaited=3)
    answered_again(at, 3)
    ask_again(at)
    at.answer(5)
    assert at.match(tokens=TOKENS) == 5 * CHUNK


@pytest.mark.parametrize("more", [0, CHUNK - 1])
def test_a_prompt_that_is_longer_than_its_producers_waits_for_no_more_than_that_one_has(more: int) -> None:
    at = desk(await_others=False, await_producer_s=PRODUCER_S)
    at.begin(tokens=TOKENS, side="consumer", handed_tokens=4 * CHUNK + more)
    at.match(tokens=TOKENS)
    at.answer(3)
    answered_again(at, 4)
    assert at.match(tokens=TOKENS) == 4 * CHUNK
    assert not at.offload.awaits_more("r", at.now_s)


def test_a_producer_that_has_stored_less_than_a_chunk_is_not_waited_for() -> None:
    at = desk(await_others=False, await_producer_s=PRODUCER_S)
    at.begin(tokens=TOKENS, side="consumer", handed_tokens=CHUNK - 1)
    at.match(tokens=TOKENS)
    at.answer(0)
    assert at.match(tokens=TOKENS) == 0


def test_a_producer_that_has_more_than_the_prompt_is_expected_up_to_its_end() -> None:
    at = desk(await_others=False, await_producer_s=PRODUCER_S)
    at.begin(tokens=TOKENS, side="consumer", handed_tokens=100 * CHUNK)
    at.match(tokens=TOKENS)
    at.answer(4)
    answered_again(at, 5)
    assert at.match(tokens=TOKENS) == 5 * CHUNK


def test_a_producer_is_expected_when_a_remote_store_has_had_its_time() -> None:
    at = desk(await_others=False, await_producer_s=PRODUCER_S, coming_wait_s=PRODUCER_S / 2)
    at.begin(tokens=TOKENS, side="consumer")
    at.match(tokens=TOKENS)
    at.answer(1, coming=2)
    at.now_s += 0.6 * PRODUCER_S
    assert at.match(tokens=TOKENS) is None
    assert at.offload.awaits_more("r", at.now_s)


def test_who_has_waited_for_long_asks_more_rarely_up_to_a_bound() -> None:
    at = waiting(found=0, awaited=5, await_wait_s=600.0)
    for waited_s, pause_s in ((0.0, AWAIT_AGAIN_S), (1.6, 0.1), (500.0, AWAIT_AGAIN_MAX_S)):
        at.now_s = 1000.0 + waited_s
        assert at.match(tokens=TOKENS) is None
        for order in at.offload.take_lookups():  # the answer was no longer believed
            at.answer(0, awaited=5, order=order)
        assert at.match(tokens=TOKENS) is None
        at.now_s += 0.99 * pause_s
        assert at.match(tokens=TOKENS) is None
        assert at.offload.take_lookups() == []
        at.now_s += 0.02 * pause_s
        assert at.match(tokens=TOKENS) is None
        at.answer(0, awaited=5)


def test_a_producer_is_not_asked_for_as_often_as_a_remote_store() -> None:
    at = expecting()
    assert at.match(tokens=TOKENS) is None
    at.now_s += 0.9 * AWAIT_AGAIN_S
    assert at.match(tokens=TOKENS) is None
    assert at.offload.take_lookups() == []


@pytest.mark.parametrize("side", ["", "producer"])
def test_nobody_else_expects_a_producer_or_waits_for_one(side: Side) -> None:
    at = desk(await_others=False, await_producer_s=PRODUCER_S)
    at.begin(tokens=TOKENS, side=side)
    at.match(tokens=TOKENS)
    order = at.lookup()
    assert not order.may_wait
    at.answer(2, order=order)
    assert at.match(tokens=TOKENS) == 2 * CHUNK


def test_who_waits_for_others_expects_no_producer_without_a_proxys_word() -> None:
    at = desk(await_producer_s=PRODUCER_S)
    at.begin(tokens=TOKENS)
    at.match(tokens=TOKENS)
    at.answer(2)
    assert at.match(tokens=TOKENS) == 2 * CHUNK


def test_a_model_with_windows_waits_for_nobody_and_pledges_nothing() -> None:
    groups = (FULL, Group(BLOCK, "window", 7))
    at = Desk(groups=groups, await_others=True, await_wait_s=WAIT_S, await_producer_s=PRODUCER_S)
    for request, side in ("c", "consumer"), ("p", "producer"):
        at.begin(request, tokens=TOKENS, side=side)  # type: ignore[arg-type]
        assert at.match(request, tokens=TOKENS) is None
        at.answer(0)
        assert at.match(request, tokens=TOKENS) == 0
        assert not at.offload.awaits_more(request, at.now_s)
        at.offload.admitted(request, hbm_tokens=0)
        at.stored(request, tokens=TOKENS)
    assert at.offload.take_pledges() == ([], [])


def test_a_consumer_without_a_wait_waits_for_nobody() -> None:
    at = desk(await_others=False, await_wait_s=0.0, await_producer_s=PRODUCER_S)
    at.begin(tokens=TOKENS, side="consumer")
    at.match(tokens=TOKENS)
    order = at.lookup()
    assert not order.may_wait
    at.answer(2, order=order)
    assert at.match(tokens=TOKENS) == 2 * CHUNK


def test_a_server_that_does_not_answer_ends_the_wait_for_a_producer() -> None:
    at = desk(await_others=False, await_producer_s=PRODUCER_S)
    at.begin(tokens=TOKENS, side="consumer")
    at.match(tokens=TOKENS)
    at.answer(0, why="connection-lost")
    assert at.match(tokens=TOKENS) == 0


def test_what_is_too_little_to_be_loaded_is_not_expected() -> None:
    tokens = 2 * CHUNK + BLOCK
    at = expecting(tokens=tokens, retrieve_tokens_min=2 * CHUNK + 1)
    assert at.match(tokens=tokens) == 0


def test_a_preempted_consumer_does_not_expect_its_own_output() -> None:
    at = expecting(found=5)
    assert at.match(tokens=TOKENS) == 5 * CHUNK
    at.offload.admitted("r", hbm_tokens=0)
    at.offload.extend("r", keys_of(7)[5 * 32 :])
    at.stored(tokens=6 * CHUNK)
    at.offload.lost_blocks("r")
    tokens = 7 * CHUNK + 1
    assert at.match(tokens=tokens) is None
    at.answer(6)
    assert at.match(tokens=tokens) == 6 * CHUNK


@pytest.mark.parametrize(("side", "is_pledged"), [("producer", True), ("consumer", False), ("", False)])
def test_a_producer_is_pledged_though_others_are_not(side: Side, is_pledged: bool) -> None:
    at = desk(await_others=False)
    at.begin(tokens=TOKENS, side=side)
    at.match(tokens=TOKENS)
    at.answer(0)
    at.match(tokens=TOKENS)
    at.offload.admitted("r", hbm_tokens=0)
    at.stored(tokens=CHUNK)
    assert (len(at.offload.take_pledges()[0]) == 1) is is_pledged


def test_a_producer_waits_to_hear_what_is_held_because_its_first_step_may_be_its_last() -> None:
    at = desk(await_others=False)
    at.begin(tokens=TOKENS, side="producer")
    assert at.match(tokens=TOKENS, hbm=TOKENS - 1) is None, "it loads nothing"
    at.answer(2)
    assert at.match(tokens=TOKENS, hbm=TOKENS - 1) == 0
    at.offload.admitted("r", hbm_tokens=TOKENS - 1)
    order = at.stored(tokens=TOKENS)
    assert order is not None
    assert (order.first_chunk, order.chunks) == (2, 3)
    assert pledged(at, held=2).keys == keys_of(CHUNKS)
    at.offload.finish("r")
    assert taken_back(at) == []


@pytest.mark.parametrize("hbm", [0, TOKENS - 1])
@pytest.mark.parametrize("is_late", [False, True])
def test_a_producer_that_found_no_room_for_long_waits_for_the_new_answer_too(hbm: int, is_late: bool) -> None:
    at = desk(await_others=False, retrieve_tokens_min=2 * CHUNK)
    at.begin(tokens=TOKENS, side="producer")
    assert at.match(tokens=TOKENS, hbm=hbm) is None
    at.answer(0)
    assert at.match(tokens=TOKENS, hbm=hbm) == 0
    at.now_s += 2 * at.options.moment_s
    assert at.match(tokens=TOKENS, hbm=hbm) is None
    if is_late:
        at.now_s += 2 * at.options.lookup_deadline_s
    else:
        at.answer(1)
    assert at.match(tokens=TOKENS, hbm=hbm) == 0
    at.offload.admitted("r", hbm_tokens=hbm)
    order = at.stored(tokens=TOKENS)
    assert order is not None
    assert order.first_chunk == (0 if is_late else 1)


# ---------------------------------------------------------------- blocks that are filled while another engine computes


def streaming(*, found: int = 1, awaited: int = 4, **options: object) -> tuple[Desk, RetrieveOrder]:
    """A desk whose request has its blocks, and waits with them for another engine."""
    at = desk(**{"await_tokens_max": 2 * TOKENS, "await_producer_s": PRODUCER_S, **options})
    order = streams(at, found=found, awaited=awaited)
    assert order is not None
    return at, order


def streams(
    at: Desk, request: str = "r", *, found: int = 0, awaited: int = 5, tokens: int = TOKENS
) -> RetrieveOrder | None:
    """The retrieve that a request begins when it was told what is to come. None: it waits without blocks."""
    at.begin(request, tokens=tokens)
    assert at.match(request, tokens=tokens) is None
    at.answer(found, awaited=awaited)
    taken = at.match(request, tokens=tokens)
    if taken is None:
        return None
    assert taken == min((found + awaited) * CHUNK, tokens - 1)
    return at.offload.allocated(request, hbm_tokens=0, tables=[table(16)])


def ends_short(
    at: Desk, order: RetrieveOrder, chunks: int, rank: int = 0, why: str = "not-coming"
) -> RetrieveEnd | None:
    return at.offload.retrieve_ended(order.job, rank, RetrieveResult(False, 0, why, chunks), seconds=0.0)


def test_a_retrieve_begins_with_the_first_answer_and_waits_for_the_rest() -> None:
    at, order = streaming()
    assert (order.hbm_tokens, order.end_tokens) == (0, 5 * CHUNK)
    assert order.lease.awaited == 4
    assert order.wait_s == WAIT_S
    assert len(order.blocks[0].block_ids) == 15
    at.retrieve_ends(order)
    assert at.stored(tokens=TOKENS) is None, "the server has it"
    assert at.offload.take_pledges() == ([], [])
    at.offload.finish("r")
    (summary,) = at.offload.take_summaries()
    assert (summary.found_tokens, summary.retrieved_tokens, summary.why) == (5 * CHUNK, 5 * CHUNK, "")


def test_it_waits_only_for_what_is_left_of_the_time() -> None:
    at = desk(await_tokens_max=TOKENS)
    at.begin(tokens=TOKENS)
    assert at.match(tokens=TOKENS) is None
    at.answer(0, awaited=5)
    at.now_s += WAIT_S / 4
    assert at.match(tokens=TOKENS) == 5 * CHUNK
    order = at.offload.allocated("r", hbm_tokens=0, tables=[table(16)])
    assert order is not None
    assert order.wait_s == pytest.approx(WAIT_S * 3 / 4)


def test_when_half_of_the_time_is_over_no_retrieve_begins_to_wait() -> None:
    at = desk(await_tokens_max=TOKENS)
    at.begin(tokens=TOKENS)
    assert at.match(tokens=TOKENS) is None
    at.answer(2, awaited=3)
    at.now_s += 0.51 * WAIT_S
    assert at.match(tokens=TOKENS) is None
    assert at.offload.awaits_more("r", at.now_s)
    at.now_s += 0.5 * WAIT_S
    assert at.match(tokens=TOKENS) is None, "its answer is old"
    at.answer(3, awaited=2)
    assert at.match(tokens=TOKENS) == 3 * CHUNK


def test_a_retrieve_of_what_is_there_does_not_wait() -> None:
    at = desk(await_tokens_max=2 * TOKENS)
    order = streams(at, found=5, awaited=0)
    assert order is not None
    assert order.wait_s == 0.0
    (order,) = [streams(desk(await_tokens_max=2 * TOKENS), found=5, awaited=1, tokens=TOKENS)]
    assert order is not None
    assert order.wait_s == 0.0, "the chunk behind it is not of this prompt"


@pytest.mark.parametrize(("chunks", "until"), [(0, 0), (1, CHUNK), (3, 3 * CHUNK)])
def test_what_came_counts_and_the_rest_is_computed_without_another_question(chunks: int, until: int) -> None:
    at, order = streaming()
    assert ends_short(at, order, chunks) == RetrieveEnd(order, False, "not-coming", until)
    assert at.offload.take_releases() == [order.lease]
    assert at.offload.statistics.tokens_retrieved == until
    assert at.offload.statistics.skipped_tokens == {"retrieve-failed": 5 * CHUNK - until}
    assert at.match(tokens=TOKENS) == 0
    assert at.offload.take_lookups() == []
    rest = at.stored(tokens=TOKENS)
    assert span(rest) == (chunks, 5), "what came is on the server"
    assert rest is not None
    at.store_ends(rest)
    at.offload.finish("r")
    (summary,) = at.offload.take_summaries()
    assert (summary.retrieved_tokens, summary.why) == (until, "not-coming")


def test_the_rank_that_got_least_decides_what_came() -> None:
    at, order = streaming(ranks=3)
    assert ends_short(at, order, 4, rank=1) is None
    assert at.retrieve_ends(order, rank=0) is None
    assert ends_short(at, order, 2, rank=2) == RetrieveEnd(order, False, "not-coming", 2 * CHUNK)


def test_less_than_the_engine_had_itself_takes_nothing_from_it() -> None:
    at = desk(await_tokens_max=2 * TOKENS)
    at.begin(tokens=TOKENS)
    at.match(tokens=TOKENS, hbm=2 * CHUNK + BLOCK)
    at.answer(1, awaited=4)
    assert at.match(tokens=TOKENS, hbm=2 * CHUNK + BLOCK) == 3 * CHUNK - BLOCK
    order = at.offload.allocated("r", hbm_tokens=2 * CHUNK + BLOCK, tables=[table(16)])
    assert order is not None
    assert ends_short(at, order, 1) == RetrieveEnd(order, False, "not-coming", 2 * CHUNK + BLOCK)


def test_of_an_ordinary_retrieve_that_fails_nothing_counts() -> None:
    at = Desk()
    order = at.retrieving(tokens=TOKENS, found=5)
    assert ends_short(at, order, 3, why="digest") == RetrieveEnd(order, False, "digest", 0)
    assert at.offload.statistics.tokens_retrieved == 0


def test_no_more_blocks_wait_than_may_and_others_wait_without_blocks() -> None:
    at = desk(await_tokens_max=2 * 5 * CHUNK + BLOCK - 1)
    first, second = (streams(at, name) for name in "ab")
    assert first is not None
    assert second is not None
    assert streams(at, "c") is None
    assert at.offload.awaits_more("c", at.now_s)
    at.offload.finish("a")
    assert at.match("c", tokens=TOKENS) is None, "the blocks of a are not free yet"
    ends_short(at, first, 0)
    assert at.match("c", tokens=TOKENS) == 5 * CHUNK
    assert at.offload.allocated("c", hbm_tokens=0, tables=[table(16)]) is not None


def test_a_block_that_is_filled_in_part_counts_whole() -> None:
    tokens = 2 * CHUNK + 1
    at = desk(await_tokens_max=2 * CHUNK + BLOCK - 1, engine_steps_back=True)
    at.begin(tokens=tokens, chunks=3)
    at.match(tokens=tokens)
    at.answer(0, awaited=3)
    assert at.match(tokens=tokens) is None


def test_no_more_retrieves_wait_than_may() -> None:
    at = desk(await_tokens_max=100 * TOKENS, awaiting_max=2)
    assert all(streams(at, name) is not None for name in "ab")
    assert streams(at, "c") is None


def test_retrieves_that_are_many_already_leave_it_waiting_without_blocks() -> None:
    at = desk(await_tokens_max=100 * TOKENS, retrieves_max=1)
    assert streams(at, "a") is not None
    assert streams(at, "b") is None
    at.now_s += at.options.retrieve_wait_s
    assert at.offload.awaits_more("b", at.now_s)


@pytest.mark.parametrize("side", ["", "consumer"])
def test_a_consumer_that_expects_more_than_is_pledged_waits_without_blocks(side: Side) -> None:
    at = desk(await_tokens_max=100 * TOKENS, await_producer_s=PRODUCER_S)
    at.begin(tokens=TOKENS, side=side)
    at.match(tokens=TOKENS)
    at.answer(1, awaited=2)
    assert at.match(tokens=TOKENS) == (None if side else 3 * CHUNK)


def test_a_consumer_gets_its_blocks_at_once_if_all_that_its_producer_has_is_pledged() -> None:
    at = desk(await_tokens_max=100 * TOKENS, await_producer_s=PRODUCER_S)
    at.begin(tokens=TOKENS, side="consumer", handed_tokens=3 * CHUNK)
    at.match(tokens=TOKENS)
    at.answer(1, awaited=2)
    assert at.match(tokens=TOKENS) == 3 * CHUNK


def test_too_little_to_be_loaded_is_not_worth_blocks() -> None:
    at = desk(await_tokens_max=100 * TOKENS, retrieve_tokens_min=4 * CHUNK)
    at.begin(tokens=TOKENS)
    at.match(tokens=TOKENS)
    at.answer(0, awaited=3)
    assert at.match(tokens=TOKENS) == 0


def test_an_aborted_request_gives_the_lease_back_so_that_its_blocks_are_free_soon() -> None:
    at, order = streaming()
    at.offload.finish("r")
    assert at.offload.take_releases() == [order.lease]
    assert at.offload.holds("r")
    ends_short(at, order, 0, why="lease-unknown")
    assert not at.offload.holds("r")
    ordinary = Desk()
    ordinary.retrieving(tokens=TOKENS, found=5)
    ordinary.offload.finish("r")
    assert ordinary.offload.take_releases() == []


def test_an_offer_that_the_engine_has_no_room_for_is_made_again_by_a_newer_answer() -> None:
    at = desk(await_tokens_max=2 * TOKENS)
    at.begin(tokens=TOKENS)
    at.match(tokens=TOKENS)
    at.answer(0, awaited=5)
    assert at.match(tokens=TOKENS) == 5 * CHUNK
    at.now_s += at.options.moment_s
    assert at.match(tokens=TOKENS) is None
    at.answer(2, awaited=0)
    assert at.match(tokens=TOKENS) == 2 * CHUNK
    order = at.offload.allocated("r", hbm_tokens=0, tables=[table(16)])
    assert order is not None
    assert (order.end_tokens, order.wait_s) == (2 * CHUNK, 0.0)
