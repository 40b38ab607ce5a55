"""The namespace of an ATOM engine's KV: everything that must be equal for its bytes to be of use to another engine.

What is in doubt is in it: a fact too many costs a hit between engines that could have shared, a fact too few is wrong
output. The server compares the sizes of pages besides, rank by rank.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvclient.atom_layout import Layout
from kvclient.identity import model_digest, settings_text, tokens_that_count
from kvserver.errors import RequestError

FACTS = 1
"""Changes when the meaning of a fact does."""


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
    """Of ATOM's Config. The same in all ranks of an engine.

    model_id: tells the model, weights included, from all others. tenant: engines of different ones share nothing.
    sleeps: of this engine's life, and how often its cache was made anew; empty for the first."""
    settings = _settings(config.hf_config)
    stages = int(getattr(config, "pipeline_parallel_size", 1) or 1)
    return {
        "facts": FACTS,
        "engine": ["atom", *(f"{name} {version}" for name, version in sorted(versions.items()))],
        "model": model_id,
        "weights_epoch": weights_epoch,
        "sleeps": sleeps,
        "settings": settings_text(settings),
        "tokens_max": tokens_that_count(settings, int(getattr(config, "max_model_len", 0) or 0)),
        "dtype": str(getattr(config, "torch_dtype", "")),
        "cache_dtype": str(getattr(config, "kv_cache_dtype", "")),
        "index_dtype": str(getattr(config, "index_cache_dtype", None)),
        "online_quantization": settings_text(getattr(config, "online_quant_config", None)),
        "draft": _draft(getattr(config, "speculative_config", None)),
        "device": device,
        "block_tokens": int(config.kv_cache_block_size),
        "chunk_tokens": chunk_tokens,
        "grid": [stages, *(int(getattr(config, f"{name}_parallel_size", 1) or 1) for name in GRID), replicas],
        "layout": list(layout.facts(pipeline_stages=stages)),
        **({"tenant": tenant} if tenant else {}),
    }


GRID = ("tensor", "decode_context", "prefill_context")


def model_id_of(config: Any) -> str:
    """The digest of the model's files. A name or a path says nothing about the weights behind it."""
    if getattr(config, "load_dummy", None):
        raise RequestError("model-identity", "dummy weights are told by nothing: say model_id in the extra config")
    return model_digest(_folder(str(config.model))).hex()


def _folder(model: str) -> Path:
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download  # noqa: PLC0415  (needed for names only, and slow to import)

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (OSError, ValueError) as problem:
        raise RequestError(
            "model-identity",
            f"the files of model {model!r} are not on this machine ({type(problem).__name__}), so that it cannot be "
            "told from others of that name: say model_id in kv_connector_extra_config",
        ) from problem


def _settings(hf_config: Any) -> object:
    to_dict = getattr(hf_config, "to_dict", None)
    return to_dict() if callable(to_dict) else dict(vars(hf_config))


def _draft(speculative: Any) -> list[str]:
    """Layers of a draft model are in the cache like any other."""
    if speculative is None:
        return []
    model = str(getattr(speculative, "model", None) or "")
    content = model_digest(Path(model)).hex() if model and Path(model).is_dir() else model
    return [str(getattr(speculative, "method", "")), content]
