"""Tiny models with random weights. The weights are large enough that the logits are not uniform.

    python -m tests.e2e.models FOLDER llama mla gemma3        # in the environment that has vLLM
    python -m tests.e2e.models FOLDER llama head adapter      # and what goes with it

Two builds of a model have the same bytes. Needs torch and transformers, which only `make e2e` installs.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import tokenizers
import torch
import transformers

VOCABULARY = 512
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.08,
}
"""initializer_range: with the usual 0.02 such a small model gives the same answer to every prompt."""


def llama() -> Any:
    config = transformers.LlamaConfig(
        intermediate_size=512, num_hidden_layers=4, num_key_value_heads=2, head_dim=64, **COMMON
    )
    return transformers.LlamaForCausalLM(config)


def mistral() -> Any:
    """One group, in which all layers have a sliding window."""
    config = transformers.MistralConfig(
        intermediate_size=512, num_hidden_layers=4, num_key_value_heads=2, head_dim=64, sliding_window=128, **COMMON
    )
    return transformers.MistralForCausalLM(config)


def experts() -> Any:
    """A mixture of experts, whose attention is as llama's."""
    config = transformers.MixtralConfig(
        intermediate_size=128,
        num_hidden_layers=4,
        num_key_value_heads=2,
        head_dim=64,
        sliding_window=None,
        num_local_experts=4,
        num_experts_per_tok=2,
        **COMMON,
    )
    return transformers.MixtralForCausalLM(config)


def gemma3() -> Any:
    """Three groups: two sliding, one with full attention."""
    config = transformers.Gemma3TextConfig(
        intermediate_size=512,
        num_hidden_layers=6,
        num_key_value_heads=2,
        head_dim=64,
        sliding_window=128,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        query_pre_attn_scalar=64,
        pad_token_id=0,
        **COMMON,
    )
    return transformers.Gemma3ForCausalLM(config)


def mla() -> Any:
    """Latent attention: every rank holds the same KV."""
    return _latent("V2", num_hidden_layers=2, num_key_value_heads=4, intermediate_size=512)


def mla_long() -> Any:
    """The KV of five layers of DeepSeek-V3, for long prompts. 260 million weights.

    It has as many heads as GPU kernels require for each of two ranks.
    """
    return _latent(
        "V2",
        num_hidden_layers=5,
        hidden_size=2048,
        intermediate_size=4096,
        num_attention_heads=32,
        num_key_value_heads=32,
        max_position_embeddings=1 << 17,
        initializer_range=0.03,
    )


def mla_mtp() -> Any:
    """A model of one layer; build_mtp() adds another."""
    return _latent("V3", num_hidden_layers=1, num_nextn_predict_layers=1, num_key_value_heads=4, intermediate_size=512)


def _latent(version: str, **sizes: Any) -> Any:
    """A model like DeepSeek's, with the same bytes per token but without experts, which have no KV."""
    config = getattr(transformers, f"Deepseek{version}Config")(
        **{**COMMON, **sizes},
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        first_k_dense_replace=sizes["num_hidden_layers"] + sizes.get("num_nextn_predict_layers", 0),
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        n_group=1,
        topk_group=1,
    )
    return getattr(transformers, f"Deepseek{version}ForCausalLM")(config)


def lfm2() -> Any:
    """Alternates layers with states (short convolutions) and layers with full attention."""
    config = transformers.Lfm2Config(
        intermediate_size=512,
        num_hidden_layers=4,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention"] * 2,
        conv_L_cache=3,
        conv_dim=COMMON["hidden_size"],
        block_dim=COMMON["hidden_size"],
        block_auto_adjust_ff_dim=False,
        block_ffn_dim_multiplier=1.0,
        block_multiple_of=256,
        pad_token_id=0,
        **COMMON,
    )
    return transformers.Lfm2ForCausalLM(config)


def qwen3_next() -> Any:
    """Three layers with states (gated delta nets), then one with full attention; experts, which vLLM demands."""
    config = transformers.Qwen3NextConfig(
        intermediate_size=512,
        num_hidden_layers=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
        mlp_only_layers=[0, 1, 2],
        pad_token_id=0,
        **COMMON,
    )
    return transformers.Qwen3NextForCausalLM(config)


def llama_long() -> Any:
    """Head sizes that GPU attention supports, and room for longer prompts."""
    config = transformers.LlamaConfig(
        **{**COMMON, "hidden_size": 512, "max_position_embeddings": 8192},
        intermediate_size=1024,
        num_hidden_layers=4,
        num_key_value_heads=2,
        head_dim=128,
    )
    return transformers.LlamaForCausalLM(config)


MODELS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "experts": experts,
    "gemma3": gemma3,
    "mistral": mistral,
    "mla": mla,
    "mla-long": mla_long,
    "mla-mtp": mla_mtp,
    "lfm2": lfm2,
    "qwen3-next": qwen3_next,
    "llama-long": llama_long,
}


def build(name: str, folder: Path) -> None:
    """Saves model and tokenizer. The tokenizer has one word for every token, w3 to w511."""
    torch.manual_seed(0)
    MODELS[name]().to(torch.bfloat16).save_pretrained(folder, safe_serialization=True)
    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{token}": token for token in range(3, VOCABULARY)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


def build_head(folder: Path) -> None:
    """An EAGLE head that often agrees with the llama model, as long as it sees the right prefix.

    It has the model's own layers, and looks at tokens, not at hidden states, except for the first token.

    A head's first layer has no norm, so token embeddings are enlarged, and the layers' outputs as much. The later
    norms cancel the factor.
    """
    torch.manual_seed(0)
    model = llama().to(torch.bfloat16)
    larger, width = 16.0, COMMON["hidden_size"]
    tensors = {"fc.weight": torch.cat((larger * torch.eye(width), torch.zeros(width, width)), dim=1).bfloat16()}
    for name, weight in model.model.layers.state_dict().items():
        scale = 1.0
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            scale = larger
        elif name.startswith(("0.self_attn.q", "0.self_attn.k", "0.self_attn.v")):
            scale = 1 / (larger * COMMON["initializer_range"])
        tensors[f"layers.{name}"] = (scale * weight).contiguous()
    del tensors["layers.0.input_layernorm.weight"]
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(folder)
    safetensors.torch.save_file(tensors, folder / "model.safetensors")


def build_mtp(folder: Path) -> None:
    """A DeepSeek-V3 with one layer of latent attention, and an MTP layer that often agrees with it.

    It agrees as long as it sees the right prefix: it is the same layer, and looks at tokens, not at hidden states,
    except for the first two tokens.

    Its embeddings have passed a norm, which enlarges them; so its layer's outputs are enlarged by the same factor.
    """
    build("mla-mtp", folder)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    larger, width = 1 / COMMON["initializer_range"], COMMON["hidden_size"]
    layer, head = "model.layers.0.", "model.layers.1."
    for name, weight in list(tensors.items()):
        if name.startswith(layer):
            scale = larger if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            tensors[head + name.removeprefix(layer)] = (scale * weight).contiguous()
    of_tokens = torch.cat((torch.eye(width), torch.zeros(width, width)), dim=1).bfloat16()
    tensors |= {
        f"{head}eh_proj.weight": of_tokens,
        f"{head}enorm.weight": torch.ones(width).bfloat16(),
        f"{head}hnorm.weight": torch.ones(width).bfloat16(),
        f"{head}embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
        f"{head}shared_head.norm.weight": tensors["model.norm.weight"].clone(),
        f"{head}shared_head.head.weight": tensors["lm_head.weight"].clone(),
    }
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def build_adapter(folder: Path) -> None:
    """A LoRA adapter for the llama model, in peft's format; strong enough to change its output."""
    folder.mkdir()
    width, heads, kv_heads, head, rank = COMMON["hidden_size"], 4, 2, 64, 8
    random = torch.Generator().manual_seed(1)
    tensors = {}
    for layer in range(4):
        for name, outputs in (("q_proj", heads * head), ("v_proj", kv_heads * head)):
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{module}.lora_A.weight"] = torch.randn(rank, width, generator=random) * 0.1
            tensors[f"{module}.lora_B.weight"] = torch.randn(outputs, rank, generator=random) * 0.1
    safetensors.torch.save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 16,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))


BESIDE = {"head": build_head, "adapter": build_adapter}
"""What goes with the model llama."""

if __name__ == "__main__":
    for name in sys.argv[2:]:
        folder = Path(sys.argv[1]) / name
        BESIDE[name](folder) if name in BESIDE else build(name, folder)
