"""Recorded sessions as requests: caps, pauses, sub-agents, sharing, and the published parameters."""

import json
from itertools import islice
from pathlib import Path

import pytest

from benchmarks.vllm_load.asks import Ask, Fork, Line, token_ids
from benchmarks.vllm_load.recorded import PRESETS, Recorded
from kvserver.errors import ConfigError
from kvserver.sizing.trace import load
from kvserver.sizing.workload import requests_of_one_pass

PARENT = {
    "id": "a",
    "tool": 100,
    "sys": 156,  # a warm prefix of half of both: two blocks
    "seq": [0, -1, -2, 3, 4],
    "req": [
        [0, 0, -1, 1, 200, 5, 0, 0, 0],  # three blocks and 8 tokens
        [1, 0, 7, 1, 130, 6, 0, 0, 0],
        [2, 0, 9, 1, 65, 9000, 0, 0, 0],
        [0, 0, 50, 1, 330, 7, 3, 3, 0],  # five blocks, three of them the first request's
        [0, 0, 1, 1, 900, 8, 1, 5, 0],
    ],
}
OTHER = {"id": "b", "tool": 0, "sys": 0, "seq": [0], "req": [[0, 0, -1, 1, 210, 3, 0, 0, 0]]}
TOO_LONG = {"id": "c", "tool": 0, "sys": 0, "seq": [0], "req": [[0, 0, -1, 1, 501, 3, 0, 0, 0]]}


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "sessions.jsonl"
    path.write_text("\n".join(map(json.dumps, (PARENT, OTHER, TOO_LONG))))
    return str(path)


def lines(options: Recorded, count: int, seed: int = 1) -> list[Line]:
    return list(islice(options.draw(seed).phases[0].lines, count))


def of(session: str, found: list[Line]) -> Line:
    """The session's line, found by its first request: only PARENT starts with 200 tokens."""
    tokens = {"a": 200, "b": 210}[session]
    return next(line for line in found if line.first_tokens() == tokens)


def text(ask: Ask) -> list[int]:
    return token_ids(ask.prompt, seed=1, vocabulary=1000)


def test_a_session_is_a_line_with_forks_up_to_its_first_prompt_that_is_too_long(trace: str) -> None:
    options = Recorded(trace=trace, context_tokens_max=500, think_s_max=20.0, time_scale=0.5, output_tokens_max=100)
    first, fork, after = of("a", lines(options, 2)).steps
    assert isinstance(first, Ask)
    assert isinstance(fork, Fork)
    assert isinstance(after, Ask)  # the later request of 900 tokens is left out
    agents = [line[0] for line in fork.lines]
    assert [ask.prompt_tokens for ask in (first, *agents, after)] == [200, 130, 65, 330]
    assert [ask.output_tokens for ask in (first, *agents, after)] == [5, 6, 100, 7]
    assert [ask.think_s for ask in (first, *agents, after)] == [0.0, 3.5, 4.5, 10.0]
    assert [ask.kind for ask in (first, *agents, after)] == ["first", "first", "first", "again"]
    assert text(after)[: 3 * 64] == text(first)[: 3 * 64]
    assert text(after)[3 * 64 : 200] != text(first)[3 * 64 : 200]


def test_all_begin_with_the_warm_prefix_and_share_nothing_else(trace: str) -> None:
    found = lines(Recorded(trace=trace, context_tokens_max=500), 2)
    first, fork, _ = of("a", found).steps
    other = of("b", found).steps[0]
    assert isinstance(first, Ask)
    assert isinstance(fork, Fork)
    assert isinstance(other, Ask)
    assert text(fork.lines[0][0])[:128] == text(first)[:128]
    assert text(other)[:128] == text(first)[:128]
    assert text(other)[128:192] != text(first)[128:192]


def test_a_session_that_begins_again_has_other_text_behind_the_warm_prefix(trace: str) -> None:
    found = [line for line in lines(Recorded(trace=trace, context_tokens_max=500), 4) if line.first_tokens() == 200]
    one, two = (line.steps[0] for line in found)
    assert isinstance(one, Ask)
    assert isinstance(two, Ask)
    assert one.name != two.name
    assert text(one)[:128] == text(two)[:128]
    assert text(one)[128:] != text(two)[128:]


def test_without_recycling_each_session_that_fits_is_played_once(trace: str) -> None:
    assert len(lines(Recorded(trace=trace, context_tokens_max=500, recycle=False), 9)) == 2


def test_shrinking_divides_all_tokens_and_leaves_what_is_shared(trace: str) -> None:
    options = Recorded(trace=trace, context_tokens_max=500, shrink=16)
    first, _, after = of_shrunk(lines(options, 2)).steps
    assert isinstance(first, Ask)
    assert isinstance(after, Ask)
    assert first.prompt_tokens == 12  # three blocks of 4; the last 8 tokens are less than one
    assert after.prompt_tokens == 20
    assert after.output_tokens == 1
    assert text(after)[:12] == text(first)


def of_shrunk(found: list[Line]) -> Line:
    return next(line for line in found if len(line.steps) == 3)


def test_a_divisor_that_blocks_do_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="shrink=3"):
        Recorded(shrink=3)


def test_a_context_that_no_session_begins_in_is_refused(trace: str) -> None:
    with pytest.raises(ConfigError, match="69 tokens"):
        Recorded(trace=trace, context_tokens_max=69).draw(1)


def test_the_sample_has_as_many_requests_as_its_reader_counts() -> None:
    sessions = load("claude-code").sessions
    found = lines(Recorded(recycle=False), 999)
    asked = 0
    for line in found:
        for step in line.steps:
            asked += sum(map(len, step.lines)) if isinstance(step, Fork) else 1
    too_long = 2  # the last two of a sub-agent, which the other count keeps
    assert asked == requests_of_one_pass(sessions, 100_000) - too_long == 2062


def test_requests_in_arrival_order_come_when_they_came(tmp_path: Path) -> None:
    path = tmp_path / "arrivals.jsonl"
    path.write_text("[0, 600, 9, 0, 0]\n[1500, 1100, 8, 1, 1]\n[500, 2000, 7, 0, 0]\n[9000, 1700, 6, 2, 2]\n")
    options = Recorded(trace=str(path), time_scale=2.0, duration_s=8.0, context_tokens_max=1800)
    (phase,) = options.draw(1).phases
    found = list(phase.lines)
    assert [line.start_s for line in found] == [0.0, 3.0]  # 2000 tokens are too many, 22 s too late
    one, two = (line.steps[0] for line in found)
    assert isinstance(one, Ask)
    assert isinstance(two, Ask)
    assert (one.prompt_tokens, two.prompt_tokens) == (600, 1100)
    assert text(one)[:512] == text(two)[:512]
    assert text(one)[512:] != text(two)[512:600]
    assert phase.users == 2


def test_the_published_experiment_is_a_preset() -> None:
    preset = PRESETS["mi300x"]
    (phase,) = preset.draw(42).phases
    assert (phase.users, phase.duration_s) == (4, 1200.0)
    assert phase.ramp is not None
    assert (phase.ramp.users_max, phase.ramp.ttft_s_max) == (32, 60.0)
    assert (phase.ramp.first_tokens_max, phase.ramp.working_set_tokens_max, phase.ramp.cooldown) == (500_000, 0, False)
    assert (preset.context_tokens_max, preset.think_s_max, preset.warm_prefix_ratio) == (100_000, 600.0, 0.5)
    assert PRESETS["mi300x-steady"].draw(42).phases[0].users == 32


def test_limits_of_the_ramp_are_options(trace: str) -> None:
    options = Recorded(
        trace=trace, users_max=5, first_tokens_max=6, working_set_tokens_max=7, working_set_s=8.0, cooldown=True
    )
    ramp = options.draw(1).phases[0].ramp
    assert ramp is not None
    assert (ramp.first_tokens_max, ramp.working_set_tokens_max, ramp.working_set_s, ramp.cooldown) == (6, 7, 8.0, True)
