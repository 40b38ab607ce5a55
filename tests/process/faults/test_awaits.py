"""An engine awaits what another one computes, and one of them, or the server, dies or stops: a few rounds of each."""

import pytest

from tests.process.faults.scenarios import run


@pytest.mark.parametrize(
    ("name", "rounds"),
    [
        ("await-producer-killed", 2),
        ("await-scheduler-killed", 1),
        ("await-producer-restarted", 1),
        ("await-producer-stopped", 1),
        ("await-producer-aborts", 1),
        ("await-producer-preempted", 1),
        ("await-producer-out-of-room", 2),
        ("await-no-store", 1),
        ("await-slow-store", 1),
        ("await-stored-by-another", 1),
        ("await-two-producers", 2),
        ("await-consumer-killed", 2),
        ("await-consumer-aborts", 2),
        ("await-consumer-out-of-time", 1),
        ("await-consumer-amid-its-copy", 1),
        ("await-consumer-mover-stuck", 1),
        ("await-brain", 1),
        ("await-mover", 2),
        ("await-supervisor", 1),
    ],
)
def test_who_awaits_gets_the_right_bytes_or_is_told_whatever_happens(name: str, rounds: int) -> None:
    assert run(name, rounds)["rounds"] == rounds
