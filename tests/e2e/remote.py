"""The process of engine.py: `python -m tests.e2e.remote FD OPTIONS`. It ends when its pipe does."""

import json
import sys
from multiprocessing.connection import Connection
from typing import Any

import torch
import vllm
from vllm.lora.request import LoRARequest


class Remote:
    """Its verbs can be called through the pipe."""

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
        """request: further fields of each; adapter: the folder of a LoRA adapter."""
        adapter = request.pop("adapter", None)
        lora = LoRARequest("adapter", 1, str(adapter)) if adapter else None
        return self._answers([{"prompt_token_ids": prompt, **request} for prompt in prompts], tokens, lora)

    def generate_embedded(self, prompts: list[tuple[int, int]], tokens: int) -> list[tuple[Any, ...]]:
        """Prompts of embeddings, of which each is a seed and how many there are."""
        width = self._llm.model_config.get_hidden_size()
        random = [(torch.Generator().manual_seed(seed), length) for seed, length in prompts]
        asked = [{"prompt_embeds": torch.randn(length, width, generator=source)} for source, length in random]
        return self._answers(asked, tokens, None)

    def embed(self, prompts: list[list[int]]) -> list[tuple[tuple[float, ...], int]]:
        """The vector of each prompt, and how many of its tokens were cached. Of a model that pools."""
        outputs = self._llm.embed([{"prompt_token_ids": prompt} for prompt in prompts], use_tqdm=False)
        return [(tuple(item.outputs.embedding), item.num_cached_tokens or 0) for item in outputs]

    def _answers(self, asked: list[dict[str, Any]], tokens: int, lora: Any) -> list[tuple[Any, ...]]:
        sampling = vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0)
        outputs = self._llm.generate(asked, sampling, use_tqdm=False, lora_request=lora)
        return [
            (tuple(item.outputs[0].token_ids), _logprobs(item.outputs[0]), item.num_cached_tokens or 0)
            for item in outputs
        ]

    def prompt_logprob(self, prompt: list[int]) -> tuple[float, int]:
        """Of all its tokens behind the first together, and how many of them were cached."""
        sampling = vllm.SamplingParams(temperature=0, max_tokens=1, detokenize=False, prompt_logprobs=0)
        (output,) = self._llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        told = zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
        return sum(at[token].logprob for token, at in told), output.num_cached_tokens or 0

    def reset(self, connector: bool = False, running: bool = False) -> bool:
        """running: also with requests that run, which begin anew. Where all is in one process, nobody steps an engine
        without requests: it would not hear of stores that have ended, and keep their blocks."""
        if self._is_one_process:
            self._llm.llm_engine.step()
        return bool(self._llm.reset_prefix_cache(reset_running_requests=running, reset_connector=connector))

    def sleep(self, level: int, mode: str) -> None:
        """Back when nothing is under way any more. Level 0 pauses, level 1 forgets all caches besides."""
        self._llm.sleep(level, mode)

    def wake(self) -> bool:
        """Before 0.32 vLLM does not say whether it has."""
        return self._llm.wake_up() is not False

    def is_asynchronous(self) -> bool:
        """Whether a step is scheduled while the one before it runs."""
        return bool(self._llm.llm_engine.vllm_config.scheduler_config.async_scheduling)

    def features(self) -> dict[str, bool]:
        """Of vLLM's usual ones, those that it turns off by itself where it has to."""
        config = self._llm.llm_engine.vllm_config
        return {
            "prefix_caching": bool(config.cache_config.enable_prefix_caching),
            "chunked_prefill": bool(config.scheduler_config.enable_chunked_prefill),
        }

    def metrics(self) -> dict[str, float]:
        """Counters and gauges by name, summed over their labels; those with a source also by name:source."""
        found: dict[str, float] = {}
        for metric in self._llm.get_metrics():
            value = getattr(metric, "value", None)
            if value is not None:
                source = metric.labels.get("source")
                for name in [metric.name, f"{metric.name}:{source}"] if source else [metric.name]:
                    found[name] = found.get(name, 0.0) + value
        return found

    # requests one by one, for tests that abort them

    def add(self, name: str, prompt: list[int], tokens: int) -> str:
        sampling = vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        self._llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        return name

    def drain(self) -> dict[str, tuple[int, ...]]:
        """Those that have finished since the last call, and what was generated."""
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
