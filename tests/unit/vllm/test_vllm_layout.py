"""Addresses of vLLM's blocks, derived from tensors that only have a shape, strides and an address."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvclient.offload.settings import chosen_chunk_tokens
from kvclient.offload.values import Group
from kvclient.vllm.layout import Layout, group_specs, groups_of, layout_of, ordered_layers, states_of
from kvserver.errors import RequestError
from kvserver.wire.messages import RegionRun
from tests.rigs.vllm_tensors import Storage

BASE = 1 << 20
BLOCKS = 7


class FullAttentionSpec(SimpleNamespace): ...


class MLAAttentionSpec(FullAttentionSpec): ...


class SlidingWindowSpec(SimpleNamespace): ...


class MambaSpec(SimpleNamespace): ...


class SinkFullAttentionSpec(FullAttentionSpec): ...


@dataclass(frozen=True)
class Tensor:
    """A tensor of two-byte elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    storage: Storage

    def stride(self) -> tuple[int, ...]:
        return self.strides

    def element_size(self) -> int:
        return 2

    def data_ptr(self) -> int:
        return self.storage.address + self.offset

    def untyped_storage(self) -> Storage:
        return self.storage


def group(spec: Any, *names: str, **more: object) -> SimpleNamespace:
    return SimpleNamespace(layer_names=list(names), kv_cache_spec=spec, **more)


def placed(*layers: str, offset: int, layer_stride: int, block_stride: int) -> SimpleNamespace:
    return SimpleNamespace(layers=list(layers), offset=offset, layer_stride=layer_stride, block_stride=block_stride)


def config(groups: list[Any], tensors: list[Any]) -> SimpleNamespace:
    return SimpleNamespace(num_blocks=BLOCKS, kv_cache_groups=groups, kv_cache_tensors=tensors)


PAGE = 2 * 3 * 16 * 5
"""Heads, tokens, elements of two bytes."""


def dense(offset: int, storage: Storage) -> Tensor:
    """[blocks, heads 3, tokens 16, elements 5]"""
    return Tensor((BLOCKS, 3, 16, 5), (240, 80, 5, 1), offset, storage)


@pytest.fixture
def one_allocation() -> tuple[SimpleNamespace, dict[str, Tensor]]:
    """Two layers one after the other, as vLLM 0.31 and later place them."""
    storage = Storage(BASE, 2 * BLOCKS * PAGE)
    spec = FullAttentionSpec(block_size=16, page_size_bytes=PAGE)
    tensor = placed("a", "b", offset=0, layer_stride=BLOCKS * PAGE, block_stride=PAGE)
    return config([group(spec, "a", "b")], [tensor]), {"a": dense(0, storage), "b": dense(BLOCKS * PAGE, storage)}


def test_layers_of_one_allocation_are_one_run(one_allocation: tuple[SimpleNamespace, dict[str, Tensor]]) -> None:
    layout = layout_of(*one_allocation)
    assert layout.regions == [[RegionRun(0, 0, 2, BLOCKS * PAGE, PAGE, PAGE)]]
    assert layout.layers == [["a", "b"]]
    assert layout.allocations == [(BASE, 2 * BLOCKS * PAGE)]


def test_heads_that_lie_apart_are_regions_of_one_run() -> None:
    storage = Storage(BASE, 2 * BLOCKS * PAGE)
    strides = (80, 80 * BLOCKS, 5, 1)
    spec = FullAttentionSpec(block_size=16, page_size_bytes=PAGE)
    tensor = placed("a", "b", offset=0, layer_stride=BLOCKS * PAGE, block_stride=160)
    caches = {name: Tensor((BLOCKS, 3, 16, 5), strides, at * BLOCKS * PAGE, storage) for at, name in enumerate("ab")}
    assert layout_of(config([group(spec, "a", "b")], [tensor]), caches).regions == [
        [RegionRun(0, 0, 6, 160 * BLOCKS, 160, 160)]
    ]


def test_blocks_of_all_layers_together_are_pages_side_by_side() -> None:
    storage = Storage(BASE, 2 * BLOCKS * PAGE)
    spec = FullAttentionSpec(block_size=16, page_size_bytes=PAGE)
    tensor = placed("a", "b", offset=0, layer_stride=PAGE, block_stride=2 * PAGE)
    caches = {name: Tensor((BLOCKS, 3, 16, 5), (480, 80, 5, 1), at * PAGE, storage) for at, name in enumerate("ab")}
    assert layout_of(config([group(spec, "a", "b")], [tensor]), caches).regions == [
        [RegionRun(0, 0, 2, PAGE, 2 * PAGE, PAGE)]
    ]


def test_kernel_blocks_are_put_together() -> None:
    storage = Storage(BASE, BLOCKS * PAGE)
    spec = MLAAttentionSpec(block_size=16, page_size_bytes=PAGE)
    tensor = placed("a", offset=0, layer_stride=0, block_stride=PAGE)
    caches = {"a": Tensor((BLOCKS * 4, 3, 4, 5), (60, 20, 5, 1), 0, storage)}
    assert layout_of(config([group(spec, "a")], [tensor]), caches).regions == [[RegionRun(0, 0, 1, 0, PAGE, PAGE)]]


def test_groups_may_alias_each_other(one_allocation: tuple[SimpleNamespace, dict[str, Tensor]]) -> None:
    found, caches = one_allocation
    window = SlidingWindowSpec(block_size=16, page_size_bytes=PAGE, sliding_window=33)
    found.kv_cache_groups.append(group(window, "c"))
    found.kv_cache_tensors.append(placed("c", offset=0, layer_stride=0, block_stride=PAGE))
    layout = layout_of(found, {**caches, "c": caches["a"]})
    assert layout.regions[1] == [RegionRun(0, 0, 1, 0, PAGE, PAGE)]
    assert len(layout.allocations) == 1


def test_keys_and_values_apart_and_an_allocation_a_layer() -> None:
    """The layout of vLLM 0.20."""
    spec = FullAttentionSpec(block_size=16, page_size_bytes=2 * PAGE)
    found = config([group(spec, "a", "b")], [SimpleNamespace(shared_by=["a"]), SimpleNamespace(shared_by=["b"])])
    storages = [Storage(BASE * (at + 1), 2 * BLOCKS * PAGE) for at in range(2)]
    caches = {
        name: Tensor((2, BLOCKS, 16, 3, 5), (240 * BLOCKS, 240, 15, 5, 1), 0, storage)
        for name, storage in zip("ab", storages, strict=True)
    }
    layout = layout_of(found, caches)
    assert layout.regions == [[RegionRun(buffer, 0, 2, BLOCKS * PAGE, PAGE, PAGE) for buffer in range(2)]]
    assert layout.allocations == storages


def shared(*layers: str, **more: object) -> SimpleNamespace:
    """A KVCacheTensor of releases before 0.29: its layers share their bytes, in groups that take turns."""
    return SimpleNamespace(shared_by=list(layers), size=BLOCKS * PAGE, **more)


def test_releases_that_name_no_stride_of_layers_may_have_an_allocation_for_each() -> None:
    """As vLLM 0.24 to 0.28 show it: a block stride of 0 says that nothing else lies there."""
    spec = FullAttentionSpec(block_size=16, page_size_bytes=PAGE)
    found = config([group(spec, "a", "b")], [shared(name, offset=0, block_stride=0) for name in "ab"])
    storages = [Storage(BASE * (at + 1), BLOCKS * PAGE) for at in range(2)]
    caches = {name: dense(0, storage) for name, storage in zip("ab", storages, strict=True)}
    layout = layout_of(found, caches)
    assert layout.regions == [[RegionRun(buffer, 0, 1, 0, PAGE, PAGE) for buffer in range(2)]]
    assert layout.allocations == storages


def test_releases_that_give_each_layers_offset_in_the_blocks_of_one_allocation_are_read() -> None:
    """Also 0.24 to 0.28, for models whose layers differ."""
    storage = Storage(BASE, 3 * BLOCKS * PAGE)
    spec = FullAttentionSpec(block_size=16, page_size_bytes=PAGE)
    tensors = [shared(name, offset=at * PAGE, block_stride=3 * PAGE) for at, name in ((0, "a"), (2, "b"))]
    caches = {
        name: Tensor((BLOCKS, 3, 16, 5), (720, 80, 5, 1), at * PAGE, storage) for at, name in ((0, "a"), (2, "b"))
    }
    found = config([group(spec, "a", "b")], tensors)
    assert layout_of(found, caches).regions == [
        [RegionRun(0, 0, 1, 0, 3 * PAGE, PAGE), RegionRun(0, 2 * PAGE, 1, 0, 3 * PAGE, PAGE)]
    ]
    tensors[1].offset -= PAGE
    with pytest.raises(RequestError, match="layer b"):
        layout_of(found, caches)


def test_the_order_of_heads_and_tokens_in_a_page_is_reported_beside_its_regions() -> None:
    """Releases before 0.31 show it nowhere, and choose it by an environment variable or by another connector."""
    storage = Storage(BASE, 2 * BLOCKS * PAGE)
    tensor = SimpleNamespace(shared_by=["a"])
    spec = FullAttentionSpec(block_size=16, page_size_bytes=2 * PAGE)
    tokens_first, heads_first, more_blocks = (
        layout_of(
            SimpleNamespace(num_blocks=blocks, kv_cache_groups=[group(spec, "a")], kv_cache_tensors=[tensor]),
            {"a": Tensor((2, blocks, 16, 3, 5), (240 * blocks, 240, *strides, 1), 0, storage)},
        )
        for blocks, strides in ((BLOCKS, (15, 5)), (BLOCKS, (5, 80)), (BLOCKS - 2, (15, 5)))
    )
    assert tokens_first.regions == heads_first.regions
    assert tokens_first.orders != heads_first.orders
    assert tokens_first.orders == more_blocks.orders


@pytest.mark.parametrize("wrong", ["offset", "stride", "page", "layer", "blocks"])
def test_a_contradiction_is_refused(wrong: str, one_allocation: tuple[SimpleNamespace, dict[str, Tensor]]) -> None:
    found, caches = one_allocation
    match wrong:
        case "offset":
            caches["b"] = replace(caches["b"], offset=PAGE)
        case "stride":
            found.kv_cache_tensors[0].block_stride += 2
        case "page":
            found.kv_cache_groups[0].kv_cache_spec.page_size_bytes += 2
        case "layer":
            del caches["b"]
        case "blocks":
            found.num_blocks = 5
    with pytest.raises(RequestError, match="layout"):
        layout_of(found, caches)


def test_a_layer_that_nothing_describes_is_refused(one_allocation: tuple[SimpleNamespace, dict[str, Tensor]]) -> None:
    found, caches = one_allocation
    found.kv_cache_groups[0].layer_names.append("c")
    with pytest.raises(RequestError, match=r"layers \['c'\]"):
        layout_of(found, caches)


# ---------------------------------------------------------------- groups


def test_a_window_reaches_one_token_less_than_it_is_wide() -> None:
    found = config([group(SlidingWindowSpec(block_size=16, sliding_window=128), "a")], [])
    assert groups_of(found) == [(16, "window", 127)]


@pytest.mark.parametrize(
    "spec",
    [
        MambaSpec(block_size=16, mamba_cache_mode="none", num_speculative_blocks=0),
        MambaSpec(block_size=16, mamba_cache_mode="align", num_speculative_blocks=1),
        SinkFullAttentionSpec(block_size=16),
        FullAttentionSpec(block_size=16, prefix_cacheable=False),
        SimpleNamespace(
            block_size=16,
            kv_cache_specs={"a": FullAttentionSpec(block_size=16), "b": FullAttentionSpec(block_size=32)},
        ),
    ],
)
def test_what_cannot_be_cached_is_refused(spec: Any) -> None:
    with pytest.raises(RequestError, match="layout"):
        groups_of(config([group(spec, "a")], []))


@pytest.mark.parametrize("more", [{"enable_kv_transfer": False}, {"host_resident": True}])
def test_groups_with_a_purpose_of_their_own_are_refused(more: dict[str, object]) -> None:
    with pytest.raises(RequestError, match="layout"):
        groups_of(config([group(FullAttentionSpec(block_size=16), "a", **more)], []))


def test_layers_of_a_draft_model_are_part_of_the_blocks_bytes(
    one_allocation: tuple[SimpleNamespace, dict[str, Tensor]],
) -> None:
    """In the group of the model's own layers, or, where their pages differ, in a group of full attention as well."""
    found, caches = one_allocation
    model = layout_of(found, caches).regions[0]
    storage = Storage(9 * BASE, BLOCKS * PAGE)
    caches = {**caches, "draft": dense(0, storage)}
    found.kv_cache_tensors.append(placed("draft", offset=0, layer_stride=0, block_stride=PAGE))
    found.kv_cache_groups[0].layer_names.append("draft")
    beside = layout_of(found, caches)
    assert beside.regions == [[*model, RegionRun(1, 0, 1, 0, PAGE, PAGE)]]
    assert beside.layers == [["a", "b", "draft"]]
    assert beside.allocations[1] == storage
    found.kv_cache_groups[0].layer_names.remove("draft")
    spec = FullAttentionSpec(block_size=16, page_size_bytes=PAGE)
    found.kv_cache_groups.append(group(spec, "draft", is_eagle_group=True))
    apart = layout_of(found, caches)
    assert groups_of(found) == [(16, "full", 0), (16, "full", 0)]
    assert apart.regions == [model, [RegionRun(1, 0, 1, 0, PAGE, PAGE)]]


def state(**more: object) -> MambaSpec:
    fields: dict[str, object] = {"block_size": 48, "mamba_cache_mode": "align", "num_speculative_blocks": 0}
    return MambaSpec(**{**fields, **more})


def test_states_at_the_ends_of_blocks_decide_what_a_chunk_is() -> None:
    groups = groups_of(config([group(FullAttentionSpec(block_size=48), "a"), group(state(), "b")], []))
    assert groups == [(48, "full", 0), (48, "state", 0)]
    assert chosen_chunk_tokens(groups, 0) == chosen_chunk_tokens(groups, 48) == 48
    with pytest.raises(RequestError, match="must be 48"):
        chosen_chunk_tokens(groups, 96)


def test_a_state_lies_in_the_page_of_a_block_and_its_padding_is_left_alone() -> None:
    """As vLLM 0.32 shows it: bytes without dimensions, in the pages of the attention layers."""
    storage = Storage(BASE, BLOCKS * PAGE)
    spec = state(page_size_bytes=PAGE, real_page_size_bytes=PAGE - 34)
    tensor = placed("b", offset=0, layer_stride=0, block_stride=PAGE)
    caches = {"b": Tensor((BLOCKS, 1, 1, (PAGE - 34) // 2), (PAGE // 2, 1, 1, 1), 0, storage)}
    found = config([group(spec, "b")], [tensor])
    assert layout_of(found, caches).regions == [[RegionRun(0, 0, 1, 0, PAGE, PAGE - 34)]]


def test_what_states_are_made_of_is_told() -> None:
    kinds = {"mamba_type": "gdn", "shapes": ((3, 8), (2, 4)), "dtypes": ("bf16", "f32")}
    found = config([group(FullAttentionSpec(block_size=48), "a"), group(state(**kinds), "b", "c")], [])
    assert states_of(found) == ["gdn ((3, 8), (2, 4)) ('bf16', 'f32')"]


def test_every_rank_has_states_of_its_own_where_it_shares_kv() -> None:
    groups = [Group(48), Group(48, "state")]
    layout = Layout([], [[], []], [[], []], [])
    full, own = group_specs(groups, layout, blocks=BLOCKS, ranks=6, rank=4, replicas=6)
    assert (full.shards, full.shard, full.writers, full.writer) == (1, 0, 6, 4)
    assert (own.shards, own.shard, own.writers, own.writer) == (6, 4, 1, 0)


def test_layers_of_equal_kind_may_have_specs_of_their_own() -> None:
    specs = {"a": FullAttentionSpec(block_size=16, heads=1), "b": FullAttentionSpec(block_size=16, heads=2)}
    found = config([group(SimpleNamespace(block_size=16, kv_cache_specs=specs), "a", "b")], [])
    assert groups_of(found) == [(16, "full", 0)]


def test_a_block_has_the_tokens_of_all_ranks_that_they_are_dealt_out_to() -> None:
    dealt, own = FullAttentionSpec(block_size=16), MLAAttentionSpec(block_size=48, dcp_sharded=False)
    inner = SimpleNamespace(block_size=16, kv_cache_specs={"c": dealt})
    found = config([group(dealt, "a"), group(own, "b"), group(inner, "c")], [])
    assert [one.block_tokens for one in groups_of(found, contexts=3)] == [48, 48, 48]
    assert [one.block_tokens for one in groups_of(found)] == [16, 48, 16]


@pytest.mark.parametrize("spec", [SlidingWindowSpec(block_size=16, sliding_window=64), None])
def test_windows_and_states_whose_tokens_are_dealt_out_are_refused(spec: Any) -> None:
    found = config([group(FullAttentionSpec(block_size=16), "a"), group(spec or state(block_size=16), "b")], [])
    with pytest.raises(RequestError, match="decode context parallel"):
        groups_of(found, contexts=2)


def test_layers_are_in_the_order_of_their_regions_before_there_is_memory(
    one_allocation: tuple[SimpleNamespace, dict[str, Tensor]],
) -> None:
    found, caches = one_allocation
    found.kv_cache_groups[0].layer_names.reverse()
    assert ordered_layers(found) == layout_of(found, caches).layers == [["a", "b"]]


def test_every_stage_and_rank_has_a_shard_of_its_own() -> None:
    """Two stages of three tensor ranks each; each pair of stages and ranks once."""
    groups, layout = [Group(48)], Layout([], [[]], [[]], [])
    told = [group_specs(groups, layout, blocks=BLOCKS, ranks=6, rank=rank, replicas=1)[0] for rank in range(6)]
    assert [(one.shards, one.shard) for one in told] == [(6, rank) for rank in range(6)]


def test_the_ranks_of_a_stage_share_latent_kv_with_each_other_alone() -> None:
    groups, layout = [Group(48)], Layout([], [[]], [[]], [])
    told = [group_specs(groups, layout, blocks=BLOCKS, ranks=6, rank=rank, replicas=3)[0] for rank in range(6)]
    assert [(one.shards, one.shard, one.writers, one.writer) for one in told] == [
        (2, rank // 3, 3, rank % 3) for rank in range(6)
    ]


def test_a_chunk_is_a_whole_number_of_every_groups_blocks() -> None:
    groups = groups_of(config([group(FullAttentionSpec(block_size=size), "a") for size in (48, 16, 80)], []))
    assert chosen_chunk_tokens(groups, 0) == 480
    assert chosen_chunk_tokens(groups, 240) == 240
    assert chosen_chunk_tokens(groups[1:2], 0) == 256
    assert chosen_chunk_tokens([Group(32), Group(32, "window", 127)], 0) == 128
    assert chosen_chunk_tokens([Group(32), Group(32, "window", 99)], 0) == 96
    assert chosen_chunk_tokens([Group(32), Group(32, "window", 20)], 0) == 32
    assert chosen_chunk_tokens([Group(48), Group(48, "window", 1023)], 0) == 288
    assert chosen_chunk_tokens([Group(48), Group(48, "window", 264)], 0) == 240
    with pytest.raises(RequestError, match="multiple of 240"):
        chosen_chunk_tokens(groups, 256)


@pytest.mark.parametrize(
    ("ranks", "replicas", "rank", "expected"),
    [(1, 1, 0, (1, 0, 1, 0)), (3, 1, 2, (3, 2, 1, 0)), (6, 6, 4, (1, 0, 6, 4)), (6, 2, 5, (3, 2, 2, 1))],
)
def test_ranks_share_out_shards_and_writing(
    ranks: int,
    replicas: int,
    rank: int,
    expected: tuple[int, int, int, int],
    one_allocation: tuple[SimpleNamespace, dict[str, Tensor]],
) -> None:
    found, caches = one_allocation
    (spec,) = group_specs(
        groups_of(found), layout_of(found, caches), blocks=BLOCKS, ranks=ranks, rank=rank, replicas=replicas
    )
    assert (spec.shards, spec.shard, spec.writers, spec.writer) == expected
