"""Processes that die by SIGKILL: no wrong byte, no leak, engines go on. `make faults` runs more rounds."""

import pytest

from tests.process.faults.scenarios import run


@pytest.mark.parametrize(
    ("name", "rounds"),
    [
        ("worker-before-register", 1),
        ("worker-mid-register", 2),
        ("worker-mid-store", 4),
        ("worker-mid-retrieve", 4),
        ("forked-child-lives-on", 2),
        ("mover", 3),
        ("brain", 3),
        ("brain-while-storing", 2),
        ("server", 2),
    ],
)
def test_a_process_may_die_at_any_instant(name: str, rounds: int) -> None:
    assert run(name, rounds)["rounds"] == rounds
