"""Addresses of ATOM's blocks, and layouts that are refused before a byte moves."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvclient.atom.layout import Layout, layout_of
from kvserver.errors import RequestError
from kvserver.wire.messages import RegionRun

BLOCKS, BLOCK = 7, 32
PAGES, PAGE = 14, 16
BASE = 0x7000_0000_0000


def tensor(
    *shape: int, item_bytes: int = 2, at: int = 0, strides: tuple[int, ...] = (), base: int = BASE
) -> SimpleNamespace:
    dense, step = [], 1
    for size in reversed(shape):
        dense.insert(0, step)
        step *= size
    return SimpleNamespace(
        shape=shape,
        stride=lambda: strides or tuple(dense),
        element_size=lambda: item_bytes,
        data_ptr=lambda: base + at,
        untyped_storage=lambda: SimpleNamespace(data_ptr=lambda: base, nbytes=lambda: 1 << 24),
        dtype="d",
        bytes=step * item_bytes,
    )


def cache(**parts: Any) -> SimpleNamespace:
    empty = dict.fromkeys(("k_cache", "v_cache", "k_scale", "v_scale", "index_cache"))
    return SimpleNamespace(**{**empty, **parts})


def k(at: int = 0, heads: int = 3) -> SimpleNamespace:
    return tensor(PAGES, heads, 5, PAGE, 8, at=at)


def v(at: int = 0, heads: int = 3) -> SimpleNamespace:
    return tensor(PAGES, heads, PAGE // 8, 40, 8, at=at)


def region(memory: SimpleNamespace, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(base_addr=memory.data_ptr(), total_bytes=memory.bytes, **more)


def regions(*found: SimpleNamespace, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(block_regions=list(found), slot_regions=[], swa_block_regions=[], **more)


def described(caches: dict[str, Any], transfer: Any = None, blocks: int | None = BLOCKS) -> Layout:
    return layout_of(caches, transfer, blocks=blocks, block_tokens=BLOCK)


@pytest.mark.parametrize("ratio", [1, 2, 16])
def test_the_bytes_of_a_block_follow_from_how_many_the_scheduler_counts(ratio: int) -> None:
    """block_ratio: the number of pages that a tensor has for each of its blocks."""
    pages, page = BLOCKS * ratio, BLOCK // ratio
    keys, values = tensor(pages, 3, 5, page, 8), tensor(pages, 3, 40, page, at=100_000)
    layout = described({"layer_0": cache(k_cache=keys, v_cache=values)})
    block_bytes = 3 * 40 * BLOCK * 2
    assert layout.regions == [RegionRun(0, at, 1, 0, block_bytes, block_bytes) for at in (0, 100_000)]
    assert block_bytes * BLOCKS == keys.bytes == values.bytes


@pytest.mark.parametrize("ratio", [1, 2, 16])
def test_a_tensor_that_is_no_whole_number_of_blocks_is_refused(ratio: int) -> None:
    tokens = (BLOCKS * ratio + 1) * BLOCK // ratio
    with pytest.raises(RequestError, match=f"holds {tokens} tokens, not the {BLOCKS * BLOCK} of all blocks"):
        described({"layer_0": cache(k_cache=tensor(BLOCKS * ratio + 1, 3, 5, BLOCK // ratio, 8))})


def test_a_block_is_several_pages_of_each_tensor() -> None:
    """block_ratio: block ids are the scheduler's, whatever the size of a page."""
    layout = described({"layer_0": cache(k_cache=k(), v_cache=v(at=100_000))})
    page_bytes = 2 * 3 * 5 * PAGE * 8 * 2
    assert layout.regions == [
        RegionRun(0, 0, 1, 0, page_bytes, page_bytes),
        RegionRun(0, 100_000, 1, 0, page_bytes, page_bytes),
    ]
    assert page_bytes * BLOCKS == k().bytes


def test_layers_of_one_tensor_are_one_run_a_part() -> None:
    size = k().bytes
    layers = {f"layer_{n}": cache(k_cache=k(n * size), v_cache=v((4 + n) * size)) for n in range(4)}
    layout = described(layers)
    assert [(run.offset, run.regions, run.region_stride) for run in layout.regions] == [
        (0, 4, size),
        (4 * size, 4, size),
    ]


def test_layers_of_different_heads_are_runs_of_their_own() -> None:
    layers = {"layer_0": cache(k_cache=k(), v_cache=v(1 << 20)), "layer_1": cache(k_cache=k(1 << 21, heads=2))}
    assert [run.regions for run in described(layers).regions] == [1, 1, 1]


def test_the_places_of_tensors_do_not_change_the_order_of_bytes() -> None:
    """Two allocations or one: the same pages in the same order, which is what the server compares."""
    apart = {
        "layer_0": cache(k_cache=tensor(PAGES, 3, 5, PAGE, 8, base=BASE + (1 << 30))),
        "layer_1": cache(k_cache=k()),
    }
    layout = described(apart)
    assert len(layout.allocations) == 2
    assert [(run.buffer, run.regions) for run in layout.regions] == [(0, 1), (1, 1)]


def test_the_first_dimension_of_mla_counts_tokens() -> None:
    layout = described({"layer_0": cache(k_cache=tensor(BLOCKS * BLOCK, 1, 576))})
    assert layout.regions == [RegionRun(0, 0, 1, 0, BLOCK * 576 * 2, BLOCK * 576 * 2)]
    assert layout.is_latent


def test_index_keys_belong_to_what_is_stored() -> None:
    index = tensor(PAGES, PAGE, 144, item_bytes=1, at=1 << 20)
    layout = described({"layer_0": cache(k_cache=tensor(BLOCKS * BLOCK, 1, 576), index_cache=index)})
    assert [run.page_bytes for run in layout.regions] == [BLOCK * 576 * 2, BLOCK * 144]
    assert layout.is_latent


def test_index_keys_that_only_the_regions_tell_of_are_taken_from_there() -> None:
    index = [tensor(PAGES, PAGE, 64, item_bytes=1, at=(1 << 21) + n * PAGES * PAGE * 64) for n in range(2)]
    layers = {"layer_0": cache(k_cache=k(), v_cache=v(1 << 20))}
    layout = described(layers, regions(region(k()), region(v(1 << 20)), *map(region, index)))
    assert layout.regions[2:] == [RegionRun(1, 0, 2, PAGES * PAGE * 64, BLOCK * 64, BLOCK * 64)]
    assert layout.allocations[1] == (BASE + (1 << 21), 2 * PAGES * PAGE * 64)
    assert not layout.is_latent


def test_scales_that_a_cache_has_no_use_for_are_left_out() -> None:
    """ATOM makes them for bf16 as well and reports them, but binds them to no layer."""
    scales = [tensor(PAGES, 3, PAGE, item_bytes=4, at=(1 << 21) + n * PAGES * 3 * PAGE * 4) for n in range(2)]
    layers = {"layer_0": cache(k_cache=k(), v_cache=v(1 << 20))}
    known = [region(k()), region(v(1 << 20))]
    assert len(described(layers, regions(*known, *map(region, scales))).regions) == 2
    extra = region(tensor(PAGES, PAGE, 6, item_bytes=2, at=1 << 22))
    assert len(described(layers, regions(*known, *map(region, scales), extra)).regions) > 2, "in doubt all of it"


@pytest.mark.parametrize(
    ("caches", "transfer", "code", "said"),
    [
        ({}, None, "layout", "no KV cache"),
        ({}, regions(region(k())), "layout", "no KV cache of any layer"),
        ({"layer_0": cache(k_cache=k())}, regions(region(tensor(45, at=1 << 22))), "layout", "not 7 equal blocks"),
        ({"layer_0": cache(k_cache=tensor(PAGES, PAGE, 3, 40))}, None, "unsupported", "not understood"),
        ({"layer_0": cache(k_cache=tensor(PAGES, 3, 5, PAGE, 4))}, None, "unsupported", "not understood"),
        ({"layer_0": cache(k_cache=tensor(PAGES, 3, PAGE, 8, item_bytes=4))}, None, "unsupported", "not understood"),
        ({"layer_1": cache(k_cache=tensor(9, 1, 4096))}, None, "unsupported", "recurrent"),
        (
            {"layer_0": cache(k_cache=tensor(9, 3, 768), v_cache=tensor(9, 4, 16, 16))},
            None,
            "unsupported",
            "GDN, KDA and other recurrent layers",
        ),
        (
            {"layer_0": cache(k_cache=k()), "layer_1": cache(v_cache=tensor(PAGES, 4, 16, PAGE + 1))},
            None,
            "unsupported",
            "GDN, KDA and other recurrent layers",
        ),
        ({"layer_0": cache(k_cache=tensor(PAGES - 2, 3, 5, PAGE, 8))}, None, "unsupported", "not addressed by blocks"),
        (
            {"layer_0": cache(k_cache=tensor(PAGES, 3, 5, PAGE, 8, strides=(9999, 640, 128, 8, 1)))},
            None,
            "layout",
            "gaps",
        ),
        ({"layer_0": cache(k_cache=k())}, regions(expected_full_slot_region_count=2), "unsupported", "each request"),
        (
            {},
            SimpleNamespace(block_regions=[region(k())], slot_regions=[], swa_block_regions=[region(k())]),
            "unsupported",
            "DeepSeek-V4",
        ),
        ({"layer_0": cache(k_cache=k())}, regions(region(k(), reverse_indexed=True)), "layout", "from their end"),
    ],
)
def test_what_is_not_understood_is_refused(caches: dict[str, Any], transfer: Any, code: str, said: str) -> None:
    """Counterparts of ATOM's tests.

    register_page_regions_rejects_invalid_region_geometry; register_empty_kv_caches_with_page_regions;
    register_rejects_malformed_full_slot_geometry_before_engine_start;
    register_empty_kv_caches_with_page_regions_selects_page_codec."""
    with pytest.raises(RequestError, match=said) as problem:
        described(caches, transfer)
    assert problem.value.code == code


def test_the_number_of_blocks_has_to_be_said() -> None:
    """No shape of an MLA cache shows it."""
    with pytest.raises(RequestError, match="num_blocks"):
        described({"layer_0": cache(k_cache=k())}, blocks=None)
