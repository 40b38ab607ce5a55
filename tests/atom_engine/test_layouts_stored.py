"""Every supported layout through the real server: evicted prefixes come back byte for byte, on every rank."""

from collections.abc import Callable

import pytest

from tests.atom_engine.memory import Shape
from tests.atom_engine.rig import Rig, prompt

LAYOUTS = {
    "mha": Shape("mha"),
    "mha, one page a block": Shape("mha", block_tokens=16, blocks=53),
    "mha, v of four dimensions": Shape("mha-v4"),
    "mha fp8 with fp32 scales": Shape("mha-fp8"),
    "mha fp8, block_ratio 3": Shape("mha-fp8", block_tokens=48, blocks=23),
    "layers of different heads": Shape("mimo", layers=4),
    "mla, token-major": Shape("mla"),
    "mla with an mtp layer": Shape("mla", draft_layers=1),
    "mla with dsa index keys": Shape("dsa"),
    "dsa with an mtp layer": Shape("dsa", draft_layers=1, layers=2),
    "index keys that only the regions tell of": Shape("m3"),
}


@pytest.mark.parametrize(("tensor", "stages"), [(1, 1), (2, 2)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_evicted_prefix_comes_back_byte_for_byte(
    make_rig: Callable[..., Rig], layout: str, tensor: int, stages: int
) -> None:
    """codec_mla_token_major_block_accounting; codec_mla_round_trip_byte_identical;
    codec_dsa_includes_index_cache_segment; codec_dsa_fp8_multilayer_including_mtp_round_trip;
    worker_load_uses_lmcache_engine_retrieve_and_marks_done; lmcache_engine_uses_selected_page_codec_bytes_per_block;
    raw_bytes_metadata_shapes_are_block_rounded."""
    shape = LAYOUTS[layout]
    rig = make_rig(shape=shape, tensor=tensor, stages=stages)
    tokens = prompt(1, 2 * 3 * shape.block_tokens + 11)
    before = rig.written_bytes()
    rig.run(tokens)
    assert rig.written_bytes() - before == 2 * 3 * stored_bytes_of_a_block(rig, tensor)
    rig.run(prompt(2, 70))
    rig.forget_hbm()
    rig.computed_tokens = 0
    rig.run(tokens + prompt(3, 50), max_tokens=4)
    (load,) = rig.loads()
    assert load.end_tokens == 2 * 3 * shape.block_tokens
    assert rig.computed_tokens == 11 + 50 + 3


def stored_bytes_of_a_block(rig: Rig, tensor: int) -> int:
    """Bytes of a block stored by all ranks; latent KV is stored once per stage."""
    of_ranks = [sum(part.bytes_of_block for part in memory.tensors) for memory in rig.memories]
    return sum(of_ranks) // (tensor if rig.shape.form in ("mla", "dsa", "kda") else 1)


@pytest.mark.parametrize("form", ["mha", "mla"])
def test_with_decode_context_parallel_each_rank_brings_its_own_tokens(make_rig: Callable[..., Rig], form: str) -> None:
    """A block of the scheduler is a page of each rank, which has every third token.
    Scenario: lmcache_connector_maps_dcp_ranges_on_virtual_block_grid.
    """
    shape = Shape(form, contexts=3, block_tokens=16, blocks=23)
    rig = make_rig(shape=shape, tensor=3)
    tokens = prompt(1, 2 * 144 + 11)
    before = rig.written_bytes()
    rig.run(tokens)
    assert rig.written_bytes() - before == 2 * 3 * stored_bytes_of_a_block(rig, 1)
    rig.forget_hbm()
    rig.run(prompt(1, 48) + prompt(2, 60))
    rig.orders.clear()
    rig.computed_tokens = 0
    (seq,) = rig.run(tokens, max_tokens=3)
    (load,) = rig.loads()
    assert (load.hbm_tokens, load.end_tokens) == (48, 288)
    assert (seq.num_prompt_tokens, rig.computed_tokens) == (299, 11 + 2)


def test_a_rank_never_gets_the_bytes_of_another(make_rig: Callable[..., Rig]) -> None:
    """Ranks of MHA hold different heads, so each has its own shard; for MLA one shard is stored for all."""
    for form, shards in (("mha", 2), ("mla", 1)):
        rig = make_rig(model=f"shards {form}", shape=Shape(form), tensor=2)
        groups = [worker._worker._half._caches[0].spec.groups[0] for worker in rig.workers]
        assert [(group.shards, group.shard, group.writers, group.writer) for group in groups] == (
            [(2, 0, 1, 0), (2, 1, 1, 0)] if shards == 2 else [(1, 0, 2, 0), (1, 0, 2, 1)]
        )


def test_equal_layouts_are_equal_runs_however_many_layers_there_are(make_rig: Callable[..., Rig]) -> None:
    """ATOM's one tensor for all layers is one run per part. Scenario: dense_backend_registers_dense_kv_byte_codec."""
    rig = make_rig(shape=Shape("mha-fp8", layers=7))
    assert len(rig.workers[0]._worker._half._caches[0].spec.groups[0].regions) == 4
