"""Several rounds of a conversation on two ranks of a model with latent attention, with evictions in between.

A few thousand tokens only, because vLLM computes latent attention on CPUs as one matrix of scores. The same with
33,000 tokens on two GPUs: `python -m tests.e2e.on_gpu --rounds 33000`.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.engine import Engine
from tests.e2e.rounds import Conversation
from tests.process.harness import Server, until

pytestmark = pytest.mark.long

RANKS = 2
CONTEXT_TOKENS = 4096
BLOCK_TOKENS = 16
LATENT_BYTES = 2 * 576 * 4
"""Layers, latent and position, float32."""
FIRST_TOKENS, MORE_TOKENS = 2600, 400


@pytest.fixture(scope="module")
def engine(models: Path, server: Server) -> Iterator[Engine]:
    with Engine(
        models / "mla",
        server.path,
        tensor_parallel_size=RANKS,
        max_model_len=CONTEXT_TOKENS,
        max_num_batched_tokens=CONTEXT_TOKENS,
        num_gpu_blocks_override=CONTEXT_TOKENS // BLOCK_TOKENS + 2,
        attention_config={"backend": "CPU_MLA"},
    ) as running:
        yield running


def test_each_round_finds_all_rounds_before_it_and_computes_the_rest(engine: Engine, server: Server) -> None:
    until("both ranks to be registered", lambda: server.status().caches == RANKS)
    filler_tokens = CONTEXT_TOKENS // 2 + BLOCK_TOKENS
    conversation = Conversation(engine, server, filler_tokens=filler_tokens, token_bytes=LATENT_BYTES, ranks=RANKS)
    for new_tokens in (FIRST_TOKENS, MORE_TOKENS, MORE_TOKENS):
        print(conversation.round(new_tokens))
    print(conversation.stored_once())
    print(conversation.flipped())
