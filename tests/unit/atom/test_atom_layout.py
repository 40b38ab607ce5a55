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


def described(
    caches: dict[str, Any], transfer: Any = None, blocks: int | None = BLOCKS, *, slots: int = 0, span: int = 1
) -> Layout:
    return layout_of(caches, transfer, blocks=blocks, block_tokens=BLOCK, entries=slots * span, span=span)


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
            {"layer_0": cache(k_cache=k())},
            SimpleNamespace(block_regions=[], slot_regions=[region(k())]),
            "unsupported",
            "1 of a kind that is not understood",
        ),
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


# ---------------------------------------------------------------- states

SLOTS = 9


def recurrent(at: int = 1 << 21, *, entries: int = SLOTS, item_bytes: int = 4, ssm: int = 16) -> SimpleNamespace:
    conv = tensor(entries, 3, 5, at=at)
    return cache(k_cache=conv, v_cache=tensor(entries, 2, 7, ssm, item_bytes=item_bytes, at=at + conv.bytes))


def slot_region(unit: Any, *, slots: int = SLOTS, at: int = 1 << 22, **more: Any) -> SimpleNamespace:
    fields = {"total_bytes": slots * unit, "reverse_indexed": True, "semantic_role": f"plane {unit}", **more}
    return SimpleNamespace(**{"base_addr": BASE + at, "unit_bytes": unit, **fields})


def v4(*slots: SimpleNamespace, planes: int | None = 2, **more: Any) -> SimpleNamespace:
    pages = [
        SimpleNamespace(base_addr=BASE + at, total_bytes=BLOCKS * unit, semantic_role=role)
        for at, unit, role in ((0, 37, "nope"), (1 << 20, 11, "rope"), (1 << 16, 5, "csa 3"), (1 << 12, 5, "csa 1"))
    ]
    fields = {"slot_regions": [], "swa_block_regions": list(slots), "expected_full_slot_region_count": planes, **more}
    return SimpleNamespace(block_regions=pages, **fields)


@pytest.mark.parametrize("span", [1, 3])
def test_the_state_of_a_recurrent_layer_is_the_first_of_a_requests_entries(span: int) -> None:
    layers = {"layer_0": recurrent(entries=SLOTS * span), "layer_1": cache(k_cache=k(), v_cache=v(100_000))}
    layout = described(layers, slots=SLOTS, span=span)
    conv, ssm = 3 * 5 * 2, 2 * 7 * 16 * 4
    assert [(plane.address - BASE, plane.step, plane.bytes) for plane in layout.planes] == [
        (1 << 21, span * conv, conv),
        ((1 << 21) + SLOTS * span * conv, span * ssm, ssm),
    ]
    assert [segment.layer for segment in layout.segments] == ["layer_1", "layer_1"]


def test_slots_of_deepseek_v4_count_from_the_end_of_their_memory_and_its_blocks_from_the_beginning() -> None:
    layout = described({}, v4(slot_region(193), slot_region(127, at=1 << 23)), slots=SLOTS)
    assert [(plane.address - BASE, plane.step, plane.bytes) for plane in layout.planes] == [
        ((1 << 22) + 8 * 193, -193, 193),
        ((1 << 23) + 8 * 127, -127, 127),
    ]
    assert [(run.buffer, run.offset, run.block_stride, run.page_bytes) for run in layout.regions] == [
        (0, 0, 37, 37),
        (1, 0, 11, 11),
        (2, 0, 5, 5),
        (3, 0, 5, 5),
    ]
    assert [allocation.address - BASE for allocation in layout.allocations] == [0, 1 << 20, 1 << 16, 1 << 12]
    assert not layout.is_latent


def test_blocks_of_deepseek_v4_keep_atoms_order_wherever_they_lie() -> None:
    """Regions of one size differ in their roles only."""
    transfer = v4(slot_region(193), slot_region(127))
    for region_, at in zip(transfer.block_regions, (BLOCKS * 21, BLOCKS * 10, BLOCKS * 5, 0), strict=True):
        region_.base_addr = BASE + at
    layout = described({}, transfer, slots=SLOTS)
    assert [segment.layer for segment in layout.segments] == ["nope", "rope", "csa 3", "csa 1"]
    assert [run.page_bytes for run in layout.regions] == [37, 11, 5, 5]


def test_pages_are_no_states_even_if_there_are_as_many() -> None:
    layers = {"layer_0": recurrent(entries=PAGES), "layer_1": cache(k_cache=k(), v_cache=v(100_000))}
    layout = described(layers, slots=PAGES)
    assert [plane.layer for plane in layout.planes] == ["layer_0", "layer_0"]
    assert [segment.layer for segment in layout.segments] == ["layer_1", "layer_1"]


@pytest.mark.parametrize(
    ("transfer", "slots", "code", "said"),
    [
        (v4(slot_region(193)), SLOTS, "layout", "1 regions of request state; expected 2"),
        (v4(planes=None), SLOTS, "layout", "9 slots of request state, but registers no memory"),
        (v4(slot_region(193), slot_region(127)), 0, "unsupported", "DeepSeek-V4"),
        (v4(slot_region(193), slot_region(127)), 8, "layout", "expected a name, and 8 slots of one size"),
        (v4(slot_region(193, slots=8), slot_region(127)), SLOTS, "layout", "9 slots of one size"),
        (v4(slot_region(0), slot_region(127)), SLOTS, "layout", "slots of one size"),
        (v4(slot_region(193.0), slot_region(127)), SLOTS, "layout", "slots of one size"),
        (v4(slot_region(True), slot_region(127)), SLOTS, "layout", "slots of one size"),
        (v4(slot_region(193, base_addr=0), slot_region(127)), SLOTS, "layout", "slots of one size"),
        (v4(slot_region(193, semantic_role=None), slot_region(127)), SLOTS, "layout", "expected a name"),
        (v4(slot_region(193), slot_region(127), slot_regions=[slot_region(5)]), SLOTS, "unsupported", "1 of a kind"),
    ],
)
def test_a_state_that_is_not_all_there_is_refused(transfer: Any, slots: int, code: str, said: str) -> None:
    """stateful_page_initialization_rejects_incomplete_slot_geometry."""
    with pytest.raises(RequestError, match=said) as problem:
        described({}, transfer, slots=slots)
    assert problem.value.code == code


@pytest.mark.parametrize("entries", [SLOTS - 1, SLOTS + 1])
def test_recurrent_layers_with_another_number_of_slots_are_refused(entries: int) -> None:
    layers = {"layer_0": cache(k_cache=k(), v_cache=v(100_000)), "layer_1": recurrent(entries=entries)}
    with pytest.raises(RequestError, match="GDN, KDA and other recurrent layers"):
        described(layers, slots=SLOTS)


def test_recurrent_tensors_with_gaps_are_refused() -> None:
    layer = recurrent()
    layer.v_cache = tensor(SLOTS, 2, 7, 16, item_bytes=4, strides=(500, 112, 16, 1))
    with pytest.raises(RequestError, match="it has gaps"):
        described({"layer_0": layer}, slots=SLOTS)


def test_all_that_shapes_a_state_is_among_the_facts() -> None:
    """Neither addresses nor the number of slots shape it.
    ATOM: slot_fingerprint_is_stable_and_covers_required_geometry;
    slot_fingerprint_tracks_equal_geometry_plane_roles_from_codec_snapshot."""

    def of(slots: int = SLOTS, span: int = 1, layer: str = "layer_0", **more: Any) -> list[object]:
        layers = {layer: recurrent(entries=slots * span, **more), "layer_9": cache(k_cache=k(), v_cache=v(100_000))}
        return list(described(layers, slots=slots, span=span).facts(pipeline_stages=1))

    assert of() == of(at=1 << 22) == of(slots=4) == of(span=3)
    for other in (of(item_bytes=2), of(ssm=17), of(layer="layer_1")):
        assert other != of()

    def of_v4(*units: Any, role: str = "a", slots: int = SLOTS, at: int = 1 << 22) -> list[object]:
        names = [f"{role} {number}" for number in range(len(units))]
        found = [
            slot_region(unit, slots=slots, at=at, semantic_role=name) for unit, name in zip(units, names, strict=True)
        ]
        return list(described({}, v4(*found, planes=len(units)), slots=slots).facts(pipeline_stages=1))

    assert of_v4(193, 127) == of_v4(193, 127, slots=4) == of_v4(193, 127, at=1 << 23)
    for other in (of_v4(193), of_v4(127, 193), of_v4(193, 127, role="b"), of_v4(193, 128)):
        assert other != of_v4(193, 127)
