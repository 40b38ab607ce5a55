"""The scheduler half between vLLM's scheduler and the decisions, with a fake server and a fake pool."""

import logging
from collections import Counter

import pytest

from kvclient.offload import lookups
from kvclient.offload.job_ends import Report
from kvclient.values import RetrieveResult, StoreResult
from kvclient.vllm.answers import Answers
from kvserver.errors import RequestError
from kvserver.wire.messages import KEY_BYTES
from tests.rigs.vllm_rig import BLOCK, CHUNK, NAMESPACE, Bench, request, stored


def test_a_computed_prompt_is_stored_and_its_blocks_are_pinned_until_it_is() -> None:
    bench, asked = Bench(), request()
    assert bench.admit(asked) == 0
    assert bench.step(r=20) != ((), ())
    _, (order,) = bench.step(r=41)
    assert bench.pool.pins == Counter(range(10, 19))
    bench.half.finished("r")
    assert bench.half.busy()
    bench.half.ended([stored(order, 2)])
    assert sum(bench.pool.pins.values()) == 3  # tokens of the first step
    assert bench.half.busy()


def test_all_blocks_of_a_request_that_has_finished_stay_while_one_of_its_stores_runs() -> None:
    bench, asked = Bench(), request()
    bench.admit(asked)
    _, (order,) = bench.step(r=20)
    bench.half.finished("r", [bench.table])
    assert all(bench.pool.pins[block] for block in bench.table)
    bench.half.ended([stored(order, 1)])
    assert +bench.pool.pins == Counter()


def test_blocks_of_a_store_that_has_ended_are_free_for_the_next_request_before_it_is_reported() -> None:
    bench, first, second = Bench(), request(), request("s")
    bench.admit(first)
    _, (order,) = bench.step(r=20)
    bench.half.finished("r", [bench.table])
    bench.half.match(second, 0)
    assert +bench.pool.pins != Counter()
    bench.over = [(order.job, 0)]
    bench.half.match(second, 0)
    assert +bench.pool.pins == Counter()
    bench.half.ended([stored(order, 1)])
    assert +bench.pool.pins == Counter()


def test_a_reset_frees_blocks_of_stores_that_have_ended_and_were_not_reported_for_want_of_a_step() -> None:
    bench, first = Bench(), request()
    bench.admit(first)
    _, (order,) = bench.step(r=20)
    bench.half.finished("r", [bench.table])
    bench.half.reset()
    assert +bench.pool.pins != Counter()
    bench.over = [(order.job, 0)]
    bench.half.reset()
    assert +bench.pool.pins == Counter()


def test_blocks_of_a_store_stay_until_ranks_elsewhere_have_reported() -> None:
    bench, first = Bench(ranks=2), request()
    bench.admit(first)
    _, (order,) = bench.step(r=20)
    bench.over = [(order.job, 0)]
    bench.half.match(request("s"), 0)
    assert +bench.pool.pins != Counter()
    bench.half.ended([Report(order.job, 1, StoreResult(order.chunks, order.chunks, 1, ""), 0.0)])
    assert +bench.pool.pins == Counter()


def test_reports_that_come_steps_later_and_twice_do_no_harm() -> None:
    """vLLM 0.33 gives the outputs of a worker that failed once more, a round later."""
    bench, first = Bench(ranks=2), request()
    bench.admit(first)
    _, (order,) = bench.step(r=20)
    one, other = (Report(order.job, rank, StoreResult(order.chunks, order.chunks, 1, ""), 0.0) for rank in range(2))
    _, (later,) = bench.step(r=41)
    bench.half.ended([one, one])
    assert +bench.pool.pins != Counter()
    bench.half.ended([other, *(one._replace(job=later.job, rank=rank) for rank in range(2))])
    bench.half.ended([one, other])
    assert +bench.pool.pins == Counter()
    assert not bench.half.busy()


def test_a_prompt_that_is_held_is_retrieved_and_not_stored() -> None:
    bench, asked = Bench(), request()
    bench.hold(asked, 3)
    assert bench.admit(asked, hbm_tokens=BLOCK) == 3 * CHUNK - BLOCK
    (order,), stores = bench.step()
    assert stores == ()
    assert [(item.first_block, list(item.block_ids)) for item in order.blocks] == [(1, bench.table[1:9])]
    bench.half.ended([Report(order.job, 0, RetrieveResult(True, 9, ""), 0.0)])
    assert bench.step(r=41) == ((), ())
    assert bench.pool.pins == Counter()


def test_a_prompt_that_waits_for_a_remote_store_does_not_ask_before_its_pause_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lookups, "ASK_AGAIN_S", 3600.0)
    bench, asked = Bench(coming_wait_s=7200), request()
    bench.hold(asked, 1)
    bench.server.coming = 2
    assert [bench.half.match(asked, 0) for _ in range(3)] == [(None, False)] * 3
    assert bench.server.asked == 1


def test_a_prompt_waits_for_a_remote_store_and_asks_again_while_the_engine_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lookups, "ASK_AGAIN_S", 0.0)
    bench, asked = Bench(coming_wait_s=60), request()
    bench.hold(asked, 1)
    bench.server.coming = 2
    assert bench.half.match(asked, 0) == (None, False)
    bench.hold(asked, 3)
    bench.server.coming = 0
    assert bench.half.match(asked, 0) == (None, False), "it has asked, and does not wait for the answer"
    assert bench.admit(asked) == 3 * CHUNK
    assert bench.server.asked == 2
    bench.step()
    assert bench.server.released == [1]


def test_an_aborted_prompt_that_waited_for_a_remote_store_gives_its_lease_back() -> None:
    bench, asked = Bench(coming_wait_s=60), request()
    bench.hold(asked, 1)
    bench.server.coming = 2
    assert bench.half.match(asked, 0) == (None, False)
    bench.half.finished("r")
    bench.step()
    assert bench.server.released == [1]
    assert not bench.half.busy()


def test_what_comes_from_disk_is_known_when_it_is_allocated_and_counted_when_it_is_there() -> None:
    bench, asked = Bench(), request()
    bench.hold(asked, 3)
    bench.server.chunks_on_disk = 1
    assert bench.admit(asked, hbm_tokens=BLOCK) == 3 * CHUNK - BLOCK
    assert bench.half.disk_tokens("r") == CHUNK
    (order,), _ = bench.step()
    assert "tokens_from_disk" not in bench.half.take_counts()
    bench.half.ended([Report(order.job, 0, RetrieveResult(True, 9, ""), 0.0)])
    counts = bench.half.take_counts()
    assert (counts["tokens_retrieved"], counts["tokens_from_disk"]) == (3 * CHUNK - BLOCK, CHUNK)
    bench.half.finished("r")
    assert bench.half.disk_tokens("r") == 0


def test_what_is_counted_in_a_step_that_says_nothing_is_told_with_the_next_answer() -> None:
    """vLLM up to 0.27 drops the statistics of a step without an answer, such as the one in which a load ends."""
    bench, asked = Bench(answers=Answers()), request()
    bench.hold(asked, 3)
    bench.admit(asked)
    (order,), _ = bench.step()
    assert bench.half.take_counts() == {}
    bench.half.ended([Report(order.job, 0, RetrieveResult(True, 9, ""), 0.25)])
    assert bench.half.take_counts() == {}
    bench.step(r=41)
    asked.num_tokens += 1
    counts = bench.half.take_counts()
    assert (counts["retrieves"], counts["tokens_retrieved"], counts["retrieve_seconds"]) == (1, 3 * CHUNK, [0.25])
    bench.step(r=42)
    assert bench.half.take_counts() == {}


def test_the_last_answer_of_a_request_that_finishes_with_it_takes_the_counts_along() -> None:
    bench, asked = Bench(answers=Answers()), request()
    bench.admit(asked)
    bench.step(r=41)
    asked.num_tokens += 1
    bench.half.finished("r")
    assert bench.half.take_counts()["requests"] == 1


def test_a_request_that_is_aborted_between_steps_takes_no_counts_along() -> None:
    bench, asked, other = Bench(answers=Answers()), request(), request("s")
    bench.admit(asked)
    bench.step(r=41)
    bench.half.finished("r")
    assert bench.half.take_counts() == {}
    bench.admit(other)
    other.num_tokens += 1
    bench.step(s=42)
    assert bench.half.take_counts() == {}, "it had that token before it was scheduled"
    other.num_tokens += 1
    assert bench.half.take_counts()["requests"] == 2


def test_output_is_stored_as_it_fills_chunks() -> None:
    bench, asked = Bench(), request(tokens=23)
    bench.admit(asked)
    _, (first,) = bench.step(r=23)
    asked.all_token_ids.append(23)
    asked.num_tokens = 24
    _, (second,) = bench.step(r=24)
    assert (first.first_chunk, second.first_chunk) == (0, 1)
    assert second.parent == first.keys
    assert first.keys + second.keys == bench.keyer.keys(asked, extra=b"", parent=b"", first_chunk=0)


def test_without_a_namespace_nothing_is_asked_or_stored() -> None:
    bench, asked = Bench(), request()
    bench.half._exchange.use_namespace(b"")
    assert bench.half.match(asked, 0) == (0, False)
    bench.half.allocated(asked, [bench.table], 0)
    assert bench.step(r=41) == ((), ())
    assert bench.server.asked == 0


def test_ranks_that_disagree_are_refused() -> None:
    with pytest.raises(RequestError, match="2 namespaces"):
        Bench().half.use_namespace({b"a" * 32, b"b" * 32})


def test_a_namespace_that_comes_later_is_used_when_all_ranks_have_said_it() -> None:
    bench, first, second = Bench(ranks=2), request("a"), request("b")
    bench.half._exchange.use_namespace(b"")
    bench.hold(second, 1)
    assert bench.admit(first) == 0
    bench.half.learn([(1, NAMESPACE)])
    bench.half.learn([])
    assert bench.step(a=41) == ((), ())
    assert bench.server.asked == 0
    bench.half.learn([(0, NAMESPACE)])
    assert bench.admit(second) > 0


def test_an_unkeyed_request_is_counted_and_left_alone() -> None:
    bench, asked = Bench(), request(prompt_embeds=object())
    assert bench.admit(asked) == 0
    assert bench.step(r=41) == ((), ())
    assert bench.server.asked == 0
    assert bench.half.take_counts()["requests_unkeyed"] == 1
    assert bench.half.take_counts() == {}


def test_after_a_reset_requests_have_other_names_and_computed_ones_none() -> None:
    bench, waiting, running = Bench(), request("w"), request("c", num_computed_tokens=12)
    bench.hold(waiting, 3)
    bench.half.new(waiting)
    bench.half.new(running)
    bench.half.reset()
    assert bench.half.match(waiting, 0) == (0, False)
    bench.half.allocated(waiting, [bench.table], 0)
    _, (order,) = bench.step(w=41, c=41)
    assert order.request == "w"
    assert not set(bench.server.held) & {order.keys[:KEY_BYTES]}


# ---------------------------------------------------------------- requests that wait for others


def test_a_request_is_asked_for_when_it_comes_and_matched_when_the_answer_is_there() -> None:
    bench, asked = Bench(), request()
    bench.hold(asked, 3)
    bench.half.new(asked)
    assert bench.server.asked == 1
    assert bench.admit(asked) == 36
    assert (bench.server.asked, bench.server.waited) == (1, 0)


def test_a_step_that_has_other_work_waits_for_no_answer() -> None:
    bench, other, asked = Bench(), request("other"), request()
    bench.hold(asked, 3)
    bench.admit(other, hbm_tokens=40)
    bench.step(other=41)
    bench.server.is_slow = True
    for _ in range(3):
        assert bench.half.match(asked, 0) == (None, False)
        bench.step(other=41)
    assert bench.server.waited == 0
    bench.server.is_slow = False
    assert bench.admit(asked) == 36


def test_an_answer_is_taken_when_the_engine_comes_by_between_two_steps() -> None:
    """The match that needs the answer then only has to decide."""
    bench, asked = Bench(), request()
    bench.hold(asked, 3)
    bench.half.new(asked)
    bench.half.collect()
    assert len(bench.server) == 0
    bench.server.is_slow = True
    assert bench.admit(asked) == 36
    assert (bench.server.asked, bench.server.waited) == (1, 0)


def test_a_step_waits_a_little_where_that_was_asked_for_and_once_for_all_its_requests() -> None:
    bench, other = Bench(step_wait_s=0.001), request("other")
    bench.admit(other, hbm_tokens=40)
    bench.step(other=41)
    bench.server.is_slow = bench.server.is_late = True
    for name in "ab":
        assert bench.half.match(request(name), 0) == (None, False)
    assert bench.server.waited == 1
    bench.step(other=41)
    bench.server.is_late = False
    assert bench.half.match(request("a"), 0) == (0, False)
    assert bench.server.waited == 2


@pytest.mark.parametrize("end", ["finished", "preempted"])
def test_an_engine_without_other_work_waits_for_the_answer(end: str) -> None:
    bench, other, asked = Bench(), request("other"), request()
    bench.hold(asked, 3)
    bench.admit(other, hbm_tokens=40)
    bench.step(other=41)
    if end == "finished":
        bench.half.finished("other")
    else:
        bench.step()  # it is in none any more
    bench.server.is_slow = True
    assert bench.admit(asked) == 36
    assert bench.server.waited == 1


def test_an_engine_goes_on_stepping_until_the_lease_of_an_aborted_request_is_back() -> None:
    bench, asked = Bench(), request()
    bench.hold(asked, 3)
    bench.server.is_slow = True
    bench.half.new(asked)
    bench.half.finished("r")
    assert bench.half.busy()
    bench.step()
    assert bench.half.busy()
    bench.server.is_slow = False
    bench.step()
    assert not bench.half.busy()
    assert bench.server.released == [1]


@pytest.mark.parametrize(("blocks", "leases"), [(0, 1), (5, 1), (8, 1), (9, 0), (10, 0)])
def test_no_lease_is_taken_for_what_hbm_holds(blocks: int, leases: int) -> None:
    bench, asked = Bench(), request()
    bench.hold(asked, 3)
    bench.pool.cached = set(asked.block_hashes[:blocks])
    bench.half.new(asked)
    tokens, _ = bench.half.match(asked, BLOCK * blocks)
    assert tokens == max(0, 36 - BLOCK * blocks)
    assert (bench.server.asked, bench.server.leased) == (1, leases)


def test_what_hbm_has_lost_since_is_asked_for_once_more() -> None:
    bench, asked = Bench(), request()
    bench.hold(asked, 3)
    bench.pool.cached = set(asked.block_hashes)
    bench.half.new(asked)
    assert bench.admit(asked) == 36
    assert (bench.server.asked, bench.server.leased) == (2, 1)


def test_the_line_of_a_request_has_the_workers_milliseconds_or_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "vllm.kvserver.scheduler")
    bench = Bench()
    loaded, early = request("loaded"), request("early", first=100)
    bench.hold(loaded, 2)
    assert bench.admit(loaded) == 24
    (order,) = bench.step()[0]
    bench.half.ended([Report(order.job, 0, RetrieveResult(True, 9, ""), 0.0043)])
    bench.half.finished("loaded")
    bench.half._exchange.use_namespace(b"")
    assert bench.admit(early) == 0
    assert bench.step(early=41) == ((), ())
    bench.half.finished("early")
    bench.step()
    assert [record.message for record in caplog.records if record.message.startswith("request=")] == [
        "request=loaded prompt=41 hbm=0 hit=24 loaded=24 load_ms=4.3 stored=0",
        "request=early prompt=41 hbm=0 hit=0 loaded=0 stored=0 why=no-namespace",
    ]
