"""A few seeds in every `make test`; `python -m tests.offload_sim` runs any number."""

from collections import Counter

from tests.rigs.seeds import counts_in_other_processes

from .run import run_seed

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
    assert len(counts_in_other_processes("tests.offload_sim", seed=3, events=300)) == 1
