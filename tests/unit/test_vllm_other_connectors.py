"""Beside another connector, or with drafts: what the engine has is stored once it is known to be right."""

from kvclient.vllm_scheduler import Scheduled
from tests.unit.test_vllm_scheduler import BLOCK, Bench, request


def test_what_another_connector_brought_is_stored_when_the_engine_has_looked_at_it() -> None:
    """A load within a step: 36 tokens, and the engine computes 5. Its outcome is known when the step after is over."""
    bench, asked = Bench(), request()
    assert bench.admit(asked) == 0
    tables = [bench.table]
    assert bench.half.step([Scheduled("r", 36, 41)], lambda name: tables) == ((), ())
    assert bench.half.step([Scheduled("r", 41, 42)], lambda name: tables) == ((), ())
    _, (order,) = bench.half.step([Scheduled("r", 42, 43)], lambda name: tables)
    assert (order.first_chunk, order.chunks) == (0, 3)


def test_what_another_connector_failed_to_bring_is_stored_when_it_is_computed() -> None:
    bench, asked = Bench(), request()
    assert bench.admit(asked) == 0
    tables = [bench.table]
    assert bench.half.step([Scheduled("r", 36, 41)], lambda name: tables) == ((), ())
    assert bench.half.step([Scheduled("r", 0, 20)], lambda name: tables) == ((), ())
    _, (order,) = bench.half.step([Scheduled("r", 20, 41)], lambda name: tables)
    assert (order.first_chunk, order.chunks) == (0, 3)


def test_a_prefix_in_hbm_that_ends_within_a_block_is_no_doubt() -> None:
    bench, asked = Bench(), request()
    assert bench.admit(asked, hbm_tokens=4 * BLOCK) == 0
    assert bench.half.step([Scheduled("r", 5 * BLOCK - 1, 41)], lambda name: [bench.table]) != ((), ())


def test_drafts_that_were_accepted_are_no_doubt() -> None:
    """A step counts without its drafts, and the next begins behind those that were accepted."""
    bench, asked = Bench(), request()
    assert bench.admit(asked) == 0
    assert bench.half.step([Scheduled("r", 0, 20)], lambda name: [bench.table]) != ((), ())
    assert bench.half.step([Scheduled("r", 20 + 2 * BLOCK, 41)], lambda name: [bench.table]) != ((), ())
