"""Everything that shapes KV is in the namespace; other settings are not, so that engines share."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvclient.offload.values import Group
from kvclient.vllm.namespace import (
    backend_called,
    called,
    check_told_by_files,
    cpu_kind,
    environment_that_counts,
    handler_called,
)
from kvserver.errors import RequestError
from tests.rigs.vllm_namespace import SETTINGS, namespace


@pytest.mark.parametrize(
    "change",
    [
        {"settings": {**SETTINGS, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5.0}}},
        {"dtype": "float16"},
        {"cache_dtype": "fp8"},
        {"skipped": ["0"]},
        {"attention": {"indexer_kv_dtype": "mxfp4"}},
        {"attention": {"use_fp4_indexer_cache": True}},
        {"quantization": "awq"},
        {"quantization_config": {"linear": {"weight": "fp8_per_channel_static"}}},
        {"backends": ["F", "G"]},
        {"environment": {"VLLM_MARLIN_INPUT_DTYPE": "fp8"}},
        {"handler": "platform.Int8Handler"},
        {"ranks": 2},
        {"layout": "LBNHC"},
        {"beside": ["a.kv_scale torch.float32 0:2 2:3 3:16"]},
        {"model_id": "n"},
        {"weights_epoch": 1},
        {"tenant": "chat"},
        {"groups": [Group(32)]},
        {"groups": [Group(16, "window", 127)]},
        {"layers": [["b", "a"]]},
        {"states": ["a state"]},
        {"chunk_tokens": 512},
        {"replicas": 2},
        {"drafts": ["eagle", "d"]},
        {"version": "0.33.0"},
        {"device": "e"},
    ],
)
def test_what_shapes_the_bytes_makes_another_namespace(change: dict[str, Any]) -> None:
    assert namespace(**change) != namespace()


@pytest.mark.parametrize(
    "change",
    [
        {"max_model_len": 2048},
        {"attention": {"indexer_kv_dtype": "auto", "use_fp4_indexer_cache": False}},
        {"settings": {**SETTINGS, "transformers_version": "9", "_name_or_path": "/elsewhere"}},
        {"backends": ["F"]},
    ],
)
def test_what_does_not_shape_them_leaves_it(change: dict[str, Any]) -> None:
    assert namespace(**change) == namespace()


def test_a_type_of_kv_that_a_platform_registers_is_told_by_its_code_and_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Since vLLM 0.33 --kv-cache-dtype may be a name that a platform gives to pages of its own making."""

    class Handler:
        __module__ = "platform_of_somebody"

        def __init__(self, bits: int) -> None:
            self.bits = bits

        def torch_dtype(self) -> str:
            return "torch.int8"

    module = ModuleType("platform_of_somebody")
    module.__file__ = str(tmp_path / "handler.py")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    names = []
    for code, bits in (("1", 3), ("2", 3), ("1", 4), ("1", 3)):
        (tmp_path / "handler.py").write_text(code)
        names.append(handler_called(Handler(bits)))
    assert len(set(names)) == 3
    assert names[0] == names[3]
    assert handler_called(None) == ""
    assert namespace(handler="") == namespace()


def test_how_each_kind_of_layer_is_quantized_is_in_the_namespace() -> None:
    ways = [{"linear": "mxfp8"}, {"moe": "mxfp8"}, {"linear": "mxfp8", "ignore": ["lm_head"]}]
    found = {namespace(quantization="online", quantization_config=way) for way in ways}
    assert len({namespace(quantization="online"), *found}) == 4


def test_a_file_that_says_how_to_quantize_is_told_by_what_it_says(tmp_path: Path) -> None:
    file = tmp_path / "torchao.json"
    found = []
    for said in ("int4", "int8"):
        file.write_text(said)
        found.append(namespace(quantization="torchao", hf_overrides={"quantization_config_file": str(file)}))
    assert found[0] != found[1]
    assert namespace(hf_overrides=lambda settings: settings) == namespace()


def test_which_layers_are_not_quantized_is_in_the_namespace() -> None:
    assert namespace(cache_dtype="fp8", skipped=["0"]) != namespace(cache_dtype="fp8", skipped=["1"])


def test_layers_that_change_their_backends_with_each_other_make_another_namespace() -> None:
    """Each lays its pages out in its own way."""
    assert (
        namespace(backends=["F", "F", "G"])
        != namespace(backends=["F", "G", "F"])
        != namespace(backends=["F", "G", "G"])
    )


def test_what_is_made_of_an_image_is_in_the_namespace_and_where_it_is_kept_meanwhile_is_not() -> None:
    def seeing(**more: object) -> bytes:
        return namespace(multimodal_config=SimpleNamespace(**{"video_pruning_rate": None, **more}))

    changes = [
        {"mm_processor_kwargs": {"num_crops": 4}},
        {"video_pruning_rate": 0.5},
        {"media_io_kwargs": {"video": {}}},
    ]
    assert len({namespace(), seeing(), *(seeing(**change) for change in changes)}) == 2 + len(changes)
    assert seeing(mm_processor_cache_gb=1) == seeing()


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope", "some-new-one"])
def test_the_longest_prompt_counts_where_positions_are_encoded_by_it(rope_type: str) -> None:
    inside = {"id2label": {0: "a"}, "text_config": {"rope_parameters": {"sliding_attention": {"rope_type": rope_type}}}}
    assert namespace(settings=inside, max_model_len=2048) != namespace(settings=inside)


def test_older_settings_name_their_rope_in_another_way() -> None:
    older: dict[str, object] = {"rope_theta": 1.0, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    assert namespace(settings=older, max_model_len=2048) != namespace(settings=older)


@pytest.mark.parametrize("load_format", ["auto", "safetensors", "sharded_state", "runai_streamer", "gguf"])
def test_weights_that_are_read_from_the_models_folder_are_told_by_it(load_format: str) -> None:
    check_told_by_files(load_format)


@pytest.mark.parametrize("load_format", ["dummy", "tensorizer", "ipc_cache", "some_plugin"])
def test_weights_that_come_from_elsewhere_need_a_model_id(load_format: str) -> None:
    with pytest.raises(RequestError, match=f"{load_format}.*model_id"):
        check_told_by_files(load_format)


@pytest.mark.parametrize("model_type", ["llama4", "llama4_text"])
def test_the_longest_prompt_counts_where_attention_is_tuned_by_it(model_type: str) -> None:
    settings = {**SETTINGS, "model_type": model_type}
    inside: dict[str, object] = {"model_type": "some", "text_config": settings}
    for these in (settings, inside):
        assert namespace(settings=these, max_model_len=65536) != namespace(settings=these)


def test_what_tunes_attention_by_a_files_word_is_in_the_namespace_and_how_tokens_are_drawn_is_not() -> None:
    settings = {**SETTINGS, "model_type": "llama4"}
    plain = namespace(settings=settings)
    assert namespace(settings=settings, generation={"temperature": 0.5}) == plain
    tuned = [
        namespace(settings=settings, generation={"attn_temperature_tuning": True}),
        namespace(settings=settings, override_generation_config={"attn_temperature_tuning": False}),
    ]
    assert len({plain, *tuned}) == 3
    both = {
        "generation": {"attn_temperature_tuning": True},
        "override_generation_config": {"attn_temperature_tuning": False},
    }
    assert namespace(settings=settings, **both) == tuned[1]


@pytest.mark.parametrize("rope_type", ["deepseek_yarn", "deepseek_llama_scaling"])
def test_a_model_that_vllm_gives_its_own_words_for_a_rope_is_shared_whatever_the_longest_prompt(rope_type: str) -> None:
    settings: dict[str, object] = {"rope_parameters": {"rope_type": rope_type, "factor": 40.0}}
    assert namespace(settings=settings, max_model_len=2048) == namespace(settings=settings)
    noted = [namespace(settings={**SETTINGS, "max_model_len": tokens}) for tokens in (2048, 4096)]
    assert noted[0] == noted[1] == namespace(), "some models leave the bound in the settings"


def test_environment_variables_that_decide_the_precision_count() -> None:
    set_ = {"VLLM_MARLIN_INPUT_DTYPE": "int8", "VLLM_LOGGING_LEVEL": "DEBUG"}
    read = SimpleNamespace(VLLM_MARLIN_INPUT_DTYPE="int8", VLLM_MOE_ROUTING_SIMULATION_STRATEGY="")
    assert environment_that_counts(set_, read) == {"VLLM_MARLIN_INPUT_DTYPE": "int8"}
    files = {"VLLM_HUMMING_ONLINE_QUANT_CONFIG": "/a/file"}
    contents = [SimpleNamespace(VLLM_HUMMING_ONLINE_QUANT_CONFIG={"dtype": bits}) for bits in ("int4", "int8")]
    assert environment_that_counts(files, contents[0]) != environment_that_counts(files, contents[1])
    assert environment_that_counts({}, read) == {}


def test_the_kind_of_cpu_says_something_and_always_the_same() -> None:
    assert cpu_kind() == cpu_kind() != ""


@pytest.mark.parametrize(
    ("served", "label"),
    [
        ("llama-8b", "llama-8b"),
        (["first", "second"], "first"),
        (None, "/models/Llama 8B"),
        ("two\nlines", "two?lines"),
        ("x" + "é" * 80, "é" * 64),
        ("y" * 7 + "é" * 64 + "z", "é" * 63 + "z"),
    ],
)
def test_a_model_is_called_what_its_users_call_it_in_no_more_bytes_than_the_server_takes(
    served: object, label: str
) -> None:
    assert called(SimpleNamespace(model="/models/Llama 8B", served_model_name=served)) == label


def test_a_backend_that_is_not_vllms_own_is_told_by_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two releases of a plug-in may lay out pages differently under one name."""

    class Backend:
        @staticmethod
        def get_name() -> str:
            return "CUSTOM"

    Backend.__module__ = "vllm.v1.attention.backends.flash_attn"
    assert backend_called(Backend) == "CUSTOM"
    Backend.__module__ = "plugin.attention"
    names = []
    for release in ("one", "two"):
        module = ModuleType("plugin.attention")
        module.__file__ = str(tmp_path / release / "attention.py")
        (tmp_path / release).mkdir()
        Path(module.__file__).write_text(f"x = '{release}'")
        monkeypatch.setitem(sys.modules, "plugin.attention", module)
        names.append(backend_called(Backend))
    assert len({"CUSTOM", *names}) == 3
    assert backend_called(Backend) == names[1]


def test_the_number_of_head_shards_takes_the_place_of_the_number_of_ranks() -> None:
    shared = namespace(ranks=4, head_shards=4)
    assert [namespace(ranks=ranks, head_shards=4) for ranks in (1, 2)] == [shared] * 2
    assert namespace(ranks=8, replicas=2, head_shards=4) == shared
    latent = namespace(ranks=1, head_shards=1)
    assert [namespace(ranks=ranks, replicas=ranks, head_shards=1) for ranks in (2, 4, 8)] == [latent] * 3
    others = [
        namespace(ranks=4),
        namespace(ranks=1),
        namespace(ranks=2, head_shards=2),
        namespace(ranks=4, head_shards=8),
        namespace(ranks=2, replicas=2),
    ]
    assert len({shared, latent, *others}) == 7


def test_without_head_shards_the_facts_are_those_of_before() -> None:
    """Also across releases of the connector: what is stored stays found."""
    assert namespace(ranks=2, replicas=2).hex() == "849ebfa83e1536bf8b539c50e9afda1b0b7599a6de465d1a343ac40a3bfa1790"
