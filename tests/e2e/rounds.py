"""A conversation on an engine that forgets: each round finds all earlier rounds in the server, to the token.

    conversation = Conversation(engine, server, filler_tokens=..., token_bytes=..., ranks=...)
    conversation.round(33_000)      # nothing is found; then once more from HBM and from the server
    conversation.round(1_000)       # 33,000 tokens are found, 1,000 are computed

Each round ends a few tokens after a chunk. The same tokens remain to be computed from HBM and from the server, so
even bfloat16 gives the same bits. Where an engine keeps no prefixes itself (latent attention on CPUs) both come from
the server.
"""

import time
from typing import NamedTuple

from tests.e2e.arena import flip_stored_bytes
from tests.e2e.checks import assert_same, is_uniform, prompt, settled, whole_chunks
from tests.e2e.engine import Answer, Engine
from tests.process.harness import Server, until

CHUNK_TOKENS = 256
BEHIND_TOKENS = 5
"""Tokens after the last whole chunk of a round."""
OUTPUT_TOKENS = 16
FILLER_SEED = 300
SALT = "never stored"
WAIT_S = 120.0


class Asked(NamedTuple):
    """An answer, and the source of the tokens that were not computed for it.

    Uses the server's own counters. vLLM reports hits only for steps with output, so its counters miss prompts that
    are loaded or computed in several steps (0.20.2).
    """

    answer: Answer
    from_hbm: float
    from_server: float
    ms: float


def mismatches(server: Server) -> int:
    """Chunks whose bytes were found to be others than were stored; at least one."""
    count = server.status().counters["digest_mismatches"]
    assert isinstance(count, int)
    assert count > 0
    return count


class Conversation:
    def __init__(self, engine: Engine, server: Server, *, filler_tokens: int, token_bytes: int, ranks: int) -> None:
        """filler_tokens: length of each of two prompts that together fill the engine's pool. token_bytes: of one rank;
        with latent attention all ranks hold the same bytes.
        """
        self.said: list[int] = []
        self.rounds = 0
        self._engine = engine
        self._server = server
        self._token_bytes = token_bytes
        self._ranks = ranks
        self._fillers = [prompt(FILLER_SEED + number, filler_tokens) for number in range(2)]

    @property
    def found_tokens(self) -> int:
        """Tokens of the conversation that the server holds and a prompt can use."""
        return whole_chunks(len(self.said) - 1, CHUNK_TOKENS) if self.said else 0

    @property
    def stored_tokens(self) -> int:
        """All tokens that the server holds, including fillers."""
        return self.found_tokens + sum(whole_chunks(len(filler), CHUNK_TOKENS) for filler in self._fillers)

    def round(self, new_tokens: int) -> str:
        """Adds about `new_tokens` tokens. AssertionError if hits or counters differ from what is expected."""
        held = self.found_tokens
        length = whole_chunks(len(self.said) + new_tokens, CHUNK_TOKENS) + BEHIND_TOKENS
        self.said += prompt(100 + self.rounds, length - len(self.said))
        self.rounds += 1
        self.forget()
        computed = self._asked()
        assert (computed.answer.cached_tokens, computed.from_hbm, computed.from_server) == (held, 0, held), computed
        assert not is_uniform(computed.answer.logprob, OUTPUT_TOKENS)
        self._settle()
        wanted = self._asked()
        assert wanted.answer.cached_tokens == length - BEHIND_TOKENS, wanted
        self.forget()
        found = self._asked()
        assert (found.from_hbm, found.from_server) == (0, length - BEHIND_TOKENS), found
        assert_same(found.answer, wanted.answer)
        self.said += found.answer.tokens
        return (
            f"{length} tokens: {held} found in the server and the rest computed {computed.ms:.1f} ms, "
            f"{wanted.from_hbm:g} in HBM {wanted.ms:.1f} ms, {found.from_server:g} in the server {found.ms:.1f} ms"
        )

    def flipped(self) -> str:
        """Repeats the last round with all stored bytes changed: that is noticed, and the engine computes all of it.

        So it is compared with the same tokens under another salt, which nobody has stored: behind a prefix that was
        loaded even a right answer rounds differently. Nothing that was stored before is found afterwards.
        """
        assert self.rounds, "no round before it"
        asked = [self.said[:-OUTPUT_TOKENS]]
        self.forget()
        wanted = self._engine.generate(asked, tokens=OUTPUT_TOKENS, cache_salt=SALT)[0]
        assert wanted.cached_tokens == 0, wanted
        self.forget()
        flip_stored_bytes(self._server.mover_pid())
        found = self._engine.generate(asked, tokens=OUTPUT_TOKENS)[0]
        assert_same(found, wanted)
        return f"{mismatches(self._server)} chunks with other bytes were noticed, and the answer is the same"

    def stored_once(self) -> str:
        """Checks that tokens are stored once, not once for each rank."""
        used = self._server.status().arena.used_bytes
        assert used == self.stored_tokens * self._token_bytes, (used, self.stored_tokens, self._token_bytes)
        return f"{self.stored_tokens} tokens in {used} bytes, of all ranks together"

    def forget(self) -> None:
        """Pushes everything out of the engine's pool with other prompts, as traffic does."""
        self._settle()
        for filler in self._fillers:
            self._engine.generate([filler], tokens=1)
        self._settle()

    def _settle(self) -> None:
        until("the stores to end", lambda: settled(self._server), WAIT_S)

    def _asked(self) -> Asked:
        before = self._retrieved_bytes()
        began_s = time.perf_counter()
        answer = self._engine.generate([self.said], tokens=OUTPUT_TOKENS)[0]
        ms = (time.perf_counter() - began_s) * 1e3
        assert self._engine.call("metrics").get("vllm:kvserver_retrieves_failed", 0) == 0
        from_server = (self._retrieved_bytes() - before) / (self._token_bytes * self._ranks)
        return Asked(answer, answer.cached_tokens - from_server, from_server, ms)

    def _retrieved_bytes(self) -> int:
        """Bytes retrieved by all ranks together."""
        count = self._server.status().counters["bytes_retrieved"]
        assert isinstance(count, int)
        return count
