"""Requests that wait: for their worker, for the disk that all share, and for answers that their author needed."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.replay.queueing import Work, answer_all
from kvserver.sizing.workload import Prompt


def _prompt(index: int, at_s: float, *, worker: int = 0, after: tuple[int, ...] = ()) -> Prompt:
    return Prompt(index=index, at_s=at_s, conversation=0, worker=worker, tokens=7, blocks=[], after=after)


def test_requests_of_one_worker_take_turns_and_those_of_another_do_not_wait() -> None:
    prompts = [_prompt(0, 1.0), _prompt(1, 2.0), _prompt(2, 2.0, worker=1)]
    answered = answer_all(prompts, {index: Work(0.0, 5.0) for index in range(3)})
    assert [answered[index].first_token_s for index in range(3)] == [6.0, 11.0, 7.0]
    assert answered[1].ttft_s == 9.0


def test_all_workers_share_the_disk_and_a_request_without_it_goes_first() -> None:
    prompts = [_prompt(0, 0.0), _prompt(1, 0.0, worker=1), _prompt(2, 1.0, worker=1)]
    answered = answer_all(prompts, {0: Work(4.0, 1.0), 1: Work(3.0, 1.0), 2: Work(0.0, 1.0)})
    assert [answered[index].first_token_s for index in range(3)] == [5.0, 8.0, 2.0]


def test_what_an_author_waits_for_delays_what_follows_by_as_much() -> None:
    prompts = [_prompt(0, 0.0), _prompt(1, 0.0, worker=1), _prompt(2, 60.0, after=(0, 1)), _prompt(3, 70.0, after=(2,))]
    answered = answer_all(prompts, {0: Work(0.0, 2.0), 1: Work(0.0, 9.0), 2: Work(0.0, 1.0), 3: Work(0.0, 1.0)})
    assert answered[2] == (69.0, 70.0)
    assert answered[3].sent_s == 80.0


def test_requests_that_were_never_answered_delay_nobody() -> None:
    prompts = [_prompt(0, 0.0), _prompt(1, 3.0, after=(0,))]
    assert answer_all(prompts, {1: Work(0.0, 1.0)})[1] == (3.0, 4.0)


@given(st.data())
def test_everyone_is_answered_and_a_worker_serves_one_at_a_time(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 25))
    seconds = st.floats(0.0, 9.0)
    prompts: list[Prompt] = []
    for index in range(count):
        before = data.draw(st.sets(st.integers(0, index - 1), max_size=2)) if index else set()
        earliest = max((prompts[i].at_s for i in before), default=0.0)
        at_s = earliest + data.draw(seconds)
        prompts.append(_prompt(index, at_s, worker=data.draw(st.integers(0, 2)), after=tuple(sorted(before))))
    work = {index: Work(data.draw(st.sampled_from([0.0, 2.5])), data.draw(seconds)) for index in range(count)}
    answered = answer_all(prompts, work)
    assert answered.keys() == work.keys()
    for prompt in prompts:
        alone_s = sum(work[prompt.index])
        assert answered[prompt.index].ttft_s >= alone_s - 1e-6
        assert all(answered[prompt.index].sent_s >= answered[before].first_token_s - 1e-6 for before in prompt.after)
    for worker in range(3):
        mine = sorted((answered[p.index].first_token_s, work[p.index].engine_s) for p in prompts if p.worker == worker)
        for (earlier_s, _), (later_s, took_s) in pairwise(mine):
            assert later_s - took_s >= earlier_s - 1e-6 or later_s == pytest.approx(earlier_s)
