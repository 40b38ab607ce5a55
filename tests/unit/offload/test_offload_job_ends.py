"""Ends of requests and jobs: ranks, failures, preemption, aborts, reused names; nothing is left over."""

from hypothesis import given
from hypothesis import strategies as st

from kvclient.values import RetrieveResult
from tests.rigs.offload_rig import BLOCK, CHUNK, Desk, span, table


def test_a_retrieve_ends_when_all_ranks_have_reported() -> None:
    desk = Desk(ranks=3)
    order = desk.retrieving(tokens=40, found=2)
    assert desk.retrieve_ends(order, rank=2) is None
    assert desk.retrieve_ends(order, rank=0) is None
    assert desk.offload.holds("r")
    end = desk.retrieve_ends(order, rank=1)
    assert end is not None
    assert (end.order, end.ok) == (order, True)
    assert not desk.offload.holds("r")
    assert desk.offload.take_releases() == [], "each rank has used the lease"


def test_a_failure_without_a_reason_is_a_failure() -> None:
    desk = Desk()
    order = desk.retrieving(tokens=40, found=2)
    end = desk.offload.retrieve_ended(order.job, 0, RetrieveResult(False, 0, ""))
    assert end is not None
    assert not end.ok


def test_reports_count_once_and_those_of_nobody_not_at_all() -> None:
    desk = Desk(ranks=2)
    order = desk.retrieving(tokens=40, found=2)
    assert desk.retrieve_ends(order, rank=0) is None
    assert desk.retrieve_ends(order, rank=0) is None
    assert desk.retrieve_ends(order, rank=9) is None
    assert desk.retrieve_ends(order._replace(job=4711), rank=1) is None
    assert desk.retrieve_ends(order, rank=1) is not None
    assert desk.retrieve_ends(order, rank=1) is None
    assert desk.offload.statistics.retrieves_in_flight == 0


def test_a_store_ends_when_all_ranks_have_reported_and_holds_what_each_of_them_holds() -> None:
    desk = Desk(ranks=2)
    desk.admit(tokens=60)
    order = desk.stored(tokens=60)
    assert order is not None
    assert desk.store_ends(order, chunks=4, rank=1, why="full") is None
    assert desk.offload.holds("r")
    end = desk.store_ends(order, rank=0)
    assert end is not None
    assert (end.order, end.chunks) == (order, 4)
    assert not desk.offload.holds("r")
    assert desk.offload.statistics.tokens_stored == 4 * CHUNK
    assert desk.offload.statistics.stores_short == 1


@given(st.integers(1, 4), st.data())
def test_a_job_ends_once_whatever_is_reported_in_which_order_and_how_often(ranks: int, data: st.DataObject) -> None:
    desk = Desk(ranks=ranks)
    order = desk.retrieving(tokens=40, found=2)
    first: dict[int, str] = {}
    for _ in range(30):
        rank, why = data.draw(st.integers(-1, ranks)), data.draw(st.sampled_from(("", "", "mover-lost")))
        complete = len(first) == ranks
        if 0 <= rank < ranks:
            first.setdefault(rank, why)
        end = desk.retrieve_ends(order, why, rank=rank)
        assert (end is not None) == (len(first) == ranks and not complete)
        if end is not None:
            assert end.ok == (not any(first.values()))


# ---------------------------------------------------------------- failure


def test_a_request_whose_retrieve_failed_is_computed_and_never_asks_again() -> None:
    desk = Desk()
    desk.retrieve_ends(desk.retrieving(tokens=40, found=3), "lease-lost")
    for _ in range(3):
        assert desk.match(tokens=40) == 0
        desk.offload.admitted("r", hbm_tokens=0)
        desk.now_s += 60
    desk.offload.preempted("r")
    assert desk.match(tokens=40) == 0
    assert desk.offload.take_lookups() == []
    desk.offload.finish("r")
    assert str(*desk.offload.take_summaries()) == (
        "request=r prompt=40 hbm=0 hit=0 loaded=0 load_ms=0.0 stored=0 preempted=1 why=lease-lost"
    )
    assert desk.offload.statistics.skipped_tokens["retrieve-failed"] == 3 * CHUNK


# ---------------------------------------------------------------- preemption


def test_a_preemption_that_is_told_twice_is_one() -> None:
    desk = Desk()
    desk.admit(tokens=40)
    desk.offload.preempted("r")
    desk.match(tokens=40)
    lease = desk.answer(2)
    desk.offload.preempted("r")
    assert desk.match(tokens=40) == 2 * CHUNK
    assert desk.offload.take_releases() == []
    assert lease is not None
    assert desk.offload.statistics.preemptions == 1


def test_a_request_that_is_matched_while_it_runs_has_been_preempted() -> None:
    desk = Desk()
    desk.admit(tokens=40)
    assert desk.match(tokens=41) is None
    assert desk.offload.statistics.preemptions == 1


def test_stores_of_a_preempted_request_keep_their_blocks_and_are_not_sent_twice() -> None:
    desk = Desk()
    desk.admit(tokens=60)
    order = desk.stored(tokens=30)
    assert order is not None
    desk.offload.preempted("r")
    assert desk.offload.holds("r")
    desk.match(tokens=60)
    desk.answer(1)
    desk.offload.admitted("r", hbm_tokens=0)
    assert span(desk.stored(tokens=60)) == (2, 5)


def test_what_the_server_has_lost_since_is_stored_again_after_a_preemption() -> None:
    desk = Desk()
    desk.admit(tokens=60)
    order = desk.stored(tokens=60)
    assert order is not None
    desk.store_ends(order)
    desk.offload.preempted("r")
    desk.match(tokens=60)
    desk.answer(2)
    desk.offload.admitted("r", hbm_tokens=0)
    assert span(desk.stored(tokens=60)) == (2, 5)


def test_the_end_of_a_retrieve_from_before_a_preemption_wakes_nobody() -> None:
    desk = Desk()
    order = desk.retrieving(tokens=40, found=3)
    desk.offload.preempted("r")
    desk.match(tokens=40)
    desk.answer(3)
    assert desk.match(tokens=40) == 3 * CHUNK
    again = desk.offload.allocated("r", hbm_tokens=0, tables=[table(10, 800)])
    assert again is not None
    assert desk.retrieve_ends(order, "mover-lost") is not None
    assert desk.stored(tokens=40) is None, "the second retrieve still runs"
    assert desk.retrieve_ends(again) is not None
    desk.offload.finish("r")
    (summary,) = desk.offload.take_summaries()
    assert summary.retrieved_tokens == 3 * CHUNK


# ---------------------------------------------------------------- finish and abort


def test_a_request_that_is_aborted_while_it_waits_gives_its_lease_back() -> None:
    desk = Desk()
    desk.begin(tokens=40)
    desk.match(tokens=40)
    lease = desk.answer(3)
    desk.offload.finish("r")
    assert desk.offload.busy()
    assert desk.offload.take_releases() == [lease]
    assert not desk.offload.busy()


def test_a_request_that_is_aborted_in_its_retrieve_holds_its_blocks_until_the_end() -> None:
    desk = Desk(ranks=2)
    order = desk.retrieving(tokens=40, found=3)
    desk.offload.finish("r")
    assert desk.offload.holds("r")
    assert desk.offload.take_summaries() == []
    desk.retrieve_ends(order, rank=0)
    assert desk.offload.busy()
    assert desk.retrieve_ends(order, "abandoned", rank=1) is not None
    assert not desk.offload.holds("r")
    assert desk.offload.take_releases() == [order.lease]
    assert len(desk.offload.take_summaries()) == 1
    assert not desk.offload.busy()


def test_a_request_that_is_finished_while_it_is_stored_is_summed_up_at_the_end() -> None:
    desk = Desk()
    desk.admit(tokens=40)
    first, second = desk.stored(tokens=CHUNK), desk.stored(tokens=40)
    assert first is not None
    assert second is not None
    desk.offload.finish("r")
    desk.store_ends(second)
    assert desk.offload.take_summaries() == []
    desk.store_ends(first)
    (summary,) = desk.offload.take_summaries()
    assert summary.stored_tokens == 3 * CHUNK


def test_an_engine_may_tell_of_every_allocation_also_during_and_after_a_retrieve() -> None:
    desk = Desk()
    order = desk.retrieving(tokens=40, hbm=BLOCK, found=3)
    desk.offload.admitted("r", hbm_tokens=0)
    assert desk.offload.holds("r")
    assert desk.offload.take_releases() == []
    desk.retrieve_ends(order)
    desk.offload.admitted("r", hbm_tokens=36)
    desk.offload.finish("r")
    (summary,) = desk.offload.take_summaries()
    assert (summary.hbm_tokens, summary.retrieved_tokens) == (BLOCK, 3 * CHUNK - BLOCK)
    assert desk.offload.statistics.tokens_asked == 40


def test_finishing_what_is_unknown_is_no_error() -> None:
    desk = Desk()
    desk.offload.finish("nobody")
    assert desk.offload.take_summaries() == []


# ---------------------------------------------------------------- statistics


def test_statistics_count_tokens_once_whatever_the_ranks() -> None:
    desk = Desk(ranks=2)
    order = desk.retrieving(tokens=60, hbm=2 * BLOCK, found=3)
    desk.retrieve_ends(order, rank=0)
    desk.retrieve_ends(order, rank=1)
    stored = desk.stored(tokens=60)
    assert stored is not None
    desk.store_ends(stored, rank=0)
    desk.store_ends(stored, rank=1)
    desk.offload.finish("r")
    seen = desk.offload.statistics
    assert (seen.requests, seen.lookups, seen.retrieves, seen.stores) == (1, 1, 1, 1)
    assert (seen.tokens_asked, seen.tokens_hbm, seen.tokens_found) == (60, 8, 36)
    assert (seen.tokens_looked_up, seen.tokens_retrieved, seen.tokens_stored) == (60, 28, 24)
    assert (seen.retrieves_in_flight, seen.stores_in_flight, seen.skipped_tokens) == (0, 0, {})
    line = "request=r prompt=60 hbm=8 hit=36 loaded=28 load_ms=0.0 stored=24 store_ms=0.0"
    assert str(*desk.offload.take_summaries()) == line
