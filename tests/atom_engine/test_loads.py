"""Loads: decided when HBM's own part is known, written nowhere else, and equal byte for byte to the computed KV."""

import random
from collections.abc import Callable
from concurrent.futures import Future
from unittest import mock

import pytest

from kvclient.atom.steps import Step
from tests.atom_engine.conftest import ATOM_DIR
from tests.atom_engine.memory import Shape
from tests.atom_engine.rig import Rig, prompt

MakeRig = Callable[..., Rig]


def test_an_evicted_prefix_is_loaded_and_the_rest_computed(make_rig: MakeRig) -> None:
    """aligned_large_hit_parks_and_emits_load_metadata.
    ATOM: stateless_page_lookup_remains_unchanged."""
    rig = make_rig()
    rig.run(prompt(1, 300))
    rig.forget_hbm()
    rig.computed_tokens = 0
    rig.run(prompt(1, 300))
    (load,) = rig.loads()
    assert (load.hbm_tokens, load.end_tokens) == (0, 288)
    assert rig.computed_tokens == 12


def test_of_a_full_hit_the_last_token_is_computed(make_rig: MakeRig) -> None:
    """The whole last chunk is loaded, but only prompt-1 counts as loaded. Scenario:
    full_prompt_hit_is_clamped_before_load_spec.
    """
    rig = make_rig()
    rig.run(prompt(1, 288))
    rig.forget_hbm()
    rig.computed_tokens = 0
    (seq,) = rig.run(prompt(1, 288), max_tokens=3)
    (load,) = rig.loads()
    assert (load.hbm_tokens, load.end_tokens) == (0, 287)
    assert len(load.blocks[0].block_ids) == 9
    assert rig.computed_tokens == 1 + 2, "the last token of the prompt, and two of three new ones"
    assert seq.offload_loaded_tokens == 287


def test_loaded_blocks_are_found_in_hbm_by_the_next_request(make_rig: MakeRig) -> None:
    """HBM promotion: offload_load_start_tokens is reported, so a third request loads nothing."""
    rig = make_rig()
    rig.run(prompt(1, 300))
    rig.forget_hbm()
    rig.run(prompt(1, 300))
    rig.orders.clear()
    rig.computed_tokens = 0
    rig.run(prompt(1, 300))
    assert rig.orders == []
    assert rig.computed_tokens == 12


@pytest.mark.parametrize("shared", [32, 64, 128])
def test_behind_an_hbm_prefix_that_is_no_whole_chunk_the_load_begins_at_once(make_rig: MakeRig, shared: int) -> None:
    """Nothing needs to be computed up to a chunk's end, because a load may begin inside a chunk (A19).
    ATOM: lmcache_connector_maps_token_ranges_to_block_ids;
    worker_reports_unaligned_hbm_load_as_failed_without_exception.
    """
    rig = make_rig()
    rig.run(prompt(1, 300))
    rig.forget_hbm()
    rig.run(prompt(1, shared) + prompt(3, 40))
    rig.orders.clear()
    rig.computed_tokens = 0
    (seq,) = rig.run(prompt(1, 300))
    (load,) = rig.loads()
    assert (load.hbm_tokens, load.end_tokens) == (shared, 288)
    assert rig.computed_tokens == 12
    assert seq.offload_loaded_tokens == 288


def test_what_brings_too_little_is_computed(make_rig: MakeRig) -> None:
    """Only tokens beyond the HBM prefix count. Scenario: load_is_skipped_if_aligned_hit_is_below_threshold."""
    rig = make_rig(min_load_tokens=161)
    rig.run(prompt(1, 300))
    rig.forget_hbm()
    rig.run(prompt(1, 128) + prompt(3, 40))
    rig.orders.clear()
    rig.run(prompt(1, 300))
    assert rig.orders == [], "160 tokens are not loaded, nor stored again"
    rig.forget_hbm()
    rig.run(prompt(1, 300))
    assert len(rig.loads()) == 1


def test_an_input_beside_the_text_is_neither_looked_up_nor_stored(make_rig: MakeRig) -> None:
    """Placeholders are the same tokens for each image."""
    rig = make_rig()
    rig.run(prompt(1, 300), multimodal_data={"image": 1})
    assert rig.orders == []
    rig.run(prompt(1, 300))
    rig.forget_hbm()
    rig.orders.clear()
    rig.run(prompt(1, 300), multimodal_data={"image": 2})
    assert rig.orders == []


def test_a_sequence_with_output_is_not_loaded_after_a_preemption(make_rig: MakeRig) -> None:
    """ATOM would size the prefill by the prompt and leave the output without KV (A24).

    The context of each forward is compared, so a hole would be noticed.
    """
    rig = make_rig(shape=Shape(blocks=19), max_num_seqs=2, chunk_tokens=64)
    first = rig.add(prompt(1, 270), max_tokens=60)
    second = rig.add(prompt(2, 270), max_tokens=60)
    rig.until("a preemption", lambda: rig.scheduler.preemptions)
    rig.scheduler.forget_prefixes()  # so that only the server has its prompt
    rig.orders.clear()
    rig.drain()
    assert first.is_finished
    assert second.is_finished
    assert rig.loads() == []


def test_loads_are_begun_before_stores(make_rig: MakeRig) -> None:
    """Requests wait for loads, not for stores.
    ATOM: mixed_batch_reserves_slot_load_before_preparing_save.
    """
    rig = make_rig()
    rig.run(prompt(1, 300))
    rig.forget_hbm()
    rig.run(prompt(1, 300))
    begun: list[str] = []
    client = rig.workers[0]._worker._half._client
    (load,), store = rig.loads(), rig.orders[0].stores[0]
    with (
        mock.patch.object(client, "retrieve", side_effect=lambda *_, **__: begun.append("load") or Future()),
        mock.patch.object(client, "store", side_effect=lambda *_, **__: begun.append("store") or Future()),
    ):
        rig.workers[0].start_load_kv(Step((load,), (store,)))
    assert begun == ["load", "store"]


@pytest.mark.skipif(not ATOM_DIR, reason="the stand-in has no deferred output; ATOM_DIR names a checkout that has")
def test_tokens_that_come_a_step_late(make_rig: MakeRig) -> None:
    """A token sampled after a partial chunk is dropped, across park and resume, as without a load (A13)."""
    rig = make_rig(deferred_output=True, max_num_batched_tokens=100)
    first, other = rig.run(prompt(1, 300), prompt(2, 150), max_tokens=7)
    rig.forget_hbm()
    again, long = rig.run(prompt(1, 300), prompt(2, 150) + prompt(3, 300), max_tokens=7)
    assert len(rig.loads()) == 2
    assert [seq.num_tokens for seq in (first, other, again, long)] == [307, 157, 307, 457]


@pytest.mark.parametrize(("tensor", "stages"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_many_turns_of_many_conversations(make_rig: MakeRig, tensor: int, stages: int) -> None:
    """The pool holds a fraction of them, so prefixes are evicted, loaded, promoted, shared and preempted.

    Each forward compares its whole context.
    """
    rig = make_rig(
        shape=Shape(layers=2, blocks=41), tensor=tensor, stages=stages, max_num_batched_tokens=170, max_num_seqs=4
    )
    draw = random.Random(f"{tensor} {stages}")
    system = prompt(9, 110)
    histories = [system + prompt(10 + number, draw.randrange(20, 90)) for number in range(6)]
    for turn in range(3):
        for number in draw.sample(range(6), 6):
            rig.add(histories[number], max_tokens=draw.randrange(1, 40))
            for _ in range(draw.randrange(4)):
                rig.step()
            histories[number] = histories[number] + prompt(1000 + 10 * turn + number, draw.randrange(10, 120))
        rig.scheduler.forget_prefixes()
    rig.drain()
    rig.forget_hbm()
    rig.run(*histories)
    assert len(rig.loads()) >= 2, "what is shared may be loaded once"
    assert rig.connector.get_statistics()["load_failures"] == 0
