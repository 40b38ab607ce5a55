"""Bytes of KV that a model keeps for each token, from its config.json.

Grouped-query attention: 2 (K and V) x KV heads x head_dim for each layer. Multi-head latent attention (DeepSeek-V2,
arXiv:2405.04434): kv_lora_rank + qk_rope_head_dim for each layer. Fields are those of Hugging Face configurations.
"""

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvserver.errors import ConfigError

WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
"""Bytes of a number, by the name of its type; the names of fp8 are those of engines' --kv-cache-dtype."""
FULL, WINDOW, STATE = "full", "window", "state"
KINDS = {"full_attention": FULL, "sliding_attention": WINDOW, "chunked_attention": WINDOW, "linear_attention": STATE}
CONFIG_BYTES_MAX = 16 << 20


@dataclass(frozen=True)
class KvSize:
    """KV bytes of a model, over all ranks."""

    dtype: str
    layer_bytes: int
    """Bytes of one token in one layer."""
    formula: str
    """layer_bytes as a product."""
    layers: Mapping[str, int]
    """Number of layers by kind: full, window, state."""

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers with full attention."""
        return self.layers.get(FULL, 0) * self.layer_bytes

    @property
    def window_token_bytes(self) -> int:
        """Bytes of one token inside the window, in all layers with a sliding window."""
        return self.layers.get(WINDOW, 0) * self.layer_bytes


def kv_size(path: Path, dtype: str = "auto") -> KvSize:
    """The KV size of the model described by a config.json.

    path: the file, or its directory. dtype: a name of WIDTHS; auto: the model's own. Raises ConfigError naming the
    field that is missing or wrong.
    """
    file = path / "config.json" if os.path.isdir(path) else path
    config = _read(file)
    match config.get("text_config"):
        case dict(of_text):
            config = of_text
    if dtype == "auto":
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if dtype not in WIDTHS:
        raise ConfigError("model-config", f"{file}: dtype {dtype!r} is none of {', '.join(WIDTHS)}")
    width = WIDTHS[dtype]
    if config.get("kv_lora_rank"):
        rank, rope = _count(file, config, "kv_lora_rank"), _count(file, config, "qk_rope_head_dim")
        numbers, formula = rank + rope, f"({rank} + {rope})"
    else:
        heads = _count(file, config, "num_attention_heads")
        kv_heads = _count(file, config, "num_key_value_heads", heads)
        dim = _head_dim(file, config, heads)
        numbers, formula = 2 * kv_heads * dim, f"2 x {kv_heads} KV heads x {dim}"
    return KvSize(dtype, numbers * width, f"{formula} x {width} bytes", _layers(file, config))


def _head_dim(file: Path, config: Mapping[str, object], heads: int) -> int:
    if config.get("head_dim") is not None:
        return _count(file, config, "head_dim")
    hidden = _count(file, config, "hidden_size")
    if hidden < heads:
        raise ConfigError("model-config", f"{file}: hidden_size={hidden} must be at least num_attention_heads={heads}")
    return hidden // heads


def _layers(file: Path, config: Mapping[str, object]) -> dict[str, int]:
    layers = _count(file, config, "num_hidden_layers")
    match config.get("layer_types"), config.get("sliding_window_pattern"):
        case [list(types), _]:
            if unknown := sorted({str(kind) for kind in types} - KINDS.keys()):
                text = f"layer_types has {', '.join(unknown)}; known are {', '.join(KINDS)}"
                raise ConfigError("model-config", f"{file}: {text}")
            if len(types) != layers:
                text = f"layer_types has {len(types)} layers, num_hidden_layers={layers}"
                raise ConfigError("model-config", f"{file}: {text}")
            return dict(Counter(KINDS[kind] for kind in types))
        case [_, int(pattern)] if pattern > 0:
            return {FULL: layers // pattern, WINDOW: layers - layers // pattern}
    has_window = bool(config.get("sliding_window")) and config.get("use_sliding_window", True)
    return {WINDOW if has_window else FULL: layers}


def _read(file: Path) -> Mapping[str, object]:
    try:
        with file.open("rb") as opened:
            text = opened.read(CONFIG_BYTES_MAX + 1)
        if len(text) > CONFIG_BYTES_MAX:
            raise ConfigError(
                "model-config", f"{file}: larger than {CONFIG_BYTES_MAX} bytes, so no model's configuration"
            )
        config = json.loads(text)
    except OSError as error:
        raise ConfigError("model-config", f"{file}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        why = f": {error}" if isinstance(error, json.JSONDecodeError) else ""
        raise ConfigError("model-config", f"{file}: not JSON{why}") from None
    if not isinstance(config, dict):
        raise ConfigError("model-config", f"{file}: expected a JSON object")
    return config


def _count(file: Path, config: Mapping[str, object], name: str, default: int = 0) -> int:
    value = config.get(name)
    found = default if value is None else value
    if type(found) is not int or found < 1:
        raise ConfigError("model-config", f"{file}: {name}={value!r} must be a positive whole number")
    return found
