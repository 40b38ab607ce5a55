"""The performance gate: what it reads from README.md, what it lets through, and how .ci/run reports it."""

import os
import subprocess
from pathlib import Path

import pytest

from benchmarks import gate
from benchmarks.gate import ROOT, SKIPPED, SLACK, best, goals, missed

STUBBED_MAKE = """#!/usr/bin/env bash
case $1 in
install)
    mkdir -p "$VENV/bin"
    ln -s "$(type -P true)" "$VENV/bin/kvserver"
    ln -s "$STUBS/python" "$VENV/bin/python" ;;
test | test-stores) echo '===== 3 passed in 7 s =====' ;;
try-dist) echo 'installed wheel: odd.whl' && exit "$WHEEL_EXITS" ;;
e2e-wheels) exit 1 ;;
esac
"""
STUBBED_PYTHON = """#!/usr/bin/env bash
[[ "$*" == "-m benchmarks.gate" ]] || exit 0
echo "$GATE_SAYS"
exit "$GATE_EXITS"
"""


@pytest.fixture
def small_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A README with one goal, on a machine that nobody else uses."""
    (tmp_path / "README.md").write_text("| what | `odd_us` | 7 µs | ≤ 10 µs |\n")
    monkeypatch.setattr(gate, "ROOT", tmp_path)
    monkeypatch.setattr(gate, "runnable", lambda: 0.0)


def ci(folder: Path, *, gate_says: str, gate_exits: int, wheel_exits: int = 0) -> "subprocess.CompletedProcess[str]":
    """A .ci/run that builds nothing, so that only the gate and the wheel decide."""
    installed = "#!/bin/sh\n"  # otherwise it would be fetched
    stubbed = {"make": STUBBED_MAKE, "python": STUBBED_PYTHON, "redis-server": installed, "azurite-blob": installed}
    for name, text in stubbed.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    stubs = {
        "STUBS": str(folder),
        "GATE_SAYS": gate_says,
        "GATE_EXITS": str(gate_exits),
        "WHEEL_EXITS": str(wheel_exits),
    }
    environment = {**os.environ, **stubs, "PATH": f"{folder}:{os.environ['PATH']}"}
    return subprocess.run([ROOT / ".ci/run"], env=environment, capture_output=True, text=True, timeout=60, check=False)


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


def test_processes_that_want_to_run_are_counted_but_for_the_one_that_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stat").write_text("cpu  1 2 3\nprocs_running 8\nprocs_blocked 5\n")
    monkeypatch.setattr(gate, "STAT", tmp_path / "stat")
    monkeypatch.setattr(gate, "LOOKS", 3)
    assert gate.runnable() == 7


def test_a_busy_machine_is_skipped_aloud_and_does_not_pass(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gate, "runnable", lambda: 1e6)
    with pytest.raises(SystemExit) as ended:
        gate.main()
    assert ended.value.code == SKIPPED
    assert capsys.readouterr().out.startswith("SKIPPED: ")


@pytest.mark.usefixtures("small_readme")
@pytest.mark.parametrize(("measured_us", "code", "verdict"), [(7.0, 0, "passed"), (41.0, 1, "failed")])
def test_what_was_measured_is_told_by_the_last_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], measured_us: float, code: int, verdict: str
) -> None:
    monkeypatch.setattr(gate, "_run", lambda bench: [{"case": "odd_us", "min": measured_us, "unit": "us"}])
    try:
        gate.main()
        ended = 0
    except SystemExit as exit_:
        ended = int(str(exit_.code))
    assert ended == code
    assert verdict in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("says", "exits"), [("SKIPPED: the performance gate. 9 processes", SKIPPED), ("performance gate: passed, 5", 0)]
)
def test_the_last_lines_of_ci_repeat_what_the_gate_said(tmp_path: Path, says: str, exits: int) -> None:
    done = ci(tmp_path, gate_says=says, gate_exits=exits)
    assert done.returncode == 0, done.stderr
    assert says in done.stdout.splitlines()[-3:]
    assert done.stdout.splitlines().count(says) == 2
    assert "installed wheel: odd.whl" in done.stdout.splitlines()[-3:]


def test_ci_ends_where_the_gate_fails(tmp_path: Path) -> None:
    done = ci(tmp_path, gate_says="performance gate: failed, more", gate_exits=1)
    assert done.returncode == 1
    assert "SKIPPED: real vLLM" not in done.stdout


def test_ci_ends_where_the_wheel_does_not_work_and_shows_why(tmp_path: Path) -> None:
    done = ci(tmp_path, gate_says="performance gate: passed, 5", gate_exits=0, wheel_exits=1)
    assert done.returncode == 1
    assert "installed wheel: odd.whl" in done.stdout
    assert "performance gate" not in done.stdout
