"""Some checks for a real GPU, run on the simulated driver so that they cannot rot between two machines."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("only", ["crowded,mover_killed", "atom_blocks", "digest-jobs"])
def test_checks_hold_on_a_simulated_device(only: str) -> None:
    command = [sys.executable, "-m", "tests.gpu.checks", "--simulated", "--only", only]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=110, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.endswith(" held, 0 failed\n")


@pytest.mark.parametrize("faults", [0, 3])
def test_any_number_of_errors_can_be_planted_but_none_shows_nothing(faults: int) -> None:
    command = [sys.executable, "-m", "tests.gpu.digest_jobs", "--faults", str(faults)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=110, check=False)
    assert (done.returncode == 0) == (faults > 0), done.stdout[-4000:] + done.stderr[-4000:]
