"""Estimated time to first token: a cost model, not a measurement. The report says so next to its results.

    prefill seconds = BASE_S + times * (NEW_TOKEN_S * new + PAIR_S * new * (prefix + new / 2))

The last term is attention: each new token looks at all tokens before it. The constants are a fit to vLLM 0.20 with
Llama-3.1-8B on one H200, cold prompts of 8K / 32K / 64K tokens: 0.209 / 1.18 / 3.26 s, and 0.025 s for a full hit.
The fit is within 3 % of each. `times` is how much longer another model takes: an assumption (its parameters over
8e9), not a measurement.

With the server three times are added: its lookup (measured in the run), the retrieved bytes over the modelled link,
and before them the bytes from disk at the disk's rate. queueing.py adds the waiting.
"""

from dataclasses import dataclass

from kvserver.sizing.outcome import Outcome

BASE_S = 0.025
NEW_TOKEN_S = 1.9e-5
PAIR_S = 9.4e-10


@dataclass(frozen=True, kw_only=True)
class CostModel:
    model_token_bytes: int
    link_bytes_per_s: float
    disk_bytes_per_s: float = 0.0
    """Rate of all devices together. Required if anything came from disk."""
    prefill_times: float = 1.0

    def engine_s(self, outcome: Outcome) -> float:
        """One request's time with the server, after its disk reads: lookup, link, and computing the rest."""
        prefix = outcome.hbm_tokens + outcome.retrieved_tokens
        link_s = outcome.retrieved_tokens * self.model_token_bytes / self.link_bytes_per_s
        return outcome.lookup_ns / 1e9 + link_s + self.prefill_s(outcome.prompt_tokens, prefix)

    def disk_s(self, outcome: Outcome) -> float:
        """Time of the request's disk reads if the disks do nothing else."""
        if not outcome.disk_tokens:
            return 0.0
        return outcome.disk_tokens * self.model_token_bytes / self.disk_bytes_per_s

    def ttft_s(self, outcome: Outcome) -> float:
        return self.disk_s(outcome) + self.engine_s(outcome)

    def hbm_only_s(self, outcome: Outcome) -> float:
        """The same request with the same HBM contents, and everything else computed."""
        return self.prefill_s(outcome.prompt_tokens, outcome.hbm_tokens)

    def prefill_s(self, prompt_tokens: int, prefix_tokens: int) -> float:
        new = prompt_tokens - prefix_tokens
        return BASE_S + self.prefill_times * (NEW_TOKEN_S * new + PAIR_S * new * (prefix_tokens + new / 2))

    def formula(self) -> str:
        times = f"{self.prefill_times:g} x " if self.prefill_times != 1 else ""
        return (
            f"prefill {BASE_S} + {times}({NEW_TOKEN_S:.2g}·new + {PAIR_S:.2g}·new·(prefix + new/2)) s (the bracket: "
            f"vLLM, Llama-3.1-8B, one H200); retrieve {self.model_token_bytes // 1024} KiB a token at "
            f"{self.link_bytes_per_s / 1e9:g} GB/s + measured lookup; from disk, before that, at the rate of the disk"
        )
