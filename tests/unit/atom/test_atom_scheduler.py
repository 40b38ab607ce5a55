"""The scheduler half between ATOM's calls and the decisions, with a fake server.

For cases that need exact numbers, or an engine that differs from today's ATOM."""

import logging
import re
import sys
from enum import Enum, auto
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvclient.atom.aborts import PASSED_STEPS
from kvclient.atom.scheduler import Scheduler
from kvclient.atom.states import NO_ROW
from kvclient.atom.steps import NAMESPACE, Name, StateCopy
from kvclient.keys import chunk_keys
from kvclient.offload.values import Group, Options
from kvserver.errors import RequestError
from kvserver.wire.messages import KEY_BYTES

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.rigs.vllm_rig import Server

BLOCK, CHUNK = 4, 12


class Status(Enum):
    """ATOM's statuses that the scheduler half reads."""

    WAITING = auto()
    WAITING_FOR_REMOTE_KVS = auto()
    ABORTED = auto()


class Operation(SimpleNamespace):
    __hash__ = object.__hash__


def operation(request: Any, job: int) -> Any:
    return Operation(req_id=request, generation=job)


def sequence(tokens: int, *, name: Any = 1, hbm: int = 0, block_tokens: int = BLOCK, **more: Any) -> Any:
    fields = {
        "id": name,
        "token_ids": list(range(tokens)),
        "num_tokens": tokens,
        "num_prompt_tokens": tokens,
        "num_cached_tokens": hbm,
        "block_table": list(range(-(-tokens // block_tokens))),
        "has_per_req_cache": False,
        "multimodal_data": None,
        "is_finished": False,
        "per_req_cache_group": -1,
        "state_fork_src": -1,
        "last_checkpoint_pos": 0,
    }
    return SimpleNamespace(**{"status": Status.WAITING, **fields, **more})


class Desk:
    def __init__(
        self, *, block: int = BLOCK, chunk: int = CHUNK, held: int = 0, state_rows: int = 0, **options: Any
    ) -> None:
        """state_rows: above 0, the model keeps states."""
        self.server = Server()
        self.chunk = chunk
        self.scheduler = Scheduler(
            self.server,  # type: ignore[arg-type]
            Options(
                chunk_tokens=chunk,
                groups=(Group(block), *([Group(chunk, "state")] if state_rows else [])),
                null_block=NO_ROW if state_rows else None,
                resumes_output=False,
                retrieve_wait_s=0,
                **options,
            ),
            state_rows=state_rows,
        )
        self.scheduler.learn([operation(NAMESPACE + "6e" * 32, 0)])
        if held:
            self.hold(held)

    def hold(self, tokens: int) -> None:
        """Makes the server hold so many leading tokens of every sequence()."""
        keys = chunk_keys(list(range(tokens)), self.chunk)
        self.server.held = {keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)}

    def admit(self, seq: Any, *, hbm: int) -> bool:
        """Admits as ATOM does: the HBM count is known only after allocation. Returns whether it is parked."""
        seq.num_cached_tokens = 0
        offered = self.scheduler.match(seq) > 0
        seq.num_cached_tokens = hbm
        self.scheduler.allocated(seq)
        return offered and self.scheduler.should_park(seq)


def test_the_store_holds_almost_as_much_as_hbm() -> None:
    """A6, with the numbers of the report: 129856 tokens in HBM, 129792 in the store. Nothing is loaded or stored."""
    desk = Desk(block=64, chunk=256, held=129_792, retrieve_tokens_min=8192)
    seq = sequence(129_900, block_tokens=64)
    assert not desk.admit(seq, hbm=129_856)
    seq.num_cached_tokens = 129_900
    assert desk.scheduler.step().requests == ()
    desk.scheduler.finished(seq)
    assert desk.scheduler.may_free(seq)
    assert desk.server.released == [1], "its lease has gone back"


def test_what_a_remote_store_may_bring_is_not_awaited() -> None:
    desk = Desk(held=24)
    desk.server.coming = 1
    assert desk.scheduler.match(sequence(50)) == 24
    assert desk.server.asked == 1


def test_a_prefix_that_ends_inside_a_block_is_computed_to_its_end_first() -> None:
    """unaligned_hbm_handoff_prefills_boundary_then_emits_load. ATOM's own prefixes end between blocks today."""
    desk = Desk(held=36)
    seq = sequence(50)
    assert not desk.admit(seq, hbm=5)
    assert seq.offload_handoff_boundary_tokens == 8
    assert desk.scheduler.chunk_until_handoff(seq, 45) == 3
    assert id(seq) in desk.scheduler.handoffs
    assert desk.scheduler.step().requests == (), "nothing is stored of it meanwhile"
    seq.num_cached_tokens = 7
    assert not desk.scheduler.should_park_now(seq)
    seq.num_cached_tokens = 8
    assert desk.scheduler.should_park_now(seq)
    (order,) = desk.scheduler.step().retrieves
    assert (order.hbm_tokens, order.end_tokens) == (8, 36)
    assert seq.offload_load_start_tokens == 8
    assert desk.scheduler.handoffs == set()


def test_no_handover_for_what_would_bring_too_little_behind_the_boundary() -> None:
    """unaligned_handoff_skips_if_boundary_remainder_is_too_small."""
    desk = Desk(held=36, retrieve_tokens_min=29)
    assert not desk.admit(sequence(50), hbm=5)
    assert desk.scheduler.handoffs == set()
    desk.scheduler.step()
    assert desk.server.released == [1]


def test_a_sequence_that_was_computed_past_its_boundary_goes_on() -> None:
    """The cap holds at admission only, so a smaller budget may overshoot it later. Then the sequence is computed."""
    desk = Desk(held=36)
    seq = sequence(50)
    desk.admit(seq, hbm=5)
    seq.num_cached_tokens = 10
    assert not desk.scheduler.should_park_now(seq)
    assert desk.scheduler.handoffs == set()
    seq.num_cached_tokens = 50
    (store,) = desk.scheduler.step().stores
    assert (store.first_chunk, store.chunks) == (3, 1), "only what the server lacks"


def test_a_head_of_the_queue_that_is_asked_again_and_again_asks_the_server_once() -> None:
    desk = Desk(held=36)
    seq = sequence(50)
    assert {desk.scheduler.match(seq) for _ in range(50)} == {36}
    assert desk.server.asked == 1


def test_without_the_ranks_namespace_nothing_is_asked_nor_stored() -> None:
    """ATOM's `multi` passes on no rank's report: no store would be seen to end, so its blocks would never come back."""
    desk = Desk(held=12)
    desk.scheduler._exchange.use_namespace(b"")
    seq = sequence(50)
    assert not desk.admit(seq, hbm=0)
    assert desk.server.asked == 0
    seq.num_cached_tokens = 50
    assert desk.scheduler.step().requests == ()
    assert desk.scheduler.may_free(seq)
    desk.scheduler.learn([operation(NAMESPACE + "6e" * 32, 0)])
    (store,) = desk.scheduler.step().stores
    assert (store.first_chunk, store.chunks) == (0, 4), "what ran already is stored when they have said it"


def test_an_engine_is_kept_polling_until_the_namespace_is_known() -> None:
    server = Server()
    options = Options(chunk_tokens=CHUNK, groups=(Group(BLOCK),))
    scheduler = Scheduler(server, options)  # type: ignore[arg-type]
    assert scheduler.busy()
    scheduler.learn([operation(NAMESPACE + "6e" * 32, 0)])
    assert not scheduler.busy()


def test_a_store_with_a_gap_ends_the_chain() -> None:
    """Chunks after the gap could not be found, so nothing more is stored of the request."""
    desk = Desk()
    seq = sequence(60)
    desk.admit(seq, hbm=0)
    seq.num_cached_tokens = 24
    (store,) = desk.scheduler.step().stores
    assert isinstance(store.request, Name)
    done = operation(1, store.job)
    ended = desk.scheduler.jobs.ended([done])
    assert [(job.is_retrieve, job.chunks) for job in ended.values()] == [(False, 2)]
    desk.scheduler.ended(ended, failed=(), gaps={done})
    seq.num_cached_tokens = 60
    assert desk.scheduler.step().requests == ()


def test_state_that_a_block_does_not_have_keeps_a_request_out() -> None:
    desk = Desk(held=36)
    seq = sequence(50, has_per_req_cache=True)
    assert desk.scheduler.match(seq) == 0
    desk.scheduler.allocated(seq)
    seq.num_cached_tokens = 50
    assert desk.scheduler.step().requests == ()
    assert desk.server.asked == 0


def test_who_was_aborted_without_a_word_is_swept() -> None:
    desk = Desk(held=36)
    seqs = [sequence(50, name=number) for number in range(30)]
    for seq in seqs:
        desk.scheduler.match(seq)
        seq.is_finished = True
    for _ in range(10):
        desk.scheduler.step()
    assert desk.scheduler._lives == {}
    assert sorted(desk.server.released) == list(range(1, 31))


def test_a_preempted_sequence_that_waits_keeps_its_answer() -> None:
    """Its chunks were to be stored. It has none now, but is still looked at in every step."""
    desk = Desk()
    seq = sequence(50)
    desk.admit(seq, hbm=0)
    desk.scheduler.step()
    desk.hold(36)
    seq.num_cached_tokens, seq.block_table = 0, []
    assert desk.scheduler.match(seq) == 36
    asked = desk.server.asked
    for _ in range(3):
        desk.scheduler.step()
        assert desk.scheduler.match(seq) == 36
    assert desk.server.asked == asked
    assert desk.server.released == []


def test_a_prefill_that_was_preempted_before_any_output_is_loaded_again() -> None:
    """With ATOM's mark of the first load, the second would count as ended."""
    desk = Desk(held=36)
    seq = sequence(50)
    assert desk.admit(seq, hbm=0)
    (first,) = desk.scheduler.step().retrieves
    done = operation(1, first.job)
    desk.scheduler.ended(desk.scheduler.jobs.ended([done]), failed=(), gaps=())
    seq.offload_loaded, seq.num_cached_tokens = True, 36
    seq.block_table = list(range(20, 33))  # preempted, and allocated anew
    assert desk.admit(seq, hbm=8)
    (again,) = desk.scheduler.step().retrieves
    assert (again.hbm_tokens, again.end_tokens) == (8, 36)
    assert [list(item.block_ids) for item in again.blocks] == [list(range(22, 29))]
    assert (seq.offload_loaded, seq.offload_load_start_tokens) == (False, 8)
    assert desk.scheduler.jobs.holds(seq)


def test_what_was_found_under_an_earlier_namespace_is_forgotten() -> None:
    """The engine has slept while a request waited: its lease is for bytes of other weights."""
    desk = Desk(held=36)
    assert desk.scheduler.match(sequence(50)) == 36
    desk.scheduler.learn([operation(NAMESPACE + "6f" * 32, 0)])
    desk.scheduler.step()
    assert desk.scheduler._lives == {}
    assert desk.server.released == [1]


def test_an_image_stays_out_when_the_engine_sleeps_while_its_request_lives() -> None:
    """ATOM forgets the image with its first batch. Named anew after a preemption, its placeholders would be text."""
    desk = Desk(held=36)
    seq = sequence(50, multimodal_data={"image": 1})
    assert not desk.admit(seq, hbm=0)
    seq.multimodal_data = None
    desk.scheduler.learn([operation(NAMESPACE + "6f" * 32, 0)])
    seq.num_cached_tokens, seq.block_table = 0, []
    assert not desk.admit(seq, hbm=0)
    seq.num_cached_tokens, seq.block_table = 50, list(range(13))
    assert desk.scheduler.step().requests == ()
    assert desk.server.asked == 0


def test_the_end_of_an_earlier_lifes_load_changes_nothing_for_the_next() -> None:
    """late_load_terminal_cannot_mutate_reused_request_lifecycle. The id is the same, the job is not."""
    desk = Desk(held=36)
    old, new = sequence(50, name=77), sequence(50, name=77)
    assert desk.admit(old, hbm=0)
    assert desk.admit(new, hbm=12)
    first, second = desk.scheduler.step().retrieves
    late = operation(77, first.job)
    desk.scheduler.ended(desk.scheduler.jobs.ended([late]), failed=[late], gaps=())
    assert not desk.scheduler.jobs.holds(old)
    assert desk.scheduler.jobs.holds(new)
    assert not desk.scheduler.may_free(new)
    done = operation(77, second.job)
    desk.scheduler.ended(desk.scheduler.jobs.ended([done]), failed=(), gaps=())
    new.num_cached_tokens = 50
    (store,) = desk.scheduler.step().stores
    assert (store.request, store.first_chunk, store.chunks) == (second.request, 3, 1), "what it loaded stays stored"


def loaded_and_not_taken(status: Any = Status.WAITING_FOR_REMOTE_KVS) -> tuple[Desk, Any]:
    """A sequence whose load has ended; ATOM was told and has not acted on it yet."""
    desk = Desk(held=36)
    seq = sequence(50)
    assert desk.admit(seq, hbm=0)
    seq.status = status
    (load,) = desk.scheduler.step().retrieves
    desk.scheduler.jobs.ended([operation(1, load.job)])
    return desk, seq


def test_who_was_aborted_in_its_load_waits_again_only_when_the_engine_stands_still() -> None:
    """This writes ATOM's own status, so it happens neither while others run nor before ATOM had time to act."""
    desk, seq = loaded_and_not_taken()
    seq.status = Status.ABORTED
    for runs in [False] * (PASSED_STEPS - 1) + [True] * 200 + [False] * (PASSED_STEPS - 1):
        desk.scheduler.step(runs=runs)
        assert seq.status is Status.ABORTED
    desk.scheduler.step()
    assert seq.status is Status.WAITING_FOR_REMOTE_KVS
    desk.scheduler.step()
    assert seq.status is Status.WAITING_FOR_REMOTE_KVS
    seq.status, seq.offload_loaded = Status.WAITING, True  # ATOM has acted on it
    desk.scheduler.step()
    assert seq.status is Status.ABORTED
    for _ in range(2 * PASSED_STEPS):
        desk.scheduler.step()
        assert seq.status is Status.ABORTED, "once it is taken it is ATOM's alone"


@pytest.mark.parametrize("status", [status for status in Status if status is not Status.ABORTED])
def test_who_was_not_aborted_keeps_its_status(status: Status) -> None:
    desk, seq = loaded_and_not_taken()
    seq.status = status
    for _ in range(2 * PASSED_STEPS):
        desk.scheduler.step()
    assert seq.status is status


def test_statuses_that_are_not_known_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """The statuses of an ATOM release that names them differently."""
    other = Enum("other", ["PARKED", "CANCELLED"])
    desk = Desk(held=36)
    seqs = [sequence(50, name=name, status=other["PARKED"]) for name in range(2)]
    assert all(desk.admit(seq, hbm=0) for seq in seqs)
    loads = desk.scheduler.step().retrieves
    desk.scheduler.jobs.ended([operation(load.request.id, load.job) for load in loads])  # type: ignore[attr-defined]
    seq = seqs[0]
    seq.status = other["CANCELLED"]
    for _ in range(2 * PASSED_STEPS):
        desk.scheduler.step()
    assert seq.status is other["CANCELLED"]
    (said,) = [record.message for record in caplog.records if "statuses not known" in record.message]
    assert "'WAITING_FOR_REMOTE_KVS', 'ABORTED'" in said


def test_what_the_server_has_lost_is_stored_although_the_answer_came_after_the_admission() -> None:
    """A prompt that is not worth a load is asked for without waiting. Until the answer it counted as stored whole."""
    desk = Desk(retrieve_tokens_min=100)
    seq = sequence(50)
    desk.admit(seq, hbm=0)
    seq.num_cached_tokens = 50
    (store,) = desk.scheduler.step().stores
    done = operation(1, store.job)
    desk.scheduler.ended(desk.scheduler.jobs.ended([done]), failed=(), gaps=())
    seq.num_cached_tokens, seq.block_table = 0, []  # preempted, and the server evicts it meanwhile
    desk.server.is_slow = True
    desk.admit(seq, hbm=0)
    seq.num_cached_tokens, seq.block_table = 50, list(range(13))
    desk.server.is_slow = False
    (store,) = desk.scheduler.step().stores
    assert (store.first_chunk, store.chunks) == (0, 4)


@pytest.mark.parametrize("then", ["runs", "is preempted", "ends"])
def test_a_prompt_is_stored_up_to_what_atom_left_out_in_hbm(then: str) -> None:
    """One request's output is part of the other's prompt.

    Of 40 tokens ATOM computes 28 anew and takes that for all of them, because the prompt has 20."""
    desk = Desk()
    seq = sequence(40, num_prompt_tokens=20)
    desk.admit(seq, hbm=0)
    seq.num_cached_tokens = 28
    if then == "is preempted":
        desk.scheduler.may_free(seq)
    if then == "ends":
        desk.scheduler.finished(seq)
    if then != "runs":
        seq.num_cached_tokens, seq.block_table = 0, []
    later = sequence(50, name=2)
    desk.admit(later, hbm=36)
    later.num_cached_tokens = 50
    stores = {order.request.id: order for order in desk.scheduler.step().stores}
    assert (stores[2].first_chunk, stores[2].chunks) == (0, 2)
    again = sequence(50, name=3)
    desk.admit(again, hbm=28)
    again.num_cached_tokens = 50
    (store,) = desk.scheduler.step().stores
    assert (store.first_chunk, store.chunks) == (0, 4), "it has computed them itself"


def test_a_request_that_ends_while_it_is_recomputed_is_forgotten() -> None:
    desk = Desk()
    seq = sequence(40, num_prompt_tokens=20)
    desk.admit(seq, hbm=0)
    seq.num_cached_tokens = 12
    desk.scheduler.finished(seq)
    assert desk.scheduler._gaps._resumed == {}


def test_a_prompt_with_an_image_is_not_looked_through_for_what_atom_left_out() -> None:
    """Nothing of it is stored, and the image's placeholders need not be tokens."""
    desk = Desk()
    seq = sequence(40, num_prompt_tokens=20)
    desk.admit(seq, hbm=0)
    seq.num_cached_tokens = 28
    pictured = sequence(50, name=2, multimodal_data={"image": 1})
    pictured.token_ids[3] = -1
    desk.admit(pictured, hbm=36)
    pictured.num_cached_tokens = 50
    assert [order.request.id for order in desk.scheduler.step().stores] == [1]


def test_a_load_has_its_milliseconds_and_the_request_its_own_id(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "atom.kvserver")
    desk = Desk(held=36)
    seq = sequence(50, name=77)
    assert desk.admit(seq, hbm=0)
    (load,) = desk.scheduler.step().retrieves
    desk.scheduler.ended(desk.scheduler.jobs.ended([operation(77, load.job)]), failed=(), gaps=())
    desk.scheduler.finished(seq)
    desk.scheduler.step()
    (line,) = [record.message for record in caplog.records if record.message.startswith("request=")]
    assert re.fullmatch(r"request=77 prompt=50 hbm=0 hit=36 loaded=36 load_ms=\d+\.\d stored=0", line)


def test_without_a_namespace_it_is_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "atom.kvserver")
    desk = Desk(held=36)
    desk.scheduler._exchange.use_namespace(b"")
    seq = sequence(50)
    assert not desk.admit(seq, hbm=0)
    seq.num_cached_tokens = 50
    assert desk.scheduler.step().requests == ()
    desk.scheduler.finished(seq)
    desk.scheduler.step()
    (line,) = [record.message for record in caplog.records if record.message.startswith("request=")]
    assert line.endswith(" loaded=0 stored=0 why=no-namespace")
    assert desk.server.asked == 0


# ---------------------------------------------------------------- states


def stateful(tokens: int, *, slot: int = 6, **more: Any) -> Any:
    return sequence(tokens, has_per_req_cache=True, per_req_cache_group=slot, **more)


def computed(desk: Desk, seq: Any, tokens: int) -> list[tuple[int, int, int | None]]:
    """(first chunk, end chunk, slot of the state) of the stores of the step after a forward that ended there."""
    seq.num_cached_tokens = tokens
    step = desk.scheduler.step()
    return [
        (order.first_chunk, order.first_chunk + order.chunks, getattr(step.states.get(order.job), "slot", None))
        for order in step.stores
    ]


def test_a_state_is_stored_only_with_the_step_after_the_forward_that_ended_there() -> None:
    """sidecar_save_waits_for_exact_completed_boundary."""
    desk = Desk(state_rows=3)
    desk.admit(seq := stateful(90), hbm=0)
    assert computed(desk, seq, 0) == []
    assert computed(desk, seq, 13) == [(0, 1, None)], "the state is that of token 13"
    assert computed(desk, seq, 24) == [(1, 2, 6)]
    assert computed(desk, seq, 24) == []
    assert computed(desk, seq, 50) == [(2, 4, None)]


def test_a_state_that_has_gone_on_is_not_stored() -> None:
    """The store came too late, because too many were in flight. Decoding does not change num_cached_tokens."""
    desk = Desk(state_rows=3, stores_max=1)
    desk.admit(first := stateful(20, name=1), hbm=0)
    desk.admit(seq := stateful(24, name=2), hbm=0)
    seq.num_cached_tokens = 24
    assert computed(desk, first, 12) == [(0, 1, 6)]
    (order,) = (job.order for job in desk.scheduler.jobs._jobs.values())
    ended = desk.scheduler.jobs.ended([operation(1, order.job)])
    desk.scheduler.ended(ended, failed=(), gaps=())
    assert computed(desk, seq, 24) == [(0, 2, None)]


def test_the_state_behind_the_output_of_a_preempted_sequence_is_not_stored() -> None:
    desk = Desk(state_rows=3)
    desk.admit(seq := stateful(24), hbm=0)
    seq.num_tokens = 30
    assert computed(desk, seq, 30) == [(0, 2, None)]


def test_a_state_that_hbm_brings_is_not_there_before_the_first_forward() -> None:
    """ATOM copies a checkpoint into the slot within that forward.
    Scenario: slot_save_waits_until_post_allocation_state_copy_forward_completes."""
    desk = Desk(state_rows=3)
    desk.admit(seq := stateful(90), hbm=24)
    assert computed(desk, seq, 24) == [(0, 2, None)]
    assert computed(desk, seq, 36) == [(2, 3, 6)]


def test_a_checkpoint_hands_the_slot_on_and_the_state_is_in_the_old_one() -> None:
    desk = Desk(state_rows=3)
    desk.admit(seq := stateful(90), hbm=0)
    seq.state_fork_src, seq.per_req_cache_group = 6, 9
    assert computed(desk, seq, 24) == [(0, 2, 6)]
    seq.state_fork_src = -1
    assert computed(desk, seq, 36) == [(2, 3, 9)]


def test_behind_a_fork_that_atom_left_for_two_steps_nothing_is_stored() -> None:
    """ATOM pins the slot for two passes only. Tokens that are computed with another request's state are wrong."""
    desk = Desk(state_rows=3)
    desk.admit(seq := stateful(90), hbm=0)
    seq.state_fork_src, seq.per_req_cache_group = 6, 9
    assert computed(desk, seq, 24) == [(0, 2, 6)]
    seq.state_fork_src = -1
    assert computed(desk, seq, 36) == [(2, 3, 9)]
    seq.state_fork_src, seq.per_req_cache_group = 9, 4
    assert computed(desk, seq, 48) == [(3, 4, 9)]
    assert computed(desk, seq, 48) == []
    seq.state_fork_src = -1
    assert computed(desk, seq, 60) == []
    assert computed(desk, seq, 90) == []


def test_output_behind_such_a_fork_is_not_stored_when_hbm_gives_it_to_a_later_prompt() -> None:
    """Decoding does not change num_cached_tokens. The checkpoint is where the fork was made."""
    desk = Desk(state_rows=3)
    desk.admit(seq := stateful(90), hbm=0)
    assert computed(desk, seq, 90) == [(0, 7, None)]
    seq.num_tokens, seq.token_ids = 100, list(range(100))
    seq.state_fork_src, seq.per_req_cache_group, seq.last_checkpoint_pos = 6, 9, 98
    assert computed(desk, seq, 90) == computed(desk, seq, 90) == []
    seq.state_fork_src = -1
    seq.num_tokens, seq.token_ids = 120, list(range(120))
    desk.scheduler.finished(seq)
    desk.hold(84)
    desk.admit(later := stateful(140, name=2), hbm=120)
    assert computed(desk, later, 140) == [(7, 8, None)]
    desk.admit(other := stateful(98, name=3), hbm=96)
    assert computed(desk, other, 98) == [(7, 8, None)], "before the fork all is right"


def test_a_fork_of_an_earlier_life_is_forgotten() -> None:
    """A preempted sequence may get the same slot to read from again."""
    desk = Desk(state_rows=3)
    desk.admit(seq := stateful(90), hbm=0)
    seq.state_fork_src, seq.per_req_cache_group = 6, 9
    assert computed(desk, seq, 24) == [(0, 2, 6)]
    desk.admit(seq, hbm=24)
    assert computed(desk, seq, 24) == []
    seq.state_fork_src = -1
    assert computed(desk, seq, 36) == [(2, 3, 9)]


def test_a_state_that_is_stored_or_held_is_not_stored_again() -> None:
    """sidecar_save_is_not_duplicated_while_inflight_or_after_commit."""
    desk = Desk(state_rows=3, held=24)
    desk.admit(seq := stateful(90), hbm=12)
    assert computed(desk, seq, 24) == []
    assert computed(desk, seq, 36) == [(2, 3, 6)]
    desk.scheduler.finished(seq)
    desk.hold(36)
    desk.admit(again := stateful(90, name=2), hbm=12)
    assert computed(desk, again, 36) == []


def test_the_first_prefill_ends_with_a_chunk_that_is_not_held() -> None:
    """prefill_chunk_is_cut_at_nearest_pending_sidecar_boundary;
    prefill_chunk_does_not_recut_committed_or_inflight_boundary; zero_checkpoint_interval_keeps_terminal_alignment."""
    desk = Desk(state_rows=3, held=24, retrieve_tokens_min=24)

    def cut(tokens: int, budget: int, *, hbm: int = 0, **more: Any) -> int:
        desk.admit(seq := stateful(tokens, hbm=hbm, name=(tokens, budget, hbm, len(more)), **more), hbm=hbm)
        seq.num_cached_tokens = hbm
        return desk.scheduler.chunk_until_state(seq, budget)

    assert cut(47, 47, hbm=8) == 28, "up to 36, the last whole chunk"
    assert cut(48, 48, hbm=8) == 28, "one token has to be left for a request like this one"
    assert cut(90, 43, hbm=8) == 40, "up to 48: the budget ends behind it"
    assert cut(35, 35, hbm=8) == 35, "24 is held"
    assert cut(47, 5, hbm=8) == 5, "there is no boundary in it"
    assert cut(47, 47, hbm=36) == 47
    assert cut(47, 47, hbm=8, num_tokens=50) == 47, "output: ATOM could take the first part for all"
    assert cut(47, 47, hbm=8, multimodal_data={"image": 1}) == 47
    consumer = Desk(state_rows=3, stores=False)
    consumer.admit(seq := stateful(90), hbm=0)
    assert consumer.scheduler.chunk_until_state(seq, 43) == 43
    unheard = Desk(state_rows=3, retrieve_tokens_min=24)
    unheard.admit(seq := stateful(20), hbm=0)
    assert unheard.scheduler.chunk_until_state(seq, 20) == 20, "12 tokens would not be worth a load"


def test_no_prefill_is_cut_for_a_state_that_cannot_be_stored() -> None:
    away = Desk(state_rows=3)
    away.server.connected = False
    away.admit(seq := stateful(47), hbm=0)
    assert away.scheduler.chunk_until_state(seq, 47) == 47
    full = Desk(state_rows=1)
    full.admit(first := stateful(47), hbm=0)
    first.num_cached_tokens = 36
    assert full.scheduler.step().states
    full.admit(seq := stateful(50, name=2), hbm=0)
    assert full.scheduler.chunk_until_state(seq, 50) == 50


def test_behind_tokens_of_hbm_no_state_is_loaded() -> None:
    """With a server that holds more."""
    desk = Desk(state_rows=3, held=48)
    assert not desk.admit(stateful(90), hbm=12)
    assert desk.scheduler.step().retrieves == ()
    assert desk.server.released == [1]


def test_a_sequence_without_a_slot_is_computed_and_brings_no_state() -> None:
    """stateful_load_without_destination_group_fails_closed."""
    desk = Desk(state_rows=3, held=24)
    assert not desk.admit(seq := stateful(90, slot=-1), hbm=0)
    assert computed(desk, seq, 36) == [(2, 3, None)]


def test_a_load_has_its_row_until_all_ranks_have_ended_it() -> None:
    """Another one waits, and no store gets a row before it has one."""
    desk = Desk(state_rows=1, held=24)
    for name, slot in ((1, 6), (2, 7)):
        assert desk.admit(stateful(30, name=name, slot=slot), hbm=0)
    step = desk.scheduler.step()
    (first,) = step.retrieves
    assert step.states == {first.job: StateCopy(row=0, slot=6)}
    assert [list(item.block_ids) for item in first.blocks] == [[0, 1, 2, 3, 4, 5], [0]]
    desk.admit(storing := stateful(90, name=3, slot=8), hbm=12)
    assert desk.scheduler.busy()
    ended = desk.scheduler.jobs.ended([operation(1, first.job)])
    desk.scheduler.ended(ended, failed=(), gaps=())
    step = desk.scheduler.step()
    (second,) = step.retrieves
    assert step.states == {second.job: StateCopy(row=0, slot=7)}
    ended = desk.scheduler.jobs.ended([operation(2, second.job)])
    desk.scheduler.ended(ended, failed=(), gaps=())
    assert computed(desk, storing, 36) == [(2, 3, 8)]


def test_a_store_gets_no_row_while_a_load_waits_for_one() -> None:
    desk = Desk(state_rows=1, held=24)
    desk.admit(storing := stateful(90, name=3, slot=8), hbm=12)
    desk.scheduler.step()
    desk.admit(stateful(30), hbm=0)
    storing.num_cached_tokens = 36
    step = desk.scheduler.step()
    assert len(step.stores) == 1
    assert list(step.states) == [order.job for order in step.retrieves]


def test_after_a_bug_loads_without_a_row_are_refused_too() -> None:
    desk = Desk(state_rows=1, held=24)
    for name in (1, 2):
        desk.admit(stateful(30, name=name), hbm=0)
    assert len(desk.scheduler.step().retrieves) == 1
    (order,) = desk.scheduler.last_step("connector-bug").retrieves
    assert order.refused == "connector-bug"


@pytest.mark.parametrize(("state_rows", "has_state"), [(0, True), (3, False)])
def test_a_sequence_unlike_the_model_is_neither_looked_up_nor_stored(state_rows: int, has_state: bool) -> None:
    desk = Desk(state_rows=state_rows, held=24)
    seq = sequence(90, has_per_req_cache=has_state)
    assert not desk.admit(seq, hbm=0)
    assert computed(desk, seq, 36) == []
    assert desk.server.asked == 0


def test_a_release_without_slots_of_sequences_is_refused_by_name() -> None:
    seq = stateful(90)
    del seq.state_fork_src
    with pytest.raises(RequestError, match="has no state_fork_src in its Sequence"):
        Desk(state_rows=3).scheduler.match(seq)
