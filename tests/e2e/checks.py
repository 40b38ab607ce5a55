"""Comparisons and waits shared by several test files."""

import math
from importlib.metadata import packages_distributions, version
from pathlib import Path

import pytest

from tests.e2e.engine import Answer
from tests.process.harness import Server

VOCABULARY = 512
CLOSE = 2e-3
"""Tolerance for float32 sums in another order. Flipped bytes changed results by at least hundreds of times as much."""


def prompt(seed: int, tokens: int) -> list[int]:
    """Token ids that differ between seeds within the first block, and are the same in every process."""
    return [(7 * place * place + (3 + seed) * place + 11 * seed + 13) % 509 + 3 for place in range(tokens)]


def skip_what_does_not_run(model: str) -> None:
    """Skips models that the installed vLLM cannot run here.

    vLLM for CPUs has short convolutions of width 3, and in float32, since 0.32; KV in fp8 only with AVX-512.
    """
    if model == "fp8" and "avx512" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("vLLM keeps KV in fp8 only on CPUs with AVX-512")
    if model == "lfm2" and release() < (0, 32):
        pytest.skip(f"this vLLM for CPUs ({release()}) does not run {model}")


def release() -> tuple[int, ...]:
    """The installed vLLM's first two numbers."""
    return tuple(map(int, version(packages_distributions()["vllm"][0]).split(".")[:2]))


def whole_chunks(tokens: int, chunk_tokens: int = 256) -> int:
    return tokens // chunk_tokens * chunk_tokens


def is_uniform(logprob: float, tokens: int) -> bool:
    """True if the model gives every token the same probability: then comparing outputs proves nothing."""
    return math.isclose(logprob, -tokens * math.log(VOCABULARY), rel_tol=1e-3)


def assert_same(found: Answer, wanted: Answer, close: float = CLOSE) -> None:
    assert found.tokens == wanted.tokens
    assert found.logprob == pytest.approx(wanted.logprob, abs=close)


def settled(server: Server) -> bool:
    """Nothing is in flight, and no leases or pins are held."""
    status = server.status()
    return not (status.stores or status.retrieves or status.leases or status.pins)
