"""Hit tokens by tier: tokens retrieved and used, counted as disk if they were there when the request asked."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvclient.offload.ranges import chunks_from_disk, tokens_within
from kvclient.offload.values import Group
from kvclient.values import Lease, RetrieveResult
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


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failed_retrieve_brought_nothing_from_any_tier(failing: int) -> None:
    desk = Desk(ranks=2)
    order = desk.retrieving(tokens=41, found=3, on_disk=2)
    for rank in range(2):
        result = RetrieveResult(rank != failing, 9, "disk-io" if rank == failing else "")
        desk.offload.retrieve_ended(order.job, rank, result)
    assert counted(desk) == (0, 0)


def test_tokens_count_once_whatever_the_ranks() -> None:
    desk = Desk(ranks=3)
    order = desk.retrieving(tokens=41, found=3, on_disk=2)
    for rank in range(3):
        desk.retrieve_ends(order, rank=rank)
    assert counted(desk) == (36, 24)


def test_what_is_found_and_not_retrieved_does_not_count() -> None:
    desk = Desk()
    desk.begin(tokens=41)
    desk.match(tokens=41)
    desk.answer(3, on_disk=3)
    desk.offload.admitted("r", hbm_tokens=0)
    desk.offload.finish("r")
    (summary,) = desk.offload.take_summaries()
    assert counted(desk) == (0, 0)
    assert "disk=" not in str(summary)


def test_what_was_read_for_a_request_while_it_waited_came_from_disk_though_the_second_answer_says_dram() -> None:
    desk = Desk()
    desk.begin(tokens=60)
    desk.match(tokens=60)
    desk.answer(3, on_disk=2)
    assert desk.match(tokens=60) == 36
    desk.now_s += 1  # there was no room: the missing chunks may have come
    assert desk.match(tokens=60) is None
    desk.answer(4, on_disk=0)
    assert desk.match(tokens=60) == 48
    order = desk.offload.allocated("r", hbm_tokens=0, tables=[table(15)])
    assert order is not None
    desk.retrieve_ends(order)
    assert counted(desk) == (48, 24), "chunk 0 and chunk 3 were in DRAM"


def test_what_an_earlier_wait_had_read_is_in_dram_for_the_next() -> None:
    desk = Desk()
    desk.retrieve_ends(desk.retrieving(tokens=41, found=3, on_disk=3))
    desk.offload.preempted("r")
    assert desk.match(tokens=41) is None
    desk.answer(3)
    assert desk.match(tokens=41) == 36
    again = desk.offload.allocated("r", hbm_tokens=0, tables=[table(11, 800)])
    assert again is not None
    desk.retrieve_ends(again)
    assert counted(desk) == (72, 36)


def test_what_was_asked_for_and_computed_in_an_earlier_life_is_forgotten() -> None:
    desk = Desk()
    desk.begin(tokens=41)
    desk.match(tokens=41)
    desk.answer(3, on_disk=3)
    desk.offload.admitted("r", hbm_tokens=0)
    desk.offload.preempted("r")
    desk.match(tokens=41)
    desk.answer(3, on_disk=1)
    assert desk.match(tokens=41) == 36
    order = desk.offload.allocated("r", hbm_tokens=0, tables=[table(11)])
    assert order is not None
    assert order.disk_tokens == 12


def test_an_answer_that_nobody_waits_for_any_more_says_nothing_of_tiers() -> None:
    desk = Desk()
    desk.begin(tokens=41)
    desk.match(tokens=41)
    late = desk.lookup()
    desk.now_s += 1
    assert desk.match(tokens=41) == 0
    desk.answer(3, order=late, on_disk=3)
    assert desk.match(tokens=41) == 0  # the answer is believed for a moment
    desk.now_s += 1
    assert desk.match(tokens=41) == 0
    desk.answer(3)
    assert desk.match(tokens=41) == 36
    order = desk.offload.allocated("r", hbm_tokens=0, tables=[table(11)])
    assert order is not None
    assert order.disk_tokens == 0


def test_a_chunk_of_which_a_window_alone_is_read_counts_whole() -> None:
    desk = Desk(groups=(Group(BLOCK), Group(BLOCK, "window", 5)))
    order = desk.retrieving(tokens=41, found=3, on_disk=1)
    desk.retrieve_ends(order)
    assert counted(desk) == (36, CHUNK)


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


def test_a_server_that_counts_wrong_is_no_reason_to_stop() -> None:
    assert chunks_from_disk(lease(3, 5)) == chunks_from_disk(lease(3, 3)) == 0b111
    assert chunks_from_disk(None) == 0
