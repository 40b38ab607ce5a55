"""The process that engine.py starts: `python -m tests.e2e.remote FD OPTIONS`. It ends when its pipe closes."""

import json
import sys
from multiprocessing.connection import Connection
from typing import Any

import torch
import vllm
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.lora.request import LoRARequest

STEPS_FOR_ITS_CONNECTOR = hasattr(KVConnectorBase_V1, "has_pending_push_work")
"""Whether vLLM asks an idle engine's connector if anything is in flight."""


class Remote:
    """The methods that can be called through the pipe."""

    def __init__(self, options: dict[str, Any]) -> None:
        settings: dict[str, Any] = {
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "max_model_len": 2048,
            "dtype": "float32",
            "kv_cache_memory_bytes": 64 << 20,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 512,
            "enable_prefix_caching": True,
            "disable_log_stats": False,
            "seed": 0,
            **options,
        }
        self._llm = vllm.LLM(**settings)
        self._is_one_process = not vllm.envs.VLLM_ENABLE_V1_MULTIPROCESSING

    def generate(self, prompts: list[list[int]], tokens: int, request: dict[str, object]) -> list[tuple[Any, ...]]:
        """request: further fields of each request; adapter: the folder of a LoRA adapter."""
        adapter = request.pop("adapter", None)
        params = request.pop("kv_transfer_params", None)
        lora = LoRARequest("adapter", 1, str(adapter)) if adapter else None
        asked = [{"prompt_token_ids": prompt, **request} for prompt in prompts]
        return self._answers(asked, tokens, lora, kv_transfer_params=params)

    def compute(self, prompt: list[int], params: dict[str, object] | None) -> object:
        """Computes a prompt as a proxy's first engine. Returns the params that the proxy passes on."""
        sampling = vllm.SamplingParams(
            temperature=0, max_tokens=1, detokenize=False, extra_args={"kv_transfer_params": params} if params else None
        )
        (output,) = self._llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        return output.kv_transfer_params

    def generate_embedded(self, prompts: list[tuple[int, int]], tokens: int) -> list[tuple[Any, ...]]:
        """Generates from embeddings; each prompt is (seed, length)."""
        width = self._llm.model_config.get_hidden_size()
        random = [(torch.Generator().manual_seed(seed), length) for seed, length in prompts]
        asked = [{"prompt_embeds": torch.randn(length, width, generator=source)} for source, length in random]
        return self._answers(asked, tokens, None)

    def embed(self, prompts: list[list[int]]) -> list[tuple[tuple[float, ...], int]]:
        """For a pooling model: the vector of each prompt, and how many of its tokens were cached."""
        outputs = self._llm.embed([{"prompt_token_ids": prompt} for prompt in prompts], use_tqdm=False)
        return [(tuple(item.outputs.embedding), item.num_cached_tokens or 0) for item in outputs]

    def _answers(
        self, asked: list[dict[str, Any]], tokens: int, lora: Any, *, kv_transfer_params: object = None
    ) -> list[tuple[Any, ...]]:
        sampling = vllm.SamplingParams(
            temperature=0,
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            extra_args={"kv_transfer_params": kv_transfer_params} if kv_transfer_params else None,
        )
        outputs = self._llm.generate(asked, sampling, use_tqdm=False, lora_request=lora)
        return [
            (tuple(item.outputs[0].token_ids), _logprobs(item.outputs[0]), item.num_cached_tokens or 0)
            for item in outputs
        ]

    def prompt_logprob(self, prompt: list[int]) -> tuple[float, int]:
        """The summed log-probability of all tokens after the first, and the number of cached tokens."""
        sampling = vllm.SamplingParams(temperature=0, max_tokens=1, detokenize=False, prompt_logprobs=0)
        (output,) = self._llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        told = zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
        return sum(at[token].logprob for token, at in told), output.num_cached_tokens or 0

    def reset(self, connector: bool = False, running: bool = False) -> bool:
        """Resets the prefix cache. running: also restarts running requests.

        With everything in one process, an engine without requests takes no steps. It would not notice finished
        stores and would keep their blocks, so this takes one step first.
        """
        if self._is_one_process:
            self._llm.llm_engine.step()
        self._let_step()
        return bool(self._llm.reset_prefix_cache(reset_running_requests=running, reset_connector=connector))

    def _let_step(self) -> None:
        """Before 0.24 an engine without requests takes no steps: it tells no statistics and hears of no store's end."""
        if not STEPS_FOR_ITS_CONNECTOR:
            self.generate([[1]], 1, {})

    def sleep(self, level: int, mode: str) -> None:
        """Returns when no work is in flight. Level 0 pauses; level 1 also forgets all caches."""
        self._llm.sleep(level, mode)

    def wake(self) -> bool:
        """True unless vLLM says that it failed; vLLM before 0.32 says nothing."""
        return self._llm.wake_up() is not False

    def is_asynchronous(self) -> bool:
        """True if a step is scheduled while the previous one runs."""
        return bool(self._llm.llm_engine.vllm_config.scheduler_config.async_scheduling)

    def is_on_cpu(self) -> bool:
        return bool(vllm.platforms.current_platform.is_cpu())

    def features(self) -> dict[str, bool]:
        """vLLM's default features that it silently turns off where they are not possible."""
        config = self._llm.llm_engine.vllm_config
        return {
            "prefix_caching": bool(config.cache_config.enable_prefix_caching),
            "chunked_prefill": bool(config.scheduler_config.enable_chunked_prefill),
        }

    def event_fields(self) -> dict[str, tuple[str, ...]]:
        """Fields of vLLM's KV events."""
        return {kind.__name__: kind.__struct_fields__ for kind in (BlockStored, BlockRemoved)}

    def metrics(self) -> dict[str, float]:
        """Counters and gauges by name, summed over labels; those with a source label also as name:source."""
        self._let_step()
        found: dict[str, float] = {}
        for metric in self._llm.get_metrics():
            value = getattr(metric, "value", None)
            if value is not None:
                source = metric.labels.get("source")
                for name in [metric.name, f"{metric.name}:{source}"] if source else [metric.name]:
                    found[name] = found.get(name, 0.0) + value
        return found

    # single requests, for tests that abort them

    def add(self, name: str, prompt: list[int], tokens: int) -> str:
        sampling = vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        self._llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        return name

    def drain(self) -> dict[str, tuple[int, ...]]:
        """Requests finished in one step, with their generated tokens."""
        steps = self._llm.llm_engine.step()
        return {output.request_id: tuple(output.outputs[0].token_ids) for output in steps if output.finished}

    def abort(self, name: str) -> None:
        self._llm.llm_engine.abort_request([name])


def _logprobs(output: Any) -> tuple[float, ...]:
    return tuple(at[token].logprob for token, at in zip(output.token_ids, output.logprobs, strict=True))


def serve(pipe: Connection, options: dict[str, Any]) -> None:
    remote = Remote(options)
    pipe.send((True, None))
    while True:
        try:
            name, arguments = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            pipe.send((getattr(remote, name)(*arguments), None))
        except Exception as problem:
            pipe.send((None, f"{type(problem).__name__}: {problem}"))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), json.loads(sys.argv[2]))
