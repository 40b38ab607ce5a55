"""Stores: which chunks and when. The frontier, whole chunks, bounds, groups, and what moves the frontier back."""

import pytest

from kvclient.offload.values import Group
from tests.rigs.offload_rig import BLOCK, CHUNK, FULL, NULL, PER_CHUNK, Desk, keys_of, span, table

WINDOW = Group(BLOCK, "window", 10)
STATE = Group(CHUNK, "state")


def test_whole_chunks_are_stored_once_their_tokens_are_computed() -> None:
    desk = Desk()
    desk.admit(tokens=40)
    assert desk.stored(tokens=CHUNK - 1) is None
    first = desk.stored(tokens=CHUNK)
    assert span(first) == (0, 1)
    assert first is not None
    assert (first.parent, first.keys) == (b"", keys_of(1))
    assert desk.stored(tokens=2 * CHUNK - 1) is None
    rest = desk.stored(tokens=40)
    assert rest is not None
    assert span(rest) == (1, 3)
    assert (rest.parent, rest.keys) == (keys_of(1), keys_of(3)[32:])
    assert rest.blocks[0].first_block == PER_CHUNK
    assert rest.blocks[0].block_ids == table(500)[PER_CHUNK : 3 * PER_CHUNK]
    assert desk.stored(tokens=40) is None


def test_a_prefix_that_the_server_holds_is_not_stored_again() -> None:
    desk = Desk()
    desk.admit(tokens=70, found=4)
    assert desk.stored(tokens=4 * CHUNK) is None
    assert span(desk.stored(tokens=70)) == (4, 5)


def test_a_long_prompt_in_the_engines_cache_and_the_servers_costs_no_bytes() -> None:
    """A published regression: hbm 129856, hit 129792, and all of it was stored again."""
    desk = Desk(chunk_tokens=192, groups=(Group(64),))
    desk.admit(tokens=129_900, hbm=129_856, found=676)
    assert desk.stored(tokens=129_900) is None
    desk.offload.finish("r")
    assert str(*desk.offload.take_summaries()) == "request=r prompt=129900 hbm=129856 hit=129792 loaded=0 stored=0"


def test_what_the_engine_holds_and_the_server_does_not_is_stored() -> None:
    desk = Desk()
    desk.admit(tokens=60, hbm=48, found=1)
    assert span(desk.stored(tokens=48)) == (1, 4)


def test_a_retrieved_prefix_is_not_stored_again() -> None:
    desk = Desk()
    desk.retrieve_ends(desk.retrieving(tokens=60, found=3))
    assert desk.stored(tokens=3 * CHUNK) is None
    assert span(desk.stored(tokens=60)) == (3, 5)


def test_a_failed_retrieve_lets_the_range_be_stored_again_from_the_engines_own_prefix() -> None:
    desk = Desk()
    desk.retrieve_ends(desk.retrieving(tokens=60, hbm=5 * BLOCK, found=4), "mover-lost")
    assert span(desk.stored(tokens=2 * CHUNK)) == (1, 2)
    assert span(desk.stored(tokens=60)) == (2, 5)


def test_nothing_is_stored_while_the_retrieve_runs() -> None:
    desk = Desk()
    desk.retrieving(tokens=60, found=2)
    assert desk.stored(tokens=60) is None


def test_a_store_waits_for_the_answer_that_could_spare_it_but_not_past_the_deadline() -> None:
    desk = Desk()
    desk.begin(tokens=41)
    assert desk.match(tokens=41, hbm=40) == 0
    desk.offload.admitted("r", hbm_tokens=40)
    assert desk.stored(tokens=41) is None
    desk.now_s += desk.options.lookup_deadline_s
    assert span(desk.stored(tokens=41)) == (0, 3)


def test_output_is_stored_when_its_keys_are_known() -> None:
    desk = Desk()
    desk.admit(tokens=20)
    assert span(desk.stored(tokens=30)) == (0, 1)
    desk.offload.extend("r", keys_of(2)[32:])
    assert span(desk.stored(tokens=30)) == (1, 2)


def test_a_request_that_was_never_matched_is_stored_like_any_other() -> None:
    desk = Desk()
    desk.begin(tokens=20)
    assert span(desk.stored(tokens=20)) == (0, 1)


# ---------------------------------------------------------------- bounds


def test_stores_in_flight_are_bounded_and_the_rest_follows() -> None:
    desk = Desk(stores_max=1)
    desk.admit(tokens=60)
    first = desk.stored(tokens=CHUNK)
    assert first is not None
    assert desk.stored(tokens=4 * CHUNK) is None
    desk.store_ends(first)
    assert span(desk.stored(tokens=60)) == (1, 5)


def test_chunks_in_flight_are_bounded_over_all_requests() -> None:
    desk = Desk(store_chunks_max=5)
    desk.admit("a", tokens=40)
    desk.admit("b", tokens=60)
    first = desk.stored("a", tokens=40)
    assert span(first) == (0, 3)
    assert span(desk.stored("b", tokens=60)) == (0, 2)
    assert desk.stored("b", tokens=60) is None
    assert first is not None
    desk.store_ends(first)
    assert span(desk.stored("b", tokens=60)) == (2, 5)


def test_what_found_no_room_before_the_end_is_counted() -> None:
    desk = Desk(stores_max=1)
    desk.admit(tokens=60)
    desk.stored(tokens=CHUNK)
    desk.stored(tokens=60)
    desk.offload.finish("r")
    assert desk.offload.statistics.skipped_tokens == {"busy": 4 * CHUNK}


# ---------------------------------------------------------------- short stores


@pytest.mark.parametrize("why", ["full", "parent-absent", "timeout", "discarded"])
def test_nothing_is_stored_after_a_gap(why: str) -> None:
    desk = Desk()
    desk.admit(tokens=60)
    first = desk.stored(tokens=40)
    assert first is not None
    desk.store_ends(first, chunks=1, why=why)
    assert desk.stored(tokens=60) is None
    desk.offload.finish("r")
    assert desk.offload.statistics.skipped_tokens == {why: 2 * CHUNK}
    (summary,) = desk.offload.take_summaries()
    assert (summary.stored_tokens, summary.why) == (CHUNK, why)


@pytest.mark.parametrize("why", ["busy", "late"])
def test_what_somebody_else_brings_is_no_gap(why: str) -> None:
    desk = Desk()
    desk.admit(tokens=60)
    first = desk.stored(tokens=40)
    assert first is not None
    desk.store_ends(first, chunks=1, why=why)
    assert span(desk.stored(tokens=60)) == (3, 5)


def test_a_gap_is_forgotten_when_the_server_is_asked_anew() -> None:
    desk = Desk()
    desk.admit(tokens=60)
    first = desk.stored(tokens=40)
    assert first is not None
    desk.store_ends(first, chunks=1, why="full")
    desk.offload.preempted("r")
    desk.match(tokens=60)
    desk.answer(1)
    desk.offload.admitted("r", hbm_tokens=0)
    assert span(desk.stored(tokens=60)) == (1, 5)


# ---------------------------------------------------------------- groups


def test_every_group_brings_its_blocks() -> None:
    desk = Desk(groups=(FULL, Group(2)))
    desk.admit(tokens=30)
    assert desk.offload.computed("r", 30, desk.now_s)
    order = desk.offload.store("r", [table(8, 100), table(15, 300)])
    assert order is not None
    assert [(item.group, item.first_block, item.block_ids) for item in order.blocks] == [
        (0, 0, table(6, 100)),
        (1, 0, table(12, 300)),
    ]


def test_a_window_group_brings_the_whole_chunks_that_the_engine_still_has() -> None:
    desk = Desk(groups=(FULL, WINDOW))
    desk.admit(tokens=40)
    assert desk.offload.computed("r", 40, desk.now_s)
    order = desk.offload.store("r", [table(10), [NULL] * 4 + table(6, 400)])
    assert order is not None
    full, window = order.blocks
    assert (full.first_block, len(full.block_ids)) == (0, 9)
    assert (window.first_block, window.block_ids) == (6, [402, 403, 404]), "chunk 1 has lost a block"


def test_a_window_group_that_has_nothing_whole_stays_away() -> None:
    desk = Desk(groups=(FULL, WINDOW))
    desk.admit(tokens=20)
    assert desk.offload.computed("r", 20, desk.now_s)
    order = desk.offload.store("r", [table(5), [NULL, *table(4, 400)]])
    assert order is not None
    assert [item.group for item in order.blocks] == [0]


def test_a_state_group_brings_the_states_that_the_engine_has_kept() -> None:
    desk = Desk(groups=(FULL, STATE))
    desk.admit(tokens=40)
    assert desk.offload.computed("r", 40, desk.now_s)
    order = desk.offload.store("r", [table(10), [NULL, NULL, 77]])
    assert order is not None
    assert (order.blocks[1].group, order.blocks[1].first_block, order.blocks[1].block_ids) == (1, 2, [77])


def test_states_alone_are_stored_when_there_is_one() -> None:
    desk = Desk(groups=(STATE,))
    desk.admit(tokens=40)
    assert desk.offload.computed("r", 20, desk.now_s)
    assert desk.offload.store("r", [[NULL]]) is None
    assert desk.offload.computed("r", 24, desk.now_s)
    order = desk.offload.store("r", [[NULL, 55]])
    assert order is not None
    assert (span(order), order.blocks[0].first_block, order.blocks[0].block_ids) == ((0, 2), 1, [55])


def test_a_full_group_ends_a_store_where_its_blocks_end() -> None:
    desk = Desk(groups=(FULL, FULL))
    desk.admit(tokens=40)
    assert desk.offload.computed("r", 40, desk.now_s)
    order = desk.offload.store("r", [table(10), table(2 * PER_CHUNK + 1)])
    assert span(order) == (0, 2)
    assert order is not None
    assert [len(item.block_ids) for item in order.blocks] == [6, 6]


def test_the_null_block_is_never_stored() -> None:
    desk = Desk()
    desk.admit(tokens=40)
    assert desk.offload.computed("r", 40, desk.now_s)
    assert span(desk.offload.store("r", [[*table(4), NULL, *table(5)]])) == (0, 1)
    assert desk.offload.store("r", [[*table(4), NULL, *table(5)]]) is None


def test_a_retrieve_brings_of_each_group_what_it_needs_at_the_boundary() -> None:
    desk = Desk(groups=(FULL, WINDOW, STATE))
    tables = [table(13, 100), table(13, 300), table(5, 700)]
    order = desk.retrieving(tokens=50, hbm=3 * BLOCK, found=4, tables=tables)
    assert [(item.group, item.first_block, item.block_ids) for item in order.blocks] == [
        (0, 3, table(13, 100)[3:12]),
        (1, 9, table(13, 300)[9:12]),
        (2, 3, [703]),
    ]


def test_a_window_does_not_reach_into_the_engines_own_prefix() -> None:
    desk = Desk(groups=(FULL, WINDOW))
    order = desk.retrieving(tokens=50, hbm=11 * BLOCK, found=4, tables=[table(13), table(13, 300)])
    assert [(item.first_block, item.block_ids) for item in order.blocks] == [(11, [111]), (11, [311])]


def test_a_window_may_begin_one_block_later_in_the_engine() -> None:
    desk = Desk(groups=(FULL, WINDOW))
    order = desk.retrieving(tokens=50, found=4, tables=[table(13), [NULL] * 10 + table(3, 310)])
    assert (order.blocks[1].first_block, order.blocks[1].block_ids) == (10, [310, 311])


@pytest.mark.parametrize("broken", [[NULL] * 13, [*table(10), NULL, 900, 901]], ids=["all", "one"])
def test_a_retrieve_never_writes_the_null_block(broken: list[int]) -> None:
    desk = Desk(groups=(FULL, FULL))
    order = desk.retrieving(tokens=50, found=4, tables=[table(13), broken])
    assert (order.blocks, order.refused) == ((), "null-block")


# ---------------------------------------------------------------- a server that is still reading its disks


def test_a_new_prompt_is_stored_at_once_while_the_server_reads_its_disks() -> None:
    desk = Desk()
    desk.begin(tokens=60)
    assert desk.match(tokens=60) is None
    desk.answer(2, why="recovering")
    desk.offload.admitted("r", hbm_tokens=0)
    assert span(desk.stored(tokens=60)) == (2, 5)


def asked_anew_while_disks_are_read(stored: int, found: int, **ends: object) -> Desk:
    """A desk with a request of five chunks. `stored` of them were stored before the server restarted."""
    desk = Desk()
    desk.admit(tokens=60)
    first = desk.stored(tokens=stored * CHUNK)
    assert first is not None
    desk.store_ends(first, **ends)  # type: ignore[arg-type]
    desk.offload.preempted("r")
    desk.match(tokens=60)
    desk.answer(found, why="recovering")
    desk.offload.admitted("r", hbm_tokens=0)
    return desk


def test_what_was_stored_once_is_believed_to_be_on_a_disk_that_is_not_read_yet() -> None:
    desk = asked_anew_while_disks_are_read(stored=3, found=1)
    rest = desk.stored(tokens=60)
    assert span(rest) == (3, 5)
    assert rest is not None
    assert not desk.offload.stored_whole("r"), "its end may say otherwise"
    desk.store_ends(rest)
    assert desk.offload.stored_whole("r")


def test_a_store_that_finds_no_parent_then_shows_the_gap_and_all_behind_it_is_stored() -> None:
    desk = asked_anew_while_disks_are_read(stored=3, found=1)
    rest = desk.stored(tokens=60)
    assert rest is not None
    desk.store_ends(rest, chunks=0, why="parent-absent")
    assert not desk.offload.stored_whole("r")
    assert span(desk.stored(tokens=60)) == (1, 5)


def test_a_second_store_without_a_parent_is_a_gap_as_any_other() -> None:
    desk = asked_anew_while_disks_are_read(stored=3, found=1)
    for _ in range(2):
        store = desk.stored(tokens=60)
        assert store is not None
        desk.store_ends(store, chunks=0, why="parent-absent")
    assert desk.stored(tokens=60) is None


def test_nothing_is_believed_after_a_known_gap() -> None:
    desk = asked_anew_while_disks_are_read(stored=3, found=1, chunks=2, why="full")
    assert span(desk.stored(tokens=60)) == (1, 5)


def test_an_answer_that_knows_all_ends_what_was_only_believed() -> None:
    desk = asked_anew_while_disks_are_read(stored=3, found=1)
    desk.offload.preempted("r")
    desk.match(tokens=60)
    desk.answer(2)
    desk.offload.admitted("r", hbm_tokens=0)
    store = desk.stored(tokens=60)
    assert span(store) == (2, 5)
    assert store is not None
    desk.store_ends(store, chunks=0, why="parent-absent")
    assert desk.stored(tokens=60) is None
