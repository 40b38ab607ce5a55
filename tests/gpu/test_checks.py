"""The checks for a real GPU run on the simulated driver, some of them, so that they cannot rot between two machines."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_checks_hold_on_a_simulated_device() -> None:
    command = [sys.executable, "-m", "tests.gpu.checks", "--simulated", "--only", "crowded,mover_killed"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=110, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.endswith(" held, 0 failed\n")
