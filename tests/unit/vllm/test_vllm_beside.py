"""Per-block tensors that attention layers keep beside the caches that vLLM registers: found, and stored or refused."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvclient.vllm.layout import layout_of
from kvclient.vllm.side_tensors import SideTensors
from kvserver.errors import RequestError
from kvserver.wire.messages import RegionRun
from tests.rigs.vllm_side_tensors import BLOCKS, HEADS, SIZE, TOKENS, bound, cache, config, known
from tests.rigs.vllm_tensors import AtomLayer, Layer, Tensor

# ---------------------------------------------------------------- unknown tensors


@pytest.mark.parametrize(
    ("where", "put"),
    [
        ("scales", lambda layer, tensor: setattr(layer, "scales", tensor)),
        ("impl.scales", lambda layer, tensor: setattr(layer.impl, "scales", tensor)),
        ("scales[1]", lambda layer, tensor: setattr(layer, "scales", [None, tensor])),
        ("impl.scales['k']", lambda layer, tensor: setattr(layer.impl, "scales", {"k": tensor})),
        ("_buffers['scales']", lambda layer, tensor: setattr(layer, "_buffers", {"scales": tensor})),
        ("child.scales", lambda layer, tensor: setattr(layer, "_modules", {"child": SimpleNamespace(scales=tensor)})),
    ],
)
@pytest.mark.parametrize("shape", [(BLOCKS, HEADS), (2, BLOCKS * 4, HEADS, 4), (HEADS, BLOCKS * TOKENS)])
def test_an_unknown_tensor_with_an_entry_for_each_block_is_refused(
    where: str, put: Any, shape: tuple[int, ...]
) -> None:
    """One entry per block, per kernel block or per token of all blocks, wherever the layer keeps it."""
    layer = Layer()
    beside, caches = bound(plain=Layer(), odd=layer)
    assert known(beside, caches) == {}
    put(layer, Tensor(*shape))
    with pytest.raises(RequestError) as refused:
        known(beside, caches)
    assert "layer odd" in str(refused.value)
    assert where in str(refused.value)
    assert str(shape) in str(refused.value)
    assert "--kv-cache-dtype auto" in str(refused.value)


def test_a_tensor_made_in_the_first_forward_is_found_by_the_next_look() -> None:
    layer = Layer()
    beside, caches = bound(odd=layer)
    beside.described(known(beside, caches))
    layer.scales = Tensor(BLOCKS, HEADS)
    with pytest.raises(RequestError, match="scales"):
        known(beside, caches)


@pytest.mark.parametrize(
    "harmless",
    [
        Tensor(HEADS, SIZE),
        Tensor(BLOCKS + 1, HEADS),
        Tensor(BLOCKS * 3, HEADS),
        Tensor(BLOCKS, HEADS, device="cpu"),
        Tensor(0, BLOCKS + 2),
    ],
)
def test_a_tensor_that_counts_something_else_or_lies_elsewhere_does_not_matter(harmless: Tensor) -> None:
    layer = Layer()
    beside, caches = bound(a=layer)
    layer.more = harmless
    assert known(beside, caches) == {}


def test_views_of_a_registered_cache_do_not_matter() -> None:
    layer = Layer()
    beside, caches = bound(a=layer)
    layer.keys, layer.both = caches["a"][0], [caches["a"][0], caches["a"][1]]
    assert known(beside, caches) == {}


def test_a_cache_in_several_parts_is_registered_whole() -> None:
    layer = Layer()
    beside = SideTensors({"a": layer})
    parts = [Tensor(BLOCKS, 8), Tensor(BLOCKS, 2)]
    layer.kv_cache = parts
    assert beside.known({"a": parts}, blocks=BLOCKS, block_tokens=[TOKENS]) == {}
    with pytest.raises(RequestError, match=r"kv_cache\[1\]"):
        known(beside, {"a": parts[0]})


def test_weights_that_have_as_many_rows_as_there_are_blocks_do_not_matter() -> None:
    """They were there before the number of blocks was known."""
    layer = Layer(weight=Tensor(BLOCKS, SIZE), _buffers={"positions": Tensor(BLOCKS, SIZE)})
    beside, caches = bound(a=layer)
    assert known(beside, caches) == {}
    layer.weight = Tensor(BLOCKS, SIZE)
    with pytest.raises(RequestError, match="weight"):
        known(beside, caches)


def test_layers_that_attend_to_nothing_do_not_matter() -> None:
    experts = SimpleNamespace()
    beside, caches = bound(a=Layer())
    beside = SideTensors({"a": Layer(), "experts": experts})
    experts.workspace = Tensor(BLOCKS, SIZE)
    assert known(beside, caches) == {}


# ---------------------------------------------------------------- known tensors


def test_the_scales_of_atoms_plug_in_are_stored_with_their_blocks() -> None:
    layers = {name: AtomLayer() for name in ("a", "b")}
    beside, caches = bound(**layers)
    plain = layout_of(config("a", "b"), caches, known(beside, caches))
    assert beside.awaited() == ["a", "b"]
    for layer in layers.values():
        layer.forward()
    assert beside.awaited() == []
    layout = layout_of(config("a", "b"), caches, known(beside, caches))
    page, all_blocks = 4 * HEADS * TOKENS, 4 * HEADS * TOKENS * BLOCKS
    assert layout.regions[0] == plain.regions[0] + [RegionRun(at, 0, 2, all_blocks, page, page) for at in (2, 3)]
    addresses = [found.address for found in layout.allocations[2:]]
    assert addresses == [layer.kv_scale.data_ptr() for layer in layers.values()]
    assert (plain.side_tensors, len(layout.side_tensors)) == ([], 2)


def test_scales_of_kernel_blocks_are_put_together() -> None:
    layer = AtomLayer()
    beside, caches = bound(a=layer)
    caches["a"] = layer.kv_cache = cache(BLOCKS * 2, TOKENS // 2)
    layer.forward()
    (_, scales) = layout_of(config("a"), caches, known(beside, caches)).regions[0]
    page = 4 * HEADS * TOKENS
    assert scales == RegionRun(1, 0, 2, page * BLOCKS, page, page)


def test_without_fp8_there_are_no_scales() -> None:
    layer = AtomLayer("auto")
    beside, caches = bound(a=layer)
    layer.forward()
    assert (beside.awaited(), known(beside, caches)) == ([], {})


@pytest.mark.parametrize("shape", [(2, BLOCKS + 1, HEADS, TOKENS), (2, BLOCKS, HEADS, TOKENS + 1), (BLOCKS, TOKENS)])
def test_scales_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    layer = AtomLayer()
    beside, caches = bound(a=layer)
    layer.forward(Tensor(*shape))
    with pytest.raises(RequestError, match="kv_scale"):
        known(beside, caches)


def test_scales_in_the_pages_are_awaited_since_the_first_forward_resets_those_of_all_blocks() -> None:
    """vLLM's Triton attention does so."""
    layer, other = Layer(), Layer()
    layer.impl = SimpleNamespace(_is_per_token_head_quant=True, _k_scale_cache=None)
    other.impl = SimpleNamespace(_is_per_token_head_quant=False, _k_scale_cache=None)
    beside, caches = bound(a=layer, b=other)
    assert beside.awaited() == ["a"]
    layer.impl._k_scale_cache = caches["a"][0]
    assert (beside.awaited(), known(beside, caches)) == ([], {})


def test_deepseek_v4_of_atoms_plug_in_is_refused_since_its_states_are_in_no_block() -> None:
    """Its one layer describes itself as full attention."""

    class AtomDeepseekV4ProxyAttention(Layer):
        __module__ = "atom.plugin.vllm.deepseek_v4_bridge"

    beside, caches = bound(proxy=AtomDeepseekV4ProxyAttention())
    with pytest.raises(RequestError, match="layer proxy is DeepSeek-V4"):
        known(beside, caches)


def test_another_engines_scales_of_that_name_are_not_taken_for_atoms() -> None:
    layer = Layer(kv_cache_dtype="fp8", k_scale=None, v_scale=None, kv_scale=Tensor())
    beside, caches = bound(a=layer)
    assert beside.awaited() == []
    layer.kv_scale = Tensor(2, BLOCKS, HEADS, TOKENS)
    with pytest.raises(RequestError, match="kv_scale"):
        known(beside, caches)


def test_scales_that_move_end_the_cache_unless_the_caches_come_anew() -> None:
    layer = AtomLayer()
    beside, caches = bound(a=layer)
    layer.forward()
    beside.described(known(beside, caches))
    known(beside, caches)
    layer.k_scale = None
    layer.forward()
    with pytest.raises(RequestError, match="scales"):
        known(beside, caches)
    beside.forget()
    assert list(known(beside, caches)) == ["a"]
