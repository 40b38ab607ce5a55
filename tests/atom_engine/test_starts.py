"""An engine's settings at its start, and refusals: by both halves, by name, before either waits for a server."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from kvclient.atom import connector
from kvserver.errors import RequestError
from tests.atom_engine.memory import Shape
from tests.atom_engine.rig import config_of

V4 = SimpleNamespace(compress_ratios=[4, 128])


def start(half: str, config: Any, *, tensor: int = 1) -> Any:
    if half == "scheduler":
        return connector.KvServerScheduler(config)
    with mock.patch.object(connector, "_tensor_rank", return_value=(0, tensor)):
        return connector.KvServerConnector(config)


@pytest.mark.parametrize("half", ["scheduler", "worker"])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"hf_config": V4}, "DeepSeek-V4 keeps compressor state and windows for each request beside its pages"),
        ({"pool_entries": {"state": 4}, "pipeline_parallel_size": 2}, "pipeline_parallel_size > 1 beside states"),
        (
            {
                "pool_entries": {"state": 4},
                "parallel_config": SimpleNamespace(
                    pipeline_parallel_rank=0, data_parallel_rank=0, data_parallel_size=2
                ),
            },
            "data_parallel_size > 1 beside states",
        ),
        ({"pool_entries": {"state": 4}, "state_rows": 0}, "state_rows=0 must be at least 1"),
        ({"state_rows": True}, "state_rows=True must be of type int"),
        ({"state_rows": "4"}, "state_rows='4' must be of type int"),
        ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size > 1"),
        ({"enable_rapidserve": True}, "rapidserve"),
        ({"kv_role": "both"}, "kv_role='both' must be one of"),
        ({"chunk_tokens": 40}, "chunk_tokens=40 must be a multiple of 32"),
        ({"decode_context_parallel_size": 3, "chunk_tokens": 64}, "chunk_tokens=64 must be a multiple of 96"),
        ({"chunk_tokens": True}, "chunk_tokens"),
    ],
)
def test_both_halves_refuse_it_by_name(half: str, options: dict[str, Any], said: str) -> None:
    """unknown_kv_role_fails_fast; rejects_coerced_geometry; scheduler_invalid_config_fails_fast; page without slot.
    ATOM: register_stateful_page_requires_full_slot_regions_before_engine_start;
    raw_bytes_metadata_rejects_unaligned_chunk_size; dsv4_scheduler_invalid_lmcache_config_fails_fast;
    dsv4_scheduler_invalid_lmcache_metadata_fails_fast; dsv4_scheduler_rejects_fractional_lmcache_chunk;
    dense_backend_rejects_unknown_role; dense_scheduler_invalid_lmcache_config_fails_fast;
    dense_scheduler_invalid_lmcache_metadata_fails_fast; dense_scheduler_rejects_coerced_geometry;
    explicit_slot_staging_geometry_rejects_integer_coercion."""
    config = config_of("/nowhere/kv.sock", Shape(), model="m", **options)
    with pytest.raises(RequestError, match=said):
        start(half, config)


@pytest.mark.parametrize("is_eager", [False, True])
def test_an_engine_without_graphs_is_told_what_that_costs(is_eager: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The value counts that the engine runs with, whether somebody chose it or it is the default."""
    half = start("scheduler", config_of("/nowhere/kv.sock", Shape(), model="m", enforce_eager=is_eager))
    half._half.close()
    assert ["enforce_eager" in record.message for record in caplog.records] == [True] * is_eager


def test_a_group_of_other_ranks_than_was_configured_is_refused() -> None:
    config = config_of("/nowhere/kv.sock", Shape(), model="m", tensor_parallel_size=4)
    with pytest.raises(RequestError, match="2 tensor ranks in a group; expected 4"):
        start("worker", config, tensor=2)


def test_with_decode_context_parallel_a_block_is_that_of_all_its_ranks() -> None:
    """worker_resolves_virtual_dcp_block_size; scheduler_alignment_uses_dcp_hash_blocks.
    ATOM: scheduler_alignment_uses_dcp_hash_blocks_and_lmcache_chunks; dense_worker_resolves_virtual_dcp_block_size."""
    engine = connector.Engine(config_of("/nowhere/kv.sock", Shape(), model="m", decode_context_parallel_size=3))
    assert (engine.local_block_tokens, engine.block_tokens, engine.chunk_tokens) == (32, 96, 288)


@pytest.mark.parametrize(("entries", "span", "slots"), [(0, 1, 0), (7, 1, 7), (12, 3, 4)])
def test_a_model_with_states_has_a_group_of_them(entries: int, span: int, slots: int) -> None:
    """page_only_load_needs_no_slot_reservation."""
    pool = {"pool_entries": {"state": entries}, "pool_entries_per_req": {"state": span}}
    engine = connector.Engine(config_of("/nowhere/kv.sock", Shape(), model="m", **pool))
    assert (engine.slots, engine.span) == (slots, span)
    assert [(group.kind, group.block_tokens) for group in engine.groups] == [
        ("full", 32),
        *([("state", engine.chunk_tokens)] if slots else []),
    ]


def test_each_replica_is_an_engine_of_its_own_and_its_stages_are_not() -> None:
    """engine_id_is_distinct_per_dp_replica; replica_world_size_counts_pp_and_tp_but_not_dp.
    ATOM: engine_id_defaults_to_replica_zero."""
    engines = {
        (replica, stage): connector.Engine(
            config_of(
                "/nowhere/kv.sock",
                Shape(),
                model="m",
                tensor_parallel_size=2,
                pipeline_parallel_size=3,
                parallel_config=SimpleNamespace(
                    data_parallel_rank=replica, data_parallel_size=2, pipeline_parallel_rank=stage
                ),
            )
        )
        for replica in range(2)
        for stage in range(3)
    }
    assert {engine.ranks for engine in engines.values()} == {6}
    assert [len({engine.life(0) for at, engine in engines.items() if at[0] == replica}) for replica in range(2)] == [
        1,
        1,
    ]
    assert engines[0, 0].life(0) != engines[1, 0].life(0)
    assert engines[0, 0].name != engines[1, 0].name
