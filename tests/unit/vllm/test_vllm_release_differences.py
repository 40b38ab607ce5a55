"""Differences between vLLM's releases, with objects that look like each of them."""

import sys
from contextlib import nullcontext
from dataclasses import make_dataclass
from enum import Enum
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvclient.vllm import release_differences
from kvclient.vllm.layout import groups_of
from kvclient.vllm.namespace import called
from kvclient.vllm.release_differences import (
    BlockTables,
    allocations,
    check_read_while_serving,
    hash_block_tokens,
    hit_sources,
    page_orders,
    reading,
    replicas_of,
    scales_kv_by_its_first_prompt,
    scheduled,
    steps_ahead,
    understanding,
    workers_count,
)
from kvserver.errors import RequestError

COMMON_SEED = SimpleNamespace(DEFAULT_NONE_HASH_SEED="vllm-none-hash")


def output(new: list[tuple[str, int]], cached: list[tuple[str, int, Any]], **more: object) -> SimpleNamespace:
    """new: name and tokens before the step. cached: the same, and its newly allocated blocks. 10 tokens each."""
    names = [item[0] for item in (*new, *cached)]
    fields: dict[str, object] = {
        "scheduled_new_reqs": [
            SimpleNamespace(req_id=name, num_computed_tokens=tokens, block_ids=([len(name)], [5]))
            for name, tokens in new
        ],
        "scheduled_cached_reqs": SimpleNamespace(
            req_ids=[item[0] for item in cached],
            num_computed_tokens=[item[1] for item in cached],
            new_block_ids=[item[2] for item in cached],
            resumed_req_ids=set(),
        ),
        "num_scheduled_tokens": dict.fromkeys(names, 10),
        "scheduled_spec_decode_tokens": {},
    }
    return SimpleNamespace(**{**fields, **more})


@pytest.mark.parametrize(
    ("methods", "known"),
    [
        ([], False),
        (["set_xfer_handshake_metadata_pp_aware"], False),  # 0.26
        (["set_xfer_handshake_metadata_pp_aware", "get_mem_pool_context"], True),  # 0.31
    ],
)
def test_stages_are_known_since_vllm_asks_where_to_allocate(methods: list[str], known: bool) -> None:
    assert release_differences.knows_stages(type("Base", (), dict.fromkeys(methods))) is known


@pytest.mark.parametrize(("methods", "right"), [([], False), (["get_mem_pool_context"], True)])
def test_requests_recover_since_vllm_asks_where_to_allocate(methods: list[str], right: bool) -> None:
    assert release_differences.recovers(type("Base", (), dict.fromkeys(methods))) is right


def test_a_step_counts_what_will_be_computed_but_no_drafts() -> None:
    step = output([("a", 0)], [("b", 30, None)], scheduled_spec_decode_tokens={"b": [7, 7, 7]})
    assert list(scheduled(step)) == [("a", 0, 10, True), ("b", 30, 37, True)]


@pytest.mark.parametrize("release", ["0.29", "0.30"])
def test_tables_are_taken_where_they_are_offered(release: str) -> None:
    held = {"a": ([1, 2], [3])}
    state = SimpleNamespace(block_ids=held) if release == "0.29" else SimpleNamespace(get_block_ids=held.get)
    of = BlockTables({}).of_step(output([], [], kv_connector_block_state=state))
    assert of("a") == ([1, 2], [3])
    assert of("gone") == ()


def test_only_states_that_are_handed_over_are_taken() -> None:
    """For block 3 the engine says where its state stopped; block 6's ended within a block."""
    held = {"a": ([1, 2, 3], [4, 5, 6]), "b": ([7], [8])}
    state = SimpleNamespace(get_block_ids=held.get, boundary_state_offloads={"a": [(1, 9, 24), (1, 6, 30)]})
    of = BlockTables({1: 12}).of_step(output([], [], kv_connector_block_state=state))
    assert of("a") == [[1, 2, 3], [0, 9, 0]]
    assert of("b") == [[7], [0]]
    assert of("gone") == ()


def test_tables_are_followed_where_they_are_not() -> None:
    tables = BlockTables({})
    tables.allocated("aa", ([9], [9]))
    assert tables.of_step(output([("aa", 0)], []))("aa") == [[2], [5]]
    assert tables.of_step(output([], [("aa", 10, ([3, 4], [])), ("b", 0, None)]))("aa") == [[2, 3, 4], [5]]
    again = output([], [("aa", 0, ([7], [8]))])
    again.scheduled_cached_reqs.resumed_req_ids = {"aa"}
    assert tables.of_step(again)("aa") == [[7], [8]]
    tables.forget("aa")
    assert tables.of_step(output([], []))("aa") == ()


def test_releases_that_do_not_tell_of_loads_within_a_step_may_have_some() -> None:
    step = output([], [("a", 10, None)])
    assert [item.loads_within for item in scheduled(step)] == [True]
    step.has_sync_kv_loads = False
    assert [item.loads_within for item in scheduled(step)] == [False]


def test_a_table_that_was_handed_out_does_not_grow() -> None:
    tables = BlockTables({})
    mine: tuple[list[int], list[int]] = ([1], [2])
    tables.allocated("a", mine)
    tables.of_step(output([], [("a", 10, ([3], [4]))]))
    assert mine == ([1], [2])


@pytest.mark.parametrize(
    ("algorithm", "seeds", "environment", "expected"),
    [
        ("sha256_cbor", COMMON_SEED, {}, 16),
        ("sha256_cbor", COMMON_SEED, {"PYTHONHASHSEED": "0"}, 0),
        ("sha256_cbor", SimpleNamespace(), {}, 0),
        ("sha256", COMMON_SEED, {}, 0),
    ],
)
def test_block_hashes_are_names_only_if_all_engines_agree_on_them(
    algorithm: str, seeds: Any, environment: dict[str, str], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    cache = SimpleNamespace(prefix_caching_hash_algo=algorithm)
    assert hash_block_tokens(SimpleNamespace(hash_block_size=16), cache, seeds) == expected
    assert hash_block_tokens(SimpleNamespace(), cache, seeds) == 0


@pytest.mark.parametrize(("ranks", "heads", "expected"), [(1, 8, 1), (4, 8, 1), (8, 2, 4), (4, 0, 4)])
def test_ranks_beyond_the_heads_hold_copies(ranks: int, heads: int, expected: int) -> None:
    assert replicas_of(SimpleNamespace(), ranks=ranks, heads=heads) == expected
    assert replicas_of(SimpleNamespace(kv_tp_replicas=3), ranks=ranks, heads=heads) == 3
    assert replicas_of(SimpleNamespace(kv_tp_replicas=3), ranks=ranks, heads=heads, contexts=2) == 1


@pytest.mark.parametrize(
    ("is_async", "stages", "batches", "expected"),
    [(False, 1, 1, 0), (True, 1, 2, 1), (False, 3, 3, 2), (True, 3, 4, 3), (False, 3, None, 2), (True, 1, None, 1)],
)
def test_an_engine_is_ahead_by_the_steps_that_it_has_in_flight(
    is_async: bool, stages: int, batches: int | None, expected: int
) -> None:
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(async_scheduling=is_async),
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
        **({"max_concurrent_batches": batches} if batches else {}),
    )
    assert steps_ahead(config) == expected


@pytest.mark.parametrize(
    ("chosen", "wanted", "expected"),
    [(True, None, True), (False, "1", False), (None, None, False), (None, "0", False), (None, "1", True)],
)
def test_a_runner_that_counts_by_itself_is_recognized_in_all_releases(
    chosen: bool | None, wanted: str | None, expected: bool
) -> None:
    """Earlier releases choose it by the environment alone."""
    config = SimpleNamespace() if chosen is None else SimpleNamespace(use_v2_model_runner=chosen)
    assert workers_count(config, {"VLLM_USE_V2_MODEL_RUNNER": wanted} if wanted is not None else {}) is expected


def test_how_pages_are_ordered_is_what_the_engine_says_or_else_what_its_tensors_show() -> None:
    told, untold = SimpleNamespace(kv_cache_layout="LBHNC"), SimpleNamespace()
    assert page_orders(told, ["2:16 3:3"], {}) == "LBHNC"
    assert page_orders(untold, ["2:16 3:3", "2:16 3:3"], {}) == "2:16 3:3"
    assert page_orders(untold, ["2:16 3:3", "3:3 2:16"], {}) == "2:16 3:3, 3:3 2:16"
    shuffled = {"VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT": "1"}
    assert page_orders(told, [], shuffled) not in ("LBHNC", page_orders(untold, ["2:16"], shuffled))
    assert page_orders(told, [], {"VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT": "0"}) == "LBHNC"


@pytest.mark.parametrize(
    ("cache_dtype", "calculate", "is_own"), [("fp8", True, True), ("fp8", False, False), ("auto", True, False)]
)
def test_an_engine_that_finds_the_scales_of_its_kv_by_itself_is_recognized(
    cache_dtype: str, calculate: bool, is_own: bool
) -> None:
    cache = SimpleNamespace(cache_dtype=cache_dtype, calculate_kv_scales=calculate)
    assert scales_kv_by_its_first_prompt(cache) == is_own
    assert not scales_kv_by_its_first_prompt(SimpleNamespace(cache_dtype="fp8")), "from 0.31 on there is no such way"


class CacheHitSource(Enum):
    """As 0.32 has it."""

    DEVICE = "device"
    HOST = "host"
    P2P = "p2p"
    DISK = "disk"
    EXTERNAL_UNSPECIFIED = "external_unspecified"


@pytest.mark.parametrize(
    ("from_disk", "expected"), [(0, {"host": 28}), (12, {"host": 16, "disk": 12}), (28, {"disk": 28})]
)
def test_an_engine_that_asks_is_told_where_a_hit_was(from_disk: int, expected: dict[str, int]) -> None:
    told = hit_sources(SimpleNamespace(CacheHitSource=CacheHitSource), 28, from_disk=from_disk)
    assert {source.value: tokens for source, tokens in told.items()} == expected


def test_an_engine_without_words_for_it_is_told_nothing() -> None:
    assert hit_sources(SimpleNamespace(), 28, from_disk=12) == {}


# ---------------------------------------------------------------- fields that a release lacks


class KVCacheConfig(SimpleNamespace):
    """The configuration of an unknown release."""


def test_a_field_that_a_release_lacks_is_refused_by_its_name_and_the_releases() -> None:
    with (
        pytest.raises(RequestError, match=r"vLLM 0\.99\.1: .*KVCacheConfig has no 'kv_cache_groups'"),
        reading("0.99.1"),
    ):
        groups_of(KVCacheConfig())


def test_a_missing_field_is_refused_in_any_function_that_reads_it() -> None:
    read = reading("0.99.1")(called)
    with pytest.raises(RequestError, match=r"vLLM 0\.99\.1: .*KVCacheConfig has no 'model'"):
        read(KVCacheConfig())


def test_a_module_that_a_release_lacks_is_refused_as_well() -> None:
    with pytest.raises(RequestError, match=r"vLLM 0\.99\.1: No module named 'vllm_of_tomorrow'"), reading("0.99.1"):
        import_module("vllm_of_tomorrow")


@pytest.mark.parametrize("problem", [KeyError("x"), TypeError("x"), ZeroDivisionError("x"), AttributeError("x")])
def test_an_object_that_is_not_understood_is_refused_whatever_python_says(problem: Exception) -> None:
    with (
        pytest.raises(RequestError, match=rf"vLLM 0\.99\.1: the layout is not understood \({type(problem).__name__}"),
        understanding("0.99.1", "the layout"),
    ):
        raise problem


def test_a_field_that_a_layout_lacks_is_named_and_a_refusal_stays_what_it_is() -> None:
    tensor = SimpleNamespace(size=70, block_stride=20)
    with pytest.raises(RequestError, match="SimpleNamespace has no 'offset'"), understanding("0.99.1", "the layout"):
        release_differences.place_of(tensor, "a")
    with pytest.raises(RequestError, match="layout: mine"), understanding("0.99.1", "the layout"):
        raise RequestError("layout", "mine")


def test_a_bug_of_ours_is_not_taken_for_a_release_that_is_unknown() -> None:
    ours = BlockTables({})
    with pytest.raises(AttributeError, match="no_such_thing"), reading("0.99.1"):
        ours.no_such_thing  # type: ignore[attr-defined]  # noqa: B018


@pytest.fixture
def engine_classes(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """vLLM's classes with the members that we read, some of them as fields, some as methods."""
    modules: dict[str, ModuleType] = {}
    for path, names in release_differences.READ_WHILE_SERVING.items():
        module, _, name = path.rpartition(".")
        made = modules.setdefault(module, ModuleType(module))
        is_record = name.endswith(("Output", "Data"))
        found = make_dataclass(name, names) if is_record else type(name, (), dict.fromkeys(names, len))
        setattr(made, name, found)
    for name, made in modules.items():
        monkeypatch.setitem(sys.modules, name, made)
    return modules


def test_what_steps_will_read_is_looked_for_when_the_engine_starts(engine_classes: dict[str, ModuleType]) -> None:
    check_read_while_serving("0.99.1")
    output, pool = engine_classes["vllm.v1.core.sched.output"], engine_classes["vllm.v1.core.block_pool"]
    cached = output.CachedRequestData
    output.CachedRequestData = make_dataclass("CachedRequestData", ["req_ids", "new_block_ids", "num_computed_tokens"])
    with pytest.raises(RequestError, match=r"vLLM 0\.99\.1: .*CachedRequestData has no 'resumed_req_ids'"):
        check_read_while_serving("0.99.1")
    output.CachedRequestData = cached
    del pool.BlockPool.touch
    with pytest.raises(RequestError, match=r"vLLM 0\.99\.1: .*BlockPool has no 'touch'"):
        check_read_while_serving("0.99.1")


def test_tables_that_are_offered_in_a_form_that_nobody_knows_are_noticed_when_the_engine_starts(
    engine_classes: dict[str, ModuleType],
) -> None:
    output = engine_classes["vllm.v1.core.sched.output"]
    for fields, is_known in (["block_ids"], True), (["get_block_ids"], True), (["tables"], False):
        output.KVConnectorBlockState = make_dataclass("KVConnectorBlockState", fields)
        with nullcontext() if is_known else pytest.raises(RequestError, match="KVConnectorBlockState has no"):
            check_read_while_serving("0.99.1")


def test_the_allocations_of_a_cache_are_one_or_one_for_each_of_its_tensors() -> None:
    def sizes(*tensors: dict[str, object]) -> list[int]:
        return allocations(SimpleNamespace(kv_cache_tensors=[SimpleNamespace(**each) for each in tensors]))

    assert sizes({"size": 70}, {"size": 90}) == [70, 90]
    assert sizes({"size": 70, "block_stride": 0}, {"size": 90, "block_stride": 0}) == [70, 90]
    assert sizes({"size": 160, "block_stride": 20}, {"size": 160, "block_stride": 20}) == [160]
    assert sizes({"size": 70, "block_stride": 0}, {"size": 160, "block_stride": 20}) == [160, 70]
    assert sizes({"size": 160, "layers": ["a"]}, {"size": 160, "layers": ["b"]}) == [160]


def test_types_of_kv_that_a_platform_registers_are_asked_for_where_there_are_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, cache = ModuleType("vllm.config.cache"), SimpleNamespace(cache_dtype="octave")
    monkeypatch.setitem(sys.modules, "vllm.config.cache", config)
    assert release_differences.cache_dtype_handler(cache) is None
    config.get_kv_cache_dtype_handler = {"octave": 8}.get  # type: ignore[attr-defined]
    assert release_differences.cache_dtype_handler(cache) == 8


@pytest.mark.parametrize(
    ("is_eager", "mode", "said"),
    [
        (True, SimpleNamespace(name="FULL"), "enforce_eager"),
        (False, SimpleNamespace(name="NONE"), "cudagraph_mode=NONE"),
        (False, SimpleNamespace(name="FULL_AND_PIECEWISE"), ""),
        (False, None, ""),
    ],
)
def test_an_engine_without_graphs_is_noticed_by_what_it_runs_with(is_eager: bool, mode: object, said: str) -> None:
    config = SimpleNamespace(
        model_config=SimpleNamespace(enforce_eager=is_eager), compilation_config=SimpleNamespace(cudagraph_mode=mode)
    )
    assert release_differences.without_graphs(config) == said
