"""`kvserver kvsize`: bytes of KV per token, from models' published configurations."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvserver.cli import main
from kvserver.errors import ConfigError
from kvserver.sizing.model import kv_size

LLAMA_8B = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3 = {
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
}
QWEN3_30B = {
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "hidden_size": 2048,
    "head_dim": 128,
    "dtype": "bfloat16",
}


def written(path: Path, config: object) -> Path:
    file = path / "config.json"
    file.write_text(json.dumps(config))
    return file


@pytest.mark.parametrize(
    ("config", "dtype", "token_bytes"),
    [
        (LLAMA_8B, "auto", 128 << 10),
        (LLAMA_8B, "fp8", 64 << 10),
        (DEEPSEEK_V3, "auto", 61 * 576 * 2),
        (QWEN3_30B, "auto", 48 * 2 * 4 * 128 * 2),
        ({"text_config": QWEN3_30B, "vision_config": {}}, "float32", 48 * 2 * 4 * 128 * 4),
    ],
)
def test_bytes_of_a_token_follow_from_the_configuration(
    tmp_path: Path, config: object, dtype: str, token_bytes: int
) -> None:
    assert kv_size(written(tmp_path, config), dtype).token_bytes == token_bytes
    assert kv_size(tmp_path, dtype).token_bytes == token_bytes


def test_layers_with_windows_and_states_are_counted_apart(tmp_path: Path) -> None:
    types = ["sliding_attention"] * 5 + ["full_attention"] * 2 + ["linear_attention"] * 3
    found = kv_size(written(tmp_path, {**QWEN3_30B, "num_hidden_layers": 10, "layer_types": types}))
    assert found.layers == {"window": 5, "full": 2, "state": 3}
    assert (found.token_bytes, found.window_token_bytes) == (2 * 2048, 5 * 2048)
    assert kv_size(written(tmp_path, {**QWEN3_30B, "sliding_window_pattern": 6})).layers == {"full": 8, "window": 40}
    assert kv_size(written(tmp_path, {**QWEN3_30B, "sliding_window": 4096})).layers == {"window": 48}
    none = {**QWEN3_30B, "sliding_window": 4096, "use_sliding_window": False}
    assert kv_size(written(tmp_path, none)).layers == {"full": 48}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, "num_attention_heads=None must be a positive whole number"),
        ({**LLAMA_8B, "num_hidden_layers": 0}, "num_hidden_layers=0 must be"),
        ({**LLAMA_8B, "num_key_value_heads": "8"}, "num_key_value_heads='8' must be"),
        ({**LLAMA_8B, "hidden_size": 31}, "hidden_size=31 must be at least num_attention_heads=32"),
        ({**LLAMA_8B, "layer_types": ["full_attention"] * 3}, "layer_types has 3 layers, num_hidden_layers=32"),
        ({**LLAMA_8B, "torch_dtype": "int3"}, "dtype 'int3' is none of float32"),
        ({**LLAMA_8B, "layer_types": ["full_attention", "odd"]}, "layer_types has odd; known are full_attention"),
        ({**LLAMA_8B, "num_hidden_layers": True}, "num_hidden_layers=True must be"),
        ([1], "expected a JSON object"),
    ],
)
def test_a_configuration_that_does_not_tell_is_refused_by_its_field(tmp_path: Path, config: object, says: str) -> None:
    with pytest.raises(ConfigError, match=r"config\.json") as refused:
        kv_size(written(tmp_path, config))
    assert says in refused.value.message


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        kv_size(tmp_path / "absent.json")
    for text in ("no JSON", "[" * 100_000):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match="not JSON"):
            kv_size(tmp_path)


def test_the_command_prints_what_size_asks_for(tmp_path: Path) -> None:
    said = CliRunner().invoke(main.app, ["kvsize", str(written(tmp_path, LLAMA_8B))])
    assert said.output.splitlines() == [
        "32 layers, full: 2 x 8 KV heads x 128 x 2 bytes (bfloat16)",
        "bytes a token: 131072 (128KiB)",
        "an arena of 64GiB holds 524288 tokens",
    ]
