"""Synthetic sessions have the published figures of the recorded ones, and are a valid trace."""

import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.replay.synthetic import SESSIONS, synthetic_sessions
from kvserver.sizing.trace import SESSION_BLOCK_TOKENS, Turn, load


@pytest.fixture(scope="module", params=[0, 1])
def turns(request: pytest.FixtureRequest) -> list[Turn]:
    return [turn for session in synthetic_sessions(request.param) for turn in session.turns]


def test_inputs_are_as_long_as_published(turns: list[Turn]) -> None:
    tokens = [turn.input_tokens for turn in turns]
    assert 42_000 <= statistics.fmean(tokens) <= 45_000
    assert 34_000 <= statistics.median(tokens) <= 38_000
    assert 9_800 <= min(tokens) < 10_000
    assert 98_000 < max(tokens) <= 98_900


def test_outputs_are_as_long_as_published(turns: list[Turn]) -> None:
    tokens = [turn.output_tokens for turn in turns]
    assert 450 <= statistics.fmean(tokens) <= 500
    assert 230 <= statistics.median(tokens) <= 250
    assert min(tokens) >= 1
    assert max(tokens) == 6_000


def test_the_share_of_each_input_repeated_from_the_turn_before_is_as_published(turns: list[Turn]) -> None:
    shared = [turn.shared_blocks * SESSION_BLOCK_TOKENS / turn.input_tokens for turn in turns if turn.back]
    assert 0.93 <= statistics.fmean(shared) <= 0.97


def test_one_seed_is_one_trace_and_another_is_another() -> None:
    assert synthetic_sessions(5) == synthetic_sessions(5)
    assert synthetic_sessions(5) != synthetic_sessions(6)


def test_what_is_printed_is_a_trace_that_a_replay_reads(tmp_path: Path) -> None:
    path = tmp_path / "drawn.jsonl"
    with path.open("wb") as out:
        subprocess.run([sys.executable, "-m", "benchmarks.replay.synthetic", "5"], stdout=out, check=True, timeout=60)
    sessions = load(str(path)).sessions
    assert len(sessions) == SESSIONS
    assert sessions == synthetic_sessions(5)
