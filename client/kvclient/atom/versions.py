"""The fields and methods of ATOM that the connector needs. A release that lacks one is refused by name.

ATOM runs from checkouts, and its names change. A missing field read as its default would store wrong pages under valid
keys, so every field that is read must exist.
"""

import importlib.metadata
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvserver.errors import RequestError

CONFIG = (
    "kv_transfer_config",
    "model",
    "hf_config",
    "kv_cache_block_size",
    "kv_cache_dtype",
    "index_cache_dtype",
    "torch_dtype",
    "online_quant_config",
    "max_model_len",
    "max_num_seqs",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "decode_context_parallel_size",
    "prefill_context_parallel_size",
    "speculative_config",
    "load_dummy",
    "enable_rapidserve",
    "parallel_config",
)
PARALLEL = ("pipeline_parallel_rank", "data_parallel_rank", "data_parallel_size")
SPECULATION = ("method", "model")
SEQUENCE = (
    "id",
    "status",
    "is_finished",
    "num_tokens",
    "num_prompt_tokens",
    "num_cached_tokens",
    "token_ids",
    "block_table",
    "has_per_req_cache",
    "multimodal_data",
)
STATEFUL = ("per_req_cache_group", "state_fork_src", "last_checkpoint_pos")
"""Further fields of a Sequence whose model keeps a state for each request."""


def release() -> str:
    """ATOM's version, which names the commit of a built checkout, and its folder."""
    try:
        version = importlib.metadata.version("atom")
    except importlib.metadata.PackageNotFoundError:
        version = "of unknown release"
    try:
        import atom  # noqa: PLC0415  (needed for a message only)
    except ImportError:
        return f"ATOM {version}"
    return f"ATOM {version} in {Path(str(atom.__file__)).parent}"


def refusal(missing: str) -> RequestError:
    return RequestError("unsupported", f"{release()} {missing}; this release of kvserver needs it (docs/atom.md)")


def check_fields(what: str, thing: Any, names: Iterable[str]) -> None:
    """Raise RequestError naming the release and the fields that `thing` lacks."""
    lacking = [name for name in names if not hasattr(thing, name)]
    if lacking:
        raise refusal(f"has no {' and no '.join(lacking)} in its {what}")


def check_config(config: Any) -> None:
    check_fields("Config", config, CONFIG)
    check_fields("ParallelConfig", config.parallel_config, PARALLEL)
    if config.speculative_config is not None:
        check_fields("SpeculativeConfig", config.speculative_config, SPECULATION)


def check_whole(kind: type) -> None:
    """Raise RequestError if ATOM's base classes demand a method that the connector lacks."""
    lacking = sorted(getattr(kind, "__abstractmethods__", ()))
    if lacking:
        raise RequestError(
            "unsupported",
            f"{release()} wants {' and '.join(lacking)} of a connector; this release of kvserver does not have that "
            "(docs/atom.md)",
        )
