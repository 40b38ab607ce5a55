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
from kvclient.atom.steps import NAMESPACE, Name
from kvclient.keys import chunk_keys
from kvclient.offload.values import Group, Options
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
    }
    return SimpleNamespace(**{"status": Status.WAITING, **fields, **more})


class Desk:
    def __init__(self, *, block: int = BLOCK, chunk: int = CHUNK, held: int = 0, **options: Any) -> None:
        self.server = Server()
        self.chunk = chunk
        self.scheduler = Scheduler(
            self.server,  # type: ignore[arg-type]
            Options(chunk_tokens=chunk, groups=(Group(block),), resumes_output=False, retrieve_wait_s=0, **options),
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
