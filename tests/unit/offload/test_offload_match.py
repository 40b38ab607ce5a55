"""The tokens that a request is told to retrieve: lookups, thresholds, the last token, and which requests wait."""

import pytest

from kvclient.offload.values import Group, Options
from kvserver.errors import RequestError
from kvserver.wire.messages import BLOCKS_MAX, CHUNKS_MAX
from tests.rigs.offload_rig import BLOCK, CHUNK, FULL, PER_CHUNK, Desk, keys_of, table


def test_a_request_waits_for_the_answer_and_is_told_what_the_server_can_bring() -> None:
    desk = Desk()
    desk.begin(tokens=5 * CHUNK + 2)
    assert desk.match(tokens=5 * CHUNK + 2) is None
    assert desk.match(tokens=5 * CHUNK + 2) is None
    order = desk.lookup()
    assert order.keys == keys_of(5)
    assert order.chunks_wanted_min == 1
    desk.answer(3, order=order)
    assert desk.match(tokens=5 * CHUNK + 2) == 3 * CHUNK
    assert desk.offload.take_lookups() == []


def test_matching_again_changes_nothing() -> None:
    desk = Desk()
    desk.begin(tokens=40)
    desk.match(tokens=40)
    desk.answer(2)
    assert {desk.match(tokens=40) for _ in range(5)} == {2 * CHUNK}
    assert desk.offload.take_lookups() == []
    assert desk.offload.take_releases() == []


def test_a_prompt_shorter_than_a_chunk_asks_nothing() -> None:
    desk = Desk()
    desk.begin(tokens=CHUNK - 1)
    assert desk.match(tokens=CHUNK - 1) == 0
    assert desk.offload.take_lookups() == []


def test_the_last_token_is_left_to_the_engine() -> None:
    desk = Desk()
    desk.begin(tokens=3 * CHUNK)
    desk.match(tokens=3 * CHUNK)
    desk.answer(3)
    assert desk.match(tokens=3 * CHUNK) == 3 * CHUNK - 1
    order = desk.offload.allocated("r", hbm_tokens=0, tables=[table(9)])
    assert order is not None
    assert [(item.first_block, item.block_ids) for item in order.blocks] == [(0, table(9))], "the whole last chunk"
    assert order.end_tokens == 3 * CHUNK - 1


def test_an_engine_that_steps_back_by_itself_is_given_the_whole_prompt() -> None:
    desk = Desk(engine_steps_back=True)
    desk.begin(tokens=3 * CHUNK)
    desk.match(tokens=3 * CHUNK)
    desk.answer(3)
    assert desk.match(tokens=3 * CHUNK) == 3 * CHUNK


@pytest.mark.parametrize("group", [Group(CHUNK, "state"), Group(BLOCK, "window", 9)], ids=["state", "window"])
def test_what_serves_one_boundary_only_is_looked_up_before_the_last_token(group: Group) -> None:
    """A state after the last token is useless to a request that must compute that token.

    A window begins one too late."""
    desk = Desk(groups=(FULL, group), engine_steps_back=True)
    desk.begin(tokens=3 * CHUNK)
    desk.match(tokens=3 * CHUNK)
    order = desk.lookup()
    assert order.keys == keys_of(2)
    desk.answer(2, order=order)
    assert desk.match(tokens=3 * CHUNK) == 2 * CHUNK


def test_only_what_lies_behind_the_engines_own_prefix_is_retrieved() -> None:
    desk = Desk()
    order = desk.retrieving(tokens=50, hbm=5 * BLOCK, found=4)
    (blocks,) = order.blocks
    assert (blocks.first_block, blocks.block_ids) == (5, table(13)[5 : 4 * PER_CHUNK])
    assert (order.hbm_tokens, order.end_tokens) == (20, 48)
    assert order.refused == ""


@pytest.mark.parametrize("hbm", [3 * CHUNK, 3 * CHUNK + BLOCK, 4 * CHUNK])
def test_nothing_is_retrieved_when_the_engine_holds_as_much(hbm: int) -> None:
    desk = Desk()
    desk.begin(tokens=60)
    assert desk.match(tokens=60, hbm=hbm) is None
    order = desk.lookup()
    assert order.chunks_wanted_min == hbm // CHUNK + 1, "no lease for what the engine holds"
    assert desk.answer(3, order=order) is None
    assert desk.match(tokens=60, hbm=hbm) == 0


def test_a_prompt_that_the_engine_holds_whole_waits_for_nobody() -> None:
    desk = Desk()
    desk.begin(tokens=41)
    assert desk.match(tokens=41, hbm=40) == 0
    order = desk.lookup()
    assert order.chunks_wanted_min == 4, "more than are asked for: never a lease"


def test_too_little_is_not_worth_a_retrieve() -> None:
    desk = Desk(retrieve_tokens_min=25)
    desk.begin(tokens=70)
    desk.match(tokens=70, hbm=BLOCK)
    order = desk.lookup()
    assert order.chunks_wanted_min == 3, "4 + 25 tokens end in the third chunk"
    assert desk.answer(2, order=order) is None
    assert desk.match(tokens=70, hbm=BLOCK) == 0
    desk.offload.admitted("r", hbm_tokens=BLOCK)
    assert desk.offload.statistics.skipped_tokens == {"below-min": 2 * CHUNK - BLOCK}


def test_enough_is_worth_a_retrieve() -> None:
    desk = Desk(retrieve_tokens_min=25)
    desk.begin(tokens=70)
    desk.match(tokens=70, hbm=11)
    desk.answer(3)
    assert desk.match(tokens=70, hbm=11) == 0, "36 - 11 tokens, but they begin inside a block"
    assert desk.match(tokens=70, hbm=8) == 28


def test_a_prefix_that_ends_inside_a_block_is_not_built_upon() -> None:
    desk = Desk()
    desk.begin(tokens=40)
    desk.match(tokens=40, hbm=6)
    lease = desk.answer(3)
    assert desk.match(tokens=40, hbm=6) == 0
    desk.offload.admitted("r", hbm_tokens=6)
    assert desk.offload.take_releases() == [lease]
    assert desk.offload.statistics.skipped_tokens == {"unaligned": 30}


def test_a_lease_is_asked_for_when_the_engine_has_lost_what_it_held() -> None:
    desk = Desk()
    desk.begin(tokens=60)
    desk.match(tokens=60, hbm=4 * CHUNK)
    desk.answer(4)
    assert desk.match(tokens=60, hbm=4 * CHUNK) == 0
    assert desk.match(tokens=60, hbm=CHUNK) is None
    desk.answer(4)
    assert desk.match(tokens=60, hbm=CHUNK) == 3 * CHUNK


def test_a_server_that_grants_no_lease_is_not_asked_for_ever() -> None:
    desk = Desk()
    desk.begin(tokens=60)
    desk.match(tokens=60)
    order = desk.lookup()
    desk.answer(4, order=order._replace(chunks_wanted_min=9))
    assert desk.match(tokens=60) == 0
    assert desk.offload.take_lookups() == []
    desk.offload.admitted("r", hbm_tokens=0)
    assert desk.offload.statistics.skipped_tokens == {"no-lease": 48}


# ---------------------------------------------------------------- late, absent, stale


def test_a_server_that_is_away_is_a_miss_at_once() -> None:
    desk = Desk()
    desk.begin(tokens=40)
    desk.match(tokens=40)
    desk.answer(0, why="connection-lost")
    assert desk.match(tokens=40) == 0
    desk.offload.admitted("r", hbm_tokens=0)
    desk.offload.finish("r")
    assert (
        str(*desk.offload.take_summaries()) == "request=r prompt=40 hbm=0 hit=0 loaded=0 stored=0 why=connection-lost"
    )
    assert desk.offload.statistics.lookups_unserved == 1


def test_what_a_server_finds_that_is_still_reading_its_disks_is_retrieved_and_counts_as_unserved() -> None:
    desk = Desk()
    desk.begin(tokens=40)
    desk.match(tokens=40)
    lease = desk.answer(1, why="recovering")
    assert desk.match(tokens=40) == CHUNK
    order = desk.offload.allocated("r", hbm_tokens=0, tables=[table(10)])
    assert order is not None
    assert order.lease == lease
    assert desk.offload.statistics.lookups_unserved == 1


@pytest.mark.parametrize(("found", "skipped"), [(0, {"recovering": 39}), (1, {"below-min": CHUNK})])
def test_what_is_missed_while_the_server_reads_its_disks_is_counted_so(found: int, skipped: dict[str, int]) -> None:
    desk = Desk(retrieve_tokens_min=CHUNK + 1)
    desk.begin(tokens=40)
    desk.match(tokens=40)
    desk.answer(found, why="recovering")
    assert desk.match(tokens=40) == 0
    desk.offload.admitted("r", hbm_tokens=0)
    assert desk.offload.statistics.skipped_tokens == skipped


def test_retrieves_in_flight_are_bounded_and_the_next_waits_for_its_turn() -> None:
    desk = Desk(retrieves_max=1)
    first = desk.retrieving("a", tokens=40, found=3)
    desk.begin("b", tokens=40)
    desk.match("b", tokens=40)
    lease = desk.answer(3)
    assert desk.match("b", tokens=40) is None
    desk.retrieve_ends(first)
    assert desk.match("b", tokens=40) == 3 * CHUNK
    assert desk.offload.take_releases() == []
    assert lease is not None


def test_who_waits_too_long_for_its_turn_computes() -> None:
    desk = Desk(retrieves_max=1, retrieve_wait_s=3)
    desk.retrieving("a", tokens=40, found=3)
    desk.begin("b", tokens=40)
    desk.match("b", tokens=40)
    lease = desk.answer(3)
    assert desk.match("b", tokens=40) is None
    desk.now_s += 3
    assert desk.match("b", tokens=40) == 0
    assert desk.offload.take_releases() == [lease]
    desk.offload.admitted("b", hbm_tokens=0)
    assert desk.offload.statistics.skipped_tokens == {"busy": 39}


def test_a_request_that_must_compute_itself_takes_no_lease() -> None:
    desk = Desk()
    desk.begin(tokens=40, reads=False)
    desk.offload.ask("r", desk.now_s)
    order = desk.lookup()
    assert order.chunks_wanted_min > 3
    assert desk.match(tokens=40) is None, "what it computes is stored only when it is known what is held"
    assert desk.answer(1, order=order) is None
    assert desk.match(tokens=40) == 0


def test_a_request_that_must_compute_itself_waits_no_longer_than_a_lookup_may_take() -> None:
    desk = Desk()
    desk.begin(tokens=40, reads=False)
    assert desk.match(tokens=40) is None
    desk.now_s += desk.options.lookup_deadline_s
    assert desk.match(tokens=40) == 0


def test_a_producer_stores_only() -> None:
    desk = Desk(retrieves=False)
    desk.begin(tokens=40)
    assert desk.match(tokens=40) is None
    assert desk.answer(1) is None
    assert desk.match(tokens=40) == 0
    desk.now_s += desk.options.moment_s
    assert desk.match(tokens=40) == 0, "also while it is asked for anew"
    assert desk.answer(1) is None
    desk.offload.admitted("r", hbm_tokens=0)
    stored = desk.stored(tokens=40)
    assert stored is not None
    assert stored.first_chunk == 1


def test_a_consumer_retrieves_only() -> None:
    desk = Desk(stores=False)
    order = desk.retrieving(tokens=40, found=1)
    desk.retrieve_ends(order)
    assert desk.stored(tokens=40) is None
    assert not desk.offload.busy()


def test_a_consumer_does_not_ask_for_what_its_engine_holds() -> None:
    desk = Desk(stores=False, retrieve_tokens_min=5)
    desk.begin(tokens=40)
    assert desk.match(tokens=40, hbm=36) == 0
    assert desk.offload.take_lookups() == []


def test_an_engine_that_cannot_resume_output_is_offered_none() -> None:
    desk = Desk(resumes_output=False)
    desk.begin(tokens=40)
    assert desk.match(tokens=47) == 0
    desk.answer(3)
    assert desk.match(tokens=47) == 0


def test_a_request_that_cannot_be_keyed_is_skipped_and_counted() -> None:
    desk = Desk()
    desk.offload.begin_unkeyed("r", tokens=77, why="multimodal")
    desk.offload.extend("r", keys_of(1))
    assert desk.match(tokens=77) == 0
    desk.offload.admitted("r", hbm_tokens=0)
    assert desk.stored(tokens=77) is None
    desk.offload.finish("r")
    assert desk.offload.take_lookups() == []
    assert desk.offload.statistics.requests_unkeyed == 1
    assert desk.offload.statistics.skipped_tokens == {"multimodal": 77}
    assert [summary.why for summary in desk.offload.take_summaries()] == ["multimodal"]


def test_a_prompt_of_more_blocks_than_one_request_takes_is_found_whole() -> None:
    """The client cuts its retrieve."""
    chunks = BLOCKS_MAX // 32 + 3
    desk = Desk(chunk_tokens=32, groups=(Group(1),))
    desk.begin(tokens=chunks * 32)
    desk.match(tokens=chunks * 32)
    assert desk.lookup().keys == keys_of(chunks)


def test_a_lookup_asks_for_no_more_chunks_than_one_request_takes() -> None:
    desk = Desk()
    desk.begin(tokens=(CHUNKS_MAX + 2) * CHUNK)
    desk.match(tokens=(CHUNKS_MAX + 2) * CHUNK)
    assert desk.lookup().keys == keys_of(CHUNKS_MAX)


# ---------------------------------------------------------------- the engine's own prefix is known after allocation


def test_what_is_retrieved_is_decided_with_the_blocks_that_the_engine_has() -> None:
    desk = Desk(retrieve_tokens_min=20)
    desk.begin(tokens=50)
    desk.match(tokens=50)
    desk.answer(4)
    assert desk.match(tokens=50) == 48
    order = desk.offload.allocated("r", hbm_tokens=3 * BLOCK, tables=[table(13)])
    assert order is not None
    assert order.blocks[0].first_block == 3


@pytest.mark.parametrize("hbm", [8 * BLOCK, 12 * BLOCK, 13])
def test_a_retrieve_that_turns_out_useless_gives_its_lease_back(hbm: int) -> None:
    desk = Desk(retrieve_tokens_min=20)
    desk.begin(tokens=50)
    desk.match(tokens=50)
    lease = desk.answer(4)
    assert desk.match(tokens=50) == 48
    assert desk.offload.allocated("r", hbm_tokens=hbm, tables=[table(13)]) is None
    assert desk.offload.take_releases() == [lease]
    assert not desk.offload.busy()


def test_an_engine_may_take_less_than_it_is_offered() -> None:
    desk = Desk()
    desk.begin(tokens=50)
    desk.match(tokens=50)
    desk.answer(4)
    order = desk.offload.allocated("r", hbm_tokens=BLOCK, tables=[table(8)], tokens=7 * BLOCK)
    assert order is not None
    assert (order.end_tokens, order.refused) == (8 * BLOCK, "")
    assert order.blocks[0].block_ids == table(8)[1:]


@pytest.mark.parametrize(("group", "tokens"), [(FULL, 45), (FULL, 0), (Group(BLOCK, "window", 9), 40)])
def test_what_was_not_offered_is_not_retrieved(group: Group, tokens: int) -> None:
    desk = Desk(groups=(FULL, group))
    desk.begin(tokens=50)
    desk.match(tokens=50)
    desk.answer(4)
    order = desk.offload.allocated("r", hbm_tokens=BLOCK, tables=[table(13)] * 2, tokens=tokens)
    assert order is not None
    assert (order.blocks, order.refused) == ((), "tokens")


def test_tables_that_do_not_fit_are_refused_and_end_like_a_failed_retrieve() -> None:
    desk = Desk()
    order = desk.retrieving(tokens=50, found=4, tables=[table(11)])
    assert (order.refused, order.blocks) == ("table-short", ())
    end = desk.retrieve_ends(order, "table-short")
    assert end is not None
    assert not end.ok
    assert desk.offload.take_releases() == [order.lease]


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    "options",
    [
        {"groups": ()},
        {"groups": (Group(5),)},
        {"groups": (Group(BLOCK, "state"),)},
        {"groups": (Group(BLOCK, "window"),)},
        {"groups": (Group(BLOCK, "full", 8),)},
        {"chunk_tokens": 0},
        {"ranks": 0},
        {"stores_max": 0},
        {"moment_s": 0.0},
        {"lookup_deadline_s": float("nan")},
        {"stores": False, "retrieves": False},
    ],
    ids=str,
)
def test_options_that_cannot_be_meant_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(RequestError, match="options"):
        Options(**{"chunk_tokens": CHUNK, "groups": (FULL,), **options})  # type: ignore[arg-type]
