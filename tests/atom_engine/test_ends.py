"""Blocks are freed once, and not before copies have ended: finish, abort, preemption, failures, in each state."""

import random
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from kvclient.atom.aborts import PASSED_STEPS
from kvclient.atom.connector import ROLLOUT
from tests.atom_engine.memory import Shape
from tests.atom_engine.rig import IDLE_S, Rig, prompt
from tests.process.harness import Server

MakeRig = Callable[..., Rig]


def warm(make_rig: MakeRig, **options: Any) -> Rig:
    """A rig whose server holds prompt(1, 300), and whose HBM does not."""
    rig = make_rig(**options)
    rig.run(prompt(1, 300))
    rig.forget_hbm()
    rig.orders.clear()
    return rig


def parked(rig: Rig, **options: Any) -> Any:
    """A request that waits for its load, because a rank is silent."""
    seq = rig.add(prompt(1, 300), **options)
    rig.until("its load", rig.loads)
    for _ in range(3):
        rig.step()
    assert rig.scheduler.parked == 1
    return seq


# ---------------------------------------------------------------- deferred free


def test_blocks_of_a_finished_request_stay_until_they_are_stored(make_rig: MakeRig) -> None:
    """The store is sent when no batch runs any more (A11, A10). Scenario:
    save_inflight_defers_free_until_save_finishes.
    ATOM: request_finish_retains_tracker_for_pending_page_save.
    """
    rig = make_rig()
    with rig.silence(0):
        seq = rig.add(prompt(1, 300))
        rig.until("the end", lambda: seq.is_finished)
        held = len(seq.block_table)
        assert held == 10
        for _ in range(5):
            rig.idle()
        assert rig.stored_tokens() == [(0, 288)]
        assert rig.connector.has_pending_work()
        assert rig.connector.should_defer_free(seq)
        assert rig.scheduler.free_blocks == rig.shape.blocks - held
    rig.drain()
    assert rig.scheduler.free_blocks == rig.shape.blocks


def test_every_rank_and_stage_has_to_have_read_them(make_rig: MakeRig) -> None:
    """One late rank keeps the blocks (A15)."""
    rig = make_rig(tensor=2, stages=2, shape=Shape(layers=1))
    with rig.silence(3):
        seq = rig.add(prompt(1, 300))
        rig.until("the end", lambda: seq.is_finished)
        for _ in range(20):
            rig.idle()
        assert rig.connector.should_defer_free(seq)
    rig.drain()


def test_a_request_that_is_finished_twice_is_finished_once(make_rig: MakeRig) -> None:
    rig = make_rig()
    (seq,) = rig.run(prompt(1, 300))
    rig.connector.request_finished(seq)
    rig.connector.request_finished(seq)
    assert not rig.connector.should_defer_free(seq)
    assert rig.connector.get_statistics()["save_requests"] == 1


def test_terminals_of_nobody_are_dropped(make_rig: MakeRig) -> None:
    """Stale and foreign terminals do not end a job: raw_callbacks_cannot_retire_exact_active_operations; stale
    generations.
    ATOM: dense_stale_or_raw_save_completion_cannot_clear_exact_lifecycle.
    """
    rig = make_rig()
    with rig.silence(0):
        seq = rig.add(prompt(1, 300))
        rig.until("the end", lambda: seq.is_finished)
        rig.idle()
    output = rig.said(0)
    kind = type(next(iter(output.finished_saving)))
    for stale in (seq.id, str(seq.id), kind(seq.id, 10**6), kind(10**6, rig.orders[0].stores[0].job)):
        wrong = type(output)(finished_saving={stale}, finished_loading={stale}, failed_loading={stale})
        told = rig.connector.process_completions(wrong)
        assert told.finished_saving | told.finished_loading | told.failed_loading == set()
        assert rig.connector.should_defer_free(seq)
    rig.scheduler.kv_ended(output)


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_a_load_that_fails_on_one_rank_is_computed(make_rig: MakeRig, rank: int) -> None:
    """The request is computed in its own blocks, and does not ask again (A12).
    Scenario: aggregator_emits_failed_recving_if_any_worker_failed.
    """
    rig = warm(make_rig, tensor=2, stages=2, shape=Shape(layers=1))
    with rig.refuse(rank):
        rig.computed_tokens = 0
        (seq,) = rig.run(prompt(1, 300), max_tokens=3)
    assert len(rig.loads()) == 1
    assert rig.computed_tokens == 300 + 2
    assert rig.connector.get_statistics()["load_failures"] == 1
    assert seq.is_finished
    rig.forget_hbm()
    rig.run(prompt(1, 300))
    assert len(rig.loads()) == 2, "another request loads it"


def test_a_failure_waits_for_the_ranks_that_still_load(make_rig: MakeRig) -> None:
    """A failure is reported when all ranks have ended: nothing is computed into blocks that a rank still writes.
    ATOM: aggregator_failure_overrides_late_success.
    """
    rig = warm(make_rig, tensor=2)
    with rig.refuse(0), rig.silence(1):
        seq = parked(rig)
        assert rig.scheduler.parked == 1
    rig.drain()
    assert seq.is_finished


def test_a_poll_that_atom_drops_costs_no_request_its_end(make_rig: MakeRig) -> None:
    """Another rank took too long, so this rank's report is lost."""
    rig = warm(make_rig, tensor=2)
    seq = rig.add(prompt(1, 300))
    rig.until("its load", rig.loads)
    while not rig.workers[0].get_finished().finished_loading:
        time.sleep(IDLE_S)
    rig.drain()
    assert seq.is_finished
    assert rig.connector.get_statistics()["load_failures"] == 0


# ---------------------------------------------------------------- abort


def test_aborted_while_it_waits_unadmitted(make_rig: MakeRig) -> None:
    """ATOM does not tell the connector, but the lease goes back all the same."""
    rig = warm(make_rig, shape=Shape(blocks=19))
    running = rig.add(prompt(5, 300), max_tokens=30)
    rig.until("it to run", lambda: running.block_table)
    waiting = rig.add(prompt(1, 300))
    for _ in range(3):
        rig.step()
    assert id(waiting) in rig.connector._half._lives, "it was matched, and has no room"
    rig.abort(waiting)
    rig.drain()
    rig.run(prompt(6, 40), max_tokens=60)
    assert rig.connector._half._lives == {}


@pytest.mark.parametrize("ends", ["after", "queued"])
def test_aborted_while_its_load_runs(make_rig: MakeRig, ends: str) -> None:
    """aborted_parked_load_defers_owned_resources_until_terminal;
    aborted_parked_load_consumes_already_queued_terminal."""
    rig = warm(make_rig, tensor=2)
    with rig.silence(1):
        seq = parked(rig)
        if ends == "after":
            rig.abort(seq)
            rig.until("its end", lambda: seq.is_finished)
            assert rig.connector.should_defer_free(seq)
            assert rig.scheduler.free_blocks == rig.shape.blocks - len(seq.block_table)
    if ends == "queued":
        rig.poll()
        rig.abort(seq)
    rig.drain()
    assert seq.is_finished
    assert rig.scheduler.parked == 0
    assert seq.block_table == []


@pytest.mark.parametrize("ranks", [(), (1,)])
def test_aborted_when_its_load_has_been_taken(make_rig: MakeRig, ranks: tuple[int, ...]) -> None:
    """The request computes the rest by then, or everything. Scenario:
    abort_cleans_load_whose_terminal_was_already_consumed.
    """
    rig = warm(make_rig, tensor=2, shape=Shape(layers=1, blocks=47), max_num_batched_tokens=100)
    with rig.refuse(*ranks):
        seq = rig.add(prompt(1, 300) + prompt(2, 500), max_tokens=9)
        rig.until("its rest to be computed", lambda: rig.loads() and seq.is_partial_prefill)
        assert getattr(seq, "offload_load_failed" if ranks else "offload_loaded")
        rig.abort(seq)
        rig.drain()
    assert seq.is_finished
    assert seq.num_tokens <= 801
    assert rig.scheduler.parked == 0


@pytest.mark.parametrize("ends", ["loaded", "failed", "queued"])
def test_one_that_was_aborted_while_it_loaded_does_not_keep_what_another_waits_for(
    make_rig: MakeRig, ends: str
) -> None:
    """ATOM does not let an aborted request go ahead; the one ahead waits for its blocks, and nothing else runs."""
    rig = warm(make_rig, tensor=2, shape=Shape(blocks=17))
    with rig.silence(1), rig.refuse(*[0] * (ends == "failed")):
        aborted = parked(rig, max_tokens=9)
        ahead = rig.add(prompt(2, 300))
        for _ in range(3):
            rig.step()
        assert ahead.block_table == [], "there is no room for it"
        if ends != "queued":
            rig.abort(aborted)
    if ends == "queued":
        rig.poll()
        rig.abort(aborted)
    rig.drain()
    assert ahead.is_finished
    assert aborted.is_finished
    assert aborted.num_tokens <= 301, "it does not go on to its own end"
    assert rig.scheduler.parked == 0


def test_one_that_was_aborted_while_it_loaded_does_not_keep_the_block_that_a_running_one_needs(
    make_rig: MakeRig,
) -> None:
    """The running one stalls: ATOM has no other to preempt, and the one ahead needs even more blocks."""
    rig = warm(make_rig, tensor=2, shape=Shape(blocks=17))
    with rig.silence(1):
        aborted = parked(rig, max_tokens=9)
        running = rig.add(prompt(2, 220), max_tokens=30)
        rig.until("its first token", lambda: running.num_tokens > 220)
        ahead = rig.add(prompt(3, 300))
        rig.until("it to need a block", lambda: running.num_tokens == 224)
        for _ in range(3):
            rig.step()
        assert ahead.block_table == []
        rig.abort(aborted)
    rig.drain()
    assert [seq.is_finished for seq in (aborted, running, ahead)] == [True] * 3
    assert running.num_tokens == 250
    assert aborted.num_tokens <= 301
    assert rig.scheduler.parked == 0


@pytest.mark.parametrize(("batched_tokens", "tokens"), [(2, 190), (90, 40)], ids=["prefills", "decodes"])
def test_one_that_was_aborted_while_it_loaded_is_left_alone_while_another_gets_on(
    make_rig: MakeRig, batched_tokens: int, tokens: int
) -> None:
    """ATOM may reach the aborted request by itself, and then waiting costs nothing."""
    rig = warm(make_rig, tensor=2, shape=Shape(layers=1, blocks=17), max_num_batched_tokens=batched_tokens)
    with rig.silence(1):
        aborted = parked(rig, max_tokens=9)
        running = rig.add(prompt(2, tokens), max_tokens=90)
        rig.until("it to run", lambda: running.num_cached_tokens)
        rig.add(prompt(3, 300))
        for _ in range(3):
            rig.step()
        rig.abort(aborted)
    for _ in range(PASSED_STEPS + 20):
        rig.step()
        assert aborted.status.name == "ABORTED"
    assert not running.is_finished
    rig.drain()
    assert aborted.is_finished


def test_aborted_while_it_runs_and_is_stored(make_rig: MakeRig) -> None:
    """aborted_load_and_save_both_finish_before_release."""
    rig = make_rig(max_num_batched_tokens=100)
    with rig.silence(0):
        seq = rig.add(prompt(1, 300), max_tokens=50)
        rig.until("a store", rig.stored_tokens)
        rig.abort(seq)
        rig.until("its end", lambda: seq.is_finished)
        assert rig.connector.should_defer_free(seq)
    rig.drain()
    assert seq.block_table == []


def test_aborts_at_any_moment_cost_no_block(make_rig: MakeRig) -> None:
    """Aborts requests that wait, are parked, prefill, are stored, decode or are preempted.

    Sometimes a rank is silent for a while or fails its loads. Preemptions depend on the duration of copies, so the
    test goes on until there is one.
    """
    preempted = 0
    for seed in range(30):
        if seed < 4 or not preempted:
            preempted += aborted_at_any_moment(make_rig, seed)
    assert preempted > 0


def aborted_at_any_moment(make_rig: MakeRig, seed: int) -> int:
    """Returns the number of preemptions."""
    draw = random.Random(seed)
    shape = Shape(layers=1, blocks=17)
    rig = make_rig(model=f"aborts {seed}", shape=shape, tensor=2, max_num_batched_tokens=90, max_num_seqs=4)
    prompts = [prompt(number, draw.randrange(100, 330)) for number in range(4)]
    rig.run(*prompts)
    alive: list[Any] = []
    for _ in range(150):
        alive = [seq for seq in alive if not seq.is_finished]
        if len(alive) < 6 and draw.random() < 0.4:
            alive.append(rig.add(draw.choice(prompts), max_tokens=draw.randrange(1, 60)))
        if alive and draw.random() < 0.15:
            rig.abort(alive.pop(draw.randrange(len(alive))))
        if draw.random() < 0.1:
            rig.scheduler.forget_prefixes()
        ranks = draw.sample((0, 1), draw.choice((0, 0, 1)))
        with rig.silence(*ranks), rig.refuse(*(rank for rank in (0, 1) if draw.random() < 0.1)):
            rig.step()
    rig.drain()
    assert rig.loads()
    assert rig.scheduler.parked == 0
    return int(rig.scheduler.preemptions)


# ---------------------------------------------------------------- preemption


def test_what_is_being_stored_is_not_preempted(make_rig: MakeRig) -> None:
    """Another request is preempted, or the step stalls until the store ends. Scenario:
    decode_preemption_skips_pinned_victim.
    """
    rig = make_rig(shape=Shape(blocks=13), max_num_seqs=3, chunk_tokens=64)
    with rig.silence(0):
        seqs = [rig.add(prompt(number, 128), max_tokens=40) for number in range(3)]
        for _ in range(12):
            rig.step()
        assert rig.scheduler.preemptions == 0, "each of them has a store in flight"
        tables = [list(seq.block_table) for seq in seqs]
        for _ in range(50):
            rig.step()
        assert rig.scheduler.preemptions == 0
        assert [seq.block_table[:4] for seq in seqs] == [table[:4] for table in tables]
    rig.drain()
    assert all(seq.is_finished for seq in seqs)


def test_chunks_that_are_due_are_taken_before_their_request_is_preempted(make_rig: MakeRig) -> None:
    """LookupExchange whether blocks may be freed begins the store that is due, so only the first question gets a no."""
    rig = make_rig()
    seq = rig.add(prompt(1, 300), max_tokens=9)
    rig.until("it to be computed", lambda: seq.num_cached_tokens == 300)
    assert rig.connector.should_defer_free(seq)
    rig.drain()
    assert rig.stored_tokens() == [(0, 288)]


# ---------------------------------------------------------------- sleep


def test_after_a_sleep_nothing_of_before_is_found(make_rig: MakeRig) -> None:
    """Weights may have changed: the engine registers again with a new namespace; HBM was freed and is new."""
    rig = warm(make_rig, tensor=2)
    before = rig.connector._half.namespace
    rig.register()
    rig.idle_until("the new namespace", lambda: rig.connector._half.namespace != before)
    rig.run(prompt(1, 300))
    assert rig.loads() == []
    assert rig.stored_tokens() == [(0, 288)]
    rig.forget_hbm()
    rig.run(prompt(1, 300))
    assert len(rig.loads()) == 1
    other = make_rig(tensor=2)
    other.run(prompt(1, 300))
    assert len(other.loads()) == 1, "another engine has what was stored before"


def test_memory_that_atom_gives_back_is_not_kept_by_the_server(make_rig: MakeRig) -> None:
    """ATOM drops its tensors without telling us. Memory that a mover keeps mapped would not be free for a trainer."""
    with Server(arena_bytes=64 << 20) as server:
        rig = make_rig(server, tensor=2)
        rig.run(prompt(1, 300))
        rig.idle_until("both caches to be registered", lambda: server.status().caches == 2)
        for memory in rig.memories:
            memory.tensors.clear()
        assert server.status().caches == 0
        for rank, memory in enumerate(rig.memories):
            memory.close()
            rig.memories[rank] = rig._memory_of(rank)
        rig.register()
        rig.idle_until("both caches to be registered", lambda: server.status().caches == 2)
        rig.idle_until("the namespace", lambda: not rig.connector.has_pending_work())
        rig.forget_hbm()
        rig.run(prompt(1, 300))
        rig.forget_hbm()
        rig.run(prompt(1, 300))
        assert len(rig.loads()) == 1


def test_what_an_engine_stores_that_can_sleep_nobody_else_looks_for(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ATOM overwrites its KV with zeros before it sleeps, even under a running store.

    So an engine that can sleep never shares its chunks.
    """
    plain = make_rig()
    monkeypatch.setitem(sys.modules, ROLLOUT, ModuleType(ROLLOUT))
    sleepers = [make_rig(tensor=2), make_rig(tensor=2)]
    for rig in (plain, *sleepers):
        rig.run(prompt(1, 300))
        assert rig.loads() == []
        assert rig.stored_tokens() == [(0, 288)]
        rig.forget_hbm()
        rig.run(prompt(1, 300))
        assert len(rig.loads()) == 1, "while it is awake it has what it stored"
