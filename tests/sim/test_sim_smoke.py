"""A few seeds of the simulator at every `make test`; `make sim` runs thousands."""

import subprocess
import sys
from pathlib import Path

from .expected import COUNTED
from .run import run_seed

ROOT = Path(__file__).resolve().parents[2]
REPLAY = "import sys; from tests.sim.run import run_seed; print(sorted(run_seed(int(sys.argv[1]), 150)[2].items()))"


def test_a_hundred_seeds_keep_every_promise() -> None:
    outcomes = [run_seed(seed, 150) for seed in range(100)]
    assert [(outcome.seed, outcome.problem) for outcome in outcomes if outcome.problem] == []
    moved = {name for outcome in outcomes for name, count in outcome.counts.items() if count}
    assert set(COUNTED) - moved == set(), "counters that nothing moves"


def test_a_seed_is_the_same_in_every_process() -> None:
    """Whatever PYTHONHASHSEED and addresses are: a failing seed must fail again."""
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
