"""Everything that could change the bytes of an ATOM engine is in its namespace."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvclient.atom.layout import Layout, Segment
from kvclient.atom.namespace import facts_of, models_of
from kvclient.identity.model_files import code_digest
from kvclient.keys import namespace_digest
from kvclient.memory.layouts import Extent
from kvserver.errors import RequestError

SETTINGS: dict[str, object] = {"hidden_size": 48, "rope_parameters": {"rope_type": "llama3"}}


def layout(kind: str = "float8", shape: tuple[int, ...] = (14, 3, 5, 16, 8), layer: str = "layer_0") -> Layout:
    return Layout([Extent(1, 2)], [], [Segment("k_cache", layer, Extent(1, 2), 0, 7 * 64, shape, kind)], [])


def digest(**changed: Any) -> bytes:
    config = SimpleNamespace(
        **{
            "hf_config": SimpleNamespace(to_dict=lambda: changed.get("settings", SETTINGS)),
            "pipeline_parallel_size": 1,
            "tensor_parallel_size": 2,
            "kv_cache_block_size": 32,
            "kv_cache_dtype": "fp8",
            "torch_dtype": "bfloat16",
            "max_model_len": 4096,
            "speculative_config": None,
            "decode_context_parallel_size": 1,
            "prefill_context_parallel_size": 1,
            "index_cache_dtype": None,
            "online_quant_config": None,
            **changed,
        }
    )
    given: dict[str, Any] = {
        "model_id": "m",
        "weights_epoch": 0,
        "tenant": "",
        "chunk_tokens": 256,
        "replicas": 1,
        "versions": {"atom": "1"},
        "device": "gfx942",
        "sleeps": [],
    }
    given |= {name: changed[name] for name in given if name in changed}
    return namespace_digest(facts_of(config, changed.get("layout", layout()), **given))


def test_equal_engines_share() -> None:
    assert digest() == digest()


@pytest.mark.parametrize(
    "changed",
    [
        {"model_id": "n"},
        {"weights_epoch": 1},
        {"tenant": "chat"},
        {"chunk_tokens": 512},
        {"replicas": 2},
        {"versions": {"atom": "2"}},
        {"device": "gfx950"},
        {"sleeps": ["atom-dp0", 5, 1]},
        {"settings": {**SETTINGS, "hidden_size": 49}},
        {"kv_cache_dtype": "bf16"},
        {"index_cache_dtype": "fp4"},
        {"online_quant_config": {"a": 1}},
        {"torch_dtype": "float16"},
        {"tensor_parallel_size": 4},
        {"pipeline_parallel_size": 2},
        {"decode_context_parallel_size": 2},
        {"kv_cache_block_size": 16},
        {"speculative_config": SimpleNamespace(method="mtp", model="d")},
        {"layout": layout(kind="uint8")},
        {"layout": layout(shape=(14, 5, 3, 16, 8))},
        {"layout": layout(layer="layer_1")},
    ],
    ids=str,
)
def test_what_changes_the_bytes_changes_the_namespace(changed: dict[str, Any]) -> None:
    assert digest(**changed) != digest()


def test_stages_with_layers_of_their_own_agree() -> None:
    """All ranks of an engine must give the same digest; the server compares their page sizes."""
    stages = [layout(layer=f"layer_{number}") for number in (0, 30)]
    assert len({digest(pipeline_parallel_size=2, layout=stage) for stage in stages}) == 1
    assert digest(pipeline_parallel_size=2, layout=layout(kind="uint8")) != digest(
        pipeline_parallel_size=2, layout=layout()
    )


def test_the_longest_prompt_counts_only_where_positions_are_encoded_by_it() -> None:
    assert digest(max_model_len=8192) == digest()
    dynamic = {**SETTINGS, "rope_parameters": {"rope_type": "dynamic"}}
    assert digest(settings=dynamic, max_model_len=8192) != digest(settings=dynamic)


def test_dummy_weights_need_an_id() -> None:
    with pytest.raises(RequestError, match="model_id"):
        models_of(SimpleNamespace(model="m", load_dummy="zero"))


def test_code_counts_by_content(tmp_path: Path) -> None:
    assert code_digest(tmp_path / "none") == ""
    (tmp_path / "b.py").write_text("x = 1\n")
    one = code_digest(tmp_path)
    (tmp_path / "b.py").write_text("x = 2\n")
    assert len({"", one, code_digest(tmp_path)}) == 3
