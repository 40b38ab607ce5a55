"""Folders of Llama models, made without a network: a configuration, a tokenizer with invented words, and weights.

Weights are drawn, so that an answer depends on its whole prompt. Or there are none, for engines that make up their
own (vLLM: --load-format dummy), whose answers say little.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FIRST_WORD = 3
SPECIAL = ("<unk>", "<s>", "</s>")


@dataclass(frozen=True)
class Shape:
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int
    positions: int = 131_072
    weights_spread: float = 0.02

    @property
    def token_bytes(self) -> int:
        """Bytes of KV for a token, in bfloat16."""
        return 2 * self.layers * self.kv_heads * self.head * 2

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes as in checkpoints of this architecture."""
        yield "model.embed_tokens.weight", (self.vocabulary, self.hidden)
        for layer in range(self.layers):
            name = f"model.layers.{layer}"
            yield f"{name}.input_layernorm.weight", (self.hidden,)
            yield f"{name}.self_attn.q_proj.weight", (self.heads * self.head, self.hidden)
            yield f"{name}.self_attn.k_proj.weight", (self.kv_heads * self.head, self.hidden)
            yield f"{name}.self_attn.v_proj.weight", (self.kv_heads * self.head, self.hidden)
            yield f"{name}.self_attn.o_proj.weight", (self.hidden, self.heads * self.head)
            yield f"{name}.post_attention_layernorm.weight", (self.hidden,)
            yield f"{name}.mlp.gate_proj.weight", (self.intermediate, self.hidden)
            yield f"{name}.mlp.up_proj.weight", (self.intermediate, self.hidden)
            yield f"{name}.mlp.down_proj.weight", (self.hidden, self.intermediate)
        yield "model.norm.weight", (self.hidden,)
        yield "lm_head.weight", (self.vocabulary, self.hidden)


SHAPES = {
    "small": Shape(
        hidden=512, intermediate=1536, layers=4, heads=8, kv_heads=4, head=64, vocabulary=2048, weights_spread=0.06
    ),
    "llama-8b": Shape(hidden=4096, intermediate=14336, layers=32, heads=32, kv_heads=8, head=128, vocabulary=128_256),
}
"""small: slow enough on a CPU for its prefill to matter, and with a weight spread at which its answers differ."""
DRAWN = ("small",)
"""Shapes that get weights."""


def write(folder: Path, shape: Shape, *, weights: bool, seed: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_config(shape), indent=1))
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer(shape)))
    special = dict(zip(("unk_token", "bos_token", "eos_token"), SPECIAL, strict=True))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **special}))
    if weights:
        _write_weights(folder / "model.safetensors", shape, seed)


def _config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.positions,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _tokenizer(shape: Shape) -> dict[str, Any]:
    """One word for every token: the special ones, then w3, w4, …"""
    words = {word: token for token, word in enumerate(SPECIAL)}
    words |= {f"w{token}": token for token in range(FIRST_WORD, shape.vocabulary)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": token, "content": word, **flags} for token, word in enumerate(SPECIAL)],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": SPECIAL[0]},
    }


def _write_weights(path: Path, shape: Shape, seed: int) -> None:
    """Writes safetensors, one tensor after another: a header of JSON with offsets, then bfloat16."""
    import torch  # noqa: PLC0415 - only where a model is made; an endpoint needs none

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    header: dict[str, Any] = {}
    offset = 0
    for name, sizes in shape.tensors():
        end = offset + 2 * math.prod(sizes)
        header[name] = {"dtype": "BF16", "shape": sizes, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, sizes in shape.tensors():
            tensor = torch.ones(sizes) if len(sizes) == 1 else torch.randn(sizes, generator=generator, device=device)
            scaled = tensor if len(sizes) == 1 else tensor * shape.weights_spread
            file.write(scaled.to(torch.bfloat16).cpu().contiguous().view(torch.uint8).numpy().tobytes())
