"""A few simulator seeds in every `make test`; `make sim` runs thousands."""

import subprocess
import sys
from pathlib import Path

import pytest

from . import run
from .expected import COUNTED
from .run import main_loop, run_seed

ROOT = Path(__file__).resolve().parents[2]
REPLAY = "import sys; from tests.sim.run import run_seed; print(sorted(run_seed(int(sys.argv[1]), 150)[2].items()))"


def test_a_hundred_seeds_keep_every_promise() -> None:
    outcomes = [run_seed(seed, 150) for seed in range(100)]
    assert [(outcome.seed, outcome.problem) for outcome in outcomes if outcome.problem] == []
    moved = {name for outcome in outcomes for name, count in outcome.counts.items() if count}
    assert set(COUNTED) - moved == set(), "counters that nothing moves"


def test_a_seed_is_the_same_in_every_process() -> None:
    """A seed gives the same counts for any PYTHONHASHSEED and addresses, so that a failing seed fails again."""
    said = {
        subprocess.run(
            [sys.executable, "-c", REPLAY, "7"],
            cwd=ROOT,
            env={"PYTHONPATH": f"{ROOT}:{ROOT / 'client'}", "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            check=True,
            timeout=60,
        ).stdout
        for hash_seed in ("0", "1", "4242")
    }
    assert len(said) == 1


@pytest.mark.parametrize(
    ("expected", "enough_seeds", "status"),
    [("event Tick", True, 0), ("event ThatNeverHappens", True, 1), ("event ThatNeverHappens", False, 0)],
)
def test_what_never_happened_fails_a_run_of_enough_seeds(
    capsys: pytest.CaptureFixture[str], expected: str, enough_seeds: bool, status: int
) -> None:
    loop = {"seed0": 3, "seeds": 2, "events": 40, "jobs": 1}
    assert main_loop(**loop, missing_is_wrong=enough_seeds, expected=("event Arrived", expected)) == status
    said = capsys.readouterr()
    assert "  event Tick\n" in said.out, "each kind is printed with its count"
    assert said.err == ("never happened: event ThatNeverHappens\n" if status else "")


def test_a_seed_that_fails_fails_the_run_and_says_how_to_see_it_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "drain", lambda world: 1 / 0)
    assert main_loop(seed0=5, seeds=2, events=40, jobs=1, missing_is_wrong=False, expected=()) == 1
    said = capsys.readouterr().out
    for seed in (5, 6):
        assert f"seed {seed} FAILED at event " in said
        assert f"python -m tests.sim --seeds 1 --seed0 {seed} --events 40 --jobs 1" in said
