"""The long runs report every scenario, and say at the end whether all passed."""

import pytest

from tests.process.campaign import counted, run_campaign


def wrong() -> str:
    raise AssertionError("3 wrong bytes")


def test_a_scenario_that_fails_hides_no_other_and_is_the_status(capsys: pytest.CaptureFixture[str]) -> None:
    scenarios = {"one": lambda: counted({"rounds": 3, "kills": 2}), "two": wrong, "three": lambda: "fine"}
    assert run_campaign("faults", scenarios, only="") == 1
    told = capsys.readouterr()
    assert [line.split(" (")[0] for line in told.out.splitlines()] == [
        "one: ok, kills 2, rounds 3",
        "two: FAILED",
        "three: ok, fine",
        "faults: FAILED: two",
    ]
    assert "3 wrong bytes" in told.err


def test_only_what_is_named_is_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_campaign("faults", {"one": lambda: "fine", "two": wrong}, only="on") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "faults: ok"


def test_a_scenario_whose_server_is_not_here_is_left_out_aloud(capsys: pytest.CaptureFixture[str]) -> None:
    def absent() -> str:
        pytest.skip("there is no such server here")

    scenarios = {"one": lambda: "fine", "two": absent, "three": wrong}
    assert run_campaign("faults", scenarios, only="o") == 0
    assert [line.split(" (")[0] for line in capsys.readouterr().out.splitlines()] == [
        "one: ok, fine",
        "two: LEFT OUT, there is no such server here",
        "faults: LEFT OUT: two",
    ]
    assert run_campaign("faults", scenarios, only="t") == 1
    assert capsys.readouterr().out.splitlines()[-1] == "faults: FAILED: three; LEFT OUT: two"
