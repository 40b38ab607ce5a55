"""Every layout that is understood, through the real server: evicted prefixes come back byte for byte, on every rank."""

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
    """codec round trips; codec_mla_token_major_block_accounting; codec_dsa_includes_index_cache_segment; mtp layers."""
    shape = LAYOUTS[layout]
    rig = make_rig(shape=shape, tensor=tensor, stages=stages)
    tokens = prompt(1, 2 * 3 * shape.block_tokens + 11)
    rig.run(tokens)
    rig.run(prompt(2, 70))
    rig.forget_hbm()
    rig.computed_tokens = 0
    rig.run(tokens + prompt(3, 50), max_tokens=4)
    (load,) = rig.loads()
    assert load.end_tokens == 2 * 3 * shape.block_tokens
    assert rig.computed_tokens == 11 + 50 + 3


def test_a_rank_never_gets_the_bytes_of_another(make_rig: Callable[..., Rig]) -> None:
    """Ranks of MHA hold different heads, so each has a shard of its own; of MLA one is stored for all."""
    for form, shards in (("mha", 2), ("mla", 1)):
        rig = make_rig(model=f"shards {form}", shape=Shape(form), tensor=2)
        groups = [worker._worker._half._cache.spec.groups[0] for worker in rig.workers]
        assert [(group.shards, group.shard, group.writers, group.writer) for group in groups] == (
            [(2, 0, 1, 0), (2, 1, 1, 0)] if shards == 2 else [(1, 0, 2, 0), (1, 0, 2, 1)]
        )


def test_equal_layouts_are_equal_runs_however_many_layers_there_are(make_rig: Callable[..., Rig]) -> None:
    """ATOM's one tensor for all layers is one run a part."""
    rig = make_rig(shape=Shape("mha-fp8", layers=7))
    assert len(rig.workers[0]._worker._half._cache.spec.groups[0].regions) == 4
