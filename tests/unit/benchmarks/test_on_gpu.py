"""Runs on GPUs can fail: by a load that failed, and by a feature that is off."""

from typing import Any

import pytest

from tests.e2e.on_gpu import KINDS, Checks, NotRunHere, clean, known_refusal, small, usual

CLEAN = {"vllm:kvserver_retrieves_failed": 0.0, "vllm:kvserver_bugs": 0.0, "vllm:kvserver_retrieves": 7.0}
ON = {"prefix_caching": True, "chunked_prefill": True}


class Engine:
    """Answers as it is told to."""

    def __init__(self, **answers: Any) -> None:
        self._answers = {"is_asynchronous": True, "is_on_cpu": False, "features": ON, "metrics": CLEAN, **answers}

    def call(self, name: str) -> Any:
        return self._answers[name]


def failures(what: Any, engine: Engine) -> int:
    checks = Checks()
    checks.check("it", lambda: what(engine))
    return checks.failed


@pytest.mark.parametrize(
    ("counted", "failed"),
    [
        (CLEAN, 0),
        ({**CLEAN, "vllm:kvserver_retrieves_failed": 1.0}, 1),
        ({**CLEAN, "vllm:kvserver_bugs": 1.0}, 1),
        ({}, 1),
    ],
)
def test_a_load_that_failed_or_that_nobody_counts_fails_the_run(counted: dict[str, float], failed: int) -> None:
    assert failures(clean, Engine(metrics=counted)) == failed


@pytest.mark.parametrize("off", ["", "prefix_caching", "chunked_prefill"])
def test_an_engine_without_one_of_the_features_fails_the_run(off: str) -> None:
    assert failures(usual, Engine(features={name: name != off for name in ON})) == bool(off)
    assert failures(usual, Engine(is_asynchronous=False)) == 1


def test_asynchronous_scheduling_is_off_on_cpus_and_beside_n_grams_and_nowhere_else() -> None:
    n_grams = KINDS["n-grams"].is_asynchronous
    assert failures(lambda engine: usual(engine, is_asynchronous=n_grams), Engine(is_asynchronous=False)) == 0
    assert failures(lambda engine: usual(engine, is_asynchronous=n_grams), Engine()) == 1
    assert failures(usual, Engine(is_asynchronous=False, is_on_cpu=True)) == 0
    assert failures(usual, Engine(is_on_cpu=True)) == 1


@pytest.mark.parametrize(
    ("name", "of", "said"),
    [
        ("states", (0, 26), "TypeError: unexpected keyword argument 'prefix_cache_retention_interval'"),
        ("groups", (0, 29), "this release of vLLM cannot be told of failed loads of windows and states"),
        ("head", (0, 26), "this release of vLLM may have blocks saved before a draft model computes"),
        ("window", (0, 26), "disabled but failed to convert the KV cache specs to one unified type"),
    ],
)
def test_a_kind_that_a_release_is_known_not_to_run_is_skipped_for_that_reason_alone(
    name: str, of: tuple[int, int], said: str
) -> None:
    kind = KINDS[name]
    log = f"a log\nHybrid KV cache manager is {said}. And more"
    assert known_refusal(kind, log, of)
    assert not known_refusal(kind, "a log of something else", of)
    assert not known_refusal(KINDS["llama"], log, of)
    runs = (0, 20) if name == "window" else (0, 32)
    assert not known_refusal(kind, log, runs), "a release that runs it must not say so"


def test_what_is_skipped_is_no_failure_and_is_counted() -> None:
    checks = Checks()

    def refused() -> str:
        raise NotRunHere("known")

    checks.check("it", refused)
    assert (checks.failed, checks.skipped) == (0, 1)


def test_the_pool_has_room_for_the_longest_prompt_of_every_group() -> None:
    for kind in KINDS.values():
        options = small(kind, {})
        tokens = int(str(options["num_gpu_blocks_override"])) * kind.block_tokens
        assert tokens >= kind.groups * int(str(options["max_model_len"]))
