"""The namespace of a vLLM worker's KV: everything that must be equal for its bytes to be of use to another engine.

What is in doubt is in it: a fact too many costs a hit between engines that could have shared, a fact too few is wrong
output. The server fixes the shapes of pages besides (the geometry of a namespace).
"""

import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvclient.identity import code_digest, is_tuned_by_length, label_of, settings_text, tokens_that_count
from kvclient.offload_values import Group
from kvserver.errors import RequestError

FACTS = 1
"""Changes when the meaning of a fact does."""

MEDIA = (
    "media_io_kwargs",
    "mm_processor_kwargs",
    "mm_device_do_normalize",
    "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",
    "video_pruning_rate",
    "video_pruning_method",
)
"""What an engine makes of images and the like, and vLLM's digests of them do not say: those are one engine's."""


ENVIRONMENT = (
    "VLLM_B12X_MOE_FP4_FORCE_A16",
    "VLLM_CPU_INT4_W4A8",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG",
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
    "VLLM_MARLIN_INPUT_DTYPE",
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY",
    "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4",
)
"""Variables that say in how many bits weights or activations are, or which experts compute. Others choose among kernels
that do the same but for rounding, as vLLM's own caches see it."""

READ_FROM_THE_FOLDER = frozenset(
    {
        "auto",
        "hf",
        "safetensors",
        "pt",
        "npcache",
        "mistral",
        "bitsandbytes",
        "gguf",
        "fastsafetensors",
        "instanttensor",
        "runai_streamer",
        "runai_streamer_sharded",
        "sharded_state",
    }
)
"""Of --load-format. Others have weights from elsewhere: a daemon, another server, a file that an extra config names."""


def facts_of(
    config: Any,
    *,
    model_id: str,
    weights_epoch: int,
    tenant: str,
    groups: Sequence[Group],
    layers: Sequence[Sequence[str]],
    states: Sequence[str],
    chunk_tokens: int,
    replicas: int,
    drafts: Sequence[str],
    version: str,
    device: str,
    backends: Sequence[str],
    layout: str,
    beside: Sequence[str],
    environment: Mapping[str, str],
) -> dict[str, object]:
    """Of a VllmConfig. The same in all ranks of an engine.

    model_id: tells the model, weights and drafts included, from all others; empty where their files do.
    drafts: what but the files tells a draft model, if it has KV.
    tenant: engines of different ones share nothing. backends: of the attention of each layer.
    layout: how the elements of a page lie. beside: what layers keep for each block beside their caches.
    environment: environment_that_counts()."""
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    settings = model.hf_config.to_dict()
    media = getattr(model, "multimodal_config", None)
    return {
        "facts": FACTS,
        "engine": ["vllm", version],
        "model": model_id,
        "weights_epoch": weights_epoch,
        "settings": settings_text(settings),
        "tokens_max": tokens_that_count(settings, model.max_model_len),
        "dtype": str(model.dtype),
        "cache_dtype": str(cache.cache_dtype),
        "quantization": str(model.quantization),
        "device": device,
        "backends": list(backends) if len(set(backends)) > 1 else sorted(set(backends)),
        "layout": layout,
        "groups": [list(group) for group in groups],
        "layers": [list(names) for names in layers],
        "states": list(states),
        "chunk_tokens": chunk_tokens,
        "grid": [parallel.tensor_parallel_size, replicas],
        **({"media": settings_text({name: getattr(media, name, None) for name in MEDIA})} if media is not None else {}),
        **({"quantized": how} if (how := _quantized_while_loading(model)) else {}),
        **({"environment": dict(environment)} if environment else {}),
        **({"types": types} if (types := _cache_types(cache, config.attention_config)) else {}),
        **({"tuning": _tuning(model)} if is_tuned_by_length(settings) else {}),
        **({"drafts": list(drafts)} if drafts else {}),
        **({"beside": list(beside)} if beside else {}),
        **({"tenant": tenant} if tenant else {}),
    }


def called(model: Any) -> str:
    """Of a ModelConfig: what users call it, the first of several names. No fact: it tells nothing of bytes."""
    served = getattr(model, "served_model_name", None) or model.model
    return label_of(served if isinstance(served, str) else served[0])


def backend_called(backend: Any) -> str:
    """Of an attention backend. One from elsewhere changes with releases of its own, so its code is in its name."""
    name, module = str(backend.get_name()), str(backend.__module__)
    if module.split(".", maxsplit=1)[0] == "vllm":
        return name
    file = getattr(sys.modules.get(module), "__file__", None)
    code = code_digest(Path(file).parent) if file else ""
    return f"{name} {module}.{backend.__qualname__} {code}"


def _tuning(model: Any) -> str:
    """What a ModelConfig says of how queries are scaled, where vLLM looks for it."""
    said = {**(model.try_get_generation_config() or {}), **model.override_generation_config}
    return str(said.get("attn_temperature_tuning"))


def _quantized_while_loading(model: Any) -> list[str]:
    """What a ModelConfig says of it, and a file that it names."""
    how, overrides = getattr(model, "quantization_config", None), getattr(model, "hf_overrides", None)
    file = overrides.get("quantization_config_file") if isinstance(overrides, dict) else None
    return ([settings_text(how)] if how else []) + ([Path(file).read_text()] if file else [])


def _cache_types(cache: Any, attention: Any) -> list[str]:
    """Of a CacheConfig and an AttentionConfig: layers whose KV has another type than the cache's."""
    skipped = [f"not {name}" for name in sorted(getattr(cache, "kv_cache_dtype_skip_layers", None) or ())]
    indexer = str(getattr(attention, "indexer_kv_dtype", "auto"))
    is_fp4 = getattr(attention, "use_fp4_indexer_cache", False)
    return skipped + ([f"indexer {indexer}"] if indexer != "auto" else []) + (["indexer fp4"] if is_fp4 else [])


def environment_that_counts(environment: Mapping[str, str], read: Any) -> dict[str, str]:
    """read: vllm.envs, which has the values, read from files where they are paths."""
    return {name: str(getattr(read, name, environment[name])) for name in ENVIRONMENT if name in environment}


def check_told_by_files(load_format: object) -> None:
    """RequestError where the weights are not what the model's folder holds."""
    if str(load_format) not in READ_FROM_THE_FOLDER:
        raise RequestError(
            "model-identity",
            f"load_format={str(load_format)!r}: the model's files do not tell its weights; say model_id in "
            "kv_connector_extra_config",
        )


def cpu_kind() -> str:
    """CPU kernels lay K and V out by instruction set, so the pages of two kinds of CPU differ."""
    wanted = ("avx2", "avx512", "amx", "asimd", "sve", "bf16", "vxe", "i8mm")
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags = next((line.split(":", 1)[1].split() for line in lines if line.lower().startswith(("flags", "feat"))), [])
    return " ".join([platform.machine(), *sorted(flag for flag in flags if flag.startswith(wanted))])
