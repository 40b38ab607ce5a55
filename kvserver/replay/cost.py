"""Estimated time to first token: a cost model, not a measurement. Stated wherever its results are printed.

    prefill seconds = BASE_S + NEW_TOKEN_S * new + PAIR_S * new * (prefix + new / 2)

The last term is attention: each new token looks at all tokens before it. The constants are a fit to vLLM 0.20 with
Llama-3.1-8B on one H200, cold prompts of 8K / 32K / 64K tokens: 0.209 / 1.18 / 3.26 s, and 0.025 s for a full hit. The
fit is within 3 % of each. With the server, its lookup (measured in the run) and the retrieved tokens' bytes over the
modelled link come on top. Queueing is not modelled.
"""

from dataclasses import dataclass

BASE_S = 0.025
NEW_TOKEN_S = 1.9e-5
PAIR_S = 9.4e-10


@dataclass(frozen=True)
class CostModel:
    model_token_bytes: int
    link_bytes_per_s: float

    def ttft_s(self, *, prompt_tokens: int, hbm_tokens: int, retrieved_tokens: int, lookup_s: float) -> float:
        """One request's time: what it looks up, gets back, and computes after what it has."""
        prefix = hbm_tokens + retrieved_tokens
        link_s = retrieved_tokens * self.model_token_bytes / self.link_bytes_per_s
        return lookup_s + link_s + prefill_s(new_tokens=prompt_tokens - prefix, prefix_tokens=prefix)

    def formula(self) -> str:
        return (
            f"prefill {BASE_S} + {NEW_TOKEN_S:.2g}·new + {PAIR_S:.2g}·new·(prefix + new/2) s (vLLM, Llama-3.1-8B, "
            f"one H200); retrieve {self.model_token_bytes // 1024} KiB a token at {self.link_bytes_per_s / 1e9:g} GB/s "
            f"+ measured lookup; no queueing"
        )


def prefill_s(*, new_tokens: int, prefix_tokens: int) -> float:
    return BASE_S + NEW_TOKEN_S * new_tokens + PAIR_S * new_tokens * (prefix_tokens + new_tokens / 2)
