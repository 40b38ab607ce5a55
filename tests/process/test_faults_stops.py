"""Processes that stop (SIGSTOP) and go on: jobs are given up in time and blocks are never handed back too early.

`make faults` runs more rounds.
"""

import pytest

from tests.process.faults import run


@pytest.mark.parametrize(
    ("name", "rounds"),
    [
        ("stop-lookups", 1),
        ("stop-brain-store", 2),
        ("stop-brain-retrieve", 2),
        ("stop-mover-store", 4),
        ("stop-mover-retrieve", 4),
        ("mover-killed-by-the-brain", 2),
    ],
)
def test_a_process_may_stop_at_any_instant(name: str, rounds: int) -> None:
    assert run(name, rounds)["rounds"] == rounds
