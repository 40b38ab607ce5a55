"""The namespace of a vLLM worker's KV: all facts that must be equal before another engine can use its bytes.

Doubtful facts are included. One fact too many costs hits between engines that could have shared; one too few causes
wrong output. Besides, the server fixes the page shapes of each namespace (its geometry).
"""

import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvclient.identity.model_files import code_digest, is_tuned_by_length, label_of, settings_text, tokens_that_count
from kvclient.offload.values import Group
from kvclient.vllm.stages import Stage
from kvserver.errors import RequestError

FACTS = 1
"""Version of the facts. Raise it when the meaning of a fact changes."""

MEDIA = (
    "media_io_kwargs",
    "mm_processor_kwargs",
    "mm_device_do_normalize",
    "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",
    "video_pruning_rate",
    "video_pruning_method",
)
"""Settings that change an engine's processing of images and other media and that vLLM's media digests leave out."""


ENVIRONMENT = (
    "VLLM_B12X_MOE_FP4_FORCE_A16",
    "VLLM_CPU_INT4_W4A8",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG",
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
    "VLLM_MARLIN_INPUT_DTYPE",
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY",
    "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4",
)
"""Variables that set the bit width of weights or activations, or which experts compute. Other variables choose between
kernels that differ only in rounding, which vLLM's own caches ignore too."""

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
"""Values of --load-format that read the model's folder. Others take weights from elsewhere: a daemon, another server,
or a file named by an extra config."""


def facts_of(
    config: Any,
    *,
    model_id: str,
    weights_epoch: int,
    tenant: str,
    groups: Sequence[Group],
    stages: Sequence[Stage],
    chunk_tokens: int,
    drafts: Sequence[str],
    version: str,
    device: str,
    layout: str,
    beside: Sequence[str],
    environment: Mapping[str, str],
    handler: str = "",
    head_shards: int = 0,
) -> dict[str, object]:
    """Facts of a VllmConfig, equal in all ranks of an engine.

    model_id: identifies model, weights and drafts; empty if their files do.

    drafts: the draft model's facts other than its files, if it has KV. tenant: different tenants share nothing.

    stages: what each pipeline stage holds, in their order. layout: order of the elements in a page.

    beside: what layers keep per block outside their caches. environment: environment_that_counts(). handler:
    handler_called(). head_shards: HeadShards.total, which takes the place of the tensor parallel size and the replicas.
    """
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    settings = model.hf_config.to_dict()
    media = getattr(model, "multimodal_config", None)
    backends = [name for stage in stages for name in stage.backends]
    layers = [[list(names) for names in stage.layers] for stage in stages]
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
        "backends": backends if len(set(backends)) > 1 else sorted(set(backends)),
        "layout": layout,
        "groups": [list(group) for group in groups],
        "layers": layers if len(stages) > 1 else layers[0],
        "states": [shape for stage in stages for shape in stage.states],
        "chunk_tokens": chunk_tokens,
        "grid": _grid(stages, ranks=parallel.tensor_parallel_size, head_shards=head_shards),
        **({"head_shards": head_shards} if head_shards else {}),
        **({"contexts": contexts} if (contexts := _contexts(parallel)) else {}),
        **({"media": settings_text({name: getattr(media, name, None) for name in MEDIA})} if media is not None else {}),
        **({"quantized": how} if (how := _quantized_while_loading(model)) else {}),
        **({"environment": dict(environment)} if environment else {}),
        **({"types": types} if (types := _cache_types(cache, config.attention_config)) else {}),
        **({"handler": handler} if handler else {}),
        **({"tuning": _tuning(model)} if is_tuned_by_length(settings) else {}),
        **({"drafts": list(drafts)} if drafts else {}),
        **({"beside": list(beside)} if beside else {}),
        **({"tenant": tenant} if tenant else {}),
    }


def _grid(stages: Sequence[Stage], *, ranks: int, head_shards: int) -> list[int]:
    """Ranks, those that hold the same KV, and the number of stages if there are several. With head_shards as if each
    rank held one shard that no other rank holds."""
    each = [head_shards, 1] if head_shards else [ranks, stages[0].replicas]
    return each + ([len(stages)] if len(stages) > 1 else [])


def called(model: Any) -> str:
    """The model's name for users, the first if there are several. Not a fact, because it says nothing about bytes."""
    served = getattr(model, "served_model_name", None) or model.model
    return label_of(served if isinstance(served, str) else served[0])


def backend_called(backend: Any) -> str:
    """Name of an attention backend. A third-party backend has its own releases, so its name includes a digest of its
    code."""
    name = str(backend.get_name())
    return name if _is_vllms(backend) else f"{name} {_code_called(backend)}"


def handler_called(handler: Any) -> str:
    """Name of what a platform has registered for a type of the KV cache, its settings, and a digest of its code."""
    if handler is None:
        return ""
    settings = {name: str(value) for name, value in getattr(handler, "__dict__", {}).items()}
    return f"{_code_called(type(handler))} {handler.torch_dtype()} {settings_text(settings)}"


def _is_vllms(kind: type) -> bool:
    return kind.__module__.split(".", maxsplit=1)[0] == "vllm"


def _code_called(kind: type) -> str:
    """Name of a class, and a digest of the code beside it, which has releases of its own."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    code = code_digest(Path(file).parent) if file and not _is_vllms(kind) else ""
    return f"{kind.__module__}.{kind.__qualname__} {code}"


def _contexts(parallel: Any) -> list[int]:
    """How the tokens of a block are dealt out to ranks. Empty if they are not."""
    ranks = int(getattr(parallel, "decode_context_parallel_size", 1))
    return [ranks, int(getattr(parallel, "cp_kv_cache_interleave_size", 1))] if ranks > 1 else []


def _tuning(model: Any) -> str:
    """The model's setting for scaling queries by position, as vLLM finds it."""
    said = {**(model.try_get_generation_config() or {}), **model.override_generation_config}
    return str(said.get("attn_temperature_tuning"))


def _quantized_while_loading(model: Any) -> list[str]:
    """Settings for quantization while loading, and the content of a file that they name."""
    how, overrides = getattr(model, "quantization_config", None), getattr(model, "hf_overrides", None)
    file = overrides.get("quantization_config_file") if isinstance(overrides, dict) else None
    return ([settings_text(how)] if how else []) + ([Path(file).read_text()] if file else [])


def _cache_types(cache: Any, attention: Any) -> list[str]:
    """Layers whose KV has another type than the cache's."""
    skipped = [f"not {name}" for name in sorted(getattr(cache, "kv_cache_dtype_skip_layers", None) or ())]
    indexer = str(getattr(attention, "indexer_kv_dtype", "auto"))
    is_fp4 = getattr(attention, "use_fp4_indexer_cache", False)
    return skipped + ([f"indexer {indexer}"] if indexer != "auto" else []) + (["indexer fp4"] if is_fp4 else [])


def environment_that_counts(environment: Mapping[str, str], read: Any) -> dict[str, str]:
    """The ENVIRONMENT variables that are set. read: vllm.envs, which has file contents where values are paths."""
    return {name: str(getattr(read, name, environment[name])) for name in ENVIRONMENT if name in environment}


def check_told_by_files(load_format: object) -> None:
    """Raise RequestError if the weights do not come from the model's folder."""
    if str(load_format) not in READ_FROM_THE_FOLDER:
        raise RequestError(
            "model-identity",
            f"load_format={str(load_format)!r}: the weights do not come from the model's files; set model_id in "
            "kv_connector_extra_config",
        )


def cpu_kind() -> str:
    """Machine and instruction sets: CPU kernels lay out K and V by instruction set, so pages differ between kinds of
    CPU."""
    wanted = ("avx2", "avx512", "amx", "asimd", "sve", "bf16", "vxe", "i8mm")
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags = next((line.split(":", 1)[1].split() for line in lines if line.lower().startswith(("flags", "feat"))), [])
    return " ".join([platform.machine(), *sorted(flag for flag in flags if flag.startswith(wanted))])
