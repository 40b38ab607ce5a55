"""One seed gives one workload, it is a closed loop, and its sums are those of an independent reader."""

from itertools import pairwise

import pytest

from benchmarks.replay.options import ReplayOptions
from kvserver.errors import ConfigError
from kvserver.sizing.schedule import Schedule
from kvserver.sizing.trace import Session, Trace, Turn, load
from kvserver.sizing.workload import Prompt, make_workload


@pytest.mark.parametrize(
    ("users", "requests", "sent", "input_tokens", "unique_tokens"),
    [(32, 0, 2064, 119_111_126, 6_481_152), (12, 600, 600, 33_179_342, 2_034_752)],
)
def test_closed_loop_has_the_sums_of_an_independent_reader(
    users: int, requests: int, sent: int, input_tokens: int, unique_tokens: int
) -> None:
    prompts = make_workload(load("claude-code"), ReplayOptions(users=users, requests=requests))
    assert len(prompts) == sent
    assert sum(p.tokens for p in prompts) == input_tokens
    assert 64 * len({block for p in prompts for block in p.blocks}) == unique_tokens


def test_same_seed_same_workload_other_seed_other_workload() -> None:
    trace = load("claude-code")
    one = make_workload(trace, ReplayOptions(requests=97))
    assert make_workload(trace, ReplayOptions(requests=97)) == one
    assert make_workload(trace, ReplayOptions(requests=97, seed=43)) != one


@pytest.mark.parametrize("name", ["claude-code", "mooncake"])
def test_prompts_come_in_time_order_and_wait_only_for_earlier_ones(name: str) -> None:
    prompts = make_workload(load(name), ReplayOptions(requests=311))
    assert [p.index for p in prompts] == list(range(311))
    assert all(before.at_s <= after.at_s for before, after in pairwise(prompts))
    assert all(earlier < p.index for p in prompts for earlier in p.after)


def test_conversations_migrate_and_all_workers_get_some() -> None:
    prompts = make_workload(load("claude-code"), ReplayOptions(requests=300, workers=3))
    workers_of: dict[int, set[int]] = {}
    for prompt in prompts:
        workers_of.setdefault(prompt.conversation, set()).add(prompt.worker)
    assert {p.worker for p in prompts} == {0, 1, 2}
    assert sum(len(workers) > 1 for workers in workers_of.values()) > len(workers_of) // 2


def test_conversations_stay_without_migration() -> None:
    prompts = make_workload(load("claude-code"), ReplayOptions(requests=300, workers=3, migrate_ratio=0.0))
    assert all(p.worker == p.conversation % 3 for p in prompts)


def test_sessions_share_the_warm_prefix_and_nothing_else() -> None:
    prompts = make_workload(load("claude-code"), ReplayOptions(requests=200))
    blocks_of: dict[int, set[int]] = {}
    for prompt in prompts:
        blocks_of.setdefault(prompt.conversation, set()).update(prompt.blocks)
    first, second = blocks_of[0], blocks_of[1]
    warm = first & second
    assert warm
    assert warm == set(range(len(warm)))
    without = make_workload(load("claude-code"), ReplayOptions(requests=200, warm_prefix_ratio=0.0))
    assert not set(without[0].blocks) & set(without[1].blocks)


def test_no_prompt_is_longer_than_the_context() -> None:
    for name in ("claude-code", "mooncake"):
        prompts = make_workload(load(name), ReplayOptions(requests=0, context_tokens_max=40_000))
        assert max(p.tokens for p in prompts) <= 40_000


def test_parent_waits_for_its_sub_agents_and_they_for_it() -> None:
    turns = [
        Turn(0, 0, 0, 1.0, 640, 1, 0, 0, 0),
        Turn(1, 0, 0, 5.0, 128, 1, 0, 0, 0),
        Turn(2, 0, 0, 2.0, 64, 1, 0, 0, 0),
        Turn(1, 0, 3.0, 1.0, 192, 1, 2, 2, 0),
        Turn(0, 0, 7.0, 1.0, 704, 1, 4, 10, 1),
    ]
    trace = Trace("t", [Session("a", 0, 0, [0, -1, -2, 4], turns)], [])
    prompts = make_workload(trace, ReplayOptions(requests=5, users=1))
    assert [(p.tokens, p.at_s, p.after) for p in prompts] == [
        (640, 0.0, ()),
        (128, 1.0, (0,)),
        (64, 1.0, (0,)),
        (192, 9.0, (1,)),
        (704, 10.0, (2, 3)),
    ]


def test_small_engine_blocks_divide_a_trace_block() -> None:
    coarse = make_workload(load("mooncake"), ReplayOptions(requests=50, block_tokens=64))
    fine = make_workload(load("mooncake"), ReplayOptions(requests=50, block_tokens=16))
    for one, other in zip(coarse, fine, strict=True):
        assert len(one.blocks) == one.tokens // 64
        assert len(other.blocks) == other.tokens // 16
        assert [b // 4 for b in other.blocks[::4]][: len(one.blocks)] == one.blocks


def test_nothing_within_the_context_is_refused() -> None:
    with pytest.raises(ConfigError) as refusal:
        make_workload(load("claude-code"), ReplayOptions(context_tokens_max=100))
    assert refusal.value.code == "workload-empty"


@pytest.mark.parametrize(
    "wrong",
    [
        {"block_tokens": 48},
        {"page_bytes": 12},
        {"pool_tokens": 1000},
        {"migrate_ratio": 1.5},
        {"workers": 0},
        {"requests": -1},
        {"arms": ()},
    ],
)
def test_impossible_options_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        ReplayOptions(**wrong)  # type: ignore[arg-type]


# ---------------------------------------------------------------- schedule


def _prompt(index: int, worker: int, *after: int) -> Prompt:
    return Prompt(index, float(index), 0, worker, 1, [], after)


def test_a_moved_conversation_waits_for_its_turn_on_the_other_worker() -> None:
    schedule = Schedule([_prompt(0, 0), _prompt(1, 1, 0), _prompt(2, 1)], workers=2, in_flight=2)
    first = schedule.take(0)
    assert first is not None
    assert schedule.take(1) is None
    schedule.ended(0, 0)
    assert [p.index for p in iter(lambda: schedule.take(1), None)] == [1, 2]


def test_no_worker_has_more_than_its_in_flight() -> None:
    schedule = Schedule([_prompt(i, 0) for i in range(5)], workers=1, in_flight=2)
    assert [p.index for p in iter(lambda: schedule.take(0), None)] == [0, 1]
    schedule.ended(0, 1)
    assert [p.index for p in iter(lambda: schedule.take(0), None)] == [2]


def test_every_prompt_is_sent_once_in_order_and_the_schedule_finishes() -> None:
    prompts = make_workload(load("claude-code"), ReplayOptions(requests=307, workers=3))
    schedule = Schedule(prompts, workers=3, in_flight=2)
    sent: list[int] = []
    running: list[Prompt] = []
    while not schedule.finished:
        for worker in range(3):
            while (prompt := schedule.take(worker)) is not None:
                assert not set(prompt.after) & {p.index for p in running}
                running.append(prompt)
                sent.append(prompt.index)
        assert running  # never stuck
        ended = running.pop(len(sent) % len(running))
        schedule.ended(ended.worker, ended.index)
    assert sorted(sent) == list(range(307))
    for worker in range(3):
        mine = [i for i in sent if prompts[i].worker == worker]
        assert mine == sorted(mine)
