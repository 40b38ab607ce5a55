"""A few simulator seeds in every `make test`; `make sim` runs thousands."""

import pytest

from tests.rigs.seeds import counts_in_other_processes, run_all

from . import run
from .expected import COUNTED
from .faults import DISK, KINDS
from .run import run_seed


def test_a_hundred_seeds_keep_every_promise() -> None:
    outcomes = [run_seed(seed, 150) for seed in range(100)]
    assert [(outcome.seed, outcome.problem) for outcome in outcomes if outcome.problem] == []
    moved = {name for outcome in outcomes for name, count in outcome.counts.items() if count}
    assert set(COUNTED) - moved == set(), "counters that nothing moves"
    assert {f"planted {kind}" for kind in KINDS} - moved == set(), "faults that never happen"
    assert {f"noticed {kind}" for kind in KINDS if kind not in DISK} - moved == set(), "faults that nobody notices"


def test_a_seed_is_the_same_in_every_process() -> None:
    assert len(counts_in_other_processes("tests.sim", seed=7, events=150)) == 1


@pytest.mark.parametrize(("expected", "status"), [("event Tick", 0), ("event ThatNeverHappens", 1)])
def test_what_never_happened_fails_a_run(capsys: pytest.CaptureFixture[str], expected: str, status: int) -> None:
    names = ("event Arrived", expected)
    assert run_all(run_seed, "again", seed0=3, seeds=2, events=40, jobs=1, expected=names) == status
    said = capsys.readouterr()
    assert "event Tick " in said.out, "each kind is printed with its count"
    assert said.err == ("never happened: event ThatNeverHappens\n" if status else "")


def test_a_seed_that_fails_fails_the_run_and_says_how_to_see_it_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "drain", lambda world: 1 / 0)
    assert run_all(run_seed, "python -m tests.sim", seed0=5, seeds=2, events=40, jobs=1) == 1
    said = capsys.readouterr().out
    for seed in (5, 6):
        assert f"seed {seed} FAILED at event " in said
        assert f"python -m tests.sim --seeds 1 --seed0 {seed} --events 40 --jobs 1" in said
