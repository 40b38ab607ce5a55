"""The namespace of an ATOM engine's KV: all facts that must be equal before another engine can use its bytes.

Doubtful facts are included. One fact too many costs hits between engines that could have shared; one too few causes
wrong output. Besides, the server compares page sizes rank by rank.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvclient.atom.layout import Layout
from kvclient.identity.model_files import ModelFiles, hub_folder, model_files, settings_text, tokens_that_count
from kvserver.errors import RequestError

FACTS = 1
"""Version of the facts. Raise it when the meaning of a fact changes."""


def facts_of(
    config: Any,
    layout: Layout,
    *,
    model_id: str,
    weights_epoch: int,
    tenant: str,
    chunk_tokens: int,
    replicas: int,
    versions: Mapping[str, str],
    device: str,
    sleeps: list[object],
) -> dict[str, object]:
    """Facts of ATOM's Config, equal in all ranks of an engine.

    model_id: identifies model and weights; empty if their files do. tenant: different tenants share nothing.

    sleeps: engine, life, and how often its cache was created again; empty the first time unless the engine can sleep.
    """
    settings = _settings(config.hf_config)
    stages = int(config.pipeline_parallel_size or 1)
    return {
        "facts": FACTS,
        "engine": ["atom", *(f"{name} {version}" for name, version in sorted(versions.items()))],
        "model": model_id,
        "weights_epoch": weights_epoch,
        "sleeps": sleeps,
        "settings": settings_text(settings),
        "tokens_max": tokens_that_count(settings, int(config.max_model_len or 0)),
        "dtype": str(config.torch_dtype),
        "cache_dtype": str(config.kv_cache_dtype),
        "index_dtype": str(config.index_cache_dtype),
        "online_quantization": settings_text(config.online_quant_config),
        "draft": _draft(config.speculative_config, model_id),
        "device": device,
        "block_tokens": int(config.kv_cache_block_size),
        "chunk_tokens": chunk_tokens,
        "grid": [stages, *(int(getattr(config, f"{name}_parallel_size") or 1) for name in GRID), replicas],
        "layout": list(layout.facts(pipeline_stages=stages)),
        **({"tenant": tenant} if tenant else {}),
    }


GRID = ("tensor", "decode_context", "prefill_context")


def models_of(config: Any) -> list[ModelFiles]:
    """Files of the model and of a draft model. A name or a path alone does not identify the weights."""
    if config.load_dummy:
        raise RequestError("model-identity", "nothing identifies dummy weights: set model_id in the extra config")
    folders = [_folder(str(config.model), config.hf_config)]
    speculation = config.speculative_config
    if speculation is not None and speculation.model:
        folders.append(_folder(str(speculation.model), getattr(speculation, "draft_model_hf_config", None)))
    return [model_files(folder) for folder in dict.fromkeys(folders)]


def _folder(model: str, hf_config: Any) -> Path:
    commit = getattr(hf_config, "_commit_hash", None)
    return Path(model) if Path(model).is_dir() else hub_folder(model, revision=None, commit=commit)


def _settings(hf_config: Any) -> object:
    to_dict = getattr(hf_config, "to_dict", None)
    return to_dict() if callable(to_dict) else dict(vars(hf_config))


def _draft(speculative: Any, model_id: str) -> list[str]:
    """Facts of a draft model, whose layers are in the cache too. With a model_id only its name identifies it."""
    if speculative is None:
        return []
    return [str(speculative.method), *([str(speculative.model or "")] if model_id else [])]
