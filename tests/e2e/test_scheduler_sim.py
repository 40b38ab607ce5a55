"""A few seeds around vLLM's own scheduler; `python -m tests.e2e.scheduler_sim` runs any number.

They run in their own process, because configuring vLLM changes a process's environment and logging.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MUST_HAPPEN = (
    "aborted",
    "finished: error",
    "finished: length",
    "loads",
    "loads failed",
    "preempted",
    "resets",
    "restarts",
    "stores",
    "stores short",
)


def test_sixty_seeds_compute_store_and_load_only_what_is_right(models: Path) -> None:
    said = _run("tests.e2e.scheduler_sim", "--seeds", "60", "--model", str(models / "llama"))
    assert "60 seeds, 0 failed" in said
    assert missing(MUST_HAPPEN, said) == []


def test_beside_another_connector_that_fails_nothing_wrong_is_stored(models: Path) -> None:
    said = _run("tests.e2e.scheduler_sim", "--beside", "--seeds", "40", "--model", str(models / "llama"))
    assert "40 seeds, 0 failed" in said
    happened = ("brought by another", "not brought by another", "between steps", "stores", "loads", "stores no more")
    assert missing(happened, said) == []


def test_loads_that_wait_for_other_engines_keep_few_blocks_and_only_what_came(models: Path) -> None:
    said = _run("tests.e2e.scheduler_sim", "--awaits", "--seeds", "30", "--model", str(models / "llama"))
    assert "30 seeds, 0 failed" in said
    happened = ("loads that wait", "loads that ended short", "passed on", "pledges", "chunks of another engine")
    assert missing(happened, said) == []


def test_deliberate_bugs_are_noticed(models: Path) -> None:
    said = _run("tests.e2e.scheduler_sim.drill", "--seeds", "200", "--model", str(models / "llama"))
    assert " 0 survived" in said
    assert re.search("not pinned .* nobody holds", said)


def missing(names: tuple[str, ...], said: str) -> list[str]:
    """Names that were not counted."""
    return [name for name in names if not re.search(rf"^{name} +\d+$", said, re.MULTILINE)]


def _run(module: str, *options: str) -> str:
    """The program's output, whatever its exit status: a failing test shows it."""
    command = [sys.executable, "-m", module, *options]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert said.returncode in (0, 1), said.stderr[-4000:]
    return said.stdout
