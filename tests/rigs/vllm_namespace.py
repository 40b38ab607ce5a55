"""The namespace of an engine whose settings a test chooses."""

from types import SimpleNamespace
from typing import Any

from kvclient.keys import namespace_digest
from kvclient.offload.values import Group
from kvclient.vllm.namespace import (
    facts_of,
)
from kvclient.vllm.stages import Stage

SETTINGS: dict[str, object] = {"hidden_size": 48, "rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0}}


def namespace(*, settings: dict[str, object] = SETTINGS, **more: Any) -> bytes:
    """An engine's namespace. `more` replaces arguments of facts_of() or values of the engine's configuration."""
    model = {"dtype": "bfloat16", "quantization": None, "max_model_len": 4096, "multimodal_config": None}
    model |= {"override_generation_config": {}, "quantization_config": None, "hf_overrides": {}}
    generation = more.pop("generation", {})
    model |= {name: more.pop(name) for name in list(more) if name in model}
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(to_dict=lambda: settings), try_get_generation_config=lambda: generation, **model
        ),
        cache_config=SimpleNamespace(
            cache_dtype=more.pop("cache_dtype", "auto"), kv_cache_dtype_skip_layers=more.pop("skipped", [])
        ),
        attention_config=SimpleNamespace(**more.pop("attention", {})),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=more.pop("ranks", 1),
            decode_context_parallel_size=more.pop("contexts", 1),
            cp_kv_cache_interleave_size=more.pop("interleave", 1),
        ),
    )
    stage: dict[str, Any] = {"layers": [["a", "b"]], "backends": ["F", "F"], "states": [], "replicas": 1}
    stage |= {name: more.pop(name) for name in list(more) if name in stage}
    told: dict[str, Any] = {
        "model_id": "m",
        "weights_epoch": 0,
        "tenant": "",
        "groups": [Group(16)],
        "stages": [Stage(**stage)],
        "chunk_tokens": 256,
        "drafts": [],
        "version": "0.32.0",
        "device": "d",
        "layout": "LBHNC",
        "beside": [],
        "environment": {},
    }
    return namespace_digest(facts_of(config, **{**told, **more}))
