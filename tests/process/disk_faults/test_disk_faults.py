"""The disk tier when processes die and stop, and when I/O fails.

Runs a small part of `python -m tests.process.disk_faults`."""

from collections.abc import Iterator

import pytest

from tests.process.disk_faults.kills import STOPS
from tests.process.disk_faults.scenarios import (
    FAULTS,
    IMPATIENT_MS,
    PATIENT_MS,
    Workload,
    open_workload,
    run_io,
    run_kills,
    run_stops,
)
from tests.process.disk_faults.sigstop import goes_on, is_replaced


def test_what_was_sealed_on_disk_is_found_after_any_kill() -> None:
    assert "5 kills" in run_kills(5, seed=3)


def test_what_was_sealed_on_disk_is_found_after_a_stop_in_the_middle_of_stores() -> None:
    told = run_kills(len(STOPS), seed=5, targets=STOPS)
    assert all(f"{target} 1" in told for target in STOPS), told


@pytest.fixture(scope="module")
def workload() -> Iterator[Workload]:
    with open_workload() as made:
        yield made


@pytest.mark.parametrize(
    ("name", "lasting", "first"), [("eio", True, 9), ("flip", False, 5), ("misdirect", False, 8), ("stall", False, 5)]
)
def test_io_that_goes_wrong_is_a_miss_that_is_counted(workload: Workload, name: str, lasting: bool, first: int) -> None:
    table = run_io(workload, FAULTS[name], lasting=lasting, stall_s=0.3, first=first, every=16)
    assert table.runs >= 2
    assert bool(table.counted) == (name != "stall")


def test_a_disk_mover_that_stops_and_goes_on_costs_nothing_but_misses() -> None:
    assert "rounds 1" in run_stops(goes_on, PATIENT_MS, rounds=1)


def test_a_disk_mover_that_does_not_go_on_is_replaced() -> None:
    assert "rounds 1" in run_stops(is_replaced, IMPATIENT_MS, rounds=1)
