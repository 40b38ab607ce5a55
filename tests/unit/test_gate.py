"""The performance gate: what it takes from README.md, and what it lets through."""

import pytest

from benchmarks.gate import ROOT, SLACK, best, goals, missed


def test_the_goals_are_those_of_the_readme() -> None:
    found = goals((ROOT / "README.md").read_text())
    assert found["lookup_512_p50_us"] == pytest.approx(150e-6)
    assert found["answer_ms"] == 1.0
    assert found["brain_rss_empty_mib"] == 150e6
    assert len(found) == 5


def test_a_case_counts_by_its_best_round_of_all_attempts() -> None:
    first = best([{"case": "a", "min": 900.0, "unit": "us"}, {"case": "b", "min": 2.0, "unit": "ms"}], {})
    assert best([{"case": "a", "min": 300.0, "unit": "us"}], first) == pytest.approx({"a": 300e-6, "b": 2e-3})


def test_what_is_beyond_the_slack_or_was_not_measured_is_missed() -> None:
    wanted = {"a": 1.0, "b": 1.0, "c": 1.0}
    assert missed(wanted, {"a": SLACK, "b": SLACK * 1.01}) == ["b", "c"]
    assert missed(wanted, {"a": 0.1, "b": 0.1, "c": float("nan")}) == ["c"]
