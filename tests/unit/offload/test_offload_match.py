"""The tokens that a request is told to retrieve: lookups, thresholds, the last token, and which requests wait."""

import pytest

from kvclient.offload.values import Group, Options
from kvserver.errors import RequestError
from kvserver.wire.messages import BLOCKS_MAX
from tests.rigs.offload_rig import BLOCK, CHUNK, FULL, Desk, keys_of, table


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


def test_a_prompt_shorter_than_a_chunk_asks_nothing() -> None:
    desk = Desk()
    desk.begin(tokens=CHUNK - 1)
    assert desk.match(tokens=CHUNK - 1) == 0
    assert desk.offload.take_lookups() == []


def test_a_prompt_that_the_engine_holds_whole_waits_for_nobody() -> None:
    desk = Desk()
    desk.begin(tokens=41)
    assert desk.match(tokens=41, hbm=40) == 0
    order = desk.lookup()
    assert order.chunks_wanted_min == 4, "more than are asked for: never a lease"


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


def test_a_consumer_does_not_ask_for_what_its_engine_holds() -> None:
    desk = Desk(stores=False, retrieve_tokens_min=5)
    desk.begin(tokens=40)
    assert desk.match(tokens=40, hbm=36) == 0
    assert desk.offload.take_lookups() == []


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


# ---------------------------------------------------------------- the engine's own prefix is known after allocation


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
