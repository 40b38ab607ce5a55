"""Kinds of models, with the shapes of their KV and how their engines are started."""

import math
from typing import NamedTuple

from tests.e2e.engine import ONE_PROCESS


class Case(NamedTuple):
    model: str
    options: dict[str, object]
    token_bytes: int
    """KV bytes of a token in all layers and ranks: its arena bytes if nothing is stored twice. 0: varies."""
    chunk_tokens: int = 256
    step_tokens: int = 0
    """With states: prefill steps end at multiples of this. A state is kept there, so reuse ends there."""
    agrees_with_itself: bool = True
    """False if vLLM on CPUs, even without a connector, does not reproduce its own output.

    Results differ in a batch, and when only the rest of a prompt is computed (latent attention: by 0.5 in a token's
    log-probability; short convolutions: by 1.2). Then an answer from the server is compared with an earlier answer
    from the server, and with one generated in one go.
    """

    @property
    def ranks(self) -> int:
        """Worker processes, each with a cache of its own."""
        return math.prod(int(str(self.options.get(f"{kind}_parallel_size", 1))) for kind in ("tensor", "pipeline"))


LLAMA_BYTES = 4 * 2 * 2 * 64 * 4
"""Layers, K and V, heads, head size, float32."""


LATENT_BYTES = 2 * 576 * 4
"""Layers, latent and position, float32: the same in all ranks."""


LATENT: dict[str, object] = {"max_num_batched_tokens": 2048, "attention_config": {"backend": "CPU_MLA"}}
"""On CPUs with AMX, vLLM would use other kernels for latent attention, which refuse float32."""


HASHES: dict[str, object] = {"prefix_caching_hash_algo": "sha256_cbor"}
"""Names chunks by vLLM's own block hashes. Other cases name them by tokens, unless PYTHONHASHSEED seeds the hashes."""


STATES: dict[str, object] = {
    "block_size": 32,
    "dtype": "bfloat16",
    "mamba_ssm_cache_dtype": "float32",
    "prefix_cache_retention_interval": 480,
}
"""On CPUs with native bfloat16, vLLM keeps states in float32 anyway. The state's size decides the tokens per block."""


STAGES: dict[str, object] = {
    "block_size": 32,
    "pipeline_parallel_size": 2,
    "kv_cache_memory_bytes": None,
    "gpu_memory_utilization": 0.15,
    "num_gpu_blocks_override": 1024,
}
"""With a KV cache of a given size vLLM for CPUs does not warm up. Then its second stage lacks a tensor in its first
step."""


CASES = {
    "llama": Case("llama", {"block_size": 32}, LLAMA_BYTES),
    "gemma3": Case("gemma3", {"block_size": 32, **ONE_PROCESS}, 0, chunk_tokens=128),
    "mla": Case("mla", {**LATENT, **ONE_PROCESS}, LATENT_BYTES, agrees_with_itself=False),
    "fp8": Case("llama", {"block_size": 64, "kv_cache_dtype": "fp8", **HASHES, **ONE_PROCESS}, LLAMA_BYTES // 4),
    "lfm2": Case(
        "lfm2",
        {"block_size": 32, "prefix_cache_retention_interval": 256},
        0,
        chunk_tokens=32,
        step_tokens=512,
        agrees_with_itself=False,
    ),
    "qwen3-next": Case(
        "qwen3-next",
        STATES,
        0,
        chunk_tokens=160,
        step_tokens=480,
        agrees_with_itself=False,
    ),
    "tp2": Case("llama", {"block_size": 32, "tensor_parallel_size": 2}, LLAMA_BYTES),
    "tp2-mla": Case("mla", {**LATENT, **HASHES, "tensor_parallel_size": 2}, LATENT_BYTES, agrees_with_itself=False),
    "pp2": Case("llama", STAGES, LLAMA_BYTES),
    "pp2-gemma3": Case("gemma3", STAGES, 0, chunk_tokens=128),
    # The last case, because chunks it stores in the shared server do not go to disk.
    "mistral": Case("mistral", {"block_size": 32, **ONE_PROCESS}, 0, chunk_tokens=128),
}
