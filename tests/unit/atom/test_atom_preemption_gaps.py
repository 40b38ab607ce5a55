"""The exact chunks stored of a prompt after ATOM skipped recomputing part of a preempted request's output."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvclient.atom.preemption_gaps import GAPS_MAX, Gaps

CHUNK = 12


def sequence(tokens: int, *, prompt: int, hbm: int = 0, first: int = 0) -> Any:
    """A sequence with tokens `first`, 1, 2, …"""
    return SimpleNamespace(
        id=1,
        token_ids=[first, *range(1, tokens)],
        num_tokens=tokens,
        num_prompt_tokens=prompt,
        num_cached_tokens=hbm,
        block_table=[1],
    )


def left_out(gaps: Gaps, *, end: int, tokens: int = 40, prompt: int = 20, hbm: int = 0, first: int = 0) -> None:
    """Preempts a sequence at `tokens` tokens; it is recomputed after HBM's part, but only up to `end`."""
    seq = sequence(tokens, prompt=prompt, hbm=hbm, first=first)
    gaps.allocated(seq)
    gaps.look()
    seq.num_cached_tokens = end
    gaps.look()


def whole(gaps: Gaps, *, hbm: int, prompt: int = 90, first: int = 0) -> int:
    return gaps.whole_tokens(sequence(prompt, prompt=prompt, hbm=hbm, first=first))


@pytest.mark.parametrize(("end", "stored"), [(20, 12), (23, 12), (24, 24), (35, 24), (36, 36), (39, 36)])
def test_whole_chunks_before_the_gap_are_stored(end: int, stored: int) -> None:
    gaps = Gaps(CHUNK)
    left_out(gaps, end=end)
    assert whole(gaps, hbm=48) == stored
    assert whole(gaps, hbm=end + 1) == stored


def test_a_gap_in_the_first_chunk_leaves_nothing_to_store() -> None:
    gaps = Gaps(CHUNK)
    left_out(gaps, end=7, prompt=6, tokens=9)
    assert whole(gaps, hbm=8) == 0


def test_who_computes_it_stores_it() -> None:
    """HBM has nothing after the gap; or the prompt is another one."""
    gaps = Gaps(CHUNK)
    left_out(gaps, end=28)
    assert whole(gaps, hbm=28) == 90
    assert whole(gaps, hbm=48, first=5) == 90
    assert whole(gaps, hbm=28, prompt=28) == 28


@pytest.mark.parametrize(("end", "hbm"), [(40, 0), (41, 0), (40, 24), (19, 0), (8, 0)])
def test_a_prefill_that_is_whole_or_not_over_leaves_no_gap(end: int, hbm: int) -> None:
    gaps = Gaps(CHUNK)
    left_out(gaps, end=end, hbm=hbm)
    assert whole(gaps, hbm=48) == 90


def test_what_hbm_has_behind_the_prompt_is_no_end_of_a_chunk() -> None:
    gaps = Gaps(CHUNK)
    left_out(gaps, end=24, hbm=24)
    assert whole(gaps, hbm=48) == 90
    left_out(gaps, end=32, hbm=24)
    assert whole(gaps, hbm=48) == 24


def test_one_that_was_preempted_again_or_ended_before_its_prefill_did_leaves_no_gap() -> None:
    gaps = Gaps(CHUNK)
    seq = sequence(40, prompt=20)
    gaps.allocated(seq)
    gaps.forget(seq)
    seq.num_cached_tokens = 28
    gaps.look()
    assert whole(gaps, hbm=48) == 90
    seq.num_cached_tokens = 0
    gaps.allocated(seq)
    seq.num_cached_tokens = 12
    gaps.allocated(seq)
    gaps.look()
    seq.num_cached_tokens = 40
    gaps.look()
    assert whole(gaps, hbm=48) == 90


def test_only_gaps_that_hbm_has_count() -> None:
    gaps = Gaps(CHUNK)
    left_out(gaps, end=34)
    left_out(gaps, end=26)
    left_out(gaps, end=26)
    assert [whole(gaps, hbm=hbm) for hbm in (26, 30, 34, 35)] == [90, 24, 24, 24]


def test_so_many_are_remembered_and_the_one_goes_that_nobody_has_met() -> None:
    gaps = Gaps(CHUNK)
    left_out(gaps, end=30, first=0xFFFF)
    left_out(gaps, end=30, first=0xFFFE)
    for number in range(GAPS_MAX - 1):
        assert whole(gaps, hbm=48, first=0xFFFF) == 24
        left_out(gaps, end=30, first=number)
    assert whole(gaps, hbm=48, first=0xFFFF) == 24
    assert whole(gaps, hbm=48, first=0xFFFE) == 90
