"""States of requests: recurrent layers and DeepSeek-V4, stored and loaded with their pages, byte for byte.

Each forward that goes on with a request compares its state with that of all tokens before, on every rank. So a wrong
one, one of another boundary and one that a forward has moved on are noticed. Rig checks that slots and rows came back.
"""

import random
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest

from kvclient.atom.connector import ROLLOUT
from kvclient.values import StoreResult
from kvserver.errors import RequestError
from tests.atom_engine.conftest import ATOM_DIR
from tests.atom_engine.ended import ended_with
from tests.atom_engine.memory import Shape
from tests.atom_engine.rig import Rig, prompt
from tests.process.harness import Server, kill, stop, until

MakeRig = Callable[..., Rig]
LAYOUTS = {
    "gdn": Shape("gdn", slots=5),
    "gdn with entries for drafts": Shape("gdn", slots=5, span=3, draft_layers=1),
    "kda": Shape("kda", slots=5),
    "v4": Shape("v4", slots=5, page_tokens=32),
}
MET = ("preemptions", "loads", "failed loads", "stored states")
BOTH = pytest.mark.parametrize("layout", ["gdn", "v4"])


def warm(make_rig: MakeRig, layout: str, *server: Server, **options: Any) -> Rig:
    """An engine that has stored prompt(1, 300) up to token 288, and has no block of it in HBM any more."""
    rig = make_rig(*server, shape=LAYOUTS[layout], **options)
    rig.run(prompt(1, 300))
    rig.run(prompt(2, 70))  # uses its slot again
    forget(rig)
    return rig


def forget(rig: Rig) -> None:
    rig.forget_hbm()
    rig.orders.clear()
    rig.prefilled_tokens = 0


def bytes_of_states(rig: Rig) -> int:
    return sum(memory.states.bytes_of_slot for memory in rig.memories if memory.states is not None)


def stored_states(rig: Rig) -> list[int]:
    """The boundaries of the stores that bring a state."""
    return [
        (order.first_chunk + order.chunks) * rig.chunk_tokens
        for step in rig.orders
        for order in step.stores
        if order.job in step.states
    ]


# ---------------------------------------------------------------- round trips


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_evicted_prefix_comes_back_with_its_state(make_rig: MakeRig, layout: str, tensor: int) -> None:
    """stateful_load_metadata_includes_slot_destination_group; slot_snapshot_uses_live_source_group_and_staging_row;
    unified_codec_gathers_into_connector_owned_slot_row; unified_codec_scatters_from_connector_owned_slot_row;
    stateful_page_initialization_builds_all_slot_components_after_engine."""
    rig = make_rig(shape=LAYOUTS[layout], tensor=tensor)
    before = rig.written_bytes()
    rig.run(prompt(1, 300))
    pages = 9 * sum(part.bytes_of_block for memory in rig.memories for part in memory.tensors)
    assert rig.written_bytes() - before == pages // (tensor if layout == "kda" else 1) + bytes_of_states(rig)
    rig.run(prompt(2, 70))
    forget(rig)
    held = rig.add(prompt(4, 50), max_tokens=9)
    rig.step()
    seq = rig.add(prompt(1, 300) + prompt(3, 50), max_tokens=4)
    rig.until("its load", rig.loads)
    assert seq.per_req_cache_group != held.per_req_cache_group
    rig.drain()
    (load,) = rig.loads()
    assert (load.hbm_tokens, load.end_tokens) == (0, 288)
    assert rig.prefilled_tokens == 50 + 62


@pytest.mark.parametrize("form", ["gdn", "kda"])
def test_with_decode_context_parallel_each_rank_has_a_state_of_its_own(make_rig: MakeRig, form: str) -> None:
    rig = make_rig(shape=Shape(form, contexts=3, block_tokens=16, blocks=23, slots=5), tensor=3)
    rig.run(prompt(1, 299))
    forget(rig)
    rig.run(prompt(1, 299), max_tokens=3)
    (load,) = rig.loads()
    assert load.end_tokens == 288
    assert rig.prefilled_tokens == 11


@BOTH
def test_states_that_left_memory_come_back_from_disk(make_rig: MakeRig, layout: str, tmp_path: Path) -> None:
    """slot_sidecar_aos1_round_trip_through_real_lmcache_disk;
    page_major_page_and_full_slot_round_trip_through_local_disk_backend."""
    disk = {"disk_paths": str(tmp_path), "disk_bytes": 16 << 20, "disk_segment_bytes": 512 << 10}
    with Server(arena_bytes=64 << 20, disk_write_policy="through", **disk) as server:
        until("the disk", lambda: server.status().disk_state == "ready")
        rig = warm(make_rig, layout, server, tensor=2)
        until("its chunks to be on disk", lambda: server.status().chunks_on_disk == 3)
        server.stop()
        server.start()
        until("the disk", lambda: server.status().disk_state == "ready")
        rig.reconnect()
        rig.run(prompt(1, 300), max_tokens=3)
        assert rig.loads()[0].end_tokens == 288
        assert rig.prefilled_tokens == 12
        assert server.status().counters["disk_read_bytes"] > 0


# ---------------------------------------------------------------- what is found


@BOTH
def test_what_is_found_ends_where_a_state_is_held(make_rig: MakeRig, layout: str) -> None:
    """stateful_page_hit_shrinks_from_16k_to_committed_8k_sidecar;
    stateful_page_hit_selects_newest_committed_boundary_not_after_page."""
    rig = make_rig(shape=LAYOUTS[layout])
    rig.run(prompt(1, 200))
    forget(rig)
    rig.run(prompt(1, 300))  # after a load ATOM lets nobody cut the rest, so only its pages are stored
    assert (rig.loads()[0].end_tokens, rig.stored_tokens(), stored_states(rig)) == (192, [(192, 288)], [])
    forget(rig)
    rig.run(prompt(1, 300) + prompt(3, 100))
    assert rig.loads()[0].end_tokens == 192


@BOTH
def test_the_state_of_a_longer_or_another_prefix_is_not_found(make_rig: MakeRig, layout: str) -> None:
    """stateful_page_hit_ignores_committed_slot_after_page_frontier;
    stateful_page_hit_rejects_slot_from_different_prefix_hash."""
    rig = warm(make_rig, layout)
    rig.run(prompt(1, 200))
    rig.run(prompt(1, 200) + prompt(3, 100))
    assert rig.loads()[:1] == [] or rig.loads()[0].end_tokens == 192
    forget(rig)
    rig.run(prompt(1, 120) + prompt(4, 300))
    assert rig.loads() == []
    assert rig.prefilled_tokens == 420


@BOTH
def test_pages_without_a_state_are_not_loaded_and_get_one_later(make_rig: MakeRig, layout: str) -> None:
    """A store without a free row brings its pages. The next one brings the state alone.
    ATOM: stateful_page_hit_without_sidecar_is_rejected_and_lookup_cleared;
    slot_staging_exhaustion_keeps_page_save_and_fails_sidecar; off_interval_terminal_saves_page_without_slot;
    sidecar_only_save_emits_when_page_boundary_is_already_stored; sidecar_only_save_skips_page_store;
    boundary_page_suffix_can_establish_full_sidecar_coverage; page_coverage_checks_only_tokens_through_slot_boundary;
    save_admission_error_fails_sidecar_but_still_saves_page."""
    rig = make_rig(shape=LAYOUTS[layout], state_rows=1)
    with rig.silence(0):  # the first store keeps the only row
        first = rig.add(prompt(2, 100))
        rig.until("the first store", lambda: stored_states(rig) == [96])
        seq = rig.add(prompt(1, 300))
        rig.until("its end", lambda: first.is_finished and seq.is_finished)
        rig.idle()
    rig.drain()
    assert rig.stored_tokens() == [(0, 96), (0, 288)]
    assert stored_states(rig) == [96]
    forget(rig)
    before = rig.written_bytes()
    rig.run(prompt(1, 300))
    assert (rig.loads(), rig.prefilled_tokens, stored_states(rig)) == ([], 300, [288])
    assert rig.written_bytes() - before == bytes_of_states(rig)
    forget(rig)
    rig.run(prompt(1, 300))
    assert rig.loads()[0].end_tokens == 288


@BOTH
def test_of_a_full_hit_the_state_before_is_used(make_rig: MakeRig, layout: str) -> None:
    """A prompt of whole chunks leaves two states: at its end for longer prompts, and a chunk before for itself.
    ATOM: stateful_full_prompt_hit_uses_prior_aligned_sidecar."""
    rig = make_rig(shape=LAYOUTS[layout])
    rig.run(prompt(1, 288))
    assert stored_states(rig) == [192, 288]
    forget(rig)
    rig.run(prompt(1, 288), max_tokens=3)
    assert rig.loads()[0].end_tokens == 192
    forget(rig)
    rig.run(prompt(1, 289), max_tokens=3)
    assert rig.loads()[0].end_tokens == 288


@BOTH
def test_another_engine_finds_the_states_of_this_one(make_rig: MakeRig, layout: str) -> None:
    """new_scheduler_session_fails_closed_without_rebuilt_slot_index; request_cleanup_retains_recent_global_commit."""
    warm(make_rig, layout)
    other = make_rig(shape=LAYOUTS[layout])
    other.run(prompt(1, 300), max_tokens=3)
    assert other.loads()[0].end_tokens == 288


@pytest.mark.skipif(not ATOM_DIR, reason="the stand-in keeps no checkpoints; ATOM_DIR names a checkout that does")
@BOTH
def test_behind_a_checkpoint_of_atoms_own_nothing_is_loaded(make_rig: MakeRig, layout: str) -> None:
    """ATOM restores its own state in the first forward after the load.
    Scenario: stateful_load_rejects_nonzero_post_alloc_hbm_floor."""
    rig = make_rig(shape=LAYOUTS[layout], state_checkpoint_interval_tokens=96)
    rig.run(prompt(1, 300))
    forget(rig)
    rig.run(prompt(1, 100) + prompt(3, 60))
    rig.orders.clear()
    rig.prefilled_tokens = 0
    rig.run(prompt(1, 300), max_tokens=3)
    assert rig.loads() == []
    assert rig.prefilled_tokens == 300 - 96


@pytest.mark.skipif(not ATOM_DIR, reason="the stand-in cuts for no checkpoint; ATOM_DIR names a checkout that does")
@BOTH
def test_a_state_is_left_where_atom_cuts_for_its_checkpoint_also_after_a_load(make_rig: MakeRig, layout: str) -> None:
    """It cuts after the connector, which is not asked again: the end of the chunk at 288 is not met."""
    rig = warm(make_rig, layout, state_checkpoint_interval_tokens=192)
    rig.run(prompt(1, 300) + prompt(3, 200))
    assert [load.end_tokens for load in rig.loads()] == [192]
    assert stored_states(rig) == [384]
    forget(rig)
    rig.run(prompt(1, 300) + prompt(3, 200), max_tokens=3)
    assert [load.end_tokens for load in rig.loads()] == [384]


# ---------------------------------------------------------------- when a state is taken


@BOTH
def test_each_chunk_of_a_prefill_that_ends_with_a_chunk_brings_its_state(make_rig: MakeRig, layout: str) -> None:
    """sidecar_save_emits_at_regular_checkpoint_boundary;
    partial_prefill_resumes_and_captures_next_boundary_after_inflight_commit;
    page_save_inflight_still_cuts_and_emits_exact_sidecar_boundary;
    terminal_sidecar_is_emitted_after_earlier_inflight_boundary_completes."""
    rig = make_rig(shape=LAYOUTS[layout], chunk_tokens=64, max_num_batched_tokens=64)
    with rig.silence(0):
        seq = rig.add(prompt(1, 300))
        rig.until("its end", lambda: seq.is_finished)
        rig.idle()
    rig.drain()
    assert stored_states(rig) == [64, 128, 192, 256]


@BOTH
def test_a_state_is_copied_before_the_forward_that_moves_it_on(make_rig: MakeRig, layout: str) -> None:
    """start_load_kv_issues_slot_snapshot_on_rpc_stream_before_return;
    slot_background_save_waits_for_snapshot_event_before_d2h."""
    rig = make_rig(shape=LAYOUTS[layout])
    worker, done = rig.workers[0]._worker._half, []

    def noted(what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*of: Any, **named: Any) -> Any:
            done.append(what)
            return call(*of, **named)

        return run

    parts = (
        (rig.rows[0], "note_stream"),
        (rig.rows[0], "copy"),
        (worker, "_event"),
        (worker._client, "store"),
        (rig.forwards, "run"),
    )
    with ExitStack() as stack:
        for part, call in parts:
            stack.enter_context(mock.patch.object(part, call, noted(call, getattr(part, call))))
        rig.run(prompt(1, 100))
    assert done[:7] == ["note_stream", "run", "note_stream", "copy", "_event", "store", "run"]


@BOTH
def test_a_load_is_reported_when_its_state_is_on_its_way_into_the_slot(make_rig: MakeRig, layout: str) -> None:
    """page_and_slot_load_orders_retrieve_get_decode_restore_sync_then_done."""
    rig = warm(make_rig, layout)
    done: list[str] = []
    copy, said = rig.rows[0].copy, rig.get_finished

    def copied(pieces: Any) -> None:
        done.append("copy")
        copy(pieces)

    def reported(rank: int) -> Any:
        output = said(rank)
        done.extend(["report"] * len(output.finished_loading))
        return output

    with mock.patch.object(rig.rows[0], "copy", copied), mock.patch.object(rig, "get_finished", reported):
        rig.run(prompt(1, 300))
    assert done[:2] == ["copy", "report"]


@BOTH
def test_slot_and_row_of_a_finished_request_stay_until_every_rank_has_read_the_row(
    make_rig: MakeRig, layout: str
) -> None:
    """request_finish_retains_tracker_for_pending_and_inflight_sidecar;
    stateful_load_tracks_identity_until_terminal_callback."""
    rig = make_rig(shape=LAYOUTS[layout], tensor=2)
    with rig.silence(1):
        seq = rig.add(prompt(1, 100))
        rig.until("its end", lambda: seq.is_finished)
        rig.idle()
        rig.idle()
        states = rig.connector._half.states
        assert len(states._copies) == 1
        assert rig.scheduler.free_slots == 4
    rig.drain()
    assert rig.scheduler.free_slots == 5


@pytest.mark.parametrize(("rows", "at_once"), [(1, 1), (2, 2), (4, 3)])
@BOTH
def test_loads_wait_for_a_row(make_rig: MakeRig, layout: str, rows: int, at_once: int) -> None:
    """Loads come before stores, and none of them is computed instead.
    ATOM: two_slot_loads_share_one_batch_reservation_sequentially;
    extra_staging_row_allows_save_after_batch_load_reservation."""
    rig = make_rig(shape=LAYOUTS[layout], state_rows=rows)
    prompts = [prompt(number, 100 + number) for number in range(1, 4)]
    for tokens in prompts:
        rig.run(tokens)
    forget(rig)
    with rig.silence(0):
        for tokens in prompts:
            rig.add(tokens, max_tokens=3)
        rig.until("a load", rig.loads)
        for _ in range(5):
            rig.step()
        assert len(rig.loads()) == at_once
    rig.drain()
    assert rig.connector.get_statistics()["load_failures"] == 0
    assert [load.end_tokens for load in rig.loads()] == [96, 96, 96]
    assert rig.prefilled_tokens == 5 + 6 + 7


# ---------------------------------------------------------------- what fails


@pytest.mark.parametrize("rank", [0, 1])
@BOTH
def test_a_load_that_fails_on_one_rank_is_computed_from_the_first_token(
    make_rig: MakeRig, layout: str, rank: int
) -> None:
    """The other rank has put the state of token 288 into the slot by then.
    ATOM: page_retrieve_failure_prevents_sidecar_fetch_and_unpins_once;
    missing_or_corrupt_sidecar_fails_whole_load_and_unpins_once."""
    rig = warm(make_rig, layout, tensor=2)
    with rig.refuse(rank):
        rig.run(prompt(1, 300), max_tokens=3)
    assert len(rig.loads()) == 1
    assert rig.prefilled_tokens == 300
    assert rig.connector.get_statistics()["load_failures"] == 1


@BOTH
def test_a_load_that_names_no_row_is_computed(make_rig: MakeRig, layout: str) -> None:
    """The slot would keep the state of the request that had it before."""
    rig = warm(make_rig, layout)
    rig.metadata_filter = lambda rank, step: replace(step, states={})
    rig.run(prompt(1, 300), max_tokens=3)
    assert rig.connector.get_statistics()["load_failures"] == 1
    assert rig.prefilled_tokens == 300


@BOTH
@pytest.mark.parametrize("ends", ["short", "throws", "refused"])
def test_a_store_that_fails_on_one_rank_leaves_no_state_to_be_found(make_rig: MakeRig, layout: str, ends: str) -> None:
    """tp_partial_sidecar_completion_never_commits; tp_sidecar_failure_prevents_commit_after_all_workers_terminal;
    sidecar_save_failure_clears_inflight_without_committing;
    failed_terminal_sidecar_does_not_pin_or_retry_finished_request;
    sidecar_put_rejection_marks_failure_and_releases_staging;
    page_store_failure_prevents_sidecar_publish_and_releases_staging;
    invalid_page_plan_still_releases_acquired_slot_snapshot."""
    rig = make_rig(shape=LAYOUTS[layout], tensor=2)
    client = rig.workers[1]._worker._half._client
    refused = mock.Mock(side_effect=RequestError("blocks", "test"))
    result = StoreResult(0, 0, 0, "full") if ends == "short" else OSError("test")
    with mock.patch.object(client, "store", refused if ends == "refused" else ended_with(result)):
        rig.run(prompt(1, 300))
    assert stored_states(rig) == [288]
    forget(rig)
    rig.run(prompt(1, 300), max_tokens=3)
    assert rig.loads() == []
    assert rig.prefilled_tokens == 300


@pytest.mark.parametrize("copy", ["kept", "restored"])
@BOTH
def test_a_copy_that_throws_ends_the_cache_and_no_request(make_rig: MakeRig, layout: str, copy: str) -> None:
    """Its row is never used again.
    ATOM: unexpected_slot_save_failure_reports_page_and_sidecar_terminals;
    restore_failure_synchronizes_and_releases_admission; rejected_save_sync_failure_quarantines_snapshot_row;
    snapshot_failure_fails_sidecar_but_still_saves_page_and_releases; restore_sync_failure_quarantines_batch_staging."""
    rig = warm(make_rig, layout, tensor=2)
    tokens = prompt(1, 300) if copy == "restored" else prompt(5, 300)
    with mock.patch.object(rig.rows[1], "copy", side_effect=RuntimeError("no such address")):
        rig.run(tokens, max_tokens=3)
    assert rig.workers[1]._worker.is_inert
    assert rig.prefilled_tokens == 300
    forget(rig)
    rig.run(tokens, max_tokens=3)
    assert rig.prefilled_tokens == 300


@BOTH
def test_the_server_dies_in_a_load(make_rig: MakeRig, layout: str) -> None:
    with Server(arena_bytes=64 << 20, mover_grace_ms=300) as server:
        rig = warm(make_rig, layout, server, tensor=2)
        stop(server.mover_pid())
        seq = rig.add(prompt(1, 300), max_tokens=4)
        rig.until("its load", rig.loads)
        server.kill()
        rig.drain()
        assert seq.is_finished
        assert rig.connector.get_statistics()["load_failures"] == 1
        assert rig.prefilled_tokens == 300


@BOTH
def test_after_a_sleep_nothing_of_before_is_found_and_rows_are_new(make_rig: MakeRig, layout: str) -> None:
    rig = warm(make_rig, layout, tensor=2)
    before = rig.connector._half.namespace
    rig.register()
    assert len(rig.rows) == 4
    rig.idle_until("the new namespace", lambda: rig.connector._half.namespace != before)
    rig.run(prompt(1, 300))
    assert (rig.loads(), stored_states(rig)) == ([], [288])
    forget(rig)
    rig.run(prompt(1, 300), max_tokens=3)
    assert len(rig.loads()) == 1


@BOTH
def test_a_load_from_before_a_sleep_does_not_reach_the_new_memory(make_rig: MakeRig, layout: str) -> None:
    rig = warm(make_rig, layout)
    with rig.silence(0):
        rig.add(prompt(1, 300), max_tokens=3)
        rig.until("its load", rig.loads)
        for _ in range(20):
            rig.step()
    rig.register()
    rig.drain()
    assert rig.connector.get_statistics()["load_failures"] == 1
    assert rig.prefilled_tokens == 300


def test_memory_that_atom_gives_back_takes_the_rows_along(make_rig: MakeRig) -> None:
    """A trainer gets all of the GPU. Its next requests are as after any sleep."""
    rig = warm(make_rig, "gdn")
    rig.memories[0].tensors.clear()
    assert rig.workers[0]._rows is None
    rig.memories[0].close()
    rig.memories[0] = rig._memory_of(0)
    before = rig.connector._half.namespace
    rig.register()
    rig.idle_until("the new namespace", lambda: rig.connector._half.namespace != before)
    rig.run(prompt(1, 300))
    forget(rig)
    rig.run(prompt(1, 300), max_tokens=3)
    assert rig.loads()[0].end_tokens == 288


def test_an_engine_that_can_sleep_and_registers_addresses_only_is_refused(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing would tell when DeepSeek-V4's memory ends."""
    monkeypatch.setitem(sys.modules, ROLLOUT, ModuleType(ROLLOUT))
    with pytest.raises(RequestError, match="can sleep, and registers addresses only"):
        make_rig(shape=LAYOUTS["v4"])


@BOTH
def test_many_requests_over_few_blocks_and_slots(make_rig: MakeRig, layout: str) -> None:
    """48 requests with aborts, preemptions, silent and failing ranks, and checkpoints of ATOM's own.

    Some of this depends on the duration of copies, so the test goes on until all of it has been.
    """
    met: Counter[str] = Counter()
    for seed in range(20):
        if seed < 2 or not all(met[what] for what in MET):
            met.update(many(make_rig, layout, seed))
    assert all(met[what] for what in MET), met


@BOTH
def test_many_requests_while_movers_and_brains_die(make_rig: MakeRig, layout: str) -> None:
    with Server(arena_bytes=64 << 20, mover_grace_ms=300) as server:
        met = many(make_rig, layout, 40, server)
    assert met["killed"] > 1


def many(make_rig: MakeRig, layout: str, seed: int, *server: Server) -> dict[str, int]:
    """Returns how often what this test is about has happened. server: its processes are killed now and then."""
    draw, killed = random.Random(seed), 0
    rig = make_rig(
        *server,
        model=f"many {layout} {seed}",
        shape=Shape(layout, layers=1, blocks=23, slots=3, page_tokens=32),
        tensor=2,
        max_num_batched_tokens=130,
        max_num_seqs=3,
        state_rows=2,
        chunk_tokens=64,
        state_checkpoint_interval_tokens=(64, 0, 128)[seed % 3],
        tells_of_release=seed % 2 == 1,
    )
    prompts = [prompt(number, draw.randrange(100, 330)) for number in range(4)]
    alive: list[Any] = []
    added = 0
    while added < 48:
        alive = [seq for seq in alive if not seq.is_finished]
        if len(alive) < 5 and draw.random() < 0.4:
            more = prompt(99, 70) if draw.random() < 0.5 else []
            alive.append(rig.add(draw.choice(prompts) + more, max_tokens=draw.randrange(1, 60)))
            added += 1
        if alive and draw.random() < 0.1:
            rig.abort(alive.pop(draw.randrange(len(alive))))
        if draw.random() < 0.1:
            rig.scheduler.forget_prefixes()
        if server and added >= 16 * (killed + 1):
            kill(server[0].mover_pid() if killed % 2 else server[0].brain_pid())
            killed += 1
        ranks = draw.sample((0, 1), draw.choice((0, 0, 1)))
        with rig.silence(*ranks), rig.refuse(*(rank for rank in (0, 1) if draw.random() < 0.1)):
            rig.step()
    rig.drain()
    assert rig.forwards.compared_states > 100
    assert rig.scheduler.parked == 0
    statistics = rig.connector.get_statistics()
    return {
        "preemptions": rig.scheduler.preemptions,
        "loads": statistics["load_requests"],
        "failed loads": statistics["load_failures"],
        "stored states": len(stored_states(rig)),
        "killed": killed,
    }
