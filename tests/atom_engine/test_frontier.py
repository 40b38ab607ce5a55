"""The stored token ranges: no chunk that the store already holds, and again only after a failed load."""

from collections.abc import Callable
from unittest import mock

import pytest

from kvclient import Client, StoreResult
from tests.atom_engine.ended import ended_with
from tests.atom_engine.memory import Shape
from tests.atom_engine.rig import Rig, prompt
from tests.process.harness import Server

MakeRig = Callable[..., Rig]


def written(server: Server) -> int:
    """Bytes that movers have copied into the arena so far."""
    return server.status().counters["bytes_stored"]


def test_whole_chunks_of_a_prompt_are_stored_once(make_rig: MakeRig) -> None:
    """Chunks have 96 tokens, and a step at most 100. Scenario: chunked_prefill_save_uses_computed_frontier.
    ATOM: chunked_prefill_save_uses_computed_frontier_and_serializes_inflight.
    """
    rig = make_rig(max_num_batched_tokens=100)
    rig.run(prompt(1, 411), max_tokens=5)
    assert rig.stored_tokens() == [(0, 96), (96, 192), (192, 288), (288, 384)]


def test_a_prompt_shorter_than_a_chunk_is_not_stored(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.run(prompt(1, 95), max_tokens=7)
    assert rig.orders == []


def test_output_is_not_stored(make_rig: MakeRig) -> None:
    """Only prompt tokens are stored, because ATOM counts only these as computed."""
    rig = make_rig()
    rig.run(prompt(1, 100), max_tokens=120)
    assert rig.stored_tokens() == [(0, 96)]


def test_a_prompt_that_hbm_holds_is_not_stored_again(make_rig: MakeRig, shared_server: Server) -> None:
    """A warm prompt stores zero bytes (P3). Scenario: lookup_time_hbm_satisfies.
    ATOM: load_is_skipped_if_hbm_satisfies_after_allocation; worker_completes_noop_load_when_hbm_satisfies.
    """
    rig = make_rig()
    rig.run(prompt(1, 300))
    before = written(shared_server)
    rig.orders.clear()
    rig.run(prompt(1, 300))
    assert rig.orders == [], "neither stored nor loaded"
    assert written(shared_server) == before


def test_a_loaded_prefix_is_not_stored_again_and_what_follows_is(make_rig: MakeRig, shared_server: Server) -> None:
    """loaded_prefix_is_not_saved_again_after_success.
    ATOM: worker_save_uses_lmcache_engine_store."""
    rig = make_rig()
    rig.run(prompt(1, 300))
    rig.forget_hbm()
    rig.orders.clear()
    before = written(shared_server)
    rig.run(prompt(1, 300) + prompt(2, 200))
    (load,) = rig.loads()
    assert (load.hbm_tokens, load.end_tokens) == (0, 288)
    assert rig.stored_tokens() == [(288, 480)]
    assert written(shared_server) - before == 6 * sum(tensor.bytes_of_block for tensor in rig.memories[0].tensors)


def test_a_failed_load_lets_the_recomputed_chunks_be_stored(make_rig: MakeRig) -> None:
    """Chunks are stored from the HBM floor on. Scenario: load_failure_allows_recomputed_hit_range_to_be_saved.
    ATOM: dense_exact_load_failure_rolls_back_save_frontier.
    """
    rig = make_rig()
    rig.run(prompt(1, 300))
    rig.forget_hbm()
    rig.run(prompt(1, 100) + prompt(3, 20))  # HBM holds three of its blocks
    rig.orders.clear()
    with rig.refuse(0):
        rig.run(prompt(1, 300))
    (load,) = rig.loads()
    assert (load.hbm_tokens, load.end_tokens) == (96, 288)
    assert rig.stored_tokens() == [(96, 288)]


def test_a_prefix_that_hbm_holds_and_the_store_does_not_is_stored(make_rig: MakeRig, shared_server: Server) -> None:
    """ATOM: lookup_time_hbm_satisfies_can_resave_locally_computed_prefix."""
    rig = make_rig()
    rig.run(prompt(1, 300))
    with Client(shared_server.path, rank=-1) as client:
        assert client.wait_connected(5)
        assert client.clear(rig.connector._half.namespace) == 3
    rig.orders.clear()
    rig.run(prompt(1, 300))
    assert rig.stored_tokens() == [(0, 288)]


def test_an_id_that_comes_again_begins_anew(make_rig: MakeRig) -> None:
    """save_tracker_resets_when_raw_req_id_gets_new_sequence_lifecycle.
    ATOM: dense_reused_request_id_resets_save_frontier."""
    rig = make_rig()
    rig.run(prompt(1, 200), id=77)
    rig.run(prompt(2, 300), id=77)
    assert rig.stored_tokens() == [(0, 192), (0, 288)]


def test_a_late_end_of_an_earlier_life_changes_nothing(make_rig: MakeRig) -> None:
    """late_load_terminal_cannot_mutate_reused_request_lifecycle; save_nonce_is_never_reused.
    ATOM: save_nonce_is_never_reused_after_request_id_cleanup."""
    rig = make_rig()
    with rig.silence(0):
        first = rig.add(prompt(1, 200), id=77)
        rig.until("the first to end", lambda: first.is_finished)
        assert rig.connector.should_defer_free(first)
        rig.scheduler.deferred.pop(77)  # as if the engine had forgotten it: the two must not be confused
        second = rig.add(prompt(2, 300), id=77)
        rig.until("the second to end", lambda: second.is_finished)
        assert rig.connector.should_defer_free(second)
        rig.idle()
    ends = rig.said(0)
    while sum(one.req_id == 77 for one in ends.finished_saving) < 2:  # a rank also reports its namespace there
        ends.finished_saving |= rig.said(0).finished_saving
    of_first = {name for name in ends.finished_saving if name.generation == rig.orders[0].stores[0].job}
    rest = ends.finished_saving - of_first
    ends.finished_saving, ends.connector_completions = set(of_first), set()
    rig.connector.process_completions(ends)
    assert not rig.connector.should_defer_free(first)
    assert rig.connector.should_defer_free(second), "its own store has not ended"
    rig.scheduler.release(first)
    rig.scheduler.deferred[77] = second
    ends.finished_saving = rest
    rig.scheduler.kv_ended(ends)


@pytest.mark.parametrize(("why", "stores"), [("full", 1), ("busy", 4), ("late", 4)])
def test_behind_a_gap_nothing_more_is_stored(make_rig: MakeRig, why: str, stores: int) -> None:
    """One rank's store is cut short, so later chunks could not be found. If another engine may bring the rest, storing
    goes on.

    Both ranks' stores end at once, so that the next step knows of them.
    """
    rig = make_rig(tensor=2, max_num_batched_tokens=100)
    one, other = (worker._worker._half._client for worker in rig.workers)
    whole, short = ended_with(StoreResult(1, 1, 0, "")), ended_with(StoreResult(0, 0, 0, why))
    with mock.patch.object(one, "store", whole), mock.patch.object(other, "store", short):
        seq = rig.add(prompt(1, 411))
        while not seq.is_finished:
            stored = len(rig.stored_tokens())
            rig.step()
            if len(rig.stored_tokens()) > stored:
                rig.until("it to end", lambda: not rig.connector.get_statistics()["saves_pending"])
        rig.drain()
    assert len(rig.stored_tokens()) == stores


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_roles(make_rig: MakeRig, role: str) -> None:
    """scheduler_producer_role_only_tracks_saves; scheduler_consumer_role_only_emits_loads_without_save_deferral.
    ATOM: dense_producer_role_tracks_only_saves; dense_consumer_role_does_not_defer_for_saves."""
    both = make_rig(model=role)
    both.run(prompt(1, 300))
    rig = make_rig(model=role, kv_role=role)
    rig.run(prompt(1, 300) + prompt(2, 300), max_tokens=3)  # an answer is not awaited where nothing is loaded
    assert len(rig.loads()) == (role == "kv_consumer")
    assert rig.stored_tokens() == ([(288, 576)] if role == "kv_producer" else [])


def test_stages_share_one_frontier(make_rig: MakeRig) -> None:
    """The frontier lives in the scheduler, so no stage has its own (K13)."""
    rig = make_rig(shape=Shape(layers=2), stages=2, tensor=2, max_num_batched_tokens=100)
    rig.run(prompt(1, 300))
    rig.run(prompt(1, 300) + prompt(2, 100))
    assert rig.stored_tokens() == [(0, 96), (96, 192), (192, 288), (288, 384)]
