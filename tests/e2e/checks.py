"""What several files compare and wait for."""

import math

import pytest

from tests.e2e.engine import Answer
from tests.process.harness import Server

VOCABULARY = 512
CLOSE = 2e-3
"""float32 sums in another order; the smallest change that flipped bytes made was hundreds of times larger."""


def prompt(seed: int, tokens: int) -> list[int]:
    """Token ids that no two seeds share in their first block, and that mean the same in every process."""
    return [(7 * place * place + (3 + seed) * place + 11 * seed + 13) % 509 + 3 for place in range(tokens)]


def whole_chunks(tokens: int, chunk_tokens: int = 256) -> int:
    return tokens // chunk_tokens * chunk_tokens


def is_uniform(logprob: float, tokens: int) -> bool:
    """Whether a model says the same of every token: then no comparison of outputs means anything."""
    return math.isclose(logprob, -tokens * math.log(VOCABULARY), rel_tol=1e-3)


def assert_same(found: Answer, wanted: Answer, close: float = CLOSE) -> None:
    assert found.tokens == wanted.tokens
    assert found.logprob == pytest.approx(wanted.logprob, abs=close)


def settled(server: Server) -> bool:
    """Nothing is in flight, and nothing is held for anybody."""
    status = server.status()
    return not (status.stores or status.retrieves or status.leases or status.pins)
