"""Each job ends once, under its own name, however ranks report it: together, apart, twice, too early, or never."""

import copy
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any
from unittest import mock

import pytest

from kvclient import RetrieveResult, StoreResult
from kvserver.errors import RequestError
from tests.atom_engine.conftest import ATOM_DIR
from tests.atom_engine.ended import ended_with
from tests.atom_engine.memory import Shape
from tests.atom_engine.rig import KVConnectorOutput, Rig, prompt

MakeRig = Callable[..., Rig]


def warm(make_rig: MakeRig, **options: Any) -> Rig:
    """A rig whose server holds prompt(1, 300), and whose HBM does not."""
    rig = make_rig(**options)
    rig.run(prompt(1, 300))
    rig.forget_hbm()
    rig.orders.clear()
    return rig


def heard(rig: Rig, field: str, seq: Any, count: int = 1) -> Any:
    """Rank 0's report once it contains `count` ends of a sequence. Earlier ends are repeated for a while."""
    while True:
        said = rig.said(0)
        if sum(one.req_id == seq.id for one in getattr(said, field)) == count:
            return said


# ---------------------------------------------------------------- once


@pytest.mark.parametrize("ends", ["loaded", "failed"])
def test_an_end_that_is_said_again_counts_once(make_rig: MakeRig, ends: str) -> None:
    """offload_completion_processing_calls_load_terminal_once; worker_load_terminal_paths_report_exact_operation_once;
    consume_failed_remote_kv_does_not_repeat_terminal_callback."""
    rig = warm(make_rig)
    with rig.silence(0), rig.refuse(*[0] * (ends == "failed")):
        seq = rig.add(prompt(1, 300))
        rig.until("its load", rig.loads)
    said = heard(rig, "finished_loading" if ends == "loaded" else "failed_loading", seq)
    again = copy.deepcopy(said)
    rig.scheduler.kv_ended(said)
    told = rig.connector.process_completions(again)
    assert told.finished_loading | told.failed_loading == set()
    rig.drain()
    assert seq.is_finished
    statistics = rig.connector.get_statistics()
    assert (statistics["load_requests"], statistics["load_failures"]) == ((1, 0) if ends == "loaded" else (0, 1))


def test_ranks_that_have_ended_different_stores_have_ended_none(make_rig: MakeRig) -> None:
    """tp_cross_generation_reports_do_not_clear_or_commit_until_matched;
    dense_worker_exact_save_generations_do_not_form_cross_tp_quorum;
    dense_build_save_metadata_uses_increasing_exact_generations;
    save_callbacks_clear_only_matching_operation_generation; earlier_save_completion_clears_only_its_page_generation."""
    rig = make_rig(tensor=2, max_num_batched_tokens=100)
    with rig.silence(0, 1):
        seq = rig.add(prompt(1, 200))
        rig.until("its end", lambda: seq.is_finished)
        rig.idle()
    ends: set[Any] = set()
    while len(ends) < 2:  # the first may no longer be reported when the second has ended
        ends |= {one for one in rig.said(0).finished_saving if one.req_id == seq.id}
    first, second = sorted(ends, key=lambda operation: operation.generation)

    def say(*of_ranks: Any) -> bool:
        """Returns True if its blocks are still held afterwards."""
        outputs = [KVConnectorOutput(finished_saving={one} if one else set()) for one in of_ranks]
        rig.scheduler.kv_ended(rig._on_stages[0].together(outputs))
        return bool(seq.block_table)

    assert say(first, second), "two ranks, and two stores"
    assert say(None, first), "the first has ended, the second has not"
    assert not say(second, None)


def test_a_load_in_flight_holds_its_own_sequence_and_nobody_elses(make_rig: MakeRig) -> None:
    """dense_active_load_defers_only_its_concrete_lifecycle;
    dense_build_load_metadata_uses_increasing_exact_generations;
    load_metadata_uses_scheduler_lifetime_generation_on_reused_req_id;
    dense_stale_load_generation_does_not_clear_active_operation."""
    rig = warm(make_rig)
    with rig.silence(0):
        seq = rig.add(prompt(1, 300), id=77)
        rig.until("its load", rig.loads)
        assert rig.connector.should_defer_free(seq)
        assert rig.connector.has_pending_work()
        assert not rig.connector.should_defer_free(rig.scheduler.sequence(prompt(1, 300), id=77))
    said = heard(rig, "finished_loading", seq)
    (operation,) = said.finished_loading
    stale = type(operation)(operation.req_id, operation.generation - 1)
    told = rig.connector.process_completions(KVConnectorOutput(finished_loading={stale}, failed_loading={stale}))
    assert told.finished_loading | told.failed_loading == set()
    assert rig.connector.should_defer_free(seq)
    rig.scheduler.kv_ended(said)
    rig.drain()
    rig.forget_hbm()
    rig.run(prompt(1, 300), id=77)
    first, again = rig.loads()
    assert again.job > first.job


@pytest.mark.parametrize("name", ["a-request", 12])
def test_a_request_is_reported_by_the_id_that_it_came_with(make_rig: MakeRig, name: Any) -> None:
    """finished_recv_matches_string_req_id; finished_saving_releases_deferred_free_with_string_req_id."""
    rig = make_rig()
    rig.run(prompt(1, 300), id=name)
    rig.forget_hbm()
    rig.run(prompt(1, 300), id=name)
    statistics = rig.connector.get_statistics()
    assert (statistics["save_requests"], statistics["load_requests"]) == (1, 1)


# ---------------------------------------------------------------- ends of a worker's transfers


@pytest.mark.parametrize("ends", ["less", "throws", "refused"])
def test_a_load_that_brings_less_or_throws_is_computed(make_rig: MakeRig, ends: str) -> None:
    """worker_load_partial_retrieve_marks_failed; load_exception_is_reported_as_failed_recving;
    load_submission_failure_unpins_once_and_marks_failed; dense_worker_load_failure_reports_exact_operation."""
    rig = warm(make_rig, tensor=2)
    client = rig.workers[1]._worker._half._client
    begin = {
        "less": ended_with(RetrieveResult(False, 5, "gone")),
        "throws": ended_with(ZeroDivisionError()),
        "refused": mock.Mock(side_effect=RequestError("lease-unknown", "test")),
    }[ends]
    rig.computed_tokens = 0
    with mock.patch.object(client, "retrieve", begin):
        (seq,) = rig.run(prompt(1, 300), max_tokens=3)
    assert len(rig.loads()) == 1
    assert rig.computed_tokens == 300 + 2
    assert rig.connector.get_statistics()["load_failures"] == 1
    assert seq.is_finished


@pytest.mark.parametrize("ends", ["throws", "refused"])
def test_a_store_that_throws_lets_its_blocks_go(make_rig: MakeRig, ends: str) -> None:
    """unexpected_save_failure_reports_exact_operation_generation;
    save_submission_failure_releases_snapshot_and_completes_save."""
    rig = make_rig(tensor=2)
    client = rig.workers[1]._worker._half._client
    begin = ended_with(ZeroDivisionError()) if ends == "throws" else mock.Mock(side_effect=RequestError("busy", "test"))
    with mock.patch.object(client, "store", begin):
        (seq,) = rig.run(prompt(1, 300))
    assert rig.connector.get_statistics()["save_requests"] == 1
    assert seq.block_table == []
    rig.forget_hbm()
    rig.run(prompt(1, 300))
    assert rig.loads() == [], "of a rank that stored nothing nothing is found"


def test_a_store_waits_for_an_event_of_the_step_that_orders_it(make_rig: MakeRig) -> None:
    """The event is recorded after its forward was launched, on that thread's stream, before start_load_kv() returns.
    Scenario: worker_save_waits_for_forward_event_before_store.
    """
    rig = make_rig()
    half, forward = rig.workers[0]._worker._half, rig.forward
    happened: list[object] = []

    def launched(batch: Any) -> None:
        happened.append("forward")
        forward(batch)

    def recorded() -> object:
        happened.append(event := object())
        return event

    def store(*_: object, after: object, **__: object) -> Future[Any]:
        happened.append(("store", after))
        return ended_with(StoreResult(3, 3, 0, ""))()

    with (
        mock.patch.object(rig, "forward", launched),
        mock.patch.object(half, "_event", recorded),
        mock.patch.object(half._client, "store", store),
    ):
        rig.run(prompt(1, 300), max_tokens=2)
    first, event, stored, *_ = happened
    assert first == "forward"
    assert stored == ("store", event)


# ---------------------------------------------------------------- idle engines


def test_an_engine_with_nothing_to_do_is_given_nothing(make_rig: MakeRig) -> None:
    """dispatch_skips_metadata_with_no_work_at_all."""
    rig = warm(make_rig)
    assert rig.connector.build_connector_meta().requests == ()
    assert not rig.connector.has_pending_work()
    if ATOM_DIR:
        from atom.kv_transfer.disaggregation.types import connector_metadata_has_work  # noqa: PLC0415

        assert not connector_metadata_has_work(rig.connector.build_connector_meta())
        rig.run(prompt(2, 300))
        assert all(connector_metadata_has_work(step) for step in rig.orders)


def test_statistics_add_up_and_forget_what_was_aborted(make_rig: MakeRig) -> None:
    """scheduler_offload_statistics_are_cumulative; request_cleanup_drops_abandoned_load_statistics;
    pending_work_tracks_undispatched_loads_and_unreported_saves."""
    rig = warm(make_rig, tensor=2)
    rig.run(prompt(1, 300) + prompt(2, 300))
    rig.forget_hbm()
    with rig.silence(0):
        seq = rig.add(prompt(1, 300))
        rig.until("its load", lambda: len(rig.loads()) == 2)
        assert rig.connector.get_statistics()["loads_pending"] == 1
        assert rig.connector.has_pending_work()
        rig.abort(seq)
    rig.drain()
    assert rig.connector.get_statistics() == {
        "load_requests": 2,
        "loaded_tokens": 288 + 288,
        "load_failures": 0,
        "save_requests": 2,
        "saved_tokens": 288 + 288,
        "loads_pending": 0,
        "saves_pending": 0,
    }


# ---------------------------------------------------------------- bounds


def test_stores_in_flight_are_bounded_and_the_rest_follows(make_rig: MakeRig) -> None:
    """At most sixteen stores are in flight, of any requests. Scenarios:
    max_pending_saves_bounds_running_plus_queued_before_snapshot;
    rejected_boundary_save_does_not_finish_prior_page_operation;
    save_workers_parallelize_different_requests_but_complete_once.
    """
    rig = make_rig(shape=Shape(layers=1, blocks=71), max_num_batched_tokens=96, max_model_len=1100)
    with rig.silence(0):
        seqs = [rig.add(prompt(number, 1000), max_tokens=30) for number in (1, 2)]
        rig.until("both to be computed", lambda: all(seq.num_cached_tokens >= 1000 for seq in seqs))
        for _ in range(5):
            rig.step()
        assert rig.connector.get_statistics()["saves_pending"] == 16
        assert {store.request.id for step in rig.orders for store in step.stores} == {seq.id for seq in seqs}
    # A request that ends stores no more, so both go on only when there is room again.
    rig.idle_until("stores to end", lambda: rig.connector.get_statistics()["saves_pending"] == 0)
    rig.drain()
    assert sum(end - first for first, end in rig.stored_tokens()) == 2 * 960


# ---------------------------------------------------------------- leases


@pytest.mark.parametrize("why", ["HBM holds it", "too little", "nothing is held"])
def test_what_was_asked_for_and_is_not_loaded_is_kept_by_nobody(make_rig: MakeRig, why: str) -> None:
    """Leases go back over the scheduler's own connection, so no worker has to be told. Scenarios:
    lookup_miss_is_forwarded_for_worker_unpin; lookup_unpin_ids_are_consumed_by_metadata_build;
    engine_core_dispatches_idle_lookup_unpin_metadata; idle_offload_dispatch_delivers_unpin_only_metadata;
    pp_connector_only_dispatch_delivers_unpin_only_metadata; worker_unpins_only_lookups_without_an_emitted_load.
    """
    rig = make_rig(shape=Shape(layers=1), stages=2, min_load_tokens=200)
    rig.run(prompt(1, 300))
    if why == "too little":
        rig.forget_hbm()
        rig.run(prompt(1, 160) + prompt(3, 10))
    rig.orders.clear()
    asked = mock.Mock(wraps=rig.connector._half._exchange._inquiries.ask)
    with mock.patch.object(rig.connector._half._exchange._inquiries, "ask", asked):
        rig.run(prompt(2 if why == "nothing is held" else 1, 300))
    assert asked.call_count == 1
    assert rig.loads() == []
    rig.idle_until("all leases to be back", lambda: rig._server.status().leases == 0)


def test_a_load_gives_its_lease_back_once(make_rig: MakeRig) -> None:
    """The load may succeed or fail; a server would notice a second release.
    ATOM: dense_lookup_unpin_passes_one_string_id.
    """
    rig = warm(make_rig, tensor=2)
    for ranks in ((), (1,)):
        with rig.refuse(*ranks):
            rig.run(prompt(1, 300))
        rig.forget_hbm()
        rig.idle_until("its lease to be back", lambda: rig._server.status().leases == 0)
    assert len(rig.loads()) == 2
