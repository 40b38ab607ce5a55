"""The ceiling of a replay: the hits of caches of a given capacity and unlimited speed."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.replay.options import ReplayOptions
from benchmarks.replay_ideal import NEVER, Ask, Belady, Lru, asks, hit_tokens, needs

OPTIONS = ReplayOptions(block_tokens=1, blocks_per_chunk=1, regions=1, page_bytes=8, context_tokens_max=100)


def _ask(chunks: list[int], held: int = 0) -> Ask:
    return Ask(prompt_tokens=len(chunks) + 1, held_blocks=held, usable_blocks=len(chunks), chunks=chunks)


def test_a_full_cache_forgets_tails_before_heads() -> None:
    cache = Lru(3)
    cache.take_in(0, [1, 2, 3])
    cache.take_in(1, [7])
    assert [cache.holds(chunk) for chunk in (1, 2, 3, 7)] == [True, True, False, True]


def test_who_knows_the_future_forgets_what_is_needed_last() -> None:
    asked = [_ask([1, 2]), _ask([7, 8]), _ask([7, 8]), _ask([1, 2])]
    assert hit_tokens(asked, Lru(2), OPTIONS) == 2
    cache = Belady(3, needs(asked))
    assert hit_tokens(asked, cache, OPTIONS) == 3  # 7, 8 and the head of the other


def test_what_hbm_holds_counts_once_and_a_missing_head_ends_what_the_server_serves() -> None:
    asked = [_ask([1, 2, 3]), _ask([1, 2, 3], held=2)]
    assert hit_tokens(asked, Lru(NEVER), OPTIONS) == 3
    assert hit_tokens(asked, Lru(2), OPTIONS) == 2
    assert hit_tokens(asked, Lru(0), OPTIONS) == 2


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5)), max_size=30), st.integers(0, 12))
def test_nobody_hits_more_than_who_knows_the_future(conversations: list[tuple[int, int]], chunks_max: int) -> None:
    asked = [_ask([10 * number + i for i in range(chunks)]) for number, chunks in conversations]
    known = hit_tokens(asked, Belady(chunks_max, needs(asked)), OPTIONS)
    assert hit_tokens(asked, Lru(chunks_max), OPTIONS) <= known <= hit_tokens(asked, Lru(NEVER), OPTIONS)


def test_requests_of_a_trace_are_asked_with_what_their_workers_hold() -> None:
    options = replace(ReplayOptions(), requests=40, users=3, pool_tokens=101_000)
    asked = asks(options)
    assert len(asked) == 40
    assert any(ask.held_blocks for ask in asked)
    assert all(ask.held_blocks <= ask.usable_blocks for ask in asked)
    assert all(len(ask.chunks) == ask.prompt_tokens // options.chunk_tokens for ask in asked)
