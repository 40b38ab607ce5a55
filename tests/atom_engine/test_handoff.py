"""Hand-off (A19): an HBM prefix that ends inside a block is computed to the block's end, and the rest is loaded.

ATOM's own prefixes end with a block today; here they are made to end five tokens earlier. A prefix of whole blocks
but not whole chunks needs no hand-off (test_loads.py), because a load may begin inside a chunk.
"""

from collections.abc import Callable
from typing import Any

import pytest

from tests.atom_engine.conftest import ATOM_DIR
from tests.atom_engine.memory import Shape
from tests.atom_engine.rig import Rig, prompt

MakeRig = Callable[..., Rig]
EARLY = 5
DROPPED = int(bool(ATOM_DIR))
"""ATOM drops the token after a prefill in chunks and decodes it again, but not after a hand-off."""


def shared(make_rig: MakeRig, **options: Any) -> Rig:
    """A rig whose server holds 288 tokens of prompt(1, 300), and whose HBM holds two blocks."""
    rig = make_rig(**options)
    rig.run(prompt(1, 300))
    rig.forget_hbm()
    rig.run(prompt(1, 64) + prompt(3, 30))
    rig.orders.clear()
    rig.computed_tokens = 0
    return rig


@pytest.mark.parametrize(("tensor", "stages"), [(1, 1), (2, 1), (2, 2)])
def test_it_is_computed_to_the_blocks_end_and_then_loaded(make_rig: MakeRig, tensor: int, stages: int) -> None:
    """unaligned_hbm_handoff_prefills_boundary_then_emits_load."""
    rig = shared(make_rig, shape=Shape(layers=2), tensor=tensor, stages=stages)
    with rig.prefixes_end_early(EARLY):
        (seq,) = rig.run(prompt(1, 300), max_tokens=3)
    (load,) = rig.loads()
    assert (load.hbm_tokens, load.end_tokens) == (64, 288)
    assert seq.offload_handoff_boundary_tokens == 64
    assert rig.computed_tokens == EARLY + 12 + 2
    assert rig.stored_tokens() == [], "what was found is not stored again"
    assert rig.connector.get_statistics()["load_failures"] == 0


def test_others_run_on_meanwhile(make_rig: MakeRig) -> None:
    """The parked sequence gives up its place among the running ones, and resumes when its load has ended."""
    rig = shared(make_rig, shape=Shape(layers=2, blocks=47), max_num_seqs=2)
    other = rig.add(prompt(5, 40), max_tokens=60)
    rig.until("the other to run", lambda: other.num_tokens > 41)
    with rig.prefixes_end_early(EARLY), rig.silence(0):
        seq = rig.add(prompt(1, 300), max_tokens=3)
        rig.until("its load", rig.loads)
        assert rig.scheduler.parked == 1
        told = other.num_tokens
        for _ in range(10):
            rig.step()
        assert other.num_tokens == told + 10
        assert seq.num_tokens == 300
    rig.drain()
    assert (seq.num_tokens, other.num_tokens) == (303, 100)
    assert rig.scheduler.parked == 0


def test_what_brings_too_little_behind_the_boundary_is_computed(make_rig: MakeRig) -> None:
    """224 tokens remain after the block's end, 229 from here. Scenario:
    unaligned_handoff_skips_if_boundary_remainder_is_too_small.
    """
    rig = shared(make_rig, min_load_tokens=225)
    with rig.prefixes_end_early(EARLY):
        rig.run(prompt(1, 300))
    assert rig.orders == []
    assert rig.computed_tokens == 300 - 64 + EARLY + DROPPED


def test_who_is_computed_past_its_boundary_goes_on(make_rig: MakeRig) -> None:
    """The limit holds at admission; steps of three tokens then cross the boundary, and only the load is lost."""
    rig = shared(make_rig, max_num_batched_tokens=3)
    with rig.prefixes_end_early(EARLY):
        (seq,) = rig.run(prompt(1, 300))
    assert rig.loads() == []
    assert rig.stored_tokens() == []
    assert rig.computed_tokens == 300 - 64 + EARLY + DROPPED
    assert seq.is_finished


def test_a_load_that_fails_behind_the_boundary_is_computed_from_there(make_rig: MakeRig) -> None:
    """The load's HBM floor is the boundary: chunks computed again may be stored again from there on."""
    rig = shared(make_rig, tensor=2)
    with rig.prefixes_end_early(EARLY), rig.refuse(1):
        rig.run(prompt(1, 300))
    assert len(rig.loads()) == 1
    assert rig.computed_tokens == 300 - 64 + EARLY
    assert rig.stored_tokens() == [(0, 288)]


@pytest.mark.parametrize("when", ["before the boundary", "in its load"])
def test_an_abort_on_the_way_costs_no_block(make_rig: MakeRig, when: str) -> None:
    rig = shared(make_rig, max_num_batched_tokens=2 if when == "before the boundary" else 100)
    with rig.prefixes_end_early(EARLY), rig.silence(0):
        seq = rig.add(prompt(1, 300), max_tokens=9)
        if when == "in its load":
            rig.until("its load", rig.loads)
        else:
            rig.until("its first tokens", lambda: seq.num_cached_tokens > 59)
            assert id(seq) in rig.connector._half.handoffs
        rig.abort(seq)
        for _ in range(3):
            rig.step()
    rig.drain()
    assert seq.is_finished
    assert seq.num_tokens <= 301
    assert rig.connector._half.handoffs == set()
