"""Hit tokens by tier: tokens retrieved and used, counted as disk if they were there when the request asked."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvclient.offload.ranges import chunks_from_disk, tokens_within
from kvclient.values import Lease
from tests.rigs.offload_rig import BLOCK, CHUNK, Desk, table


def lease(chunks: int, on_disk: int) -> Lease:
    return Lease(1, chunks, 7, 1e9, on_disk)


def counted(desk: Desk) -> tuple[int, int]:
    return desk.offload.statistics.tokens_retrieved, desk.offload.statistics.tokens_from_disk


@pytest.mark.parametrize(
    ("on_disk", "tokens", "hbm", "expected"),
    [
        (0, 41, 0, (36, 0)),
        (3, 41, 0, (36, 36)),
        (1, 41, 0, (36, 12)),
        (1, 36, 0, (35, 11)),  # the last token is left to compute
        (1, 41, 2 * BLOCK, (28, 12)),
        (2, 41, 4 * BLOCK, (20, 20)),  # HBM reaches into the first of the two
        (2, 36, 4 * BLOCK, (19, 19)),
        (1, 36, 8 * BLOCK, (3, 3)),  # within one chunk
        (2, 41, CHUNK, (24, 24)),
    ],
)
def test_tokens_of_the_last_chunks_are_those_from_disk(
    on_disk: int, tokens: int, hbm: int, expected: tuple[int, int]
) -> None:
    desk = Desk()
    order = desk.retrieving(tokens=tokens, hbm=hbm, found=3, on_disk=on_disk)
    assert counted(desk) == (0, 0), "not before they are there"
    desk.retrieve_ends(order)
    assert counted(desk) == expected
    assert order.disk_tokens == expected[1]


@pytest.mark.parametrize(("taken", "from_disk"), [(12, 0), (16, 0), (28, 4), (35, 11), (36, 12)])
def test_what_the_engine_does_not_take_does_not_count(taken: int, from_disk: int) -> None:
    desk = Desk()
    desk.begin(tokens=41)
    desk.match(tokens=41)
    desk.answer(3, on_disk=1)
    assert desk.match(tokens=41) == 36
    order = desk.offload.allocated("r", hbm_tokens=0, tables=[table(11)], tokens=taken)
    assert order is not None
    desk.retrieve_ends(order)
    assert counted(desk) == (taken, from_disk)


def test_the_line_of_a_request_says_what_came_from_disk() -> None:
    desk = Desk()
    desk.retrieve_ends(desk.retrieving(tokens=41, hbm=BLOCK, found=3, on_disk=1))
    desk.offload.finish("r")
    line = "request=r prompt=41 hbm=4 hit=36 loaded=32 disk=12 load_ms=0.0 stored=0"
    assert str(*desk.offload.take_summaries()) == line


@given(
    chunk_tokens=st.integers(1, 7),
    leases=st.lists(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), max_size=3),
    begin=st.integers(0, 40),
    more=st.integers(-2, 40),
)
def test_tokens_are_counted_one_by_one(chunk_tokens: int, leases: list[tuple[int, int]], begin: int, more: int) -> None:
    bits, tokens = 0, set[int]()
    for chunks, on_disk in leases:
        bits |= chunks_from_disk(lease(chunks, on_disk))
        tokens |= set(range((chunks - on_disk) * chunk_tokens, chunks * chunk_tokens))
    expected = len(tokens & set(range(begin, begin + more)))
    assert tokens_within(bits, chunk_tokens=chunk_tokens, begin=begin, end=begin + more) == expected
