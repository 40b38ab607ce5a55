"""A few seeds in every `make test`; `python -m tests.offload_sim` runs any number."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

from .run import run_seed

ROOT = Path(__file__).resolve().parents[2]
REPLAY = """import sys
from tests.offload_sim.run import run_seed
print(sorted(run_seed(int(sys.argv[1]), 300).counts.items()))"""
MUST_HAPPEN = (
    "retrieves",
    "retrieves_failed",
    "stores",
    "stores_short",
    "preemptions",
    "lookups_late",
    "lookups_unserved",
    "requests_unkeyed",
    "tokens_retrieved",
    "tokens_from_disk",
    "tokens_stored",
    "below-min",
    "busy",
    "late",
    "lease-lost",
    "retrieve-failed",
    "unanswered",
    "recovering",
)


def test_fifty_seeds_keep_every_promise_and_meet_every_trouble() -> None:
    outcomes = [run_seed(seed, 400) for seed in range(9000, 9050)]  # these seeds meet them all
    assert [(outcome.seed, outcome.problem) for outcome in outcomes if outcome.problem] == []
    met = sum((outcome.counts for outcome in outcomes), Counter())
    assert [name for name in MUST_HAPPEN if not met[name]] == []


def test_a_seed_is_the_same_in_every_process() -> None:
    said = {
        subprocess.run(
            [sys.executable, "-c", REPLAY, "3"],
            cwd=ROOT,
            env={"PYTHONPATH": f"{ROOT}:{ROOT / 'client'}", "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            check=True,
            timeout=60,
        ).stdout
        for hash_seed in ("0", "1", "4242")
    }
    assert len(said) == 1
