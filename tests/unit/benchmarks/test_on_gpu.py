"""Runs on GPUs can fail: by a load that failed, and by a feature that is off."""

from typing import Any

import pytest

from tests.e2e.on_gpu import Checks, clean, usual

CLEAN = {"vllm:kvserver_retrieves_failed": 0.0, "vllm:kvserver_bugs": 0.0, "vllm:kvserver_retrieves": 7.0}
ON = {"prefix_caching": True, "chunked_prefill": True}


class Engine:
    """Answers as it is told to."""

    def __init__(self, **answers: Any) -> None:
        self._answers = {"is_asynchronous": True, "features": ON, "metrics": CLEAN, **answers}

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
